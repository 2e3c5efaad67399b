"""Statistics of padded, cached and generated runs of `transformers` models, against eager float64 weights of each
sequence alone, without padding and without a cache.
"""

import copy

import pytest
import torch
import transformers

import headwise as hw
from sequences_alone import COMMON_POSITIONS, mean_statistics, require_statistics
from tiny import PADDED, TOKENS, family

OWN = TOKENS[:, 3:10]
OWN_PADDED = {
    "no padding": torch.ones(2, 7, dtype=torch.long),
    "left": (torch.arange(7) >= torch.tensor([[0], [3]])).long(),
    "right": (torch.arange(7) < torch.tensor([[7], [4]])).long(),
}


def exact(model):
    """Return a copy of a model in float64 with eager attention, which returns its weights."""
    model = copy.deepcopy(model).double()
    model.set_attn_implementation("eager")
    return model


@torch.no_grad()
def rows_alone(model, sequences):
    """Return the statistics of a decoder's heads: means over these sequences of token ids, each alone."""
    model = exact(model)
    weights = [model(tokens[None], output_attentions=True, use_cache=False).attentions for tokens in sequences]
    tokens = [each.tolist() for each in sequences]
    found = [mean_statistics_of(weights, tokens, layer) for layer in range(len(weights[0]))]
    return [row for layer in found for row in layer]


def mean_statistics_of(weights, tokens, layer):
    """Return the statistics of the heads of one layer; each sequence has token ids of its own."""
    alone = [mean_statistics([each[layer][0]], tokens=ids) for each, ids in zip(weights, tokens, strict=True)]
    rows = []
    for heads in zip(*alone, strict=True):
        names = set().union(*heads)
        values = {name: [each[name] for each in heads if name in each] for name in names}
        rows.append({name: sum(numbers) / len(numbers) for name, numbers in values.items()})
    return rows


def decoder():
    torch.manual_seed(0)
    sizes = {"vocab_size": 31, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "head_dim": 10}
    config = transformers.LlamaConfig(**sizes, num_key_value_heads=2, intermediate_size=37, pad_token_id=0)
    model = transformers.LlamaForCausalLM(config).eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.3)
    return model


def in_chunks(model, cache):
    for start, stop in ((0, 6), (6, 10), (10, 11), (11, 12), (12, 13)):
        model(TOKENS[:, start:stop], past_key_values=cache)


@pytest.mark.parametrize("kind", ["dynamic", "static"])
@torch.no_grad()
def test_calls_with_cached_keys_continue_their_sequences(kind):
    model = family("llama", "sdpa")
    if kind == "static":
        cache = transformers.StaticCache(config=model.config, max_cache_len=32)
    else:
        cache = transformers.DynamicCache(config=model.config)
    with hw.watch(model) as heads:
        in_chunks(model, cache)
    require_statistics(heads.rows(), rows_alone(model, TOKENS))


def cached(model, tokens):
    """Return a cache with the keys of a prompt."""
    cache = transformers.DynamicCache(config=model.config)
    model(tokens, past_key_values=cache)
    return cache


@torch.no_grad()
def test_texts_after_the_same_cached_prompt_are_sequences_of_their_own():
    model, (prompt, *texts) = family("llama", "sdpa"), TOKENS.split((5, 2, 6), 1)
    caches = [cached(model, prompt) for _ in texts]
    with hw.watch(model) as heads:
        for text, cache in zip(texts, caches, strict=True):
            model(text, past_key_values=cache)
    assert {record.statistics["entropy"].count[0].item() for record in heads.records} == {4}


