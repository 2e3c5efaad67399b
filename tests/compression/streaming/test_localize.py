"""`localize`: ranking, choice by measured loss, reports, files, and what it refuses."""

import json
import math
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch
import transformers

import headwise as hw
import tiny
from compression.streaming import streaming_oracle
from compression.streaming.streaming_oracle import expected_logits, head_mask, ids
from headwise.compression.streaming.localize import localize
from headwise.compression.streaming.streaming_heads import StreamingHeads

WINDOW, FIRST = 4, 2


BUDGET = 0.2


def texts(count=4, rows=2, tokens=21):
    """Return batches of texts that the tiny Llama samples, so that its loss rises if its heads see less."""
    made, batches = streaming_oracle.model("llama"), []
    for seed in range(count):
        torch.manual_seed(seed)
        batches.append({"input_ids": made.generate(ids(rows, 1, seed), do_sample=True, max_new_tokens=tokens - 1)})
    return batches


def localized(name="llama", budget=BUDGET, data=None):
    made = streaming_oracle.model(name)
    return made, localize(made, texts() if data is None else data, budget, window=WINDOW, first=FIRST)


@pytest.fixture(scope="module")
def llama():
    return localized()


def loss_by_oracle(made, streaming, batch):
    """Return the next-token loss of each text, from logits with dense masks."""
    logits = expected_logits(made, streaming, batch["input_ids"])[:, :-1]
    return torch.nn.functional.cross_entropy(logits.mT, batch["input_ids"][:, 1:], reduction="none").mean(1)


def with_streaming(streaming, heads):
    """Return streaming heads with other heads, listed as layer and number."""
    modules = tuple(
        replace(each, streaming=tuple(head for layer, head in sorted(heads) if layer == each.layer))
        for each in streaming.modules
    )
    return replace(streaming, modules=modules)


def ranked(streaming):
    rows = [(score, each.layer, head) for each in streaming.modules for head, score in enumerate(each.scores)]
    return [(layer, head) for _, layer, head in sorted(rows)]


def test_the_losses_are_those_of_dense_masks_on_held_out_texts(llama):
    made, streaming = llama
    selection, report = texts()[0::2], texts()[1::2]
    none = with_streaming(streaming, [])
    for part, losses in ((selection, streaming.selection_losses), (report, streaming.losses)):
        for heads, loss in zip((none, streaming), losses, strict=True):
            expected = torch.cat([loss_by_oracle(made, heads, batch) for batch in part]).mean()
            assert math.isclose(loss, float(expected), rel_tol=1e-10)
    assert streaming.has_held_out
    assert (streaming.selection_examples, streaming.examples) == (4, 4)
    assert streaming.loss_rise == streaming.losses[1] / streaming.losses[0] - 1


def test_the_number_of_heads_is_where_the_budget_ends(llama):
    made, streaming = llama
    order = ranked(streaming)
    count = streaming.streaming_kv_heads
    assert 0 < count < streaming.kv_heads == len(order)
    before, after = streaming.selection_losses
    assert after <= before * (1 + BUDGET)
    chosen = {(each.layer, head) for each in streaming.modules for head in each.streaming}
    assert chosen == set(order[:count])
    one_more = with_streaming(streaming, order[: count + 1])
    loss = torch.cat([loss_by_oracle(made, one_more, batch) for batch in texts()[0::2]]).mean()
    assert loss > before * (1 + BUDGET)


def test_a_large_budget_takes_all_heads_and_a_small_one_none():
    assert localized(budget=100.0)[1].streaming_kv_heads == 6
    made, none = localized(budget=1e-15)
    assert none.streaming_kv_heads == 0
    with none.running(made), torch.no_grad():  # nothing is restricted
        assert torch.equal(made(ids(1, 9)).logits, made(ids(1, 9), past_key_values=none.cache(made)).logits)


def test_shares_and_scores_by_an_oracle(llama):
    made, streaming = llama
    weights_of, outputs = {}, {}

    def attention(module, query, key, value, attention_mask, scaling=None, **options):
        layer = streaming.modules[module.layer_idx]
        group = layer.num_heads // layer.num_kv_heads
        key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
        every = with_streaming(streaming, [(layer.layer, 0), (layer.layer, 1)]).modules[layer.layer]
        real = torch.ones(query.shape[0], query.shape[2], dtype=torch.bool)
        scores = query @ key.mT * scaling
        dense = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), -torch.inf).softmax(-1)
        mask = head_mask(streaming, every, real)
        streams = scores.masked_fill(~mask, -torch.inf).softmax(-1)
        out = dense @ value
        out.retain_grad()
        weights_of[layer.layer] = (dense * ~mask).sum(-1)[:, :, WINDOW + FIRST :]
        outputs[layer.layer] = out, (streams - dense).detach() @ value.detach()
        return out.transpose(1, 2), None

    shares, scores = torch.zeros(3, 2, dtype=torch.float64), torch.zeros(3, 2, dtype=torch.float64)
    for batch in texts()[0::2]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(transformers.AttentionInterface, "get_interface", lambda *_: attention)
            logits = made(batch["input_ids"], use_cache=False).logits[:, :-1]
        targets = batch["input_ids"][:, 1:]
        torch.nn.functional.cross_entropy(logits.mT, targets, reduction="none").mean(1).sum().backward()
        for layer, (out, change) in outputs.items():
            effects = (out.grad * change).sum(-1).unflatten(1, (2, 3)).sum(2)
            scores[layer] += effects.square().sum((0, 2))
            shares[layer] += weights_of[layer].unflatten(1, (2, 3)).mean((0, 2, 3)) / 2
    made.zero_grad()
    for each in streaming.modules:
        torch.testing.assert_close(torch.tensor(each.outside, dtype=torch.float64), shares[each.layer])
        torch.testing.assert_close(torch.tensor(each.scores, dtype=torch.float64), scores[each.layer])


