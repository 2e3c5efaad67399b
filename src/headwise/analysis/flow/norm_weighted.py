"""Norm-weighted attention of every head over a data set (Kobayashi et al. 2020)."""

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from torch import nn

from headwise.analysis.head_pass import head_rows, measure_further, require_some
from headwise.data.texts import Texts
from headwise.intercept.sites import SiteRegistry
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.statistics.by_norm import BY_NORM, CHANGE, MOVED, PREFERENCE, NormStatistics
from headwise.statistics.columns import CHANGE_SUFFIX, CHANGES, WEIGHTS, Column
from headwise.statistics.registry import row_statistics

NORM_PREFIX = "norm_"
"""Prefix of the name of a statistic of norms in tables."""


class NormWeighted(HeadTable[HeadRow]):
    """Table of norm-weighted attention (Kobayashi et al. 2020), one row per head. Each attention weight is multiplied
    by the norm of the key's value vector after the output projection. The table compares statistics of these products
    with statistics of the plain weights.

    With A_ij the weight of key j for query i and f(x_j) the key's value vector, with its bias, times the head's slice
    of the output projection, let

        B_ij = |A_ij f(x_j)| / sum over keys k of |A_ik f(x_k)|

    Each statistic of weights, such as `entropy` and `first`, has two columns: `norm_entropy` is the statistic of B, and
    `entropy_change` is that of B minus that of A over the same queries. Two columns compare B with A in queries that
    see more than one key:

        moved             sum over j of |B_ij - A_ij| / 2: the share of attention that is on other keys, 0 to 1
        norm_preference   ln of the mean of |f(x_j)| weighted by A_ij, divided by its plain mean over the visible keys

    The preference is negative for a head that attends to keys with short vectors, and 0 for one to which the norms do
    not matter. Changes and preferences are tested against zero, with p-values (`_p`) and p-values adjusted for the
    number of heads (`_q`, Benjamini and Hochberg 1995). All numbers are means over sequences, with standard errors
    clustered by document.
    """

    NAME = "norm_weighted"
    PLOTTED = PREFERENCE
    COLUMNS = (
        Column(MOVED, "Mean share of attention that is on other keys by norm than by weight.", "share"),
        Column(
            PREFERENCE,
            "Mean logarithm of the norm of attended vectors, relative to that of all visible keys.",
            is_signed=True,
            is_tested=True,
        ),
        *(column.derived(NORM_PREFIX + column.name, "by norm") for column in WEIGHTS),
        *CHANGES,
    )


def norm_weighted(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    special: Collection[int] | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> NormWeighted:
    """Measure where each head attends if each attention weight is multiplied by the norm of the key's value vector
    after the output projection (Kobayashi et al. 2020). Also measure how much these products differ from the plain
    weights. The class `NormWeighted` defines the statistics.

        norms = hw.norm_weighted(model, texts)
        norms.table()                   # one row per head: norm_entropy, entropy_change, ..., moved, norm_preference
        norms.plot("norm_preference")

    The vector is the value of key j, with the bias of the value projection, times the head's slice of the output
    projection. The bias of the output projection belongs to no head, and is left out. Heads that share values have
    slices of their own, so each query head has its own norms. The norms are one number for each key and head, so the
    statistics are computed in blocks, without the matrix. The output projection is found by name, and compared with
    what the model computes: it must map the outputs of the heads.

    Args:
        model: any module that `watch` supports. For texts, an encoder-decoder is reduced to its encoder.
        dataset: `Texts`, or batches in the same order each time: mappings of the model's arguments, or tensors.
        special: ids of special tokens; by default those of the tokenizer.
        out: folder for the table; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: name of the model in the results.

    Raises:
        InputError: an argument cannot be used, or no module of the model has an output projection that maps the outputs
            of its heads.
        MissingExtra: a package that `out`, `progress` or the data set needs is not installed.

    Warns:
        UserWarning: of modules whose output projection or values could not be established; their rows have no numbers.
    """
    options: dict[str, Any] = {"special": special, "out": out, "force": force, "progress": progress, "title": title}
    names = {BY_NORM: NORM_PREFIX + "{}", CHANGE: "{}" + CHANGE_SUFFIX}  # such as norm_entropy and entropy_change
    columns = {each + suffix: name.format(each) for each in row_statistics() for suffix, name in names.items()}
    columns |= {MOVED: MOVED, PREFERENCE: PREFERENCE}

    def make_table(registry: SiteRegistry, metadata: dict[str, Any]) -> NormWeighted:
        require_some(registry, columns, "an output projection that is seen to map the outputs of the heads")
        measured = {name for record in registry.records for name in record.statistics}
        return NormWeighted(
            head_rows(registry, {name: columns[name] for name in columns if name in measured}), metadata
        )

    norms = NormStatistics()
    return measure_further(model, dataset, norms, NormWeighted, make_table, analysis="norm-weighted", **options)
