"""Unusual calls of SDPA, changes in place, and unusual modules: the output of the model stays, and the rest is right or
named.
"""

import pytest
import torch
import torch.nn.functional as F
from self_attention import HEADS, LENGTH, WIDTH, SelfAttention, merge, sdpa, softmax, split
from torch import nn
from torch.nn.attention.bias import causal_lower_right, causal_upper_left
from torch.utils.checkpoint import checkpoint

import headwise as hw

X = torch.randn(2, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


class Attention(SelfAttention):
    """Attention in float64 by a function of queries, keys and values."""

    def __init__(self, function):
        torch.manual_seed(1)
        super().__init__(function, lambda module, *qkv: module.out_proj(merge(function(*qkv))))
        self.double()


def rows_of(model):
    with torch.no_grad(), hw.watch(model) as heads:
        model(X)
    return heads.rows()


# -- masks that are objects of torch ----------------------------------------------------------------------------------


def test_a_causal_mask_of_torch_is_causal():
    causal = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True))
    model = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, causal_upper_left(LENGTH, LENGTH)))
    with torch.no_grad(), hw.watch(model):
        watched = model(X)
    torch.testing.assert_close(watched, causal(X), rtol=1e-12, atol=1e-12)
    for row, expected in zip(rows_of(model), rows_of(causal), strict=True):
        assert {name: value for name, value in row.items() if isinstance(value, float)} == pytest.approx(
            {name: value for name, value in expected.items() if isinstance(value, float)}, rel=1e-12
        )


