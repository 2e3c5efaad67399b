"""Reports of compressed models, against sizes counted by hand, independent losses, and models with known output."""

import functools
import json
import math
import warnings
from copy import deepcopy
from dataclasses import replace
from types import SimpleNamespace

import numpy
import pytest
import scipy.stats
import torch
import transformers
from torch import nn

import headwise as hw
import tiny
from headwise.compression.parameter_counts import count_parameters, weight_bytes
from headwise.compression.report import times
from headwise.compression.report.compression_report import greedy_agreements, output_cosines
from headwise.compression.report.report_data import ReportData
from headwise.compression.report.report_result import CompressionReport, ReportRow
from headwise.compression.report.times import paired_times, run_times
from jackknife import jackknife
from removal import families

QUICK = {"rounds": 6, "batches": (1, 2), "prompt": 16, "new_tokens": 4}


@pytest.fixture(autouse=True)
def _short_samples(monkeypatch):
    """Time one run per sample: no test depends on times."""
    monkeypatch.setattr(times, "LEAST_SECONDS", 0.0)


def halved(model, batch):
    """Return the model with half of its heads."""
    plan = hw.plan_pruning(hw.MagnitudeScores(model, batch), keep=0.5)
    return hw.prune(model, plan)


@functools.cache
def decoders(dtype=torch.float64):
    """Return a causal model, one with half of its heads, and texts in which documents have one to three sequences."""
    dense, tokenizer = tiny.model("decoder", top="ForCausalLM").to(dtype), tiny.tokenizer("decoder")
    texts = hw.Texts(tiny.texts(30, 60, 50, 24, 33), tokenizer, documents="cut", context=20)
    return dense, halved(dense, next(iter(texts))), texts


@pytest.fixture(scope="module")
def report():
    """Report of a causal model with half of its heads."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(times, "LEAST_SECONDS", 0.0)
        return quiet_report(*decoders(), **QUICK)


def quiet_report(*arguments, **options):
    """Return a report without warnings of times."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "no speed-up")
        return hw.compression_report(*arguments, **options)


# -- sizes ------------------------------------------------------------------------------------------------------------


def test_parameters_and_weights_are_those_counted_by_hand(report):
    embed, heads, kv_heads, width, layers = 48, 6, 2, 10, 2
    full = layers * (2 * embed * heads * width + 2 * embed * kv_heads * width)
    half = layers * (2 * embed * 4 * width + 2 * embed * kv_heads * width)  # of 3 query heads of a group, 2 remain
    others = 2 * 97 * embed + layers * (3 * embed * 37 + 2 * embed) + embed
    row = report.row("parameters in attention")
    assert (row.dense, row.compressed, row.change) == (full, half, half / full)
    row = report.row("parameters")
    assert (row.dense, row.compressed) == (others + full, others + half)
    row = report.row("weights")
    assert (row.dense, row.compressed, row.unit) == (8 * (others + full), 8 * (others + half), "bytes")


def test_attention_of_bert_has_its_output_projection_and_shared_weights_count_once():
    model = tiny.model("encoder", top="ForMaskedLM")  # its output embedding is that of the input
    batch = {"input_ids": torch.arange(5, 25)[None]}
    row = quiet_report(model, model, [batch], loss=hw.MaskedTokenLoss(1), **QUICK)
    assert row.row("parameters in attention").dense == 2 * 4 * (48 * 48 + 48)
    distinct = {tensor.data_ptr(): tensor.numel() for tensor in model.state_dict().values() if tensor.numel()}
    buffers = {tensor.data_ptr() for tensor in model.buffers()}
    assert row.row("parameters").dense == sum(count for place, count in distinct.items() if place not in buffers)


def test_numbers_in_shared_memory_count_once():
    dense = tiny.model("decoder", top="ForCausalLM")
    distinct = sum(weight.numel() for weight in dense.parameters())
    embedding = dense.model.embed_tokens.weight
    tied = deepcopy(dense)
    tied.lm_head.weight = nn.Parameter(tied.model.embed_tokens.weight.detach())
    assert count_parameters(tied) == distinct - embedding.numel()
    assert weight_bytes(tied) == 4 * (distinct - embedding.numel())
    parts, memory = nn.Module(), torch.zeros(6, 10)
    parts.columns, parts.others = nn.Parameter(memory[:, :4]), nn.Parameter(memory[:, 4:])
    parts.transposed, parts.row = nn.Parameter(memory.t()[4:7]), nn.Parameter(memory[2])
    assert count_parameters(parts) == 60
    del parts.others
    assert count_parameters(parts) == 6 * 7 + 3  # columns 0 to 6, and the end of a row
    assert weight_bytes(parts) == 4 * 45
    assert count_parameters(parts.to("meta")) == 24 + 18 + 10
    assert count_parameters(deepcopy(dense).to("meta")) == distinct


