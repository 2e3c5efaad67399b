"""Rotation of few tokens by the native operator, against the operators of torch and the definition in float64."""

import warnings

import pytest
import torch
from torch.autograd import forward_ad

import headwise as hw
from headwise.attention import rotary as module
from headwise.attention.backends.native import library
from oracles import rotated, within_budget

pytestmark = pytest.mark.skipif(library.why_not_loaded() is not None, reason="the native kernels are not available")

ROTARIES = {
    "all features": hw.Rotary(),
    "some features": hw.Rotary(theta=500.0, width=6),
    "neighbours": hw.Rotary(interleaved=True),
    "some neighbours": hw.Rotary(width=10, interleaved=True),
    "scaled": hw.Rotary(scaling=hw.YaRN(factor=4.0, trained_length=128)),
    "Llama 3": hw.Rotary(scaling=hw.Llama3(factor=8.0, trained_length=128)),
}
LAYOUTS = {
    "heads first": lambda x: x,
    "tokens first": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "every second token": lambda x: x.repeat_interleave(2, 2)[:, :, ::2],
    "repeated heads": lambda x: x[:, :1].expand_as(x),
}


def by_torch(rotary, x, positions):
    """Return `x` rotated by the operators of torch."""
    return rotary.apply_angles(x, rotary.angles(x, positions))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", ROTARIES)
def test_error_is_at_most_twice_that_of_torch(name, layout, dtype):
    rotary = ROTARIES[name]
    for batch, tokens in ((1, 1), (1, 7), (3, 2)):
        x = LAYOUTS[layout](torch.randn(batch, 5, tokens, 14).to(dtype))
        for positions in (torch.randint(0, 200_000, (batch, tokens)), torch.arange(-1, tokens - 1)[None]):
            assert module.suits_native(x, positions)
            ours, theirs = rotary.rotate(x, positions), by_torch(rotary, x, positions)
            exact = by_torch(rotary, x.double(), positions)
            within_budget(ours, theirs, exact)
            assert ours.dtype == dtype


def test_against_the_definition():
    x, positions = torch.randn(2, 3, 3, 8), torch.tensor([[0, 5, 70], [1, 2, 100_000]])
    for interleaved in (False, True):
        rotary = hw.Rotary(theta=300.0, width=6, interleaved=interleaved)
        exact = rotated(x.double(), positions, 300.0, 6, interleaved)
        torch.testing.assert_close(rotary.rotate(x, positions).double(), exact, rtol=0, atol=2e-6)


def test_both_have_positions_of_their_own():
    q, k = torch.randn(1, 4, 2, 8), torch.randn(1, 2, 3, 8)
    positions = torch.tensor([[8, 9]]), torch.tensor([[7, 8, 9]])
    for rotary in ROTARIES.values():
        if rotary.width is None:
            for both, x, of_x in zip(rotary.rotate_both(q, k, *positions), (q, k), positions, strict=True):
                torch.testing.assert_close(both, by_torch(rotary, x, of_x))


@pytest.mark.parametrize(
    ("x", "positions"),
    [
        (torch.randn(1, 2, 9, 8), torch.arange(9)[None]),
        (torch.randn(1, 2, 1, 8).double(), torch.arange(1)[None]),
        (torch.randn(1, 2, 1, 8, requires_grad=True), torch.arange(1)[None]),
        (torch.randn(1, 8, 2, 3).permute(0, 2, 3, 1), torch.arange(3)[None]),
        (torch.randn(1, 2, 2, 8), torch.arange(4)[None, ::2]),
        (torch.randn(1, 2, 1, 8), torch.arange(1, dtype=torch.int32)[None]),
        (torch.randn(1, 2, 1, 8, device="meta"), torch.arange(1, device="meta")[None]),
    ],
    ids=["many tokens", "float64", "gradient", "strided features", "strided positions", "int32", "meta"],
)
def test_other_calls_are_left_to_torch(x, positions):
    assert not module.suits_native(x, positions)
    assert hw.Rotary().rotate(x, positions).shape == x.shape


def test_transforms_see_the_operators_of_torch():
    x, positions = torch.randn(3, 1, 2, 1, 8), torch.tensor([[5]])
    one_by_one = torch.stack([hw.Rotary().rotate(each, positions) for each in x])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch has no batching rule for addcmul_
        batched = torch.vmap(lambda each: hw.Rotary().rotate(each, positions))(x)
    torch.testing.assert_close(batched, one_by_one)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(x[0], torch.ones_like(x[0]))
        assert forward_ad.unpack_dual(hw.Rotary().rotate(dual, positions)).tangent is not None


def test_a_scaling_of_another_package_is_computed_anew():
    class Growing(hw.LinearScaling):
        def frequencies(self, theta, width, length, *, device):
            calls.append(width)
            return super().frequencies(theta, width, length, device=device)

    calls: list[int] = []
    rotary = hw.Rotary(scaling=Growing(2.0))
    for _ in range(3):
        rotary.rotate(torch.randn(1, 2, 1, 8), torch.tensor([[3]]))
    assert len(calls) == 3


def test_torch_accepts_the_operator():
    turns = torch.rand(3, dtype=torch.float64)
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.randn(2, 3, 4, 8).to(dtype)
        inputs = (x.transpose(1, 2).contiguous().transpose(1, 2), torch.arange(4)[None], turns, 1.5, True)
        torch.library.opcheck(
            torch.ops.headwise.rotate_few_tokens.default, inputs, test_utils=("test_schema", "test_faketensor")
        )


@pytest.mark.usefixtures("as_user")
def test_wrong_input_is_named():
    with pytest.raises(hw.InputError, match=r"^x: expected a float tensor \(batch, heads, length, head_dim\)"):
        hw.Rotary().rotate(torch.randn(2, 8), torch.tensor([[0]]))
    with pytest.raises(hw.InputError, match="^positions: "):
        hw.Rotary().rotate(torch.randn(1, 2, 3, 8), torch.tensor([[0, 1]]))


def test_a_subclass_is_asked_for_its_angles():
    class Doubled(hw.Rotary):
        def angles(self, x, positions, *, length=None):
            return super().angles(x, 2 * positions, length=length)

    x, positions = torch.randn(1, 2, 3, 8), torch.arange(3)[None]
    torch.testing.assert_close(Doubled().rotate(x, positions), hw.Rotary().rotate(x, 2 * positions))
    both = Doubled().rotate_both(x, x, positions, positions)
    torch.testing.assert_close(both[1], hw.Rotary().rotate(x, 2 * positions))
