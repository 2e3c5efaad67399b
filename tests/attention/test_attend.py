"""`attend` on every backend against plain attention in float64."""

import re
import threading
from collections import defaultdict

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from torch.utils._python_dispatch import TorchDispatchMode

import headwise as hw
from headwise.attention.backends.blockwise import tiles
from headwise.attention.backends.native import library
from headwise.attention.backends.native.library import why_not_loaded
from headwise.attention.masks import key_ranges
from headwise.attention.masks.grid import Grid
from oracles import PlainResult, distance, plain_attention, plain_errors
from strategies import MASKS, DrawnProblem, problems

NATIVE = () if why_not_loaded() else ("native",)
BACKENDS = ("fused", "blockwise", *NATIVE, "reference")
COMPLETE_BACKENDS = ("fused", "blockwise", "reference")
"""Backends with float64 and gradients of a bias."""


def check_random_problems(check, number: int, **options) -> None:
    """Run a check of a `DrawnProblem` on `number` random problems with each kind of mask, and as many without one.

    Every run draws the same problems, since rounding may leave little room to a bound.
    """
    same = settings(max_examples=number, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
    for place, kind in enumerate([None, *MASKS]):
        test = given(drawn=problems(kind))(check)
        # Each kind of mask has a seed of its own, so that the kinds do not draw the same sizes.
        seed(100 + place)(same(test))(**options)


NAMES = ("out", "lse", "weights")


def capable_backends(drawn: DrawnProblem, q, k, v) -> list[str]:
    """Return the backends that can compute a problem; the reference always can."""
    capable = [backend for backend in BACKENDS if hw.why_not(backend, q, k, v, **drawn.attend_options) is None]
    refused = {"fused": drawn.softcap or drawn.talking, "blockwise": drawn.talking, "reference": False}
    refused["native"] = drawn.talking or q.dtype == torch.float64
    assert capable == [backend for backend in BACKENDS if not refused[backend]]
    return capable


def errors_and_budget(drawn: DrawnProblem, dtype: torch.dtype, sets: int) -> tuple[dict, dict]:
    """Return the largest error of each backend and result over `sets` sets of values, and twice the plain error."""
    errors: dict = defaultdict(float)
    budget: dict = defaultdict(float)
    for number in range(sets):
        q, k, v = drawn.tensors(dtype, number)
        wide = (q.double(), k.double(), v.double())
        exact = plain_attention(*wide, **drawn.oracle_options)
        plain = plain_errors(q, k, v, exact, **drawn.oracle_options)
        for name in NAMES:
            budget[name] = max(budget[name], 2 * plain[name])
        empty = ~drawn.rows_with_keys()
        for backend in capable_backends(drawn, q, k, v):
            # Separate calls: with the weights asked for, all results come from the matrix.
            out, lse = hw.attend(q, k, v, **drawn.attend_options, return_lse=True, backend=backend)
            _, weights = hw.attend(q, k, v, **drawn.attend_options, return_weights=True, backend=backend)
            got, alone = PlainResult(out, lse, weights), hw.attend(q, k, v, **drawn.attend_options, backend=backend)
            assert (got.out.dtype, got.lse.dtype, got.weights.dtype) == (dtype, torch.float32, dtype)
            if drawn.talking is None:  # with them an empty row of a head gets the weights of other heads
                assert not any(result[empty].any() for result in (got.out, alone, got.weights))
            for name in NAMES:
                error = distance(getattr(got, name), getattr(exact, name))
                errors[backend, name] = max(errors[backend, name], error)
            errors[backend, "out"] = max(errors[backend, "out"], distance(alone, exact.out))
    return errors, budget


def check_error(dtype: torch.dtype, drawn: DrawnProblem) -> None:
    # The largest of a few rounding errors depends on luck. A problem that exceeds the budget on two sets of values is
    # measured again on 64: there luck averages out, and a kernel that is worse stays worse.
    for sets in (2, 64):
        errors, budget = errors_and_budget(drawn, dtype, sets)
        if all(error <= budget[name] for (_, name), error in errors.items()):
            return
    pytest.fail(f"errors {dict(errors)} beyond {dict(budget)}")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_plain_attention(dtype):
    check_random_problems(check_error, 5, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_error_is_at_most_twice_that_of_plain_attention_in_more_problems(dtype):
    check_random_problems(check_error, 14, dtype=dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("scale", [0.7, torch.tensor([0.5, 0.7, 0.9])], ids=["scale", "scale per head"])
def test_scores_of_bfloat16_are_kept_in_float32(backend, scale):
    q, k, v = (3 * torch.randn(2, 3, n, 7).bfloat16() for n in (5, 11, 11))
    bias = torch.randn(2, 3, 5, 11)
    exact = plain_attention(q.double(), k.double(), v.double(), bias=bias.double(), scale=scale)
    lse = hw.attend(q, k, v, bias=bias, scale=scale, return_lse=True, backend=backend)[1]
    assert distance(lse, exact.lse) < 2e-4  # scores are up to about 100; bfloat16 would be off by 0.1


KERNEL_BLOCKS = {
    "left padding": (hw.causal() & hw.padding([1100, 37], side="left"), 1100, 1100),
    "window": (hw.window(40), 600, 1300),
    "sparse": (hw.dense(torch.rand(600, 1100, generator=torch.Generator().manual_seed(0)) < 0.002), 600, 1100),
}


@pytest.mark.parametrize("case", KERNEL_BLOCKS)
def test_lengths_of_many_kernel_blocks_whose_first_are_empty(case):
    mask, queries, keys = KERNEL_BLOCKS[case]
    q, k, v = (torch.randn(2, 2, n, 9, dtype=torch.float64, requires_grad=True) for n in (queries, keys, keys))
    allowed = mask.block(Grid(2, 2, queries, keys)).expand(2, 2, queries, keys)
    exact = plain_attention(q, k, v, allowed)
    out, lse = hw.attend(q, k, v, mask=mask, return_lse=True)
    assert distance(out, exact.out) < 1e-12
    assert distance(lse, exact.lse) < 1e-12
    upstream = torch.randn_like(out)
    ours = torch.autograd.grad((out * upstream).sum() + lse[lse > -torch.inf].sum(), (q, k, v))
    theirs = torch.autograd.grad((exact.out * upstream).sum() + exact.lse[exact.lse > -torch.inf].sum(), (q, k, v))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-10)


def check_gradients(asked: list[str], drawn: DrawnProblem) -> None:
    inputs = [tensor.clone().requires_grad_() for tensor in (drawn.q, drawn.k, drawn.v)]
    learned = [drawn.sinks] if drawn.sinks is not None else []
    learned += [drawn.scale] if isinstance(drawn.scale, torch.Tensor) else []
    learned += drawn.talking or []
    inputs += [values.requires_grad_() for values in learned]
    exact = plain_attention(*inputs[:3], **drawn.oracle_options)
    finite = exact.lse > -torch.inf
    upstream = [torch.randn_like(exact.out), torch.randn_like(exact.lse), torch.randn_like(exact.weights)]

    def gradients(out, lse=None, weights=None):
        loss = (out * upstream[0]).sum()
        if lse is not None:
            loss = loss + (torch.where(finite, lse, 0.0) * upstream[1]).sum()
        if weights is not None:
            loss = loss + (weights * upstream[2]).sum()
        return torch.autograd.grad(loss, inputs, allow_unused=True, materialize_grads=True)

    wanted = {"return_lse": exact.lse, "return_weights": exact.weights}
    expected = gradients(exact.out, *(wanted[name] for name in asked))
    for backend in capable_backends(drawn, *inputs[:3]):
        result = hw.attend(*inputs[:3], **drawn.attend_options, **dict.fromkeys(asked, True), backend=backend)
        torch.testing.assert_close(gradients(*(result if asked else [result])), expected, rtol=1e-10, atol=1e-11)


ASKED = ([], ["return_lse"], ["return_lse", "return_weights"])


@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_gradients_in_float64(asked):
    check_random_problems(check_gradients, 5, asked=asked)


@pytest.mark.slow
@pytest.mark.parametrize("asked", ASKED, ids=str)
def test_gradients_in_float64_of_more_problems(asked):
    check_random_problems(check_gradients, 21, asked=asked)


@pytest.mark.parametrize("backend", COMPLETE_BACKENDS)
def test_gradient_of_a_bias(backend):
    q, k, v = (torch.randn(2, 3, n, 11, dtype=torch.float64) for n in (5, 7, 7))
    bias = torch.randn(1, 3, 5, 7, dtype=torch.float64, requires_grad=True)
    allowed = torch.rand(2, 3, 5, 7) > 0.4
    out = hw.attend(q, k, v, mask=allowed, bias=bias, backend=backend)
    (ours,) = torch.autograd.grad(out.square().sum(), bias)
    exact = plain_attention(q, k, v, allowed, bias.expand(2, -1, -1, -1)).out
    (theirs,) = torch.autograd.grad(exact.square().sum(), bias)
    torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-12)


SCALES = {
    "zero": 0.0,
    "minus zero": -0.0,
    "negative": -0.3,
    "zero in float32": 1e-60,
    "per head": torch.tensor([0.0, -0.7, 0.5]),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("mask", [None, hw.causal(), hw.window(3)], ids=str)
@pytest.mark.parametrize("scale", SCALES)
def test_a_scale_of_zero_or_below(scale, mask, dtype, backend):
    q, k, v = (torch.randn(2, 3, 97, 5).to(dtype).requires_grad_() for _ in range(3))
    allowed = None if mask is None else mask.block(Grid(2, 3, 97, 97)).expand(2, 3, 97, 97)
    sinks = torch.tensor([-1.0, 0.0, 2.0])
    for options in ({}, {"sinks": sinks}):
        exact = plain_attention(q.double(), k.double(), v.double(), allowed, scale=SCALES[scale], **options)
        out = hw.attend(q, k, v, mask=mask, scale=SCALES[scale], backend=backend, **options)
        with_lse, lse = hw.attend(q, k, v, mask=mask, scale=SCALES[scale], backend=backend, return_lse=True, **options)
        tolerance = 1e-5 if dtype == torch.float32 else 2e-2
        assert distance(out, exact.out) < tolerance
        assert distance(with_lse, exact.out) < tolerance
        assert distance(lse, exact.lse) < 1e-5
        ours = torch.autograd.grad(out.sum(), (q, k, v))
        torch.testing.assert_close(ours, torch.autograd.grad(exact.out.sum(), (q, k, v)), rtol=0, atol=4 * tolerance)


# -- conventions ------------------------------------------------------------------------------------------------


def values_seen(mask, queries: int, keys: int, backend: str) -> list[list[int]]:
    """Return 1 for each key that a query attends to, read from the output: value j is the unit vector j."""
    out = hw.attend(
        torch.zeros(1, 1, queries, 3),
        torch.zeros(1, 1, keys, 3),
        torch.eye(keys)[None, None],
        mask=mask,
        backend=backend,
    )
    return (out[0, 0] > 0).int().tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_is_aligned_to_the_last_key(backend):
    assert values_seen(hw.causal(), 2, 4, backend) == [[1, 1, 1, 0], [1, 1, 1, 1]]
    assert values_seen(hw.causal(), 4, 2, backend) == [[0, 0], [0, 0], [1, 0], [1, 1]]
    assert values_seen(hw.causal(), 3, 3, backend) == [[1, 0, 0], [1, 1, 0], [1, 1, 1]]


@pytest.mark.parametrize("backend", BACKENDS)
def test_true_attends(backend):
    mask = torch.tensor([[True, False, True], [False, True, False]])
    assert values_seen(mask, 2, 3, backend) == mask.int().tolist()


@pytest.mark.parametrize("backend", BACKENDS)
def test_row_without_a_key_is_zero_with_finite_gradients(backend):
    q, k, v = (torch.randn(2, 3, 5, 7, requires_grad=True) for _ in range(3))
    mask = hw.padding([0, 3], side="left")
    out, lse, weights = hw.attend(q, k, v, mask=mask, return_lse=True, return_weights=True, backend=backend)
    assert not out[0].any()
    assert not weights[0].any()
    assert (lse[0] == -torch.inf).all()
    (out.sum() + weights.square().sum() + lse[1].sum()).backward()
    for tensor in (q, k, v):
        assert tensor.grad.isfinite().all()
        assert not tensor.grad[0].any()
        assert tensor.grad[1].any()


@pytest.mark.parametrize("backend", BACKENDS)
def test_float_mask_is_added(backend):
    q, k, v = (torch.randn(2, 3, 5, 7) for _ in range(3))
    added = torch.randn(5, 5)
    assert torch.equal(hw.attend(q, k, v, mask=added, backend=backend), hw.attend(q, k, v, bias=added, backend=backend))
    assert not torch.equal(hw.attend(q, k, v, mask=added, backend=backend), hw.attend(q, k, v, backend=backend))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", [(3,), (2, 3), (2, 3, 5)], ids=str)
def test_gate_multiplies_the_output_and_nothing_else(backend, shape):
    q, k, v = (torch.randn(2, 3, n, 7) for n in (5, 11, 11))
    gate = torch.randn(shape)
    plain = hw.attend(q, k, v, return_lse=True, return_weights=True, backend=backend)
    gated = hw.attend(q, k, v, gate=gate, return_lse=True, return_weights=True, backend=backend)
    expected = torch.einsum({1: "bhld,h->bhld", 2: "bhld,bh->bhld", 3: "bhld,bhl->bhld"}[gate.ndim], plain[0], gate)
    torch.testing.assert_close(gated[0], expected)
    assert torch.equal(gated[1], plain[1])
    assert torch.equal(gated[2], plain[2])


@pytest.mark.parametrize("backend", COMPLETE_BACKENDS)
def test_a_permutation_of_the_keys_leaves_the_output(backend):
    q, k, v = (torch.randn(2, 3, n, 7, dtype=torch.float64) for n in (5, 11, 11))
    order = torch.randperm(11)
    torch.testing.assert_close(
        hw.attend(q, k[:, :, order], v[:, :, order], backend=backend), hw.attend(q, k, v, backend=backend)
    )


@pytest.mark.parametrize("backend", BACKENDS)
def test_causal_output_does_not_change_with_the_future(backend):
    q, k, v = (torch.randn(2, 3, 11, 7) for _ in range(3))
    before = hw.attend(q, k, v, mask=hw.causal(), backend=backend)
    k[:, :, 6:], v[:, :, 6:] = 100.0, 100.0
    after = hw.attend(q, k, v, mask=hw.causal(), backend=backend)
    assert torch.equal(before[:, :, :6], after[:, :, :6])
    assert not torch.equal(before[:, :, 6:], after[:, :, 6:])


# -- grouped-query attention ------------------------------------------------------------------------------------


class LargestTensor(TorchDispatchMode):
    """The most elements that any operator returned in newly made memory."""

    def __init__(self):
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple) else (result,):
            if isinstance(tensor, torch.Tensor):
                self.elements = max(self.elements, tensor.untyped_storage().nbytes() // tensor.element_size())
        return result


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("asked", [{}, {"return_lse": True}], ids=["out", "lse"])
def test_keys_are_never_repeated_in_memory(backend, asked, monkeypatch):
    monkeypatch.setattr(tiles.Pool, "_of_thread", threading.local())  # buffers of earlier calls would not be counted
    q, k = torch.randn(2, 12, 2, 64), torch.randn(2, 2, 512, 64)
    with LargestTensor() as largest:
        hw.attend(q, k, k.clone(), backend=backend, **asked)
    assert largest.elements == k.numel()  # the clone; repeated keys would be 6 times that


def test_gqa_equals_attention_with_repeated_heads():
    q, k, v = torch.randn(2, 6, 5, 7), torch.randn(2, 2, 11, 7), torch.randn(2, 2, 11, 13)
    repeated = hw.attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1))
    torch.testing.assert_close(hw.attend(q, k, v), repeated)
    assert not torch.allclose(hw.attend(q, k, v), hw.attend(q, k.repeat(1, 3, 1, 1), v.repeat(1, 3, 1, 1)))