def test_bytes_of_a_growing_cache_are_those_of_the_formula():
    dense, _, texts = decoders(torch.float32)
    plan = hw.plan_pruning(hw.MagnitudeScores(dense, next(iter(texts))), keep=0.5, constraint="groups")
    report = quiet_report(dense, hw.prune(dense, plan), texts, **QUICK)
    row, total = report.row("cache per token"), report.row("cache after 20 tokens")
    assert (row.dense, row.compressed) == (
        2 * 2 * 2 * 10 * 4,
        2 * 2 * 1 * 10 * 4,
    )  # k and v, layers, heads, width, bytes
    assert (total.dense, total.compressed, total.change) == (20 * row.dense, 20 * row.compressed, 0.5)


def test_a_cache_that_does_not_grow_has_no_bytes_per_token():
    model = families.model("mistral", transformers.AutoModelForCausalLM)  # a window of 4 tokens
    report = quiet_report(model, model, [families.inputs("mistral")], **QUICK)
    assert "cache per token" not in {row.quantity for row in report.rows}
    assert any(note.startswith("no cache bytes per token: the cache of the compressed model") for note in report.notes)
    assert report.row("cache after 20 tokens").dense == 2 * 2 * 3 * 8 * 3 * 8  # the 3 tokens before the next one


# -- losses -----------------------------------------------------------------------------------------------------------


def losses_in_float64(model, texts):
    """Return the mean next-token loss of each sequence, in the order of the data."""
    losses = []
    for sequence in texts.sequences:
        with torch.no_grad():
            probabilities = model(sequence[None].long()).logits[0].double().softmax(-1)
        picked = probabilities[torch.arange(len(sequence) - 1), sequence[1:].long()]
        losses.append(float(-picked.log().mean()) if len(picked) else math.nan)
    return numpy.array(losses)


def test_losses_and_their_paired_difference_equal_independent_ones(report):
    dense, compressed, texts = decoders()
    documents = [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 4, 4]  # 30, 60, 50, 24, 33 words in sequences of 20
    before, after = (losses_in_float64(model, texts) for model in (dense, compressed))
    row = report.row("loss, next_token_loss")
    for found, error, values in (
        (row.dense, row.dense_sem, before),
        (row.compressed, row.compressed_sem, after),
        (row.change, row.change_sem, after - before),
    ):
        mean, expected, _, degrees = jackknife(values, documents)
        assert found == pytest.approx(mean, abs=1e-9)
        assert error == pytest.approx(expected, rel=1e-6)
    assert (row.samples, row.documents) == (12, 5)
    length = scipy.stats.t.ppf(0.975, degrees) * row.change_sem
    assert (row.low, row.high) == pytest.approx((row.change - length, row.change + length))
    alone = numpy.nanstd(after - before, ddof=1) / 12**0.5
    assert row.change_sem != pytest.approx(alone, rel=1e-3)  # without clusters


@pytest.mark.parametrize("mode", ["cut", "pack", "truncate", "whole"])
@pytest.mark.parametrize("limit", [None, 3])
def test_texts_know_the_document_of_each_sequence(mode, limit):
    lengths = (4, 13, 2, 9, 30)
    documents = [" ".join([tiny.WORDS[index]] * length) for index, length in enumerate(lengths)]
    context = 64 if mode == "whole" else 8
    texts = hw.Texts(documents, tiny.tokenizer("decoder"), documents=mode, context=context, limit=limit, batch=2)
    found = texts.document_numbers()
    sequences = [row for batch in texts for row in batch["input_ids"]]
    words = [row[row >= 5] - 5 for row in sequences]  # the word is the number of the document; 4 is a separator
    assert found == [int(numpy.bincount(each.numpy()).argmax()) for each in words]
    assert len(found) == len(texts.sequences)


