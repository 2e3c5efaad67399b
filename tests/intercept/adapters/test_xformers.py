"""Calls of xformers are observed and gated, with every mask, against float64."""

import copy

import pytest
import torch
import xformers_stand_in as stand_in
from engine_model import DIM, HEADS, WIDTH, EngineAttention, model_of, require_rows
from torch import nn
from xformers_stand_in import Spans, attended, sequences_of

import headwise as hw

POSITIONS = {"distance", "self", "previous", "next", "duplicate", "induction"}
MASKS = {
    "none": None,
    "LowerTriangularMask": stand_in.LowerTriangularMask(),
    "LowerTriangularMaskWithTensorBias": stand_in.LowerTriangularMaskWithTensorBias(
        torch.randn(1, HEADS, 7, 7, generator=torch.Generator().manual_seed(0)).double()
    ),
    "LowerTriangularFromBottomRightMask": stand_in.LowerTriangularFromBottomRightMask(),
    "LowerTriangularFromBottomRightLocalAttentionMask": stand_in.LowerTriangularFromBottomRightLocalAttentionMask(3),
    "LocalAttentionFromBottomRightMask": stand_in.LocalAttentionFromBottomRightMask(2, 1),
    "tensor": torch.randn(3, HEADS, 7, 7, generator=torch.Generator().manual_seed(1)).double(),
}


def of_batch(tensors, mask, scale=None):
    """Return weights and outputs of each sequence, from the definition."""
    added = mask if isinstance(mask, torch.Tensor) else getattr(mask, "_subtensor", None)
    added = None if added is None else added.expand(len(tensors[0]), -1, -1, -1)
    return [
        attended(*each, mask, None if added is None else added[b], scale)
        for b, each in enumerate(zip(*tensors, strict=True))
    ]


@pytest.mark.parametrize("name", MASKS)
@torch.no_grad()
def test_batches_are_observed_with_every_mask(xformers, name):
    function, mask = xformers.memory_efficient_attention, MASKS[name]
    model, x = model_of(function, kv_heads=HEADS), torch.randn(3, 7, WIDTH).double()
    plain = model[0](x, attn_bias=mask, scale=0.6)
    with hw.watch(model) as heads:
        assert torch.equal(model[0](x, attn_bias=mask, scale=0.6), plain)
    found = of_batch(model[0].split(x), mask, 0.6)
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


@pytest.mark.parametrize("name", ["LowerTriangularMask", "LowerTriangularFromBottomRightMask"])
@torch.no_grad()
def test_causal_cross_attention_is_aligned_as_the_mask_states(xformers, name):
    model, mask = model_of(xformers.memory_efficient_attention, kv_heads=HEADS), MASKS[name]
    x, context = torch.randn(2, 3, WIDTH).double(), torch.randn(2, 8, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, context, attn_bias=mask)
    found = of_batch(model[0].split(x, context), mask)
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], POSITIONS)


LENGTHS, KEY_LENGTHS = (4, 1, 6), (5, 3, 7)
SELF, KEYS = Spans((0, 4, 5, 11), LENGTHS), Spans((0, 5, 8, 15), KEY_LENGTHS)
PADDED, GAPPY = Spans((0, 8, 16, 24), KEY_LENGTHS), Spans((1, 9, 17, 24), KEY_LENGTHS)
TABLES = torch.tensor([[3, 0, 7, 1], [2, 5, 4, 6], [11, 8, 9, 10]], dtype=torch.int32)
PACKED = {
    "BlockDiagonalMask": (SELF, SELF, {}),
    "BlockDiagonalCausalMask": (SELF, SELF, {}),
    "BlockDiagonalCausalFromBottomRightMask": (SELF, SELF, {}),
    "BlockDiagonalCausalLocalAttentionMask": (SELF, SELF, {"_window_size": 3}),
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask": (SELF, SELF, {"_window_size": 2}),
}
OF_OTHER_KEYS = {
    "BlockDiagonalMask": (SELF, KEYS, {}),
    "BlockDiagonalCausalMask": (SELF, KEYS, {}),
    "BlockDiagonalCausalFromBottomRightMask": (SELF, KEYS, {}),
    "BlockDiagonalCausalLocalAttentionMask": (SELF, KEYS, {"_window_size": 3}),
    "BlockDiagonalPaddedKeysMask": (SELF, PADDED, {}),
    "BlockDiagonalCausalWithOffsetPaddedKeysMask": (SELF, PADDED, {}),
    "BlockDiagonalLocalAttentionPaddedKeysMask": (SELF, PADDED, {"window_left": 2, "window_right": 1}),
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask": (SELF, PADDED, {"_window_size": 3}),
    "BlockDiagonalGappyKeysMask": (SELF, GAPPY, {}),
    "PagedBlockDiagonalPaddedKeysMask": (SELF, PADDED, {"block_tables": TABLES, "page_size": 2}),
    "PagedBlockDiagonalCausalWithOffsetPaddedKeysMask": (SELF, PADDED, {"block_tables": TABLES, "page_size": 2}),
}