# -- dropout ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_drops_weights_and_scales_the_others(backend):
    q, k = torch.randn(2, 3, 50, 7), torch.randn(2, 3, 40, 7)
    v = torch.eye(40).expand(2, 3, 40, 40)  # so that the output is the matrix of weights that were used
    mask = hw.window(20)
    kept, lse, weights = hw.attend(
        q, k, v, mask=mask, dropout=0.3, return_lse=True, return_weights=True, backend=backend
    )
    exact = hw.attend(q, k, v, mask=mask, return_lse=True, return_weights=True, backend="reference")
    torch.testing.assert_close(lse, exact[1])
    torch.testing.assert_close(weights, exact[2])
    dropped = (kept == 0) & (weights > 0)
    torch.testing.assert_close(kept, torch.where(dropped, 0.0, weights / 0.7))
    drawn = int((weights > 0).sum())
    # Four standard deviations of a binomial count.
    assert abs(int(dropped.sum()) - 0.3 * drawn) < 4 * (drawn * 0.3 * 0.7) ** 0.5


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropout_follows_the_seed(backend):
    q = torch.randn(2, 3, 5, 7)

    def run(seed):
        torch.manual_seed(seed)
        return hw.attend(q, q, q, dropout=0.5, backend=backend)

    assert torch.equal(run(1), run(1))
    assert not torch.equal(run(1), run(2))