def test_data_of_one_document_have_no_standard_errors():
    dense, compressed, _ = decoders()
    texts = hw.Texts(tiny.texts(90), tiny.tokenizer("decoder"), documents="cut", context=20)
    report = quiet_report(dense, compressed, texts, **QUICK)
    row = report.row("loss, next_token_loss")
    assert (row.change_sem, row.low, row.documents) == (None, None, 1)
    assert any("the data is one document" in note for note in report.notes)


def test_without_a_loss_outputs_are_compared_by_their_cosine():
    model = tiny.model("encoder").double()
    ids = torch.randint(5, 97, (3, 12), generator=torch.Generator().manual_seed(2))
    mask = (torch.arange(12) < torch.tensor([[12], [7], [9]])).long()
    pruned = halved(model, {"input_ids": ids})
    report = quiet_report(model, pruned, [{"input_ids": ids, "attention_mask": mask}], loss=None, **QUICK)
    cosines = []
    for row, length in zip(ids, (12, 7, 9), strict=True):
        with torch.no_grad():
            a, b = (each(row[None, :length]).last_hidden_state[0].mean(0).numpy() for each in (model, pruned))
        cosines.append(a @ b / numpy.linalg.norm(a) / numpy.linalg.norm(b))
    row = report.row("cosine of outputs")
    assert row.compressed == pytest.approx(numpy.mean(cosines), abs=1e-9)
    assert row.compressed_sem == pytest.approx(numpy.std(cosines, ddof=1) / 3**0.5, rel=1e-6)
    assert {"the data do not state documents: each example counts as one"} <= set(report.notes)


# -- agreement --------------------------------------------------------------------------------------------------------


class Counting(nn.Module):
    """Causal model whose most likely next token is the last one plus 1, except after some tokens. Its cache is the
    list of tokens so far.
    """

    def __init__(self, other_after=()):
        super().__init__()
        self.other_after = other_after

    def forward(self, input_ids, past_key_values=None, use_cache=False):
        seen = input_ids if past_key_values is None else torch.cat([past_key_values[0], input_ids], 1)
        target = (seen + 1) % 30
        for token in self.other_after:
            target = torch.where(seen == token, 29, target)
        logits = nn.functional.one_hot(target[:, -input_ids.shape[1] :], 30).float()
        return SimpleNamespace(logits=logits, past_key_values=[seen])


@pytest.mark.parametrize(
    ("other_after", "end_tokens", "expected"),
    [
        ((), (), [(1.0, 1.0)] * 3),
        # 1 2 | 3 4 5 6 7 8, of which 6 differs; 10 | 11 ... 16, of which 13 does not; 5 | 6 ..., the first differs
        ((5,), (), [(3 / 6, 5 / 6), (1.0, 1.0), (0.0, 5 / 6)]),
        ((5, 7), (), [(3 / 6, 4 / 6), (1.0, 1.0), (0.0, 4 / 6)]),
        ((5, 7), (7,), [(3 / 5, 4 / 5), (1.0, 1.0), (0.0, 1 / 2)]),
    ],
)
def test_agreement_of_models_with_known_output(other_after, end_tokens, expected):
    prompts = [torch.tensor([1, 2]), torch.tensor([10]), torch.tensor([5])]
    found = greedy_agreements((Counting(), Counting(other_after)), prompts, 6, end_tokens)
    assert [tuple(each) for each in found] == [pytest.approx(each) for each in expected]


def test_agreement_equals_that_of_generate(report):
    dense, compressed, texts = decoders()
    prefixes, same = [], []
    for batch in texts:
        for row in batch["input_ids"]:
            prompt = row[None, :16]
            options = {"max_new_tokens": 4, "do_sample": False, "pad_token_id": 0, "eos_token_id": 4}
            a, b = (model.generate(prompt, **options)[0, prompt.shape[1] :] for model in (dense, compressed))
            with torch.no_grad():
                forced = compressed(torch.cat([prompt[0], a])[None]).logits[0, prompt.shape[1] - 1 : -1].argmax(-1)
            equal = [x == y for x, y in zip(a.tolist(), b.tolist(), strict=False)]
            prefixes.append([*equal, False].index(False) / len(a))
            same.append(float((forced == a).double().mean()))
    row = report.row("greedy tokens equal until the first difference")
    assert (row.compressed, row.samples) == (pytest.approx(numpy.mean(prefixes)), 12)
    row = report.row("most likely token equal after the same tokens")
    assert row.compressed == pytest.approx(numpy.mean(same))


