"""Weights between tokens that a view keeps, against eager attention of tiny models."""

import pytest
import torch
import transformers

import headwise as hw
import tiny
from headwise.analysis.viewer import TokensOfWords, VisibleWeights, WordWeights, largest
from headwise.page.contents import LargestWeights


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


@pytest.mark.parametrize("columns", [1, 7, 31, 32, 33, 64, 131, 257, 1021, 2053])
@pytest.mark.parametrize("count", [1, 8, 32])
def test_the_largest_weights_are_those_of_topk(columns, count):
    count = min(count, columns)
    for weights in (torch.randn(2, 3, columns), (9 * torch.randn(2, 3, columns)).softmax(-1)):
        found, chosen = largest(weights, count)
        assert torch.equal(found, weights.topk(count).values)
        assert torch.equal(weights.gather(-1, chosen), found)
    equal = largest(torch.zeros(2, 3, columns), count)[1]
    assert all(len(set(row.tolist())) == count for row in equal.flatten(0, 1))


@pytest.mark.parametrize("seed", range(7))
def test_weights_between_words_are_sums_of_those_between_tokens(seed):
    """Words of up to 5 tokens, in blocks of rows that begin within words, with keys before them that are hidden."""
    generator = torch.Generator().manual_seed(seed)
    word_of = torch.randint(0, 5, (61,), generator=generator).ne(0).cumsum(0)
    words, tokens, heads = int(word_of[-1]) + 1 - int(word_of[0]), 61, 2
    word_of = word_of - word_of[0]
    sides = TokensOfWords(word_of, torch.rand(words, generator=generator) > 0.3)
    is_visible = torch.ones(tokens, tokens, dtype=torch.bool).tril().triu(-11)
    weights = torch.randn(heads, tokens, tokens, generator=generator).masked_fill(~is_visible, -torch.inf).softmax(-1)
    found = WordWeights(heads, sides, sides)
    for start in range(0, tokens, 9):
        rows = range(start, min(start + 9, tokens))
        keys = torch.arange(max(start - 11, 0), rows.stop)
        selected = slice(rows.start, rows.stop)
        shown = is_visible[None, selected][..., keys]
        found.add(VisibleWeights(weights[:, selected][..., keys], slice(0, heads), rows, keys, shown, tokens))
    member = torch.nn.functional.one_hot(word_of, words).float()
    expected = (member.T / member.sum(0)[:, None]) @ weights @ member
    top = expected.topk(8)
    torch.testing.assert_close(found.top_weights, top.values)
    has_weight = top.values > 0
    torch.testing.assert_close(expected.gather(-1, found.top_keys.long())[has_weight], top.values[has_weight])
    torch.testing.assert_close(found.picture, expected)
    may_link = sides.is_lexical & sides.is_lexical[:, None] & ~torch.eye(words, dtype=torch.bool)
    may_link[:, 0] = False  # the first token sees no other
    best = expected.masked_fill(~may_link, -1.0).amax(-1)
    torch.testing.assert_close(found.best_weight.clamp(min=0), best.clamp(min=0))
    has_link = best > 0
    assert torch.equal(expected.gather(-1, found.best_key[..., None])[..., 0][has_link], best[has_link])
    strengths = [link.weight for link in found.links(0)]
    assert strengths == sorted(strengths, key=lambda weight: -round(weight, 4))
    for link in found.links(0):
        key, weight = int(found.best_key[0, link.query]), float(found.best_weight[0, link.query])
        assert (link.key, link.weight) == (key, weight)
        is_mutual = int(found.best_key[0, key]) == link.query and min(weight, float(best[0, key])) > 1 / words
        assert (link.back is not None) == is_mutual
