"""Models of `transformers` with FlashAttention and FlexAttention are observed and gated.

The statistics are computed in float64 from the weights that eager attention returns for each sequence alone.
"""

import flash_attn_3_stand_in
import flash_attn_stand_in
import pytest
import torch
import transformers
from transformers import modeling_flash_attention_utils as library
from transformers.integrations import flex_attention as integration

import headwise as hw
from oracles import statistics_of

VOCABULARY, LENGTHS = 31, (9, 4, 7)
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 24,
    "intermediate_size": 20,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 6,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
CONFIGS = {
    "llama": lambda: transformers.LlamaConfig(**SIZES),
    "mistral, window": lambda: transformers.MistralConfig(**SIZES, sliding_window=3),
    "gemma2, softcap": lambda: transformers.Gemma2Config(
        **SIZES, attn_logit_softcapping=0.7, sliding_window=3, query_pre_attn_scalar=3
    ),
    "bert": lambda: transformers.BertConfig(
        **{name: size for name, size in SIZES.items() if name not in ("num_key_value_heads", "head_dim")}
    ),
}


def model_of(name):
    """Return a model with eager attention in float64, whose heads differ."""
    torch.manual_seed(7)
    config = CONFIGS[name]()
    config._attn_implementation = "eager"
    model = transformers.AutoModel.from_config(config).double().eval()
    for parameter in model.parameters():
        parameter.data += 0.3 * torch.randn(parameter.shape)
    return model


pytestmark = pytest.mark.filterwarnings(
    "ignore:flex_attention called without torch.compile", "ignore:_compile flag on create_block_mask"
)


@pytest.fixture
def engine(monkeypatch):
    """Return a function that lets a model use an attention implementation, with stand-ins for the packages."""

    def lazy_imports(implementation, *_, **__):
        module = flash_attn_3_stand_in if implementation == "flash_attention_3" else flash_attn_stand_in
        functions = (module.flash_attn_func, module.flash_attn_varlen_func, module.flash_attn_with_kvcache)
        return (*functions, library._pad_input, library._unpad_input)

    monkeypatch.setattr(library, "_lazy_imports", lazy_imports)
    monkeypatch.setattr(library, "_loaded_implementation", None)
    # On a CPU, compiled FlexAttention has no float64.
    monkeypatch.setattr(integration.WrappedFlexAttention, "__call__", lambda self: integration.flex_attention)

    def use(model, implementation):
        for module in model.modules():
            if hasattr(module, "config"):
                monkeypatch.setattr(module.config, "_attn_implementation_internal", implementation)
        return model

    return use


@torch.no_grad()
def expected(model, sequences, **options):
    """Return the statistics of each head of each layer, from eager attention of each sequence alone."""
    found = []
    for ids in sequences:
        attentions = model(input_ids=ids[None], output_attentions=True, **options).attentions
        found.append([[statistics_of(weights, ids) for weights in layer[0]] for layer in attentions])
    rows = []
    for layer in range(len(found[0])):
        for head in range(len(found[0][0])):
            values = [each[layer][head] for each in found]
            names = set().union(*values)
            numbers = {name: [each[name] for each in values if name in each] for name in names}
            rows.append({name: sum(each) / len(each) for name, each in numbers.items()})
    return rows


def require_equal(heads, rows):
    assert len(heads.rows()) == len(rows)
    for row, values in zip(heads.rows(), rows, strict=True):
        for name, value in values.items():
            assert row[name] == pytest.approx(value, rel=5e-6, abs=1e-7), name  # eager attention has softmax in float32


def batch(side):
    ids = [torch.randint(1, VOCABULARY, (length,)) for length in LENGTHS]
    padded = torch.zeros(len(ids), max(LENGTHS), dtype=torch.long)
    for row, sequence in zip(padded, ids, strict=True):
        row[slice(-len(sequence), None) if side == "left" else slice(len(sequence))] = sequence
    return ids, padded, (padded != 0).long()


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "flex_attention"])
@pytest.mark.parametrize("name", CONFIGS)
@torch.no_grad()
def test_a_batch_with_padding(engine, name, implementation):
    torch.manual_seed(5)
    model = model_of(name)
    sequences, ids, mask = batch("right" if name == "bert" else "left")
    rows = expected(model, sequences)
    engine(model, implementation)
    plain = model(input_ids=ids, attention_mask=mask).last_hidden_state
    with hw.watch(model) as heads:
        assert torch.equal(model(input_ids=ids, attention_mask=mask).last_hidden_state, plain)
    require_equal(heads, rows)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
@pytest.mark.parametrize("name", ["llama", "mistral, window"])
@torch.no_grad()
def test_packed_sequences_are_rows_of_the_statistics(engine, name, by):
    torch.manual_seed(5)
    model = model_of(name)
    sequences, _, _ = batch("left")
    rows = expected(model, sequences)
    engine(model, "flash_attention_2")
    packed = {
        "input_ids": torch.cat(sequences)[None],
        "position_ids": torch.cat([torch.arange(length) for length in LENGTHS])[None],
    }
    if by == "cu_seq_lens":
        offsets = torch.tensor([0, *LENGTHS]).cumsum(0).to(torch.int32)
        packed |= {f"cu_seq_lens_{each}": offsets for each in "qk"}
        packed |= {f"max_length_{each}": max(LENGTHS) for each in "qk"}
    plain = model(**packed, use_cache=False).last_hidden_state
    with hw.watch(model) as heads:
        assert torch.equal(model(**packed, use_cache=False).last_hidden_state, plain)
    require_equal(heads, rows)


@pytest.mark.parametrize("name", ["llama", "mistral, window"])
@torch.no_grad()
def test_decoding_with_a_cache(engine, name):
    torch.manual_seed(5)
    model, ids = model_of(name), torch.randint(1, VOCABULARY, (2, 8))
    rows = expected(model, list(ids))
    engine(model, "flash_attention_2")
    with hw.watch(model) as heads:
        cache = model(input_ids=ids[:, :5], use_cache=True).past_key_values
        for token in range(5, 8):
            model(input_ids=ids[:, token : token + 1], past_key_values=cache, use_cache=True)
    if name == "llama":
        require_equal(heads, rows)
    else:  # the cache drops keys, so that tokens of dropped keys are unknown
        for row, values in zip(heads.rows(), rows, strict=True):
            for statistic in ("entropy", "confidence", "distance", "self"):
                assert row[statistic] == pytest.approx(values[statistic], rel=5e-6), statistic


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flex_attention"])
@torch.no_grad()
def test_a_gate_acts_as_with_sdpa(engine, implementation):
    torch.manual_seed(5)
    model, (_, ids, mask) = engine(model_of("llama"), "sdpa"), batch("left")
    with hw.gate(model, {(0, 2): 0.3, (1, 0): 0.0}):
        gated = model(input_ids=ids, attention_mask=mask).last_hidden_state
    engine(model, implementation)
    with hw.watch(model) as heads, hw.gate(model, {(0, 2): 0.3, (1, 0): 0.0}):
        out = model(input_ids=ids, attention_mask=mask).last_hidden_state
    torch.testing.assert_close(out[mask.bool()], gated[mask.bool()])
    assert len(heads.rows()) == 8


@torch.no_grad()
def test_a_paged_cache_is_named(engine):
    model = engine(model_of("llama"), "flash_attention_2")
    table = torch.zeros(1, 1, dtype=torch.int32)
    with (
        pytest.raises(hw.errors.InputError, match="flash_attention_2 with block_table cannot be read"),
        hw.watch(model),
    ):
        model(input_ids=torch.ones(1, 3, dtype=torch.long), block_table=table)