def test_a_model_agrees_with_itself():
    dense, _, texts = decoders(torch.float32)
    report = quiet_report(dense, dense, texts, **QUICK)
    assert [row.compressed for row in report.rows if row.kind == "agreement"] == [1.0, 1.0]
    loss = report.row("loss, next_token_loss")
    assert (loss.change, loss.change_sem) == (0.0, 0.0)
    assert {row.change for row in report.rows if row.kind == "size"} == {1.0}


# -- times ------------------------------------------------------------------------------------------------------------


def test_runs_alternate_and_a_slow_drift_of_the_machine_cancels(monkeypatch):
    monkeypatch.setattr(times, "LEAST_SECONDS", 3.0)
    order, runs = [], iter(range(1000))

    def run(name, seconds):
        def once():
            order.append(name)
            return {"total": seconds * (1 + 0.001 * next(runs)), "attention": seconds / 4}

        return once

    found = paired_times((run("dense", 2.0), run("compressed", 1.5)), 6)
    assert order[:4] == ["dense", "compressed"] * 2  # warm-up, and the number of runs per sample
    a, b = ["dense"] * 2, ["compressed"] * 2  # 2 runs of each make a sample of 3 seconds
    assert order[4:] == [*a, *b, *b, *a] * 3
    total, attention = (ReportRow.of_times(part, *found[part]) for part in ("total", "attention"))
    assert total.change == pytest.approx(0.75, rel=1e-3)
    assert total.low < 0.75 < total.high
    assert (attention.dense, attention.change, attention.samples) == (0.5, 0.75, 6)
    assert paired_times((run("dense", 2.0), run("compressed", 1.5)), 6, steps=4)["attention"][0] == [0.125] * 6


def test_the_interval_of_a_ratio_is_that_of_the_sign_test():
    ratios = [0.5, 0.9, 0.7, 0.4, 0.8, 0.6, 1.2, 1.1, 0.55, 0.65, 0.75, 0.85]
    dense = [float(number) for number in range(1, 13)]
    found = ReportRow.of_times("a time", dense, [ratio * seconds for ratio, seconds in zip(ratios, dense, strict=True)])
    outside = [sum(math.comb(12, k) for k in range(rank)) / 2**11 for rank in range(1, 5)]
    rank = max(rank for rank, share in enumerate(outside, 1) if share <= 0.05)
    ordered = sorted(ratios)
    assert (found.low, found.high) == pytest.approx((ordered[rank - 1], ordered[-rank]))
    assert (found.change, found.dense) == (pytest.approx(0.725), 6.5)


def test_the_times_of_attention_modules_are_added_up():
    now = [0.0]

    class Slow(nn.Module):
        def __init__(self, seconds):
            super().__init__()
            self.seconds = seconds

        def forward(self, x):
            now[0] += self.seconds
            return x

    model = nn.Sequential(Slow(1.0), Slow(2.0), Slow(4.0), Slow(8.0))
    for _ in range(2):
        found = run_times(model, ["0", "2"], lambda: model(torch.zeros(1)), clock=lambda: now[0])
        assert found == {"total": 15.0, "attention": 5.0}
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model)


def test_a_time_that_is_not_shorter_is_named_in_a_warning_and_in_the_report(monkeypatch):
    ratios = {"total": [0.9, *[0.95] * 4, 1.0], "attention": [0.4, *[0.5] * 4, 0.99]}  # the ends are the interval
    samples = {part: ([1.0] * 6, of_part) for part, of_part in ratios.items()}
    monkeypatch.setattr(times, "paired_times", lambda calls, rounds, steps: samples)
    with pytest.warns(
        UserWarning, match="no speed-up is shown for prompt of 16 tokens, batch 1: x 0.950 .*; "
    ) as caught:
        report = hw.compression_report(*decoders(), **QUICK)
    assert len(caught) == 1
    assert len(report.warnings) == 4
    assert not any("attention" in warning for warning in report.warnings)
    for name in ("prompt of 16 tokens, batch 2", "decoding a token after 16, batch 1"):
        assert f"warning: no speed-up is shown for {name}: x 0.950 (0.900 to 1.000)" in str(report)


# -- the result -------------------------------------------------------------------------------------------------------