@pytest.mark.parametrize("name", ["gemma3", "gpt2", "phi", "qwen3"])
def test_decoders_of_other_families(name):
    made, streaming = localized(name, budget=1.0, data=texts(2))
    assert streaming.streaming_kv_heads > 0
    assert [each.layer for each in streaming.modules] == [0, 1, 2]
    assert [each.own_window for each in streaming.modules] == ([5, None, None] if name == "gemma3" else [None] * 3)
    tokens = ids(2, 15)
    cache = streaming.cache(made)
    with streaming.running(made), torch.no_grad():
        found = torch.cat([made(part, past_key_values=cache).logits for part in tokens.split([9, 1, 5], 1)], 1)
    expected = expected_logits(made, streaming, tokens)
    assert (found - expected).abs().max() <= 1e-10 * expected.abs().max()
    dense = transformers.DynamicCache(config=made.config)
    made(tokens, past_key_values=dense)
    stated = streaming.cache_bytes(15, batch=2)
    assert stated.dense == sum(layer.keys.nbytes + layer.values.nbytes for layer in dense.layers)


def test_padding_does_not_count():
    made = streaming_oracle.model("llama")
    whole = [{"input_ids": ids(1, tokens, seed)} for seed, tokens in enumerate((21, 17, 16, 19))]
    padded = []
    for short, long in (whole[1:3], (whole[3], whole[0])):
        rows = [short["input_ids"][0], long["input_ids"][0]]
        size = max(map(len, rows))
        padded.append({
            "input_ids": torch.stack([torch.nn.functional.pad(row, (0, size - len(row))) for row in rows]),
            "attention_mask": torch.stack([(torch.arange(size) < len(row)).long() for row in rows]),
        })  # fmt: skip
    alone = [whole[1], whole[3], whole[2], whole[0]]  # batches 0 and 2 are for the choice
    found, expected = (localize(made, data, 0.01, window=WINDOW, first=FIRST) for data in (padded, alone))
    for one, other in zip(found.modules, expected.modules, strict=True):
        assert one.streaming == other.streaming
        torch.testing.assert_close(torch.tensor(one.outside), torch.tensor(other.outside))
        torch.testing.assert_close(torch.tensor(one.scores), torch.tensor(other.scores))
    assert math.isclose(found.losses[1], expected.losses[1], rel_tol=1e-10)


def test_one_batch_is_divided_by_texts_and_one_text_serves_for_everything():
    rows = torch.cat([batch["input_ids"] for batch in texts(2)])
    _, one_batch = localized(data=[{"input_ids": rows}])
    _, batches = localized(data=[{"input_ids": rows[0::2]}, {"input_ids": rows[1::2]}])
    assert one_batch == batches
    _, alone = localized(data=[{"input_ids": rows[:1]}])
    assert not alone.has_held_out
    assert alone.losses == alone.selection_losses
    assert "on 1 text," in str(alone)


def test_the_result_is_saved_printed_and_listed(llama, tmp_path):
    made, streaming = llama
    streaming.save(tmp_path / "streaming.json")
    loaded = StreamingHeads.load(tmp_path / "streaming.json")
    assert loaded == streaming
    with loaded.running(made), torch.no_grad():
        made(ids(1, 9), past_key_values=loaded.cache(made))
    table = streaming.table()
    assert len(table) == 6
    assert table.streaming.sum() == streaming.streaming_kv_heads
    assert table.outside.between(0, 1).all()
    assert f"{streaming.streaming_kv_heads} of 6 key/value heads stream" in str(streaming)
    assert f"{streaming.modules[1].outside[0]:6.1%}" in str(streaming).splitlines()[5]
    assert repr(streaming) == f"StreamingHeads({streaming.streaming_kv_heads} of 6 key/value heads, window 4, first 2)"
    for text in ("[]", "{}", streaming.to_json().replace('"format": 1', '"format": 2')):
        with pytest.raises(hw.InputError, match="streaming: expected JSON of StreamingHeads"):
            StreamingHeads.from_json(text)
    with pytest.raises(hw.InputError, match="path: expected a file with streaming heads"):
        StreamingHeads.load(tmp_path / "none.json")