def test_a_causal_mask_aligned_with_the_last_key_keeps_the_output():
    def function(q, k, v):
        return F.scaled_dot_product_attention(q[:, :, 4:], k, v, attn_mask=causal_lower_right(3, LENGTH))

    model = Attention(function)
    expected = model(X)
    with torch.no_grad(), hw.watch(model) as heads:
        torch.testing.assert_close(model(X), expected, rtol=1e-12, atol=1e-12)
    q, k, _ = map(split, model.qkv(X).chunk(3, -1))
    visible = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()[4:]
    weights = (q[:, :, 4:] @ k.mT / (WIDTH // HEADS) ** 0.5).masked_fill(~visible, -torch.inf).softmax(-1)
    entropy = torch.special.entr(weights).sum(-1).mean((0, 2))
    distances = (torch.arange(4, LENGTH)[:, None] - torch.arange(LENGTH)).abs()
    distance = (weights * distances).sum(-1).mean((0, 2))
    assert [row["entropy"] for row in heads.rows()] == pytest.approx(entropy.tolist(), rel=1e-9)
    assert [row["distance"] for row in heads.rows()] == pytest.approx(distance.tolist(), rel=1e-9)


def test_a_mask_with_gradients_under_checkpointing():
    bias = nn.Parameter(torch.randn(1, HEADS, LENGTH, LENGTH, dtype=torch.float64))
    attention = Attention(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=bias))

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = attention

        def forward(self, x):
            return checkpoint(self.attention, x, use_reentrant=False)

    model, gradients = Checkpointed(), []
    model(X.clone().requires_grad_()).sum().backward()
    gradients.append(bias.grad.clone())
    bias.grad = None
    with hw.watch(model):
        model(X.clone().requires_grad_()).sum().backward()
    torch.testing.assert_close(bias.grad, gradients[0], rtol=1e-12, atol=1e-12)


# -- changes in place -------------------------------------------------------------------------------------------------


def zeroed_weights(q, k, v):
    weights = (q @ k.mT).softmax(-1)
    out = weights @ v
    weights.zero_()
    return out


def zeroed_queries(q, k, v):
    out = F.scaled_dot_product_attention(q, k, v)
    q.zero_()
    return out


def halved_output(q, k, v):
    return F.scaled_dot_product_attention(q, k, v).mul_(0.5)


@pytest.mark.parametrize("function", [zeroed_weights, zeroed_queries, halved_output])
def test_tensors_that_are_changed_before_they_are_read_are_named(function):
    model = nn.ModuleDict({"good": Attention(F.scaled_dot_product_attention), "bad": Attention(function)})
    model.forward = lambda x: model["bad"](model["good"](x))
    warning = pytest.warns(UserWarning, match="in place before the output projection: bad")
    with torch.no_grad(), warning, hw.watch(model) as heads:
        model(X)
    assert {row["module"] for row in heads.rows()} == {"good"}


# -- compilers ---------------------------------------------------------------------------------------------------------


@torch.no_grad()
def test_the_operator_of_a_function_that_is_compiled_under_watch_is_observed():
    def compiled(q, k, v):
        return torch.compile(F.scaled_dot_product_attention, backend="aot_eager")(q, k, v)

    model = nn.Sequential(Attention(compiled), Attention(F.scaled_dot_product_attention))
    model[1].load_state_dict(model[0].state_dict())
    for module in model:
        with hw.watch(module) as heads:
            module(X)
        module.rows = [list(filter(lambda value: isinstance(value, float), row.values())) for row in heads.rows()]
    assert model[0].rows
    assert model[0].rows == [pytest.approx(row, rel=1e-6) for row in model[1].rows]


# -- gates of outputs that are used in ways that are not seen ---------------------------------------------------------


@pytest.mark.parametrize("way", [sdpa, softmax])
def test_a_gate_that_has_no_effect_is_an_error(way):
    projected = lambda module, *qkv: torch.vmap(module.out_proj)(merge(way(*qkv)))  # noqa: E731
    model = nn.Sequential(SelfAttention(way, projected).double())
    error = pytest.raises(hw.InputError, match="outputs of the heads of these modules cannot be changed, .* seen")
    with torch.no_grad(), error, hw.gate(model, {("0", 1): 0.0}):
        model(X)


# -- products of parts of the weights ---------------------------------------------------------------------------------


def by_keys(weights, v):
    return weights[..., :3] @ v[:, :, :3] + weights[..., 3:] @ v[:, :, 3:]


def by_queries(weights, v):
    return torch.cat([weights[:, :, :3] @ v, weights[:, :, 3:] @ v], 2)


def by_copies_of_keys(weights, v):
    left, right = weights[..., :-1].contiguous(), weights[..., 1:].contiguous()
    return left @ v[:, :, :-1] + right @ v[:, :, 1:]


def by_sequences(weights, v):
    return torch.stack([weights[index] @ v[index] for index in range(len(weights))])


@pytest.mark.parametrize("product", [by_keys, by_queries, by_copies_of_keys, by_sequences])
def test_weights_that_are_multiplied_in_parts_are_named(product):
    model = nn.Sequential(Attention(lambda q, k, v: product((q @ k.mT).softmax(-1), v)))
    error = pytest.raises(hw.InputError, match="attention of these modules is left out, since")
    with torch.no_grad(), error, hw.watch(model):
        model(X)
    with torch.no_grad(), pytest.raises(hw.InputError), hw.gate(model, {("0", 1): 0.0}):
        model(X)


def test_a_module_of_which_only_a_part_is_established_is_not_reported():
    def local_and_global(q, k, v):
        local = by_keys((q @ k.mT).softmax(-1), v)
        return torch.cat([F.scaled_dot_product_attention(q[:, :, :1], k, v), local[:, :, 1:]], 2)

    model = nn.Sequential(Attention(local_and_global), Attention(F.scaled_dot_product_attention))
    named = pytest.warns(UserWarning, match="^attention of these modules is left out, .*: 0$")
    with torch.no_grad(), named, hw.watch(model) as heads:
        model(X)
    assert {row["module"] for row in heads.rows()} == {"1"}


# -- several token ids at each position -------------------------------------------------------------------------------


def test_ids_of_several_tokens_at_each_position_are_not_the_tokens_of_a_text():
    class Codebooks(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.attention = nn.Embedding(11, WIDTH).double(), Attention(F.scaled_dot_product_attention)

        def forward(self, input_ids):
            return self.attention(self.embed(input_ids).sum(2))

    model = Codebooks()
    with torch.no_grad(), hw.watch(model, special=[3]) as heads:
        model(torch.randint(11, (2, LENGTH, 5), generator=torch.Generator().manual_seed(0)))
    assert len(heads.rows()) == HEADS
    assert all("special" not in row and "distance" in row for row in heads.rows())


def test_other_numbers_of_key_heads_are_stated_in_the_error():
    keys = []

    def function(q, k, v):
        return F.scaled_dot_product_attention(q, k[:, : keys[0]], v[:, : keys[0]], enable_gqa=True)

    model, sentence = (
        Attention(function),
        f"{HEADS} heads, {HEADS} of keys and values, in every call.*got {HEADS}, 1 of",
    )
    with torch.no_grad(), hw.watch(model):
        keys[:] = [HEADS]
        model(X)
        keys[:] = [1]
        with pytest.raises(hw.InputError, match=sentence):
            model(X)
