"""A pass of a layer reads no value of a tensor on a GPU: with every option, input layout and cache."""

import pytest
import torch

import headwise as hw
from headwise.nn import layout
from pretend_device import HostRead, NoReads
from without_a_gpu import as_on_a_gpu, on_pretended_device, passes_that_read


@pytest.mark.parametrize("kind", ["layers", pytest.param("all-layers", marks=pytest.mark.slow)])
def test_layers_on_a_device_read_nothing_and_equal_those_on_the_cpu(kind):
    assert on_pretended_device(kind) == []


@pytest.mark.slow
def test_a_read_fails_every_layer_on_the_device():
    failed = on_pretended_device("all-layers", "with-a-read")
    assert len(failed) > 200
    assert all("HostRead: aten._local_scalar_dense" in line for line in failed)


@pytest.mark.slow
def test_layers_pass_with_fake_tensors_wherever_no_plan_of_blocks_is_made():
    for line in on_pretended_device("all-layers", "fake"):
        assert "InputError: backend: expected one that can do this, got blockwise" in line


def test_layers_read_nothing_where_values_are_unreadable(monkeypatch):
    assert passes_that_read("layers", monkeypatch) == {}


def test_a_read_of_lengths_is_found(monkeypatch):
    layer, x, lengths = hw.MultiHeadAttention(8, 2), torch.randn(2, 5, 8), torch.tensor([2, 5])
    as_on_a_gpu(monkeypatch)
    with NoReads():
        layer(x, lengths=lengths)
    monkeypatch.setattr(layout, "has_readable_values", lambda tensor: True)
    with NoReads(), pytest.raises(HostRead, match="_local_scalar_dense"):
        layer(x, lengths=lengths)


@pytest.mark.usefixtures("as_user")  # each nested tensor has its own name for the lengths
def test_nested_sequences_are_read_neither_for_their_lengths_nor_compared(monkeypatch):
    layer = hw.MultiHeadAttention(8, 2, context_dim=6, value_context_dim=4)
    x, context, values = (
        torch.nested.nested_tensor([torch.randn(2, width), torch.randn(5, width)], layout=torch.jagged)
        for width in (8, 6, 4)
    )
    expected = layer(x, context, values).values()
    as_on_a_gpu(monkeypatch)
    with NoReads():
        y = layer(x, context, values)
        gradients = torch.autograd.grad(y.values().square().sum(), list(layer.parameters()))
    torch.testing.assert_close(y.values(), expected)
    wanted = torch.autograd.grad(expected.square().sum(), list(layer.parameters()))
    torch.testing.assert_close(gradients, wanted)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("options", "call", "message"),
    [
        ({}, {"mask": hw.padding([1, 2])}, "offsets: expected a list or a tensor on the CPU with a mask that is not"),
        (
            {"rotary": hw.Rotary(scaling=hw.DynamicNTK(2.0, 4))},
            {},
            "offsets: expected .* with a Rotary that depends on",
        ),
    ],
)
def test_packed_sequences_that_differ_in_more_need_offsets_that_can_be_read(options, call, message, monkeypatch):
    layer, x = hw.MultiHeadAttention(8, 2, **options), torch.randn(7, 8)
    layer(x, offsets=[0, 2, 7], **call)
    as_on_a_gpu(monkeypatch)
    with pytest.raises(hw.InputError, match=f"^{message}"):
        layer(x, offsets=torch.tensor([0, 2, 7]), **call)


@pytest.mark.usefixtures("as_user")
def test_offsets_of_one_kind_go_with_offsets_of_the_same_kind(monkeypatch):
    layer, x, context = hw.MultiHeadAttention(8, 2), torch.randn(7, 8), torch.randn(5, 8)
    as_on_a_gpu(monkeypatch)
    with pytest.raises(hw.InputError, match="^context_offsets: expected 3 numbers like offsets, got 4"):
        layer(x, context, offsets=torch.tensor([0, 2, 7]), context_offsets=torch.tensor([0, 2, 2, 5]))
    with pytest.raises(hw.InputError, match="^offsets: expected numbers that rise from 0 to 7"):
        layer(x, context, offsets=torch.tensor([0]), context_offsets=torch.tensor([0]))


def test_wrong_offsets_and_lengths_that_cannot_be_read_stay_within_the_tensors(monkeypatch):
    """They are clamped, so that no memory outside of the tensors is read."""
    layer = hw.MultiHeadAttention(8, 2, mask=hw.causal()).eval()
    x = torch.randn(2, 5, 8)
    expected = layer(x, lengths=[0, 5])
    as_on_a_gpu(monkeypatch)
    torch.testing.assert_close(layer(x, lengths=torch.tensor([-3, 9])), expected)
    for offsets in ([0, 3, 4], [2, 1, 9], [-5, 3, 5]):
        assert layer(x[0], offsets=torch.tensor(offsets)).isfinite().all()
