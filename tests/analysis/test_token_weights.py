"""Weights between tokens that a view keeps, against eager attention of tiny models."""

import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.page.contents import AllWeights, LargestWeights


def eager_weights(config, seed=0):
    """Return a tiny model, and its eager attention weights on 29 tokens, `(layers, heads, tokens, tokens)`."""
    torch.manual_seed(seed)
    model = tiny.with_distinct_heads(transformers.AutoModel.from_config(config, attn_implementation="eager"))
    tokenizer = tiny.tokenizer("decoder")
    (text,) = tiny.texts(29)
    with torch.no_grad():
        attentions = model(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions
    return model, tokenizer, text, torch.cat(attentions)


LONG = transformers.LlamaConfig(**{**tiny.configs()["llama"].to_dict(), "max_position_embeddings": 128})
CONFIGS = {name: tiny.configs()[name] for name in ("bert", "llama", "mistral, window 4", "gpt-oss, sinks")}


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("name", CONFIGS)
def test_all_weights_are_kept_for_short_texts(name, implementation):
    if name in tiny.EAGER_ONLY and implementation == "sdpa":
        pytest.skip("not implemented by transformers")
    model, tokenizer, text, weights = eager_weights(CONFIGS[name])
    model.set_attn_implementation(implementation)
    seen = hw.view(model, tokenizer, text)
    assert len(seen.heads) == weights.shape[0] * weights.shape[1]
    for head in seen.heads:
        assert isinstance(head.attention.weights, AllWeights)
        expected = weights[head.layer, head.head]
        torch.testing.assert_close(head.attention.weights.weights, expected, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(head.attention.tiles, expected, rtol=1e-4, atol=1e-6)  # 29 tokens are not pooled


@pytest.mark.parametrize("name", CONFIGS)
def test_visible_keys_are_those_of_the_mask(name):
    model, tokenizer, text, _ = eager_weights(CONFIGS[name])
    distance = torch.arange(29)[:, None] - torch.arange(29)
    allowed = torch.ones(29, 29, dtype=torch.bool) if name == "bert" else distance >= 0
    if "window" in name:
        allowed &= distance < 4
    for head in hw.view(model, tokenizer, text).heads:
        visible, shown = head.attention.visible, torch.zeros(29, 29, dtype=torch.bool)
        bounds = iter(zip(visible.starts.tolist(), visible.stops.tolist(), strict=True))
        for query, runs in enumerate(visible.runs.tolist()):
            for start, stop in (next(bounds) for _ in range(runs)):
                shown[query, start:stop] = True
        is_whole = name != "gpt-oss, sinks" or head.layer % 2  # its other layers have windows of 128 tokens
        assert torch.equal(shown, allowed) or not is_whole


def test_the_largest_weights_are_kept_for_long_texts():
    model, tokenizer, text, _ = eager_weights(LONG)
    seen = hw.view(model, tokenizer, " ".join([text] * 3), keep_all=10)
    with torch.no_grad():
        inputs = tokenizer(" ".join([text] * 3), return_tensors="pt")
        weights = torch.cat(model(**inputs, output_attentions=True).attentions)
    for head in seen.heads:
        kept, expected = head.attention.weights, weights[head.layer, head.head]
        assert isinstance(kept, LargestWeights)
        torch.testing.assert_close(kept.totals, torch.ones(87))
        torch.testing.assert_close(kept.weights, expected.topk(32).values, rtol=1e-4, atol=1e-6)
        found = expected.gather(1, kept.keys.long())
        torch.testing.assert_close(found.masked_fill(kept.weights == 0, 0.0), kept.weights, rtol=1e-4, atol=1e-6)


def test_tiles_are_means_over_queries_of_sums_over_keys():
    model, tokenizer, text, _ = eager_weights(LONG)
    text = " ".join([text] * 3)  # 87 tokens
    with torch.no_grad():
        weights = torch.cat(model(**tokenizer(text, return_tensors="pt"), output_attentions=True).attentions).double()
    part = [[token for token in range(87) if token * 64 // 87 == tile] for tile in range(64)]
    for head in hw.view(model, tokenizer, text).heads:
        tiles = head.attention.tiles
        assert tiles.shape == (64, 64)
        for row, column in ((0, 0), (17, 3), (40, 40), (63, 0), (63, 63)):
            expected = weights[head.layer, head.head][part[row]][:, part[column]].sum(-1).mean()
            assert float(tiles[row, column]) == pytest.approx(float(expected), rel=1e-4, abs=1e-6)


def test_sums_of_weights_are_kept_where_a_sink_takes_some():
    model, tokenizer, text, weights = eager_weights(CONFIGS["gpt-oss, sinks"])
    assert weights.sum(-1).min() < 0.9
    for head in hw.view(model, tokenizer, text, keep_all=0).heads:
        expected = weights[head.layer, head.head].sum(-1)
        torch.testing.assert_close(head.attention.weights.totals, expected, rtol=1e-4, atol=1e-6)
