"""Statistics of cached, padded and chunked runs, against runs of each sequence alone, without padding and cache."""

import pytest
import torch
import transformers

import headwise as hw
from tiny import PADDED, TOKENS, family


@torch.no_grad()
def rows_of(model, run):
    with hw.watch(model) as heads:
        run()
    return heads.rows()


def require_equal(rows, expected):
    for row, other in zip(rows, expected, strict=True):
        assert row.keys() == other.keys()
        for name, value in row.items():
            is_number = isinstance(value, float)
            assert other[name] == (pytest.approx(value, rel=1e-4, abs=1e-5, nan_ok=True) if is_number else value), name


def in_chunks(model, cache):
    for start, stop in ((0, 6), (6, 10), (10, 11), (11, 12), (12, 13)):
        model(TOKENS[:, start:stop], past_key_values=cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
def test_calls_with_cached_keys_continue_their_sequences(kind):
    model = family("llama", "sdpa")
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    else:
        cache = transformers.DynamicCache(config=model.config)
    rows = rows_of(model, lambda: in_chunks(model, cache))
    require_equal(rows, rows_of(model, lambda: [model(TOKENS[:1]), model(TOKENS[1:])]))


def test_padding_on_either_side_of_cross_attention_does_not_count():
    torch.manual_seed(0)
    sizes = {"encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    config = transformers.BartConfig(vocab_size=97, d_model=24, encoder_layers=1, decoder_layers=1, **sizes)
    model, own = transformers.BartModel(config).eval(), TOKENS[:, 3:10]
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    encoder, decoder = PADDED["right"], (torch.arange(7) < torch.tensor([[7], [4]])).long()
    masks = {"attention_mask": encoder, "decoder_attention_mask": decoder}
    padded = rows_of(model, lambda: model(input_ids=TOKENS, decoder_input_ids=own, **masks))

    def one_by_one():
        for index in range(2):
            tokens, own_tokens = TOKENS[index, encoder[index].bool()], own[index, decoder[index].bool()]
            model(input_ids=tokens[None], decoder_input_ids=own_tokens[None])

    require_equal(padded, rows_of(model, one_by_one))
    cross = [row for row in padded if row["kind"] == "cross"]
    assert cross
    assert not {"distance", "self", "previous", "next", "duplicate", "induction"} & set(cross[0])