# -- empty axes -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("sizes", [(0, 3, 5, 7), (2, 3, 0, 7), (2, 3, 5, 0)], ids=str)
@pytest.mark.parametrize("return_weights", [False, True])
def test_an_axis_of_length_zero(backend, sizes, return_weights):
    batch, heads, queries, keys = sizes
    q = torch.randn(batch, heads, queries, 11, requires_grad=True)
    k = torch.randn(batch, heads, keys, 11, requires_grad=True)
    v = torch.randn(batch, heads, keys, 13, requires_grad=True)
    out, lse, *weights = hw.attend(q, k, v, return_lse=True, return_weights=return_weights, backend=backend)
    assert out.shape == (batch, heads, queries, 13)
    assert lse.shape == (batch, heads, queries)
    assert [each.shape for each in weights] == return_weights * [sizes]
    assert not out.any()
    assert (lse == -torch.inf).all()
    out.sum().backward()
    assert not any(tensor.grad.any() for tensor in (q, k, v))


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("layout", ["every other feature", "transposed"])
def test_tensors_without_elements_may_have_any_strides(layout, backend):
    def empty(heads, length, width):
        if layout == "transposed":
            return torch.randn(1, heads, width, length).mT.requires_grad_()
        return torch.randn(1, heads, length, 2 * width)[..., ::2].requires_grad_()

    for queries, keys in ((5, 0), (0, 7), (0, 0)):
        q, k, v = empty(6, queries, 11), empty(3, keys, 11), empty(3, keys, 13)
        for mask in (None, hw.causal(), hw.mask_rule(lambda b, h, q, k: (q + k) % 2 == 0)):
            out = hw.attend(q, k, v, mask=mask, backend=backend)
            assert out.shape == (1, 6, queries, 13)
            assert not out.any()
            out.sum().backward()


