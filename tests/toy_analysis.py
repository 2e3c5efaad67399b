"""The smallest analysis: a table, a function that runs a model over data, and a command."""

from pathlib import Path

import headwise as hw
from headwise.analysis.head_pass import measure_sequences, pass_data
from headwise.cli.loading import RunFlags
from headwise.cli.options import Top
from headwise.data.batches import call_model, documents_of
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.statistics.columns import Column


class Reach(HeadTable[HeadRow]):
    """Table of the mean distance of each head's attention, minus 1, one row per head."""

    NAME = "reach"
    ROW_TYPE = HeadRow
    COLUMNS = (Column("reach", "Mean distance of the attention, minus 1.", "tokens", is_signed=True, is_tested=True),)


def mean_reach(model, dataset, *, out: str | Path | None = None, force=False, progress=False, title=None) -> Reach:
    """Measure how much farther than one token each head attends."""
    data = pass_data(model, dataset, (), out=out, shown=progress)

    def measure_batch(batch):
        with hw.watch(data.model) as heads:
            call_model(data.model, batch)
        values = {}
        for record in heads.records:
            (tally,) = record.latest_tallies()  # there are several of a module that attends several times
            values[record.site] = {"reach": tally.means()["distance"].double().cpu() - 1}
        return heads.records, values

    def make_table(registry, values, metadata):
        rows, documents = [], documents_of(data.dataset)
        for record, labels in registry.head_labels():
            of_head = values[record.site]["reach"][:, labels["head"]].tolist()
            rows.append(HeadRow(**labels, statistics={"reach": MeanEstimate.of(of_head, documents)}))
        return Reach(tuple(rows), metadata)

    options = {"out": out, "force": force, "progress": progress, "title": title}
    return measure_sequences(data, measure_batch, Reach, make_table, **options)


def reach(*, run: RunFlags, top: Top = 20) -> None:
    """Measure how much farther than one token each head attends.

    Examples:
    headwise reach --data corpus.jsonl --out reach
    """
    run.measure(mean_reach, Reach, {}, top=top)