def test_the_exported_pattern_is_read_as_kvpress_reads_it(llama, tmp_path):
    _, streaming = llama
    streaming.export_pattern(tmp_path / "pattern")
    config = json.loads((tmp_path / "pattern" / "config.json").read_text())
    text = (tmp_path / "pattern" / "full_attention_heads.tsv").read_text()
    scores = np.clip(np.loadtxt(StringIO(text), dtype=float, delimiter="\t"), 0, 1)
    assert (config["sink_size"], config["recent_size"]) == (FIRST, WINDOW)
    assert scores.shape == (3, 2)
    ratio = streaming.streaming_kv_heads / streaming.kv_heads
    lowest = np.argsort(scores, axis=None)[: round(scores.size * ratio)]
    mask = np.zeros(scores.shape, dtype=bool)
    mask[np.unravel_index(lowest, scores.shape)] = True
    assert mask.tolist() == [[head in each.streaming for head in range(2)] for each in streaming.modules]


def test_a_pattern_of_layers_with_windows_is_refused(tmp_path):
    _, streaming = localized("gemma3", data=texts(2))
    with pytest.raises(hw.InputError, match="none of which has a window of its own"):
        streaming.export_pattern(tmp_path)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"budget": 0.0}, "budget: expected"),
        ({"budget": math.nan}, "budget: expected"),
        ({"window": 0}, "window: expected"),
        ({"window": 2.5}, "window: expected"),
        ({"first": -1}, "first: expected"),
        ({"loss": 3}, "loss: expected a function"),
        ({"loss": lambda model, batch: -hw.next_token_loss(model, batch)}, "loss: expected a positive number"),
        (
            {"loss": lambda model, batch: torch.ones(len(batch["input_ids"]))},
            "loss: expected a differentiable function",
        ),
        ({"dataset": []}, "calibration: expected at least one batch"),
        ({"dataset": [{"inputs_embeds": torch.zeros(1, 3, 24)}]}, "batches with input_ids"),
        (
            {"window": 19},
            "dataset: expected texts of more than 21 tokens, the window and the first tokens, got at most",
        ),
    ],
)
@pytest.mark.usefixtures("as_user")
def test_arguments_that_cannot_be_used(options, message):
    arguments = {"dataset": texts(2), "window": WINDOW, "first": FIRST} | options
    with pytest.raises(hw.InputError, match=message):
        localize(streaming_oracle.model("llama"), arguments.pop("dataset"), **arguments)


def test_other_models_are_refused():
    mistral = transformers.MistralConfig(**streaming_oracle.ROTARY, num_key_value_heads=3, sliding_window=4)
    cases = [
        (transformers.AutoModelForCausalLM.from_config(mistral), "a layer without a sliding window"),
        (tiny.model("encoder", top="ForMaskedLM"), "causal attention to all tokens|past_key_values"),
        (
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=97, d_model=24, num_layers=1, num_heads=2, d_kv=12, d_ff=9)
            ),
            "a decoder of transformers, got T5ForConditionalGeneration",
        ),
        (hw.MultiHeadAttention(24, num_heads=2), "a decoder of transformers"),
    ]
    for made, message in cases:
        with pytest.raises(hw.InputError, match=message):
            localize(made, texts(2), window=WINDOW, first=FIRST)


def test_heads_of_another_model_are_refused(llama):
    _, streaming = llama
    other = streaming_oracle.model("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(2.0)
    for call in (streaming.running, streaming.cache):
        with pytest.raises(hw.InputError, match="the model of these streaming heads, got one with other weights"):
            call(other)
    with pytest.raises(hw.InputError, match=r"one with a module model\.layers\.0\.self_attn"):
        streaming.running(streaming_oracle.model("gpt2"))


def test_a_model_whose_attention_is_not_what_the_call_states_is_refused(monkeypatch):
    def changed(*args, **kwargs):
        out, weights = own(*args, **kwargs)
        return out * 1.01, weights

    from transformers.integrations import sdpa_attention

    own = sdpa_attention.sdpa_attention_forward
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", changed)
    with pytest.raises(
        hw.InputError, match=r"softmax attention with the options of its call in model\.layers|replaced"
    ):
        localized()


def test_texts_of_one_document_are_not_held_out():
    from headwise.compression.streaming.localize import _parts

    batches = [{"input_ids": torch.arange(12).view(3, 4)}, {"input_ids": torch.arange(12, 20).view(2, 4)}]
    selection, report = _parts(batches, [4, 7, 4, 9, 7], 3)
    assert [batch["input_ids"][:, 0].tolist() for batch in selection] == [[0, 8], [12]]
    assert [batch["input_ids"][:, 0].tolist() for batch in report] == [[4], [16]]
    selection, report = _parts(batches, [2, 2, 2, 2, 2], 3)
    assert report is selection
    assert sum(len(batch["input_ids"]) for batch in selection) == 5
