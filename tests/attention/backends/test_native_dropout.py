"""Dropout in the native kernels: its generator, the weights that it drops, and its seed in torch's transforms."""

import math

import pytest
import torch
from native_checks import SEED, Options, attend_with_seed, check_dropped_weights, check_results
from test_native import run_python, tensors
from torch.utils.checkpoint import checkpoint

import headwise as hw
from headwise.attention.backends.native import library
from headwise.attention.backends.native.backend import arguments
from headwise.attention.masks import key_ranges
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Problem
from oracles import kept_by_dropout, philox, plain_attention

pytestmark = pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded()))

KNOWN_ANSWERS = [
    ("00000000 00000000 00000000 00000000", 0, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", 2**64 - 1, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", 0x299F31D0_A4093822, "d16cfe09 94fdcceb 5001e420 24126ea1"),
]
"""Counters, keys and results of Philox 4x32-10, published with it (Random123, tests/kat_vectors)."""


@pytest.mark.parametrize(("counter", "seed", "answer"), KNOWN_ANSWERS)
def test_the_generator_of_the_oracle_has_the_published_answers(counter, seed, answer):
    words = philox([int(word, 16) for word in counter.split()], seed)
    assert " ".join(f"{int(word):08x}" for word in words) == answer


def test_the_kernels_drop_the_weights_that_the_generator_selects():
    check_dropped_weights()


@pytest.mark.parametrize("half", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.bfloat16, marks=pytest.mark.slow)], ids=str)
def test_results_with_dropout_are_within_the_error_budget(dtype, half):
    check_results(dtype, 0.3, half)


def kept_by_kernel(dropout: float, seed: int, heads: int, queries: int, keys: int, batch: int = 1) -> torch.Tensor:
    """Return True at the weights that the kernel keeps, read from the output with the identity matrix as values."""
    q, k = torch.zeros(batch, heads, queries, 1), torch.zeros(batch, heads, keys, 1)
    v = torch.eye(keys).expand(batch, heads, keys, keys)
    return attend_with_seed(q, k, v, Options(), dropout, seed)[0] > 0


NEIGHBOURS = {"key": (0, 0, 0, 1), "query": (0, 0, 1, 0), "head": (0, 1, 0, 0), "batch": (1, 0, 0, 0)}
NEIGHBOURS |= {"two keys": (0, 0, 0, 2), "counter": (0, 0, 0, 8), "diagonal": (0, 0, 1, 1)}


@pytest.mark.parametrize("dropout", [0.1, 0.5, 0.9])
def test_the_rate_is_the_probability_and_neighbours_are_independent(dropout):
    """With n weights, the number of dropped ones has standard deviation sqrt(n p (1 - p)). The mean over n pairs of the
    product of two standardized indicators has expectation 0 and standard deviation 1 / sqrt(n) if they are independent.
    One of the 8 numbers is beyond 5 standard deviations for one of 200,000 seeds.
    """
    kept = kept_by_kernel(dropout, SEED, 3, 500, 512, batch=3).double()
    standardized = (kept - (1 - dropout)) / math.sqrt(dropout * (1 - dropout))
    assert abs(standardized.sum()) < 5 * math.sqrt(kept.numel())
    for name, steps in NEIGHBOURS.items():
        first, second = standardized, standardized
        for axis, step in enumerate(steps):
            size = kept.shape[axis] - step
            first, second = first.narrow(axis, 0, size), second.narrow(axis, step, size)
        products = first * second
        assert abs(products.sum()) < 5 * math.sqrt(products.numel()), name


def test_every_row_key_and_seed_drops_its_share():
    """The sum of squares of n independent standardized counts has expectation n and variance 2 n: each is nearly
    normal, since hundreds of weights are counted.
    """
    dropout, sizes = 0.2, (2, 400, 600)
    counts = [kept_by_kernel(dropout, seed, *sizes)[0].double() for seed in range(SEED, SEED + 20)]
    kept = torch.stack(counts)
    for axes in ((1, 2), (1, 3), (2, 3), (0, 1, 2), (0, 1, 3)):
        number = math.prod(kept.shape[axis] for axis in axes)
        count = kept.sum(axes).flatten()
        squares = (count - number * (1 - dropout)).square() / (number * dropout * (1 - dropout))
        assert abs(squares.sum() - len(count)) < 5 * math.sqrt(2 * len(count)), axes


