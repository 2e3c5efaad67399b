"""Ablation effects of single documents and their robust summaries, against gates set by hand, numpy and scipy."""

import math
import statistics as numbers

import numpy as np
import pyarrow.parquet
import pytest
import scipy.stats
import torch

import headwise as hw
import tiny
from headwise.analysis.ablation_result import DocumentEffects, modified_z
from headwise.data.batches import NumberedBatches
from headwise.runs.rows import HeadRow, MeanEstimate

DOCUMENTS = tiny.texts(23, 5, 2, 17, 31, 11)
"""Six documents; cut to a context of 7 they have 1 to 5 sequences, and sequences of one token have no loss."""


def texts():
    return hw.Texts(DOCUMENTS, tiny.tokenizer("decoder"), 7, "cut", batch=3)


def causal():
    return tiny.model("decoder", top="ForCausalLM").double()


@torch.no_grad()
def losses_by_document(model, gates):
    """Return the mean next-token loss of each document with gates, by its number, computed one sequence at a time."""
    by_document, batches = {}, [row for batch in texts() for row in batch["input_ids"]]
    with hw.gate(model, gates):
        for number, ids in zip(texts().document_numbers(), batches, strict=True):
            if len(ids) > 1:
                logits = model(input_ids=ids[None]).logits[0, :-1]
                by_document.setdefault(number, []).append(torch.nn.functional.cross_entropy(logits, ids[1:]).item())
    return {number: numbers.fmean(losses) for number, losses in sorted(by_document.items())}


def table_of(*effects):
    """Return a table of heads 0.0, 0.1, ... with these effects on documents 0, 10, 20, ..., one sequence each."""
    rows = tuple(
        HeadRow(
            layer=0, head=head, kv_head=head, module="m", kind="self", statistics={"cost": of(row), "loss": of(row)}
        )
        for head, row in enumerate(effects)
    )
    documents = tuple(range(0, 10 * len(effects[0]), 10))
    shared = (documents, (1,) * len(documents), (0.5,) * len(documents))
    return hw.Ablation(rows, {}, DocumentEffects(*shared, tuple(map(tuple, effects))))


def of(values):
    return MeanEstimate.of(values)


ONE_OUTLIER = [0.04, 0.05, 0.06, 0.03, 0.05, 3.59, 0.045, 0.055]


@pytest.fixture(scope="module")
def ablation_and_folder(tmp_path_factory):
    """Effects of all heads on the documents, and the folder in which they are saved."""
    out = tmp_path_factory.mktemp("ablation")
    return hw.ablate(causal(), texts(), hw.next_token_loss, out=out), out


def test_effects_of_documents_are_those_of_gates(ablation_and_folder):
    model, (found, _) = causal(), ablation_and_folder
    whole = losses_by_document(model, {(0, 0): 1.0})
    effects = found.effects()
    assert effects.index.name == "document"
    assert effects.index.tolist() == list(whole)
    assert list(effects) == [row.name for row in found.rows]
    for row in found.rows[1::5]:
        without = losses_by_document(model, {(row.layer, row.head): 0.0})
        expected = [without[document] - whole[document] for document in whole]
        assert effects[row.name].tolist() == pytest.approx(expected, abs=1e-12)
    assert found.by_document.losses == pytest.approx(tuple(whole.values()), abs=1e-12)
    by_document = texts().document_numbers()
    has_loss = [len(ids) > 1 for batch in texts() for ids in batch["input_ids"]]
    counts = [sum(n == document and loss for n, loss in zip(by_document, has_loss, strict=True)) for document in whole]
    assert found.by_document.sequences == tuple(counts)
    assert max(counts) > 1
    # The mean over sequences is that of documents weighted by their sequences.
    weighted = np.average(effects.to_numpy(), axis=0, weights=counts)
    assert [row.statistics["cost"].value for row in found.rows] == pytest.approx(weighted.tolist(), abs=1e-12)


def test_summaries_equal_numpy_and_scipy():
    generator = np.random.default_rng(0)
    effects = [generator.standard_t(2, size=23).tolist() for _ in range(5)]
    found = table_of(*effects).table()
    assert list(found)[-6:] == ["loss", "cost_median", "cost_trimmed", "cost_outliers", "cost_p", "cost_q"]
    for row, values in zip(found.itertuples(), effects, strict=True):
        ordered = sorted(values)
        assert row.cost_median == pytest.approx(ordered[11], abs=1e-15)
        assert row.cost_trimmed == pytest.approx(numbers.fmean(ordered[4:-4]), abs=1e-12)  # 20 % of 23 is 4.6
        assert row.cost_trimmed == pytest.approx(scipy.stats.trim_mean(values, 0.2), abs=1e-12)
        distances = [abs(value - ordered[11]) for value in values]
        limit = 3.5 * sorted(distances)[11] / scipy.stats.norm.ppf(0.75)
        assert row.cost_outliers == sum(distance > limit for distance in distances)
    assert found["cost_outliers"].sum() > 0


