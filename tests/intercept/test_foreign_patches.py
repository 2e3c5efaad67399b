"""Other libraries' patches of torch's functions stay in use under `watch` and `gate`, and outlive the context."""

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.modeling_utils import AttentionInterface

import headwise as hw
from tiny import PADDED, TOKENS

WIDTH, HEADS, LENGTH, BATCH = 33, 3, 7, 2
SDPA, SOFTMAX, DROPOUT, BMM = F.scaled_dot_product_attention, F.softmax, F.dropout, torch.bmm


class Attention(nn.Module):
    """Self-attention by SDPA or by torch's softmax function."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.qkv, self.out_proj, self.way, self.num_heads = nn.Linear(WIDTH, 99), nn.Linear(WIDTH, WIDTH), way, HEADS

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        if self.way == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            weights = F.softmax(q @ k.mT * q.shape[-1] ** -0.5, dim=-1)
            out = torch.bmm(F.dropout(weights, 0.0).flatten(0, 1), v.flatten(0, 1)).unflatten(0, (BATCH, HEADS))
        return self.out_proj(out.transpose(1, 2).flatten(2))


def plain_model(way: str) -> tuple[nn.Module, dict]:
    torch.manual_seed(0)
    x = torch.randn(BATCH, LENGTH, WIDTH)
    if way == "torch":
        return nn.MultiheadAttention(WIDTH, HEADS, batch_first=True), {
            "query": x,
            "key": x,
            "value": x,
            "need_weights": False,
        }
    if way == "ours":
        return hw.MultiHeadAttention(WIDTH, HEADS), {"x": x}
    if way == "llama":
        sizes = {"vocab_size": 97, "hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6}
        sizes |= {"num_key_value_heads": 2, "intermediate_size": 37}
        model = transformers.LlamaModel(transformers.LlamaConfig(**sizes, attn_implementation="sdpa"))
        return model, {"input_ids": TOKENS, "attention_mask": PADDED["left"]}
    return nn.Sequential(Attention(way)), {"input": x}


def output_of(model: nn.Module, inputs: dict) -> torch.Tensor:
    """Return the output of a model in training mode, with the random numbers of dropout fixed."""
    torch.manual_seed(7)
    out = model(**inputs)
    out = out.last_hidden_state if hasattr(out, "last_hidden_state") else out
    return out[0] if isinstance(out, tuple) else out


def by_matrix(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False):
    """Compute SDPA by the whole matrix, as other libraries' kernels compute it by other means."""
    groups = query.shape[-3] // key.shape[-3]
    key, value = key.repeat_interleave(groups, -3), value.repeat_interleave(groups, -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        attn_mask = torch.ones(scores.shape[-2:], dtype=torch.bool).tril()
    if attn_mask is not None:
        scores = scores.masked_fill(~attn_mask, -torch.inf) if attn_mask.dtype == torch.bool else scores + attn_mask
    return torch.dropout(scores.softmax(-1).nan_to_num(), dropout_p, True) @ value


WAYS = ["sdpa", "torch", "llama", "ours"]


@pytest.mark.parametrize("way", WAYS)
def test_an_earlier_patch_that_computes_attention_is_called_and_observed(way, monkeypatch):
    model, inputs = plain_model(way)
    model.eval()
    with hw.watch(model) as without_patch:
        output_of(model, inputs)
    calls = []

    def patch(*args, **kwargs):
        calls.append(args)
        return by_matrix(*args, **kwargs)

    monkeypatch.setattr(F, "scaled_dot_product_attention", patch)
    with torch.no_grad():
        plain = output_of(model, inputs)
        expected_calls = len(calls)
        with hw.watch(model) as heads:
            watched = output_of(model, inputs)
        with hw.gate(model, {(0, 1): 0.0}):
            gated = output_of(model, inputs)
    assert len(calls) == 3 * expected_calls
    assert torch.equal(watched, plain)
    assert not torch.allclose(gated, plain)
    assert F.scaled_dot_product_attention is patch
    for row, other in zip(heads.rows(), without_patch.rows(), strict=True):
        numbers = {name: value for name, value in other.items() if isinstance(value, float)}
        assert {name: row[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6, nan_ok=True)


@torch.no_grad()
def test_a_patch_between_calls_that_follow_a_plan_is_compared_with_attention(monkeypatch):
    model, inputs = plain_model("sdpa")
    model.eval()
    with hw.watch(model) as without_patch:
        for _ in range(4):
            output_of(model, inputs)
    monkeypatch.setattr(F, "scaled_dot_product_attention", by_matrix)
    plain = output_of(model, inputs)
    with hw.watch(model) as heads:
        assert torch.equal(output_of(model, inputs), plain)
    for row, other in zip(heads.rows(), without_patch.rows(), strict=True):
        assert row["entropy"] == pytest.approx(other["entropy"], rel=1e-4)
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: 1.1 * by_matrix(*args, **kwargs))
    none = pytest.raises(hw.InputError, match="another library replaced the attention function, and its output")
    with none, hw.watch(model):
        output_of(model, inputs)


@pytest.mark.parametrize("way", ["sdpa", "torch", "llama"])
@torch.no_grad()
def test_an_earlier_patch_that_computes_something_else_is_called_and_named(way, monkeypatch):
    model, inputs = plain_model(way)
    model.eval()
    monkeypatch.setattr(
        F, "scaled_dot_product_attention", lambda q, k, v, *args, **kwargs: 1.1 * by_matrix(q, k, v, *args, **kwargs)
    )
    plain = output_of(model, inputs)
    none = pytest.raises(hw.InputError, match="^model: expected attention in a way that can be seen, got none in ")
    with none, hw.watch(model):
        watched = output_of(model, inputs)
    assert torch.equal(watched, plain)


@torch.no_grad()
def test_a_patched_module_is_named_next_to_one_without(monkeypatch):
    model, inputs = nn.Sequential(Attention("sdpa"), Attention("sdpa")), {"input": torch.randn(BATCH, LENGTH, WIDTH)}
    calls = []

    def every_other(*args, **kwargs):
        calls.append(args)
        return by_matrix(*args, **kwargs) * (1.0 + len(calls) % 2)

    monkeypatch.setattr(F, "scaled_dot_product_attention", every_other)
    with (
        pytest.warns(UserWarning, match="^another library replaced .* softmax attention: 0$"),
        hw.watch(model) as heads,
    ):
        model(**inputs)
    assert {row["module"] for row in heads.rows()} == {"1"}


@pytest.mark.parametrize("way", ["sdpa", "torch", "llama"])
def test_training_under_an_earlier_patch_draws_the_same_random_numbers(way, monkeypatch):
    monkeypatch.setattr(F, "scaled_dot_product_attention", by_matrix)
    model, inputs = plain_model(way)
    for module in model.modules():
        module.attention_dropout = 0.3
        module.dropout = 0.3
    with torch.no_grad():
        plain = output_of(model.train(), inputs)
        state = torch.get_rng_state()
        with hw.watch(model) as heads:
            watched = output_of(model, inputs)
    assert torch.equal(watched, plain)
    assert torch.equal(torch.get_rng_state(), state)
    assert heads.rows()[0]["entropy"] > 0


@pytest.mark.parametrize("name", ["softmax", "dropout", "bmm"])
@pytest.mark.parametrize("way", ["softmax", "torch, with weights"])
@torch.no_grad()
def test_an_earlier_patch_of_another_function_is_applied_once(name, way, monkeypatch):
    model, inputs = plain_model(way.partition(",")[0])
    if way != "softmax":
        inputs["need_weights"] = True
    model.eval()
    owner = torch if name == "bmm" else F
    own = getattr(owner, name)

    def doubled(*args, **kwargs):
        return 2 * own(*args, **kwargs)

    monkeypatch.setattr(owner, name, doubled)
    plain = output_of(model, inputs)
    with hw.gate(model, {}):
        gated = output_of(model, inputs)
    torch.testing.assert_close(gated, plain)
    assert getattr(owner, name) is doubled


@pytest.mark.parametrize("way", WAYS)
def test_a_patch_within_the_context_outlives_it(way, monkeypatch):
    model, inputs = plain_model(way)
    model.eval()
    calls = []
    with torch.no_grad(), hw.watch(model):
        before = F.scaled_dot_product_attention

        def patch(*args, **kwargs):
            calls.append(args)
            return before(*args, **kwargs)

        monkeypatch.setattr(F, "scaled_dot_product_attention", patch)
        watched = output_of(model, inputs)
    assert F.scaled_dot_product_attention is patch
    calls.clear()
    with torch.no_grad():
        torch.testing.assert_close(output_of(model, inputs), watched)
        with hw.watch(model) as heads:
            torch.testing.assert_close(output_of(model, inputs), watched)
    if way != "ours":
        assert len(calls) >= 2
    assert heads.rows()
    monkeypatch.undo()


def test_a_function_that_another_library_restores_within_the_context_stays_restored():
    F.scaled_dot_product_attention = by_matrix
    with hw.watch(plain_model("sdpa")[0]):
        F.scaled_dot_product_attention = SDPA
    assert F.scaled_dot_product_attention is SDPA
    assert (F.softmax, F.dropout, torch.bmm) == (SOFTMAX, DROPOUT, BMM)


@torch.no_grad()
def test_another_attention_function_under_the_name_sdpa_is_called(monkeypatch):
    model, inputs = plain_model("llama")

    def larger(*args, **kwargs):
        out, weights = sdpa_attention_forward(*args, **kwargs)
        return 1.1 * out, weights

    monkeypatch.setitem(AttentionInterface._global_mapping, "sdpa", larger)
    plain = output_of(model, inputs)
    none = pytest.raises(hw.InputError, match="^model: expected attention in a way that can be seen, got none in ")
    with none, hw.watch(model):
        watched = output_of(model, inputs)
    assert torch.equal(watched, plain)