def test_rows_of_a_causal_model(report):
    per_batch = [
        f"{name}{part}"
        for batch in (1, 2)
        for name in (f"prompt of 16 tokens, batch {batch}", f"decoding a token after 16, batch {batch}")
        for part in ("", ", attention")
    ]
    assert [row.quantity for row in report.rows] == [
        *("parameters", "parameters in attention", "weights", "cache per token", "cache after 20 tokens"),
        *per_batch,
        "loss, next_token_loss",
        *("greedy tokens equal until the first difference", "most likely token equal after the same tokens"),
    ]
    assert report.notes == ()
    assert all(0 < row.compressed < 60 and row.samples == 6 for row in report.rows if row.kind == "time")


def test_a_report_is_saved_and_loaded(report, tmp_path):
    report.save(tmp_path / "report.json")
    assert CompressionReport.load(tmp_path / "report.json") == report
    with pytest.raises(hw.InputError, match=r"report: expected JSON of a report of hw.compression_report, got '\{\}'"):
        CompressionReport.from_json("{}")
    with pytest.raises(hw.InputError, match="report: expected a file with a report of hw.compression_report"):
        CompressionReport.load(tmp_path)
    assert report.metadata["dense"]["weights"] != report.metadata["compressed"]["weights"]
    assert (report.metadata["examples"], report.metadata["documents"]) == (12, 5)


def test_cosines_that_rounding_makes_larger_than_1_are_1(report):
    row = ReportRow.of_agreement("cosine of outputs", "cosine", [1.0000000000000002] * 3, [0, 1, 2])
    changed = replace(report, rows=(row,))
    assert CompressionReport.from_json(changed.to_json()) == changed


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("quantity", "name", "value", "message"),
    [
        ("parameters", "compressed", "x", "a number for parameters, got 'x'"),
        ("parameters", "change", 0.5, "the change from .* for parameters, got 0.5"),
        ("parameters", "kind", "x", "a kind 'x' and its unit for parameters, got 'parameters'"),
        ("parameters", "unit", "bytes!", "a kind 'size' and its unit for parameters, got 'bytes!'"),
        ("parameters", "quantity", 3, "the name of a quantity, got 3"),
        ("parameters", "quantity", "weights", "different quantities"),
        ("parameters", "samples", -1, "a number of samples"),
        ("loss, next_token_loss", "change_sem", -0.5, "standard errors or null"),
        ("loss, next_token_loss", "documents", 1.5, "a number of documents"),
        ("loss, next_token_loss", "high", -99.0, "an interval around"),
        ("decoding a token after 16, batch 1", "change", None, "the change"),
        ("decoding a token after 16, batch 1", "dense", None, "a number for decoding"),
        ("most likely token equal after the same tokens", "dense", 1.0, "a number for most likely"),
        ("most likely token equal after the same tokens", "low", 2.0, "an interval"),
        ("parameters", "other", 1.0, "JSON of a report"),
    ],
)
def test_edited_reports_are_checked(report, quantity, name, value, message):
    content = json.loads(report.to_json())
    next(row for row in content["rows"] if row["quantity"] == quantity)[name] = value
    with pytest.raises(hw.InputError, match=f"^report: expected {message}"):
        CompressionReport.from_json(json.dumps(content))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("notes", "abc", "JSON of a report"),
        ("notes", [1], "notes as texts"),
        ("metadata", {}, "name, dtype, device of both models"),
        ("metadata", [], "JSON of a report|name"),
        ("rows", {}, "JSON of a report"),
    ],
)
def test_edited_reports_need_models_and_notes(report, name, value, message):
    content = json.loads(report.to_json()) | {name: value}
    with pytest.raises(hw.InputError, match=f"^report: expected ({message})"):
        CompressionReport.from_json(json.dumps(content))


def test_the_table_has_the_numbers_and_the_print_their_units(report):
    table = report.table()
    assert list(table.quantity) == [row.quantity for row in report.rows]
    assert table.set_index("quantity").loc["parameters in attention", "change"] == 0.75
    lines = str(report).splitlines()
    assert lines[0] == "LlamaForCausalLM: float64 on cpu, 1 thread"
    parameters = next(line for line in lines if line.startswith("parameters in attention"))
    assert parameters.split() == ["parameters", "in", "attention", "15,360", "11,520", "x", "0.750"]
    assert any("12 examples, 5 documents" in line for line in lines)
    assert repr(report).startswith("CompressionReport(16 rows, ")
    with pytest.raises(hw.InputError, match="quantity: expected one of parameters, .*, got 'cost'"):
        report.row("cost")