@torch.no_grad()
def test_alternating_caches_are_named():
    model = family("llama", "sdpa")
    caches = [transformers.DynamicCache(config=model.config) for _ in range(2)]
    warning = pytest.warns(UserWarning, match="it is unknown which sequences some calls with cached keys continue")
    with warning, hw.watch(model) as heads:
        for start, stop in ((0, 6), (6, 7)):
            for cache, tokens in zip(caches, (TOKENS, TOKENS.flip(1)), strict=True):
                model(tokens[:, start:stop], past_key_values=cache)
    assert not {"entropy", "distance", "received"} & heads.rows()[0].keys()


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("padding", ["left", "no padding"])
@torch.no_grad()
def test_a_prompt_and_what_follows_it_are_one_sequence(padding, cache):
    model, mask = decoder(), PADDED[padding]
    prompt = TOKENS.remainder(30) + 1
    options = {"max_new_tokens": 5, "do_sample": False, "eos_token_id": None, "cache_implementation": cache}
    with hw.watch(model) as heads:
        tokens = model.generate(prompt, attention_mask=mask, **options)
    real = torch.cat([mask.bool(), torch.ones(2, 4).bool()], 1)  # the last token is not attended from
    sequences = [each[:-1][kept] for each, kept in zip(tokens, real, strict=True)]
    require_statistics(heads.rows(), rows_alone(model, sequences))
    assert {record.statistics["first"].count[0].item() for record in heads.records} == {2}


@torch.no_grad()
def test_token_ids_that_change_in_place_are_read_again():
    model, tokens = decoder(), TOKENS.remainder(30)
    texts = torch.stack([tokens, tokens.flip(1) // 2])
    buffer = torch.empty_like(tokens)
    with hw.watch(model) as heads:
        for each in texts:
            buffer.copy_(each)
            model(buffer, use_cache=False)
    require_statistics(heads.rows(), rows_alone(model, texts.flatten(0, 1)))


def bart():
    sizes = {"encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    return transformers.BartModel(
        transformers.BartConfig(vocab_size=97, d_model=24, encoder_layers=1, decoder_layers=1, **sizes)
    )


def t5():
    sizes = {"vocab_size": 97, "d_model": 24, "d_kv": 7, "d_ff": 37, "num_layers": 1, "num_heads": 3}
    return transformers.T5Model(transformers.T5Config(**sizes))


def fsmt():
    sizes = {"encoder_ffn_dim": 37, "decoder_ffn_dim": 37, "encoder_attention_heads": 3, "decoder_attention_heads": 3}
    sizes |= {"src_vocab_size": 97, "tgt_vocab_size": 97, "d_model": 24, "encoder_layers": 1, "decoder_layers": 1}
    return transformers.FSMTModel(transformers.FSMTConfig(langs=["a", "b"], **sizes))


def weights_of(model, tokens, own):
    """Return the weights of the encoder, the decoder's self-attention and its cross-attention, of one sequence."""
    masks = {"attention_mask": torch.ones_like(tokens)[None], "decoder_attention_mask": torch.ones_like(own)[None]}
    options = {"use_cache": False, "output_attentions": True, "return_dict": True}
    result = model(tokens[None], decoder_input_ids=own[None], **masks, **options)
    return [each[0][0] for each in (result.encoder_attentions, result.decoder_attentions, result.cross_attentions)]


@pytest.mark.parametrize(
    ("make", "side", "own_side"),
    [
        *((t5, side, own_side) for side in ("left", "right") for own_side in ("left", "right")),
        *((make, side, "right") for make in (bart, fsmt) for side in ("no padding", "right")),  # positions from 0
    ],
)
@torch.no_grad()
def test_padding_of_encoder_and_decoder_does_not_count(make, side, own_side):
    torch.manual_seed(0)
    model = make().eval()
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.1)  # no weight is 0 in float32
    encoder, own = PADDED[side], OWN_PADDED[own_side]
    with hw.watch(model) as heads:
        model(
            input_ids=TOKENS,
            attention_mask=encoder,
            decoder_input_ids=OWN,
            decoder_attention_mask=own,
            use_cache=False,
        )
    eager = model if make is fsmt else exact(model)  # it returns weights, and its masks are those of float32
    alone = [weights_of(eager, TOKENS[i, encoder[i].bool()], OWN[i, own[i].bool()]) for i in range(2)]
    rows, of_encoder = heads.rows(), alone[0][0].shape[0]
    for part, kind in enumerate(("encoder", "decoder", "cross")):
        expected = mean_statistics([each[part] for each in alone])
        own_rows = rows[part * of_encoder : (part + 1) * of_encoder]
        require_statistics(own_rows, expected, without=COMMON_POSITIONS if kind == "cross" else frozenset())