@pytest.mark.parametrize("backend", [*BACKENDS, None])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_no_heads_and_no_sequences_under_every_mask(dtype, backend):
    for batch, heads in ((2, 0), (0, 4), (0, 0)):
        q = torch.randn(batch, heads, 5, 11, dtype=dtype)
        k, v = torch.randn(batch, 2, 7, 11, dtype=dtype), torch.randn(batch, 2, 7, 13, dtype=dtype)
        rule = hw.mask_rule(lambda b, h, q, k: (b + h + k) % 2 == 0)
        for mask in (rule, rule & hw.causal(), ~rule, hw.window(3, dilation=2), torch.ones(5, 7, dtype=torch.bool)):
            assert hw.attend(q, k, v, mask=mask, backend=backend).shape == (batch, heads, 5, 13)


# -- tensors of inference mode ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", [*BACKENDS, None])
def test_options_made_in_inference_mode_serve_training(backend):
    length, heads = 131, 3
    q, k, v = (torch.randn(2, heads, length, 7, requires_grad=True) for _ in range(3))
    with torch.inference_mode():
        matrix, bias = torch.rand(length, length) < 0.5, torch.randn(1, heads, length, length)
        lengths, ids = torch.tensor([length, 97]), torch.arange(length).expand(2, -1) // 20
        options = (
            {"mask": matrix},
            {"mask": hw.dense(matrix) & hw.padding(lengths)},
            {"mask": hw.mask_rule(lambda b, h, q, k: matrix[q, k])},
            {"mask": hw.causal() & hw.segments(ids), "bias": bias},
            {"sinks": torch.randn(heads), "scale": torch.rand(heads), "gate": torch.rand(2, heads)},
            {"mask": hw.window(9), "query_positions": torch.arange(length), "key_positions": torch.arange(length)},
        )
    for each in options:
        gradients = torch.autograd.grad(hw.attend(q, k, v, backend=backend, **each).sum(), (q, k, v))
        assert all(gradient.isfinite().all() for gradient in gradients)