@pytest.mark.parametrize(
    ("row", "texts"),
    [
        (ReportRow.of_sizes("w", "bytes", 5.381e8, 2e9), ("538 MB", "2 GB", "x 3.717")),
        (ReportRow.of_sizes("p", "parameters", 134_515_008, 999), ("135 million", "999", "x 0.000")),
        (
            ReportRow.of_times("t", [5e-5] * 6, [1.25e-5, *[2.5e-5] * 4, 7.5e-5]),
            ("50 µs", "25 µs", "x 0.500 (0.250 to 1.500)"),
        ),
        (
            ReportRow.of_times("t", [0.0123] * 6, [0.0246] * 6),
            ("12.3 ms", "24.6 ms", "x 2.000 (2.000 to 2.000)"),
        ),
        (ReportRow.of_losses("l", [1.0, 2.0], [1.5, 2.0], "aa"), ("1.5000", "1.7500", "+0.2500")),
        (ReportRow.of_agreement("a", "share", [1.0, 1.0], "ab"), ("", "100.0% ± 0.0 (100.0% to 100.0%)", "")),
    ],
)  # fmt: skip
def test_numbers_are_shown_with_units(row, texts):
    assert row.texts[1:4] == texts


def test_the_interval_of_a_share_stays_between_0_and_1():
    row = ReportRow.of_agreement("a", "share", [1.0, 0.9, 0.1], "abc")
    assert (row.low, row.high) == (0.0, 1.0)


def test_the_plot_shows_every_row_with_its_interval(report):
    figure = report.plot()
    ratios, losses, agreements = figure.axes
    shown = [text.get_text() for axes in figure.axes for text in axes.get_yticklabels()]
    assert shown == [row.quantity for row in report.rows]
    points = [container.lines[0].get_xdata()[0] for container in ratios.containers]
    drawn = [row for row in report.rows if row.kind in ("size", "time")]
    assert points == pytest.approx([100 * row.change for row in drawn])
    ends = [container.lines[2][0].get_segments()[0][:, 0] for container in ratios.containers]
    row = drawn[-1]
    assert ends[-1] == pytest.approx([100 * row.low, 100 * row.high])
    loss = report.row("loss, next_token_loss")
    assert [each.lines[0].get_xdata()[0] for each in losses.containers] == [loss.dense, loss.compressed]
    assert len(agreements.containers) == 2
    assert "percent of dense" in ratios.get_xlabel()
    assert {text.get_text() for text in ratios.get_legend().get_texts()} == {
        *("size", "time, whole model", "time, attention alone")
    }


# -- other models -----------------------------------------------------------------------------------------------------


class Pooled(nn.Module):
    """A plain module: attention, and the mean over tokens."""

    def __init__(self, axis=1):
        super().__init__()
        self.attention, self.out, self.axis = hw.MultiHeadAttention(24, num_heads=4), nn.Linear(24, 5), axis

    def forward(self, x):
        return self.out(self.attention(x if self.axis == 1 else x.transpose(0, 1))).mean(1)


def test_a_plain_module_has_times_of_calls_and_no_generated_text():
    model = Pooled().double().eval()
    batches = [torch.randn(3, 7, 24, dtype=torch.float64) for _ in range(2)]
    pruned = halved(model, {"": batches[0]})
    report = quiet_report(model, pruned, batches, loss=None, **QUICK)
    assert [row.quantity for row in report.rows] == [
        *("parameters", "parameters in attention", "weights", "call, batch 1", "call, batch 1, attention"),
        *("call, batch 2", "call, batch 2, attention", "cosine of outputs"),
    ]
    assert "no agreement of generated text: the call of Pooled has no past_key_values" in " ".join(report.notes)
    with torch.no_grad():
        a, b = (torch.cat([each(batch) for batch in batches]).numpy() for each in (model, pruned))
    cosines = (a * b).sum(1) / numpy.linalg.norm(a, axis=1) / numpy.linalg.norm(b, axis=1)
    assert report.row("cosine of outputs").compressed == pytest.approx(cosines.mean())