def test_weights_are_dropped_at_a_rate_below_the_unit_of_the_upper_bits():
    """A rate of 2^-20 is decided by the lower 32 bits of the numbers."""
    dropped = sum(int((~kept_by_kernel(2**-20, seed, 4, 1000, 1000)).sum()) for seed in range(5))
    expected = 5 * 4 * 1000 * 1000 / 2**20
    assert abs(dropped - expected) < 5 * math.sqrt(expected)


def test_the_dropped_weights_do_not_depend_on_sizes_masks_or_groups():
    queries, keys = 130, 300
    whole = kept_by_kernel(0.4, SEED, 4, queries, keys)
    assert torch.equal(kept_by_kernel(0.4, SEED, 2, 3, 77), whole[:, :2, :3, :77])
    q, k = torch.zeros(1, 4, queries, 8), torch.zeros(1, 2, keys, 8)
    v = torch.eye(keys).expand(1, 2, keys, keys)
    shown = torch.rand(1, 1, queries, keys) < 0.5
    window = hw.window(31).block(Grid(1, 4, queries, keys))
    for mask, visible in ((hw.dense(shown), shown), (hw.window(31), window)):
        out, _ = attend_with_seed(q, k, v, Options(mask), 0.4, SEED)
        assert torch.equal(out > 0, whole & visible)


def test_equal_states_of_the_generator_give_equal_results_and_others_do_not():
    q, k, v = tensors(2, 3, 20, 8)

    def run(seed, dropout=0.5):
        torch.manual_seed(seed)
        return hw.attend(q, k, v, dropout=dropout, backend="native"), torch.rand(())

    (out, after), (again, after_again), (other, _) = run(1), run(1), run(2)
    assert torch.equal(out, again)
    assert torch.equal(after, after_again)
    assert not torch.equal(out, other)
    assert not torch.equal(out, hw.attend(q, k, v, dropout=0.5, backend="native"))


def test_without_dropout_nothing_is_drawn_and_nothing_changes():
    q, k, v = tensors(2, 3, 20, 8)
    state = torch.get_rng_state()
    out = hw.attend(q, k, v, dropout=0.0, backend="native")
    assert torch.equal(state, torch.get_rng_state())
    assert torch.equal(out, hw.attend(q, k, v, backend="native"))
    assert torch.equal(out, attend_with_seed(q, k, v, Options(), 0.0, SEED)[0])


def test_gradients_of_sinks_and_the_log_sum_exp_are_those_of_plain_attention():
    q, k, v = (tensor.double() for tensor in tensors(2, 4, 70, 8, keys=130))
    sinks, upstream = torch.randn(4), torch.randn(2, 4, 70, 8)
    factors = kept_by_dropout(0.3, SEED, 2, 4, 70, 130) / 0.7
    exact_sinks = sinks.double().requires_grad_()
    exact = plain_attention(q, k, v, sinks=exact_sinks, factors=factors)
    ours = sinks.clone().requires_grad_()
    out, lse = attend_with_seed(q.float(), k.float(), v.float(), Options(None, {"sinks": ours}), 0.3, SEED)
    torch.testing.assert_close(lse, exact.lse.float())
    (wanted,) = torch.autograd.grad((exact.out * upstream).sum() + exact.lse.sum(), exact_sinks)
    (grad,) = torch.autograd.grad((out * upstream).sum() + lse.sum(), ours)
    torch.testing.assert_close(grad, wanted.float())


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_checkpointing_drops_the_same_weights_again(use_reentrant):
    def attend(q, k, v):
        return hw.attend(q, k, v, mask=hw.causal(), dropout=0.3, backend="native").square().sum()

    inputs, results = tensors(2, 3, 70, 8), []
    for call in (attend, lambda *leaves: checkpoint(attend, *leaves, use_reentrant=use_reentrant)):
        torch.manual_seed(5)
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        loss = call(*leaves)
        loss.backward()
        results.append([loss, *(leaf.grad for leaf in leaves)])
    assert all(map(torch.equal, *results))


def test_torch_accepts_the_operator_with_dropout():
    q, k, v = tensors(1, 4, 9, 8, requires_grad=True)
    bias = torch.randn(1, 4, 9, 9, requires_grad=True)
    inputs = (*arguments(Problem.checked(q, k, v, bias=bias), None, None), 0.3, torch.tensor(SEED), 3, 5)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.headwise.attend_forward, inputs, test_utils=tests)
    inputs = [each.detach() if isinstance(each, torch.Tensor) else each for each in inputs]
    out, lse, normalizers = torch.ops.headwise.attend_forward(*inputs)
    upstream = (torch.randn_like(out), torch.randn_like(lse), out, normalizers)
    for operator in (torch.ops.headwise.attend_backward, torch.ops.headwise.attend_bias_gradient):
        torch.library.opcheck(operator, (*upstream, *inputs))