# -- choice of the backend -----------------------------------------------------------------------------------------


def test_why_not_returns_none_or_one_sentence():
    q = torch.randn(2, 3, 5, 7)
    bias = torch.zeros(5, 5, requires_grad=True)
    assert hw.why_not("fused", q, q, q, mask=hw.causal()) is None
    assert hw.why_not("fused", q, q, q, bias=bias) is None
    assert hw.why_not("reference", q, q, q, bias=bias, return_lse=True) is None
    assert hw.why_not("fused", q, q, q, bias=bias, return_weights=True) is None
    assert hw.why_not("fused", q, q, q, softcap=30.0) == "torch's fused operators have no softcap"
    reason = hw.why_not("fused", q, q, q, bias=bias, return_lse=True)
    assert reason == NO_BIAS_GRADIENT
    meta = q.to("meta")
    assert "for the log-sum-exp on cpu only, and q is on meta" in hw.why_not("fused", meta, meta, meta, return_lse=True)


NO_BIAS_GRADIENT = "torch's operator has no gradient of the log-sum-exp for a bias, and bias requires one"


def test_a_bias_that_requires_grad_has_an_lse_under_no_grad():
    q = torch.randn(2, 3, 5, 7)
    bias = torch.randn(5, 5, requires_grad=True)
    with torch.no_grad():
        lse = hw.attend(q, q, q, bias=bias, return_lse=True)[1]
    torch.testing.assert_close(lse, plain_attention(q, q, q, bias=bias.detach().expand(2, 3, 5, 5)).lse)