def test_an_outlying_document_is_named():
    table = table_of([0.1] * 5 + [0.11, 0.09, 0.1], ONE_OUTLIER, [0.2, 0.21, 0.19, 0.2, 0.18, 0.22, 0.2, -9.0])
    found = table.outliers()
    assert list(found) == ["layer", "head", "kv_head", "module", "kind", "document", "effect", "median", "score"]
    assert found[["head", "document", "effect"]].to_numpy().tolist() == [[2, 70, -9.0], [1, 50, 3.59]]
    scale = numbers.median(abs(each - 0.05) for each in ONE_OUTLIER) * 1.482602218505602
    assert found["median"].tolist() == pytest.approx([0.2, 0.05])
    assert found["score"][1] == pytest.approx((3.59 - 0.05) / scale, rel=1e-12)
    robust = table.robust()
    assert robust["head"].tolist() == [2, 0, 1]  # by the median; the mean of head 1 is the largest
    assert robust["cost"].idxmax() == 2
    assert robust["cost_sem"].tolist() == [table.rows[head].statistics["cost"].sem for head in (2, 0, 1)]
    assert robust["cost_outliers"].tolist() == [1, 0, 1]


def test_a_table_without_outliers_lists_none():
    found = table_of([0.1, 0.2, 0.3]).outliers()
    assert not len(found)
    assert "score" in found


def test_scores_where_more_than_half_of_the_effects_are_equal():
    assert modified_z([2.0] * 7) == [0.0] * 7
    scores = modified_z([0.0] * 9 + [1.0])  # the mean absolute deviation is 0.1
    assert scores[:9] == [0.0] * 9
    assert scores[9] == pytest.approx(1.0 / (0.1 * math.sqrt(math.pi / 2)), rel=1e-12)


def test_effects_are_saved_and_loaded(ablation_and_folder):
    found, folder = ablation_and_folder
    loaded = hw.Ablation.load(folder)
    assert loaded == found
    assert loaded.effects().equals(found.effects())
    assert loaded.table().equals(found.table())
    columns = pyarrow.parquet.read_table(folder / "ablation.parquet").to_pydict()
    assert columns["cost_median"] == found.table()["cost_median"].tolist()
    assert columns["cost_outliers"] == found.table()["cost_outliers"].tolist()


def test_sets_of_heads_and_unknown_documents(tmp_path):
    batches = list(texts())
    sets = {"loss": [(0, 1)], "two": [(0, 1), (1, 0)]}
    found = hw.ablate(causal(), batches, hw.next_token_loss, units=sets, out=tmp_path)
    loaded = hw.SetAblation.load(tmp_path)
    assert list(loaded.effects()) == ["loss", "two"]
    lengths = [len(row) for batch in batches for row in batch["input_ids"]]
    assert loaded.effects().index.tolist() == [index for index, length in enumerate(lengths) if length > 1]
    assert loaded.outliers().columns[:2].tolist() == ["name", "heads"]
    assert loaded.robust().equals(found.robust())


def test_numbered_batches_state_documents():
    numbered = NumberedBatches(list(texts()), texts().document_numbers())
    found = hw.ablate(causal(), numbered, hw.next_token_loss, units="layers")
    assert found.effects().equals(hw.ablate(causal(), texts(), hw.next_token_loss, units="layers").effects())


def test_a_table_of_an_older_version_has_no_effects(tmp_path):
    table = table_of(ONE_OUTLIER)
    hw.Ablation(table.rows, {}).save(tmp_path)
    loaded = hw.Ablation.load(tmp_path)
    assert "cost_median" not in loaded.table()
    sentence = (
        "^ablation: expected effects of single documents, got a table without them, .*; measure again, with --force"
    )
    for method in (loaded.effects, loaded.outliers, loaded.robust):
        with pytest.raises(hw.InputError, match=sentence):
            method()


def test_a_damaged_list_of_effects_is_refused(tmp_path):
    table_of(ONE_OUTLIER).save(tmp_path)
    stored = pyarrow.parquet.read_table(tmp_path / "ablation.parquet")
    metadata = {**stored.schema.metadata, b"headwise_samples": b"{}"}
    pyarrow.parquet.write_table(stored.replace_schema_metadata(metadata), tmp_path / "ablation.parquet")
    with pytest.raises(hw.InputError, match="unreadable content"):
        hw.Ablation.load(tmp_path)


@pytest.mark.parametrize("mode", ["whole", "cut", "pack"])
def test_documents_without_text_keep_their_numbers(mode):
    source = ["", *tiny.texts(9), " \n", *tiny.texts(9, 8)]
    texts = hw.Texts(source, tiny.tokenizer("decoder"), documents=mode, context=9)
    effects = hw.ablate(tiny.model("decoder", top="ForCausalLM"), texts, hw.next_token_loss).effects()
    assert sorted(effects.index) == [1, 3, 4]
