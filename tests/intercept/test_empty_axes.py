"""Tensors without elements in attention, such as an empty memory, an empty batch or a selection of no head."""

import pytest
import torch
from self_attention import HEADS, LENGTH, WIDTH, SelfAttention, einsum, merge, require_gate, sdpa, softmax
from test_watch import require_statistics
from torch import nn

import headwise as hw

EMPTY = {
    "queries": lambda attend, q, k, v: torch.cat([attend(q[:, :, :0], k, v), attend(q, k, v)], 2),
    "keys": lambda attend, q, k, v: attend(q, k, v) + attend(q, k[:, :, :0], v[:, :, :0]),
    "sequences": lambda attend, q, k, v: torch.cat([attend(q[:0], k[:0], v[:0]), attend(q, k, v)]),
    "memory": lambda attend, q, k, v: attend(q, torch.cat([k[:, :, :0], k], 2), torch.cat([v[:, :, :0], v], 2)),
    "rest of the output": lambda attend, q, k, v: torch.cat([*attend(q, k, v).split([7, 0], 2)], 2),
    "heads of the output": lambda attend, q, k, v: torch.cat([(out := attend(q, k, v))[:, :0], out], 1),
}


def model_with(attend, empty):
    """Return attention by `empty(attend, q, k, v)`."""

    def output(module, *qkv):
        module.attend(*qkv)  # stores the weights
        return module.out_proj(merge(empty(attend, *qkv)))

    attention = SelfAttention(lambda *_: None, output)
    attention.num_heads = HEADS
    return nn.Sequential(attention)


@pytest.mark.parametrize("attend", [sdpa, softmax, einsum])
@pytest.mark.parametrize("part", EMPTY)
@torch.no_grad()
def test_tensors_without_elements_change_nothing(attend, part):
    torch.manual_seed(0)
    model, x = model_with(attend, EMPTY[part]), torch.randn(2, LENGTH, WIDTH)
    plain = model(x)
    with hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    require_statistics(heads, [model[0].weights])
    require_gate(model, x)


@pytest.mark.parametrize("attend", [sdpa, softmax, einsum])
@torch.no_grad()
def test_an_empty_batch_counts_as_no_sequence(attend):
    torch.manual_seed(0)
    model, x = model_with(attend, lambda attend, *qkv: attend(*qkv)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads, hw.gate(model, {("0", 1): 1.0}):
        assert model(x[:0]).shape == (0, 7, 15)
        assert model(x[:, :0]).shape == (2, 0, 15)
        model(x)
    require_statistics(heads, [model[0].weights])
    (record,) = heads.records
    assert record.statistics["entropy"].count.tolist() == [2, 2, 2]


@pytest.mark.parametrize("attend", [sdpa, softmax, einsum])
@pytest.mark.parametrize("shape", [(0, LENGTH, WIDTH), (2, 0, WIDTH)])
@torch.no_grad()
def test_a_gate_of_a_run_without_elements_has_no_effect(attend, shape):
    model = model_with(attend, lambda attend, *qkv: attend(*qkv))
    with hw.gate(model, {("0", 1): 0.0}):
        assert model(torch.zeros(shape)).shape == shape