def test_functional_gradients_of_the_lse():
    q = torch.randn(1, 2, 3, 5, dtype=torch.float64)
    got = torch.func.grad(lambda x: hw.attend(x, q, q, return_lse=True)[1].sum())(q)
    wanted = torch.func.grad(lambda x: hw.attend(x, q, q, return_lse=True, backend="reference")[1].sum())(q)
    torch.testing.assert_close(got, wanted)


def test_a_named_backend_never_falls_back():
    q = torch.randn(2, 3, 5, 7)
    bias = torch.zeros(5, 5, requires_grad=True)
    with pytest.raises(hw.InputError, match=re.escape(f"got fused: {NO_BIAS_GRADIENT}")):
        hw.attend(q, q, q, bias=bias, return_lse=True, backend="fused")


def test_the_reference_is_never_chosen_by_default():
    q, mixing = torch.randn(2, 3, 5, 7), (torch.eye(3), torch.eye(3))
    with pytest.raises(hw.InputError, match="fused: .*; blockwise: .*; backend='reference' can, with the whole matrix"):
        hw.attend(q, q, q, talking_heads=mixing)
    torch.testing.assert_close(hw.attend(q, q, q, talking_heads=mixing, backend="reference"), hw.attend(q, q, q))


def test_problems_that_torchs_kernel_cannot_compute_use_blocks_without_native_kernels(monkeypatch):
    monkeypatch.setattr(library, "load", lambda: "there are none")
    q, bias = torch.randn(2, 3, 5, 7), torch.zeros(5, 5, requires_grad=True)
    for options in ({"softcap": 3.0}, {"bias": bias, "return_lse": True}):
        assert hw.why_not("fused", q, q, q, **options) is not None
        both = [hw.attend(q, q, q, **options, backend=backend) for backend in (None, "blockwise")]
        torch.testing.assert_close(*both, rtol=0, atol=0)


# -- bad input --------------------------------------------------------------------------------------------------


def zeros(*shape, **options):
    return torch.zeros(shape, **options)


