"""Calls of FlashAttention's functions are observed and gated, and computed by these functions, against float64."""

import copy

import pytest
import torch
from torch import nn

import headwise as hw
from engine_model import DIM, HEADS, WIDTH, EngineAttention, model_of, require_rows
from flash_attn_stand_in import one_sequence

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (3, -1)},
    "left window": {"window_size": (2, -1)},
    "scale and softcap": {"softmax_scale": 0.7, "softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.9]), "causal": True},
    "alibi of sequences": {"alibi_slopes": torch.rand(3, HEADS, generator=torch.Generator().manual_seed(0))},
}
LENGTHS = (5, 1, 8)


def of_one(q, k, v, options, row=0):
    """Return output and weights of one sequence, from the definition."""
    slopes = options.get("alibi_slopes")
    return one_sequence(
        *(q, k, v, 0.0, options.get("softmax_scale"), options.get("causal", False)),
        *(options.get("window_size", (-1, -1)), options.get("softcap", 0.0)),
        slopes[row] if slopes is not None and slopes.ndim == 2 else slopes,
    )


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_batches_are_observed_with_every_option(flash_attn, name):
    options, model, x = OPTIONS[name], model_of(flash_attn.flash_attn_func), torch.randn(3, 7, WIDTH).double()
    plain = model[0](x, **options)
    with hw.watch(model) as heads:
        assert torch.equal(model[0](x, **options), plain)
    found = [of_one(*tensors, options, row) for row, tensors in enumerate(zip(*model[0].split(x), strict=True))]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])
    assert {row["kind"] for row in heads.rows()} == {"self"}


@pytest.mark.parametrize("queries", (3, 9))
@torch.no_grad()
def test_cross_attention_of_other_lengths_is_aligned_with_the_last_key(flash_attn, queries):
    model, options = model_of(flash_attn.flash_attn_func), {"causal": True, "window_size": (4, 0)}
    x, context = torch.randn(2, queries, WIDTH).double(), torch.randn(2, 6, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, context, **options)
    found = [of_one(*tensors, options) for tensors in zip(*model[0].split(x, context), strict=True)]
    without = {"distance", "self", "previous", "next", "duplicate", "induction"}
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], without)


def varlen(function, lengths, key_lengths=None):
    def attend(q, k, v, **options):
        of_keys = lengths if key_lengths is None else key_lengths
        sizes = (cumulative(lengths), cumulative(of_keys), max(lengths), max(of_keys))
        return function(q, k, v, *sizes, **options)

    return attend


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_packed_sequences_are_rows_of_the_statistics(flash_attn, name):
    options, model = OPTIONS[name], model_of(varlen(flash_attn.flash_attn_varlen_func, LENGTHS))
    x = torch.randn(sum(LENGTHS), WIDTH).double()
    plain = model[0](x, **options)
    with hw.watch(model) as heads:
        assert torch.equal(model[0](x, **options), plain)
    parts = zip(*(tensor.split(LENGTHS) for tensor in model[0].split(x)), strict=True)
    found = [of_one(*tensors, options, row) for row, tensors in enumerate(parts)]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


@pytest.mark.parametrize("causal", (False, True))
@torch.no_grad()
def test_packed_queries_and_keys_of_other_lengths(flash_attn, causal):
    lengths, key_lengths = (2, 5, 1), (6, 7, 3)
    model = model_of(varlen(flash_attn.flash_attn_varlen_func, lengths, key_lengths))
    x, context = torch.randn(8, WIDTH).double(), torch.randn(16, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, context, causal=causal)
    q, k, v = model[0].split(x, context)
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    found = [of_one(*tensors, {"causal": causal}) for tensors in parts]
    without = {"distance", "self", "previous", "next", "duplicate", "induction"}
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], without)
    assert {row["kind"] for row in heads.rows()} == {"cross"}


PACKED = {
    "flash_attn_qkvpacked_func": lambda f: lambda q, k, v, **o: f(torch.stack([q, k, v], 2), **o),
    "flash_attn_kvpacked_func": lambda f: lambda q, k, v, **o: f(q, torch.stack([k, v], 2), **o),
    "flash_attn_varlen_qkvpacked_func": lambda f: lambda q, k, v, **o: f(
        torch.stack([q, k, v], -3).flatten(0, 1), cumulative([6, 6]), 6, **o
    ).unflatten(0, (2, 6)),
    "flash_attn_varlen_kvpacked_func": lambda f: lambda q, k, v, **o: f(
        q.flatten(0, 1), torch.stack([k, v], -3).flatten(0, 1), cumulative([6, 6]), cumulative([6, 6]), 6, 6, **o
    ).unflatten(0, (2, 6)),
}


