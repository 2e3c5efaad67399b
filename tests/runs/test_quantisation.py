"""Recognition of quantised weights."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

import headwise as hw
import tiny
from headwise.runs.quantisation import quantisation_of
from profile_runs import texts


def quantised(weight, bits):
    """Return a matrix whose rows were quantised in blocks of 32 weights, each with a scale and a minimum."""
    blocks = weight.view(-1, 32)
    low, high = blocks.amin(1, keepdim=True), blocks.amax(1, keepdim=True)
    scale = (high - low) / (2**bits - 1)
    return (low + ((blocks - low) / scale).round() * scale).view_as(weight)


def model_of(*matrices):
    """Return a module with these matrices as parameters."""
    return nn.ParameterList([nn.Parameter(matrix) for matrix in matrices])


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("is_transposed", [False, True])
def test_the_bits_of_dequantised_weights_are_named(bits, dtype, is_transposed):
    matrix = quantised(torch.randn(96, 160), bits).to(dtype)
    matrix = matrix.T.contiguous() if is_transposed else matrix
    found = quantisation_of(model_of(matrix, torch.randn(480, 32)))
    assert found == f"dequantised from {bits} bits in blocks (50% of the matrices)"


def test_weights_that_were_not_quantised_to_few_bits_have_no_name():
    dense = torch.randn(64, 64)
    sparse = torch.where(torch.rand(256, 256) < 0.95, 0.0, torch.randn(256, 256))
    for matrix in (dense, dense.bfloat16(), quantised(dense, 8), sparse, torch.ones(64, 64), torch.randn(20, 20)):
        assert quantisation_of(model_of(matrix)) is None
    assert quantisation_of(nn.Identity()) is None


@pytest.mark.parametrize("times", [2, 4, 8])
def test_copies_of_rows_or_columns_are_not_taken_for_quantised_weights(times):
    matrix = torch.randn(256, 64)[: 256 // times]
    for copied in (matrix.repeat_interleave(times, 0), matrix.unflatten(0, (-1, 4)).repeat(1, times, 1).flatten(0, 1)):
        assert quantisation_of(model_of(copied)) is None
        assert quantisation_of(model_of(copied.T.contiguous())) is None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("spread", [0.25, 1.0, 4.0])
def test_values_that_differ_by_few_steps_of_their_format_are_not_taken_for_quantised_weights(dtype, spread):
    """Weights near 1, with a standard deviation of few steps of the format; a few lie further from it."""
    step, draws = torch.finfo(dtype).eps, torch.Generator().manual_seed(4)
    steps = spread * torch.randn(96, 160, generator=draws, dtype=torch.float64)
    steps[torch.rand(96, 160, generator=draws) < 0.03] *= 100
    matrix = (1 + step * steps).to(dtype)
    values = [block.unique().numel() for block in matrix[:16].reshape(-1, 32)]
    assert max(values) <= 16 or spread == 4.0
    assert quantisation_of(model_of(matrix)) is None
    assert quantisation_of(model_of(matrix.float())) is None  # the format of the values is not that of the storage


@pytest.mark.parametrize("bits", [1, 2, 3, 4])
def test_quantised_weights_far_from_0_are_named_where_their_format_has_room(bits):
    matrix = quantised(1 + 0.1 * torch.randn(96, 160, dtype=torch.float64), bits)
    assert quantisation_of(model_of(matrix.float())) == f"dequantised from {bits} bits in blocks (100% of the matrices)"
    assert quantisation_of(model_of((1 + (matrix - 1) / 10).bfloat16())) is None  # few numbers between 0.9 and 1.1


def test_each_matrix_of_experts_is_examined():
    experts = torch.randn(5, 96, 160)
    for number in (1, 3):
        experts[number] = quantised(experts[number], 4)
    found = quantisation_of(model_of(experts, torch.randn(3, 96, 160)))
    assert found == "dequantised from 4 bits in blocks (25% of the matrices)"
    assert quantisation_of(model_of(torch.randn(5, 96, 160), torch.randn(64, 64, 3))) is None


def test_a_stated_quantisation_is_named():
    model = nn.Identity()
    model.config = SimpleNamespace(quantization_config={"quant_method": "awq"})
    assert quantisation_of(model) == "quantised by awq"
    model.config.quantization_config = {"load_in_8bit": True}
    assert quantisation_of(model) == "quantised by a method without a name"


def test_the_metadata_of_tables_name_the_quantisation():
    model = tiny.model("decoder", hidden_size=64, intermediate_size=64, num_attention_heads=4)
    assert hw.profile(model, texts()).metadata["model"]["quantisation"] is None
    with torch.no_grad():
        for weight in model.parameters():
            if weight.ndim == 2:
                weight.copy_(quantised(weight, 3))
    effects = hw.profile(model, texts(), repeats=False)
    assert effects.metadata["model"]["quantisation"] == "dequantised from 3 bits in blocks (100% of the matrices)"