Q = zeros(2, 6, 5, 7)
K = zeros(2, 3, 11, 7)
MISTAKES = {
    "rank": (
        (Q[0], K, K, {}),
        r"q: expected 4 dimensions \(batch, heads, length, head_dim\), got 3 dimensions \(6, 5, 7\); use q.unsqueeze",
    ),
    "rank of v": ((Q, K, K[0, 0], {}), r"v: expected 4 dimensions .*, got 2 dimensions \(11, 7\)"),
    "not a tensor": (([1.0], K, K, {}), "q: expected a tensor, got list"),
    "dtype": ((Q, K.double(), K, {}), "k: expected torch.float32 like q, got torch.float64"),
    "integers": ((Q.int(), K, K, {}), "q: expected float16, bfloat16, float32 or float64, got torch.int32"),
    "device": ((Q, K.to("meta"), K, {}), "k: expected a tensor on cpu like q, got meta"),
    "batch": ((Q, K[:1], K, {}), "k: expected batch 2 like q, got batch 1"),
    "head_dim": ((Q, zeros(2, 3, 11, 8), K, {}), "k: expected head_dim 7 like q, got head_dim 8"),
    "no width": ((Q[..., :0], K[..., :0], K, {}), "q: expected a width of 1 or more, got width 0"),
    "values": ((Q, K, K[:, :, :9], {}), r"v: expected \(kv_heads, length\) = \(3, 11\) like k, got \(3, 9\)"),
    "kv heads": (
        (Q, zeros(2, 4, 11, 7), zeros(2, 4, 11, 7), {}),
        "k: expected a number of kv_heads that divides the 6 heads of q, got 4",
    ),
    "mask shape": (
        (Q, K, K, {"mask": zeros(5, 12, dtype=torch.bool)}),
        r"mask: expected a shape that broadcasts to .* = \(2, 6, 5, 11\), got \(1, 1, 5, 12\)",
    ),
    "mask rank": (
        (Q, K, K, {"mask": zeros(2, 5, 11, dtype=torch.bool)}),
        r"mask: expected 2 dimensions .* or 4 .*, got 3 dimensions \(2, 5, 11\); unsqueeze the batch or the head axis",
    ),
    "mask dtype": (
        (Q, K, K, {"mask": zeros(5, 11, dtype=torch.int64)}),
        "mask: expected a boolean tensor, True where a query attends, got torch.int64; make it one with .bool()",
    ),
    "mask type": ((Q, K, K, {"mask": "causal"}), "mask: expected a headwise Mask, .*, got str"),
    "two biases": (
        (Q, K, K, {"mask": zeros(5, 11), "bias": zeros(5, 11)}),
        "mask: expected a boolean tensor or a Mask together with bias=, got a second tensor to add, of torch.float32",
    ),
    "mask device": (
        (Q, K, K, {"mask": zeros(5, 11, dtype=torch.bool, device="meta")}),
        "mask: expected a tensor on cpu like q, got meta",
    ),
    "bias dtype": (
        (Q, K, K, {"bias": zeros(5, 11, dtype=torch.bool)}),
        "bias: expected a float tensor, added to the scores, got torch.bool",
    ),
    "bias shape": (
        (Q, K, K, {"bias": zeros(4, 11)}),
        r"bias: expected a shape that broadcasts .*, got \(1, 1, 4, 11\)",
    ),
    "no values": ((Q, K, K[..., :0], {}), "v: expected a width of 1 or more, got width 0"),
    "narrow float": ((Q.to(torch.float8_e5m2), K, K, {}), "q: expected float16, .* or float64, got torch.float8_e5m2"),
    "nested": (
        (torch.nested.nested_tensor([Q[0], Q[1]], layout=torch.jagged), K, K, {}),
        "q: expected a tensor, got a nested tensor",
    ),
    "gate type": ((Q, K, K, {"gate": 0.5}), "gate: expected a float tensor, got float"),
    "complex gate": ((Q, K, K, {"gate": zeros(6) + 0j}), "gate: expected a float tensor, got torch.complex64"),
    "dropout type": ((Q, K, K, {"dropout": "0.1"}), "dropout: expected a probability .*, got '0.1'"),
    "scale type": ((Q, K, K, {"scale": 1j}), "scale: expected a finite number, got 1j"),
    "scale value": ((Q, K, K, {"scale": float("inf")}), "scale: expected a finite number, got inf"),
    "bias type": ((Q, K, K, {"bias": 0.5}), "bias: expected a float tensor, added to the scores, got float"),
    "backend type": (
        (Q, K, K, {"backend": ["fused"]}),
        r"backend: expected one of fused, flex, blockwise, native, reference, got \['fused'\]",
    ),
    "padding mask": (
        (Q, K, K, {"mask": zeros(2, 11, dtype=torch.bool)}),
        r"mask: .* got \(1, 1, 2, 11\); a padding mask \(batch, keys\) goes in as mask\[:, None, None, :\]",
    ),
    "softcap": ((Q, K, K, {"softcap": 0.0}), "softcap: expected a finite number above 0, got 0.0"),
    "softcap with a gradient": (
        (Q, K, K, {"softcap": torch.tensor(3.0, requires_grad=True)}),
        r"softcap: expected a number, got a tensor that requires grad; its gradient would be lost: pass float\(value\)",
    ),
    "dropout with a gradient": (
        (Q, K, K, {"dropout": torch.tensor(0.5, requires_grad=True)}),
        r"dropout: expected a number, got a tensor that requires grad; its gradient would be lost: pass float\(value\)",
    ),
    "sinks": (
        (Q, K, K, {"sinks": zeros(3)}),
        r"sinks: expected one number for each of 6 heads, got shape \(3,\)",
    ),
    "scale": (
        (Q, K, K, {"scale": zeros(6, 1)}),
        r"scale: expected one number for each of 6 heads, got shape \(6, 1\)",
    ),
    "padding count": (
        (Q, K, K, {"mask": hw.padding([3])}),
        r"padding\(lengths\): expected one length for each of 2 sequences, got 1",
    ),
    "padding length": (
        (Q, K, K, {"mask": hw.causal() & hw.padding([3, 12])}),
        r"padding\(lengths\): expected lengths of 0 to 11 \(the keys\), got 12",
    ),
    "gate": (
        (Q, K, K, {"gate": zeros(5)}),
        r"gate: expected a shape of .* = \(6,\), \(2, 6\), \(2, 6, 5\), got \(5,\)",
    ),
    "gate device": ((Q, K, K, {"gate": zeros(6, device="meta")}), "gate: expected a tensor on cpu like q, got meta"),
    "dropout": ((Q, K, K, {"dropout": 1.0}), "dropout: expected a probability of 0 or more and less than 1, got 1.0"),
    "return_lse": ((Q, K, K, {"return_lse": "no"}), "return_lse: expected True or False, got 'no'"),
    "return_weights": (
        (Q, K, K, {"return_weights": "False"}),
        "return_weights: expected True or False, got 'False'",
    ),
    "backend": (
        (Q, K, K, {"backend": "flash"}),
        "backend: expected one of fused, flex, blockwise, native, reference, got 'flash'",
    ),
}


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_raises_an_error_of_one_sentence(mistake):
    (q, k, v, options), message = MISTAKES[mistake]
    with pytest.raises(hw.InputError, match="^" + message):
        hw.attend(q, k, v, **options)