@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_packed_tensors(flash_attn, name):
    model, x = model_of(PACKED[name](getattr(flash_attn, name)), kv_heads=HEADS), torch.randn(2, 6, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, causal=True)
    found = [of_one(*tensors, {"causal": True}) for tensors in zip(*model[0].split(x), strict=True)]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


def test_training_keeps_the_gradients_and_counts_weights_before_dropout(flash_attn):
    model, x = model_of(flash_attn.flash_attn_func), torch.randn(2, 7, WIDTH).double()
    results = []
    for context in (None, hw.watch(model)):
        model.zero_grad()
        torch.manual_seed(3)
        if context is None:
            model[0](x, dropout_p=0.3, causal=True).square().sum().backward()
        else:
            with context as heads:
                model[0](x, dropout_p=0.3, causal=True).square().sum().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))
    found = [of_one(*tensors, {"causal": True}) for tensors in zip(*model[0].split(x), strict=True)]
    require_rows(heads, [each[1].detach() for each in found], [each[0].detach() for each in found])


@pytest.mark.parametrize("is_packed", (False, True))
def test_a_gate_multiplies_the_columns_of_the_projection_also_in_the_gradient(flash_attn, is_packed):
    attend = varlen(flash_attn.flash_attn_varlen_func, LENGTHS) if is_packed else flash_attn.flash_attn_func
    model, x = model_of(attend), torch.randn(*((14,) if is_packed else (2, 7)), WIDTH).double()
    factor = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    other, expected_factor = copy.deepcopy(model), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    with hw.watch(model) as heads, hw.gate(model, {("0", 2): factor}):
        out = model[0](x, causal=True)
    out.square().sum().backward()
    scale = torch.ones(HEADS * DIM, dtype=torch.float64)
    scale = torch.cat([scale[: 2 * DIM], scale[2 * DIM : 3 * DIM] * expected_factor, scale[3 * DIM :]])
    heads_out = other[0].attend(*other[0].split(x), causal=True).flatten(-2)
    expected = other[0].out_proj(heads_out * scale)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(factor.grad, expected_factor.grad)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad)
    assert len(heads.rows()) == HEADS


def test_checkpointing_repeats_the_gate_and_counts_once(flash_attn):
    model, x = model_of(flash_attn.flash_attn_func), torch.randn(2, 7, WIDTH).double()
    gradients = []
    for is_checkpointed in (False, True):
        model.zero_grad()
        with hw.watch(model) as heads, hw.gate(model, {("0", 1): 0.0}):
            arguments = (model, x)
            out = torch.utils.checkpoint.checkpoint(*arguments, use_reentrant=False) if is_checkpointed else model(x)
        out.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        found = [of_one(*tensors, {}) for tensors in zip(*model[0].split(x), strict=True)]
        require_rows(heads, [each[1].detach() for each in found])
    for one, another in zip(*gradients, strict=True):
        torch.testing.assert_close(one, another)


@torch.no_grad()
def test_one_layer_by_flash_attention_and_another_by_sdpa(flash_attn):
    def sdpa(q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    model = nn.Sequential(EngineAttention(flash_attn.flash_attn_func), EngineAttention(sdpa)).double()
    x = torch.randn(2, 7, WIDTH).double()
    with hw.watch(model) as heads:
        model(x)
    assert [row["module"] for row in heads.rows()] == ["0"] * HEADS + ["1"] * HEADS
    by_sdpa = nn.Sequential(*copy.deepcopy(model))
    by_sdpa[0].attend = sdpa
    with hw.watch(by_sdpa) as expected:
        by_sdpa(x)
    for row, other in zip(heads.rows(), expected.rows(), strict=True):
        assert row == pytest.approx(other, rel=1e-9)


REFUSED = {
    "with return of another window": ({"window_size": (-3, 0)}, "window_size"),
    "with a slope of another shape": ({"alibi_slopes": torch.ones(3)}, "bias"),
}


@pytest.mark.parametrize("name", REFUSED)
@torch.no_grad()
def test_unreadable_arguments_are_named(flash_attn, name):
    options, word = REFUSED[name]

    def stub(q, k, v, alibi_slopes=None, window_size=(-1, -1)):
        return q

    flash_attn_func = flash_attn.flash_attn_func
    code, flash_attn_func.__code__ = flash_attn_func.__code__, flash_attn_func.__code__
    model, x = model_of(flash_attn_func), torch.randn(3, 7, WIDTH).double()
    sentence = rf"attention of these modules by flash_attn_func .*{word}.* cannot be read.*: 0$"
    try:
        with pytest.warns(UserWarning, match=sentence), hw.watch(model):
            model[0](x, **options)
    except RuntimeError:
        pytest.skip("the stand-in refuses it as well")