def test_the_operator_states_what_is_wrong_with_a_seed():
    q, k, v = tensors(1, 2, 5, 8)
    inputs = arguments(Problem.checked(q, k, v), None, None)
    for seed, message in ((None, "dropout needs a seed"), (torch.tensor(1.0), "seed has another dtype")):
        with pytest.raises(RuntimeError, match=message):
            torch.ops.headwise.attend_forward(*inputs, 0.3, seed)


COMPILED = """
import torch, headwise as hw
from headwise.attention.masks import key_ranges

rule = hw.causal() & hw.mask_rule(lambda b, h, q, k: (q + 2 * k + h) % 3 > 0)

def function(q, k, v, bias):
    return hw.attend(q, k, v, mask=hw.causal(), bias=bias, dropout=0.3, backend="native")

def in_parts(q, k, v, bias):
    return hw.attend(q, k, v, mask=rule, bias=bias, dropout=0.3, backend="native")

def compare(plain, compiled, length):
    leaves = [torch.randn(1, 4, length, 8, requires_grad=True) for _ in range(3)]
    leaves.append(torch.randn(1, 4, length, length, requires_grad=True))
    results = []
    for each in (plain, compiled):
        torch.manual_seed(length)
        out = each(*leaves)
        results.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    assert torch.equal(results[0][0], results[1][0])
    assert not torch.equal(compiled(*leaves), compiled(*leaves))
    return results

compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
for length in (17, 23):
    assert all(map(torch.equal, *compare(function, compiled, length)))
key_ranges.MATRIX_ELEMENTS = 2**14
torch.testing.assert_close(
    *compare(in_parts, torch.compile(in_parts, fullgraph=True, backend="aot_eager"), 150), rtol=0, atol=5e-6
)
print("equal")
"""
"""Program that compares compiled functions with plain ones; in a fresh interpreter, without the checks of shapes in
tests, which torch cannot compile. The compiler adds up the gradients of parts in another order."""


@pytest.mark.slow
def test_a_compiled_function_drops_the_same_weights():
    assert run_python(COMPILED) == "equal"


def test_watch_reports_the_weights_without_dropout_and_leaves_the_output_unchanged():
    layer = hw.MultiHeadAttention(24, 3, dropout=0.4, backend="native")
    x = torch.randn(2, 80, 24)
    torch.manual_seed(3)
    plain = layer(x)
    torch.manual_seed(3)
    with hw.watch(layer) as heads:
        observed = layer(x)
    layer.eval()
    with hw.watch(layer) as without:
        layer(x)
    torch.testing.assert_close(observed, plain, rtol=0, atol=0)
    columns = heads.table().select_dtypes("number")
    torch.testing.assert_close(
        torch.from_numpy(columns.to_numpy()), torch.from_numpy(without.table()[columns.columns].to_numpy())
    )


def test_parts_of_the_score_matrix_drop_the_weights_of_the_whole(monkeypatch):
    """A mask that is too large to be evaluated at once divides a call into parts, which begin at other keys."""
    leaves = [*tensors(1, 2, 391, 32, keys=523, requires_grad=True), torch.randn(1, 2, 391, 523, requires_grad=True)]
    *inputs, bias = leaves
    mask = hw.window(60, dilation=2) & hw.mask_rule(lambda b, h, q, k: (q + 2 * k + h) % 3 > 0)

    def results():
        torch.manual_seed(1)
        out = hw.attend(*inputs, mask=mask, bias=bias, dropout=0.3, backend="native")
        return out, *torch.autograd.grad(out.square().sum(), leaves)

    whole = results()
    monkeypatch.setattr(key_ranges, "MATRIX_ELEMENTS", 2**16)
    monkeypatch.setattr(key_ranges, "CACHED_ELEMENTS", 0)
    parts = key_ranges.visible_keys(mask, Grid(1, 2, 391, 523)).parts()
    assert len(parts) > 2
    assert any(part.columns.start > 0 for part in parts)
    out, *gradients = results()
    assert torch.equal(out, whole[0])
    torch.testing.assert_close(gradients, whole[1:])
