"""The dispatcher truth: weights and heads of models in every layout equal those computed from their formula."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from research.dispatcher_truth.element_tags import ElementTags
from research.dispatcher_truth.recorder import dispatcher_truth, double_copy

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 5, 7
WIDTH = HEADS * HEAD_DIM


class Attention(nn.Module):
    """Self-attention whose core is a function `(q, k, v) -> out`, with all of them `(batch, heads, length, dim)`."""

    def __init__(self, core):
        super().__init__()
        self.qkv, self.out_proj, self.core = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, 11), core

    def heads_of(self, x):
        return [part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3) for part in self.qkv(x).chunk(3, -1)]

    def forward(self, x):
        return self.out_proj(self.core(*self.heads_of(x)).transpose(-2, -3).flatten(-2))


def plain(q, k, v):
    return (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1) @ v


def fused(q, k, v):
    return F.scaled_dot_product_attention(q, k, v)


def heads_in_batch(q, k, v):
    q, k, v = (x.flatten(0, 1) for x in (q, k, v))
    return (torch.bmm(q, k.mT) / math.sqrt(HEAD_DIM)).softmax(-1).bmm(v).unflatten(0, (BATCH, HEADS))


def batch_in_heads(q, k, v):
    q, k, v = (x.transpose(0, 1).flatten(0, 1) for x in (q, k, v))
    out = (torch.bmm(q, k.mT) / math.sqrt(HEAD_DIM)).softmax(-1).bmm(v)
    return out.unflatten(0, (HEADS, BATCH)).transpose(0, 1)


def heads_third(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    weights = (torch.einsum("bqhd,bkhd->bqhk", q, k) / math.sqrt(HEAD_DIM)).softmax(-1)
    return torch.einsum("bqhk,bkhd->bqhd", weights, v).transpose(1, 2)


def keys_first(q, k, v):
    scores = torch.einsum("bhqd,bhkd->khbq", q, k) / math.sqrt(HEAD_DIM)
    return torch.einsum("khbq,bhkd->bhqd", scores.softmax(0), v)


def summed(q, k, v):
    weights = (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1)
    return (weights[..., None] * v[:, :, None]).sum(-2)


def filled_and_activated(q, k, v):
    weights = (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1)
    return F.hardswish(weights.masked_fill(weights < 0, torch.tensor(0.0, dtype=v.dtype)) @ v)


def in_two_products(q, k, v):
    weights = (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1)
    return weights[..., :2] @ v[..., :2, :] + weights[..., 2:] @ v[..., 2:, :]


def with_dropped_sink(q, k, v):
    scores = torch.cat([q @ k.mT / math.sqrt(HEAD_DIM), torch.full((*q.shape[:3], 1), -1e9)], -1)
    return scores.softmax(-1)[..., :-1] @ v


def exponential_minus_logsumexp(q, k, v):
    scores = q @ k.mT / math.sqrt(HEAD_DIM)
    return (scores - scores.logsumexp(-1, keepdim=True)).exp() @ v


CORES = [plain, fused, heads_in_batch, batch_in_heads, heads_third, keys_first, summed, in_two_products]


@pytest.mark.parametrize("core", [*CORES, with_dropped_sink, filled_and_activated, exponential_minus_logsumexp])
def test_weights_outputs_and_columns_equal_the_formula(core):
    torch.manual_seed(0)
    model, x = double_copy(Attention(core)), torch.randn(BATCH, LENGTH, WIDTH).double()
    with dispatcher_truth(model) as record:
        model(x)
    q, k, v = model.heads_of(x)
    weights = (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1)
    (call,) = record.calls
    torch.testing.assert_close(call.weights, weights)
    torch.testing.assert_close(call.outputs, weights @ v)
    assert [columns.tolist() for columns in call.columns] == torch.arange(WIDTH).view(HEADS, HEAD_DIM).tolist()
    expected_rows = torch.arange(BATCH * LENGTH).view(BATCH, 1, LENGTH).expand(-1, HEADS, -1)
    assert torch.equal(call.rows, expected_rows)
    assert call.path == ""
    assert call.projection.path == "out_proj"
    assert call.notes == []


def test_a_sequence_without_batch_axis():
    model, x = double_copy(Attention(plain)), torch.randn(LENGTH, WIDTH).double()
    with dispatcher_truth(model) as record:
        model(x)
    assert record.calls[0].weights.shape == (1, HEADS, LENGTH, LENGTH)


def test_windows_are_sequences():
    class Windows(Attention):
        def forward(self, x):
            q, k, v = (part.unflatten(2, (2, LENGTH)) for part in self.heads_of(x))
            out = plain(q, k, v)  # (batch, heads, windows, queries, head_dim)
            return self.out_proj(out.flatten(2, 3).transpose(1, 2).flatten(2))

    model, x = double_copy(Windows(plain)), torch.randn(BATCH, 2 * LENGTH, WIDTH).double()
    with dispatcher_truth(model) as record:
        model(x)
    q, k, _ = (part.unflatten(2, (2, LENGTH)) for part in model.heads_of(x))
    weights = (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1)
    torch.testing.assert_close(record.calls[0].weights, weights.transpose(1, 2).flatten(0, 1))


def test_heads_of_several_output_projections_are_not_resolved():
    class Experts(Attention):
        def forward(self, x):
            out = plain(*self.heads_of(x)).transpose(1, 2).flatten(2)
            return self.out_proj(out[:, ::2]).sum() + self.out_proj(out[:, 1::2]).sum()

    model, x = double_copy(Experts(plain)), torch.randn(BATCH, LENGTH, WIDTH).double()
    with dispatcher_truth(model) as record:
        model(x)
    assert not record.calls
    assert [reason for _, reason in record.unresolved] == ["its output is divided among several output projections"]


def test_packed_query_heads_of_one_key_head():
    class MultiQuery(Attention):
        def forward(self, x):
            q, k, v = self.heads_of(x)
            packed = plain(q.flatten(1, 2), k[:, 0], v[:, 0])  # (batch, heads * queries, head_dim)
            return self.out_proj(packed.unflatten(1, (HEADS, LENGTH)).transpose(1, 2).flatten(2))

    model, x = double_copy(MultiQuery(plain)), torch.randn(BATCH, LENGTH, WIDTH).double()
    with dispatcher_truth(model) as record:
        model(x)
    q, k, _ = model.heads_of(x)
    torch.testing.assert_close(record.calls[0].weights, (q @ k[:, :1].mT / math.sqrt(HEAD_DIM)).softmax(-1))


def test_dropout_is_after_the_weights():
    def dropped(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    model, x = double_copy(Attention(dropped)), torch.randn(BATCH, LENGTH, WIDTH).double()
    with dispatcher_truth(model) as record:
        model(x)
    q, k, v = model.heads_of(x)
    weights = (q @ k.mT / math.sqrt(HEAD_DIM)).softmax(-1)
    torch.testing.assert_close(record.calls[0].weights, weights)
    torch.testing.assert_close(record.calls[0].outputs, weights @ v)
    assert record.calls[0].notes == ["weights were changed between softmax and the product"]


def over_features(q, k, v):
    return q.softmax(-1) @ (k.softmax(-1).mT @ v)


@pytest.mark.parametrize("core", [over_features, lambda q, k, v: v * q.softmax(-1)])
def test_softmax_over_features_is_not_attention(core):
    model, x = Attention(core), torch.randn(BATCH, LENGTH, WIDTH)
    with dispatcher_truth(model) as record:
        model(x)
    assert record.calls == []
    assert record.unresolved


def test_layers_of_torch_are_decomposed():
    layer = nn.TransformerEncoderLayer(WIDTH, HEADS, 13, batch_first=True).eval()
    with dispatcher_truth(layer) as record:
        layer(torch.randn(BATCH, LENGTH, WIDTH))
    assert record.fused == []
    assert [call.path for call in record.calls] == ["self_attn"]
    assert record.calls[0].weights.shape == (BATCH, HEADS, LENGTH, LENGTH)
    assert torch.backends.mha.get_fastpath_enabled()


def test_tags_follow_elements_through_views_writes_and_copies():
    tags, x = ElementTags(), torch.randn(2, 3)
    tags.set(x, torch.arange(1.0, 7.0).view(2, 3))
    assert tags.of(x.T[1]).tolist() == [2.0, 5.0]
    out = torch.zeros(4, 3)
    function = torch.ops.aten.copy_.default
    tags.follow(function, (out[1:3], x), {}, function(out[1:3], x))
    assert tags.of(out).tolist() == [[0, 0, 0], [1, 2, 3], [4, 5, 6], [0, 0, 0]]


@pytest.mark.parametrize(("is_cross", "is_self"), [(False, True), (True, False)])
def test_the_source_of_queries_and_keys(is_cross, is_self):
    layer = nn.MultiheadAttention(WIDTH, HEADS, batch_first=True).eval()
    x, context = torch.randn(BATCH, LENGTH, WIDTH), torch.randn(BATCH, LENGTH, WIDTH)
    memory = context if is_cross else x
    with dispatcher_truth(layer) as record:
        layer(x, memory, memory)
    assert record.calls[0].scores.is_self is is_self


@pytest.mark.parametrize("hidden", [-1e9, torch.finfo(torch.float32).min, -math.inf])
def test_rows_in_which_a_mask_hides_every_key_have_no_weights(hidden):
    torch.manual_seed(0)
    mask = torch.zeros(LENGTH, LENGTH)
    mask[3] = hidden
    model = Attention(lambda q, k, v: ((q @ k.mT) + mask).softmax(-1).nan_to_num() @ v)
    with dispatcher_truth(model) as record:
        model(torch.randn(BATCH, LENGTH, WIDTH))
    assert (record.calls[0].weights == 0).all(-1)[0, 0].tolist() == [False, False, False, True, False]


@pytest.mark.parametrize("is_self", [True, False])
def test_keys_of_another_sequence_are_not_those_of_the_queries(is_self):
    class Exchanged(Attention):
        def heads_of(self, x):
            inputs = (x, x, x) if is_self else (x, x.flip(0), x.flip(0))
            parts = [F.linear(each, weight) for each, weight in zip(inputs, self.qkv.weight.chunk(3), strict=True)]
            return [part.unflatten(-1, (HEADS, HEAD_DIM)).transpose(-2, -3) for part in parts]

    torch.manual_seed(0)
    with dispatcher_truth(model := Exchanged(plain)) as record:
        model(torch.randn(BATCH, LENGTH, WIDTH).exp())
    assert record.calls[0].scores.is_self is is_self
