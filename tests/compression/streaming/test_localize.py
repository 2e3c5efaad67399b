"""`localize`: ranking, choice by measured loss, reports, files, and what it refuses."""

import functools
import math
from dataclasses import replace

import pytest
import torch
import transformers

import headwise as hw
import tiny
from compression.streaming import streaming_oracle
from compression.streaming.streaming_oracle import expected_logits, head_mask, ids
from headwise.compression.streaming.localize import divided, localize

WINDOW, FIRST = 4, 2


BUDGET = 0.2


@functools.cache
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
            {"dataset": [{"input_ids": ids(1, 9), "attention_mask": torch.ones(1, 1, 9, 9)}]},
            r"dataset: expected attention_mask of the shape of input_ids, \(1, 9\), got \(1, 1, 9, 9\)",
        ),
        ({"window": 19}, "dataset: expected texts of more than 21 tokens, the window and the first tokens, got at mos"),
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
        (
            transformers.T5ForConditionalGeneration(
                transformers.T5Config(vocab_size=97, d_model=24, num_layers=1, num_heads=2, d_kv=12, d_ff=9)
            ),
            "a decoder of transformers, got T5ForConditionalGeneration",
        ),
        (hw.MultiHeadAttention(24, num_heads=2), "a decoder of transformers"),
    ]
    for made, message in cases:
        for window in (WINDOW, 500):  # which is too large for the texts
            with pytest.raises(hw.InputError, match=message):
                localize(made, texts(2), window=window, first=FIRST)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_an_encoder_is_refused_by_either_implementation(implementation):
    made = tiny.model("encoder", top="ForMaskedLM")
    made.set_attn_implementation(implementation)
    with pytest.raises(hw.InputError, match="a decoder with causal attention, got BertForMaskedLM with bidirectional"):
        localize(made, texts(2))


def test_eager_attention_in_float64_may_have_a_softmax_in_float32(monkeypatch):
    from transformers.models.llama import modeling_llama

    made, expected = localized()
    made.set_attn_implementation("eager")  # Llama's computes its softmax in float32
    found = localize(made, texts(), BUDGET, window=WINDOW, first=FIRST)
    assert [each.streaming for each in found.modules] == [each.streaming for each in expected.modules]
    for one, other in zip(found.modules, expected.modules, strict=True):
        assert one.outside == pytest.approx(other.outside, rel=1e-5)
        assert one.scores == pytest.approx(other.scores, rel=1e-4)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    own = modeling_llama.eager_attention_forward

    def changed(*args, **kwargs):
        out, weights = own(*args, **kwargs)
        return out * 1.001, weights

    monkeypatch.setattr(modeling_llama, "eager_attention_forward", changed)
    with pytest.raises(hw.InputError, match=r"softmax attention with the options of its call in model\.layers\.0"):
        localize(made, texts(), BUDGET, window=WINDOW, first=FIRST)


def test_a_model_whose_attention_is_not_what_the_call_states_is_refused(monkeypatch):
    def changed(*args, **kwargs):
        out, weights = own(*args, **kwargs)
        return out * 1.01, weights

    from transformers.integrations import sdpa_attention

    own = sdpa_attention.sdpa_attention_forward
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "sdpa", changed)
    with pytest.raises(hw.InputError, match=r"softmax attention with the options of its call in model\.layers|replace"):
        localized()


def first_tokens(batches, documents):
    """Return the first tokens of the texts in both parts."""
    return [[batch["input_ids"][:, 0].tolist() for batch in part] for part in divided(batches, documents, 3)]


def test_texts_are_divided_by_document():
    batches = [{"input_ids": torch.arange(12).view(3, 4)}, {"input_ids": torch.arange(12, 20).view(2, 4)}]
    assert first_tokens(batches, [4, 7, 4, 9, 7]) == [[[0, 8], [12]], [[4], [16]]]
    assert first_tokens(batches, [2, 2, 2, 2, 2]) == [[[0, 4, 8], [12, 16]]] * 2
    assert first_tokens(batches, None) == [[[0, 4, 8]], [[12, 16]]]
    assert first_tokens(batches[:1], None) == [[[0, 8]], [[4]]]


def test_equal_texts_count_as_one():
    one, two, three = torch.arange(15).view(3, 5)
    padded = {
        "input_ids": torch.nn.functional.pad(torch.stack([one, two]), (2, 0), value=99),
        "attention_mask": torch.ones(2, 7, dtype=torch.long),
    }
    padded["attention_mask"][:, :2] = 0
    rows = [{"input_ids": row[None]} for row in (one, one, two, one)]
    assert first_tokens(rows[:2], None) == [[[0], [0]]] * 2
    assert first_tokens(rows[:2], [0, 1]) == [[[0], [0]]] * 2
    assert first_tokens(rows, None) == [[[0], [0], [0]], [[5]]]
    assert first_tokens(rows, [3, 4, 5, 6]) == [[[0], [0], [0]], [[5]]]
    assert first_tokens([{"input_ids": torch.stack([one, one, three])}], None) == [[[0, 0]], [[10]]]
    assert first_tokens([rows[0], padded, rows[2]], None) == [[[0], [99]], [[99], [5]]]
    same = ids(1, 15)
    _, streaming = localized(data=[{"input_ids": same}, {"input_ids": same.clone()}])
    assert not streaming.has_held_out
    assert "on 2 texts," in str(streaming)