def packed_mask(xformers, masks, name):
    queries, keys, options = masks[name]
    return getattr(xformers, name)(queries, keys, **options)


@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_packed_sequences_are_rows_of_the_statistics(xformers, name):
    model, mask = model_of(xformers.memory_efficient_attention, kv_heads=HEADS), packed_mask(xformers, PACKED, name)
    x = torch.randn(1, 11, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, attn_bias=mask)
    found = [attended(*each, mask, None, None) for each in sequences_of(*model[0].split(x), mask)]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


@pytest.mark.parametrize("name", OF_OTHER_KEYS)
@torch.no_grad()
def test_packed_sequences_with_other_keys(xformers, name):
    mask = packed_mask(xformers, OF_OTHER_KEYS, name)
    model = model_of(xformers.memory_efficient_attention, kv_heads=HEADS)
    x, context = torch.randn(1, 11, WIDTH).double(), torch.randn(1, mask.k_seqinfo.seqstart_py[-1], WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, context, attn_bias=mask)
    found = [attended(*each, mask, None, None) for each in sequences_of(*model[0].split(x, context), mask)]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], POSITIONS)


@pytest.mark.parametrize("is_packed", [False, True])
@torch.no_grad()
def test_two_axes_of_heads(xformers, is_packed):
    mask = packed_mask(xformers, PACKED, "BlockDiagonalCausalMask") if is_packed else stand_in.LowerTriangularMask()

    def attend(*tensors):
        q, k, v = (tensor.unflatten(2, (2, 2)) for tensor in tensors)
        return xformers.memory_efficient_attention(q, k, v, attn_bias=mask).flatten(2, 3)

    model, x = model_of(attend, kv_heads=HEADS), torch.randn(1 if is_packed else 2, 11, WIDTH).double()
    other = copy.deepcopy(model)
    other[0].out_proj.weight[:, 2 * DIM : 3 * DIM] *= 0.3
    with hw.watch(model) as heads, hw.gate(model, {("0", 2): 0.3}):
        out = model(x)
    torch.testing.assert_close(out, other(x))
    tensors = model[0].split(x)
    found = (
        [attended(*each, mask, None, None) for each in sequences_of(*tensors, mask)]
        if is_packed
        else of_batch(tensors, mask)
    )
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


@pytest.mark.parametrize("name", ["none", "LowerTriangularMask"])
@torch.no_grad()
def test_heads_in_the_axis_of_the_batch(xformers, name):
    mask = MASKS[name]

    def attend(*tensors):
        q, k, v = (tensor.transpose(1, 2).flatten(0, 1) for tensor in tensors)
        out = xformers.memory_efficient_attention(q, k, v, attn_bias=mask)
        return out.unflatten(0, (-1, HEADS)).transpose(1, 2)

    model, x = model_of(attend, kv_heads=HEADS), torch.randn(2, 7, WIDTH).double()
    other = copy.deepcopy(model)
    other[0].out_proj.weight[:, 2 * DIM : 3 * DIM] *= 0.3
    with hw.watch(model) as heads, hw.gate(model, {("0", 2): 0.3}):
        out = model(x)
    torch.testing.assert_close(out, other(x))
    found = of_batch(model[0].split(x), mask)
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


@torch.no_grad()
def test_masks_that_cannot_be_read_are_named(xformers):
    class OwnMask(xformers.AttentionBias):
        pass

    model, x = model_of(xformers.memory_efficient_attention, kv_heads=HEADS), torch.randn(2, 7, WIDTH).double()
    sentence = "memory_efficient_attention with OwnMask cannot be read"
    with pytest.raises(hw.errors.InputError, match=sentence), hw.watch(model):
        model[0](x, attn_bias=OwnMask())


def test_training_with_dropout(xformers):
    model, x = model_of(xformers.memory_efficient_attention, kv_heads=HEADS), torch.randn(2, 7, WIDTH).double()
    gradients = []
    for is_watched in (False, True):
        model.zero_grad()
        torch.manual_seed(3)
        if is_watched:
            with hw.watch(model) as heads:
                model[0](x, p=0.4).square().sum().backward()
        else:
            model[0](x, p=0.4).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *gradients))
    found = of_batch(model[0].split(x), None)
    require_rows(heads, [each[1].detach() for each in found], [each[0].detach() for each in found])


@torch.no_grad()
def test_two_layers_with_different_engines(xformers, flash_attn):
    functions = (xformers.memory_efficient_attention, flash_attn.flash_attn_func)
    model = nn.Sequential(*(EngineAttention(each, kv_heads=HEADS) for each in functions)).double()
    with hw.watch(model) as heads:
        model(torch.randn(2, 7, WIDTH).double())
    assert {row["module"] for row in heads.rows()} == {"0", "1"}