def test_cosines_of_encoder_decoders_are_those_of_the_targets():
    dense = families.model("bart")
    other = deepcopy(dense)
    with torch.no_grad():
        other.decoder.layers[0].fc2.weight.mul_(3.0)
    masks = torch.ones(2, 3, 7, dtype=torch.long)
    masks[0, 1, 3:], masks[1, 2, 5:] = 0, 0
    ids = torch.randint(3, 97, (2, 3, 7), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[0], "decoder_input_ids": ids[1]}
    batch |= {"attention_mask": masks[0], "decoder_attention_mask": masks[1]}
    cosines = output_cosines((dense, other), ReportData.of([batch], torch.device("cpu")))
    with torch.no_grad():
        states = [model(**batch).last_hidden_state.double() for model in (dense, other)]
    means = [torch.stack([x[row][masks[1, row].bool()].mean(0) for row in range(3)]) for x in states]
    assert cosines == pytest.approx(nn.functional.cosine_similarity(*means, dim=-1).tolist(), abs=1e-6)


def test_a_module_whose_first_axis_is_not_the_batch_is_timed_on_its_own_batch():
    model = Pooled(axis=0).eval()
    report = quiet_report(
        model, model, [torch.randn(7, 3, 24)], loss=lambda model, batch: batch[""].mean((1, 2)), **QUICK
    )
    assert "call on the first batch, of 7" in {row.quantity for row in report.rows}
    assert any("no times of batches 1, 2" in note for note in report.notes)


def test_a_module_without_attention_says_so():
    model = nn.Linear(6, 4)
    report = quiet_report(model, model, [torch.randn(3, 6)], loss=None, **QUICK)
    assert "parameters in attention" not in {row.quantity for row in report.rows}
    assert any(note.startswith("no parameters and times of attention: ") for note in report.notes)


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_an_encoder_decoder_has_no_generated_text(name):
    model = families.model(name)
    report = quiet_report(model, model, [families.inputs(name)], loss=None, **QUICK)
    assert {"call, batch 1", "call, batch 2, attention"} <= {row.quantity for row in report.rows}
    assert f"{type(model).__name__} is an encoder-decoder" in " ".join(report.notes)
    with pytest.raises(hw.InputError, match=f"got {type(model).__name__}, an encoder-decoder"):
        quiet_report(model, model, [families.inputs(name)], **QUICK)


def test_the_next_token_loss_of_a_masked_model_is_refused():
    model = tiny.model("encoder", top="ForMaskedLM")
    batch = {"input_ids": torch.arange(5, 45).view(2, 20), "token_type_ids": torch.zeros(2, 20, dtype=torch.int64)}
    with pytest.raises(hw.InputError, match="got BertForMaskedLM, whose logits depend on later tokens; pass another"):
        quiet_report(model, model, [batch], **QUICK)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rounds": 5}, "rounds: expected a whole number of 6 or more, got 5"),
        ({"prompt": 0}, "prompt: expected a whole number of 1 or more, got 0"),
        ({"new_tokens": 1}, "new_tokens: expected a whole number of 2 or more"),
        ({"batches": (0,)}, "batches: expected a whole number of 1 or more"),
        ({"prompt": 126}, "prompt: expected at most 128 tokens, the model's limit, got 126, with new tokens 130"),
        ({"loss": 3.0}, "loss: expected a function of model and batch"),
    ],
)
def test_unusable_arguments_are_named(options, message, as_user):
    dense, compressed, texts = decoders()
    with pytest.raises(hw.InputError, match=message):
        quiet_report(dense, compressed, texts, **(QUICK | options))


def test_a_loss_of_one_model_alone_is_refused():
    dense, compressed, texts = decoders()

    def loss(model, batch):
        losses = hw.next_token_loss(model, batch)
        return losses if model is dense else losses * math.nan

    with pytest.raises(hw.InputError, match="loss: expected a number for the same examples under both models"):
        quiet_report(dense, compressed, texts, loss=loss, **QUICK)
    with pytest.raises(hw.InputError, match="dataset: expected at least one batch"):
        quiet_report(dense, compressed, [], **QUICK)


def test_a_cosine_of_nan_is_refused():
    dense = tiny.model("encoder")
    broken = deepcopy(dense)
    with torch.no_grad():
        broken.embeddings.word_embeddings.weight[5] = math.nan
    batches = [{"input_ids": torch.tensor([[4, token, 6]])} for token in (3, 5)]
    with pytest.raises(hw.InputError, match="outputs that are numbers, got NaN"):
        hw.compression_report(dense, broken, batches, loss=None, prompt=3, batches=(1,), rounds=6)