IN_PARTS = hw.mask_rule(lambda b, h, q, k: (q + k) % 3 > 0)


@pytest.mark.parametrize(
    ("backend", "options"),
    [
        *(("blockwise", options) for options in ({}, {"sinks": (2,)})),
        *(
            (native, options)
            for native in NATIVE
            for options in ({}, {"sinks": (2,)}, {"bias": (5, 5)}, {"mask": IN_PARTS})
        ),
    ],
    ids=str,
)
def test_the_gradient_cannot_be_differentiated_again(backend, options, monkeypatch):
    """Neither can that of sinks, of a bias, or of a call in parts."""
    monkeypatch.setattr(key_ranges, "MATRIX_ELEMENTS", 8)
    q, k, v = (torch.randn(1, 2, 5, 8, requires_grad=True) for _ in range(3))
    shapes = {name: shape for name, shape in options.items() if name != "mask"}
    learned = {name: torch.zeros(shape, requires_grad=True) for name, shape in shapes.items()}
    out = hw.attend(q, k, v, **(options | learned), backend=backend)
    (gradient,) = torch.autograd.grad(out.square().sum(), [*learned.values(), q][:1], create_graph=True)
    refused = rf"derivative for the gradient of ({backend} attention|sinks) is not implemented; backend='reference'"
    with pytest.raises(RuntimeError, match=refused):
        torch.autograd.grad(gradient.square().sum(), q)


def test_function_transforms_cannot_differentiate_the_gradient_again():
    q, k, v = (torch.randn(1, 2, 5, 8) for _ in range(3))

    def squares(q):
        return sum(each.square().sum() for each in hw.attend(q, k, v, return_lse=True, backend="fused"))

    refused = "derivative for the gradient of fused attention is not implemented; backend='reference'"
    with pytest.raises(RuntimeError, match=refused):
        torch.func.grad(lambda q: torch.func.grad(squares)(q).square().sum())(q)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_row_without_a_key_or_a_sink_is_empty(backend):
    q = torch.randn(1, 2, 3, 5, requires_grad=True)
    sinks = torch.tensor([-torch.inf, 0.5])
    out, lse = hw.attend(q, q, q, mask=~hw.prefix(3), sinks=sinks, return_lse=True, backend=backend)
    assert not out.any()
    assert lse[0].tolist() == [[-torch.inf] * 3, [0.5] * 3]
    assert torch.autograd.grad(out.sum() + lse[:, 1].sum(), q)[0].isfinite().all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("keys", [3, 0])
def test_gradients_are_finite_with_a_sink_of_minus_infinity_and_an_empty_row(keys, backend):
    q, k, v = (torch.randn(1, 2, n, 5, requires_grad=True) for n in (3, keys, keys))
    sinks = torch.tensor([-torch.inf, 0.5], requires_grad=True)
    mask = torch.arange(keys)[None] < torch.arange(3)[:, None]  # the first row is empty
    out, lse = hw.attend(q, k, v, mask=mask, sinks=sinks, return_lse=True, backend=backend)
    loss = out.square().sum() + lse[lse > -torch.inf].sum()
    for gradient in torch.autograd.grad(loss, (q, k, v, sinks)):
        assert gradient.isfinite().all()
