"""Checks of the native kernels for one instruction set, which the environment variable HEADWISE_NATIVE names.

python tests/attention/backends/native_checks.py [library]

An instruction set that this processor does not have is skipped.
"""

import math
import sys
from dataclasses import dataclass, field
from itertools import chain, product
from pathlib import Path

import torch

import headwise as hw
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.native import build, installed, library
from headwise.attention.backends.native.backend import arguments
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.key_ranges import visible_keys
from headwise.attention.problem import Problem
from headwise.statistics import kernel_statistics
from headwise.statistics.attend_observed import attend_observed
from headwise.statistics.tally import Tally
from oracles import distance, kept_by_dropout, plain_attention

SIZES = [
    # batch, heads, kv_heads, queries, keys, head_dim, value_dim: several tiles of keys and blocks of rows, and rests
    (2, 6, 3, 5, 37, 11, 13),
    (1, 2, 1, 67, 131, 64, 32),
    (1, 2, 2, 259, 317, 19, 96),
    (2, 3, 1, 7, 401, 80, 37),
    (3, 2, 1, 3, 211, 19, 70),
    (1, 3, 3, 130, 23, 2, 5),
    # few rows for each key/value head, and several pieces of keys
    (2, 3, 3, 1, 1300, 64, 80),
    (1, 6, 2, 1, 1201, 40, 33),
    (1, 4, 1, 2, 700, 19, 128),
    (3, 2, 1, 3, 603, 32, 71),
]

OTHER_INSTRUCTION_SETS = [name for name in build.INSTRUCTION_SETS if name not in ("avx2", "portable")]
"""Instruction sets that `make test-native` does not test."""

SEED = 1234567890123456789
"""Seed of the dropout."""


@dataclass
class Options:
    """Options of `attend`, of which the oracle needs some in another form."""

    mask: hw.Mask | None = None
    others: dict = field(default_factory=dict)


def options_for(heads: int, queries: int, keys: int) -> dict[str, Options]:
    """Return options to test, by name, for a problem of these sizes."""
    generator = torch.Generator().manual_seed(0)
    bias = torch.randn(1, heads, queries, keys, generator=generator)
    bias[..., ::7] = -torch.inf
    matrix = torch.rand(1, 1, queries, keys, generator=generator) < 0.3
    return {
        "nothing": Options(),
        "causal": Options(hw.causal()),
        "window": Options(hw.window(50)),
        "window and sinks": Options(hw.causal() & (hw.window(20) | hw.prefix(3))),
        "a matrix": Options(hw.dense(matrix) & hw.causal()),
        "a bias": Options(hw.causal(), {"bias": bias}),
        "softcap": Options(hw.causal(), {"softcap": 3.0}),
        "a bias in bfloat16": Options(hw.causal(), {"bias": bias[:, :1].bfloat16()}),
        "sinks": Options(hw.window(9), {"sinks": torch.randn(heads, generator=generator)}),
        "scales": Options(None, {"scale": torch.rand(heads, generator=generator) - 0.2}),
    }


def results(attention, *tensors, upstream) -> list[torch.Tensor]:
    """Return output and log-sum-exp (0 in empty rows) of an attention function, and the gradients of its arguments."""
    leaves = [tensor.detach().clone().requires_grad_() for tensor in tensors]
    out, lse = attention(*leaves)
    lse = torch.where(lse > -torch.inf, lse, 0.0)
    loss = (out * upstream.to(out.dtype)).sum() + lse.sum()
    return [out.detach(), lse.detach(), *torch.autograd.grad(loss, leaves)]


def attend_with_seed(q, k, v, options: Options, dropout: float, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp of the native operator with dropout."""
    problem = Problem.checked(q, k, v, mask=options.mask, **options.others)
    visible = visible_keys(problem.mask, problem.grid)
    inputs = arguments(problem, visible.ranges, visible.matrix())
    out, lse, _ = torch.ops.headwise.attend_forward(*inputs, dropout, torch.tensor(seed))
    return out, lse


def check_results(dtype: torch.dtype, dropout: float = 0.0, half: int | None = None) -> None:
    """Check output, log-sum-exp and gradients against float64: over some sets of values, the largest error of the first
    two, and the root of the summed squared errors of gradients, may be at most twice that of plain attention. The
    largest of a few errors depends on luck, so a problem beyond a limit is computed again with more sets of values.

    Single gradients may be further off. In a row that sees few keys, plain attention subtracts nearly equal numbers.

    Each half, 0 or 1, has each size with every second of the options, and each of the options with every second size.
    """
    for number, sizes in enumerate(SIZES):
        all_options = list(options_for(sizes[1], sizes[3], sizes[4]).items())
        for name, options in all_options if half is None else all_options[(number + half) % 2 :: 2]:
            beyond = {}
            for sets in (4, 32):
                beyond = errors_beyond(dtype, sizes, options, sets, dropout)
                if not beyond:
                    break
            assert not beyond, f"{dtype} {name}: {beyond}"


def errors_beyond(dtype: torch.dtype, sizes: tuple[int, ...], options: Options, sets: int, dropout: float) -> dict:
    """Return error and limit of the results beyond their limit over some sets of values, by name."""
    batch, heads, kv_heads, queries, keys, head_dim, value_dim = sizes
    shapes = ((heads, queries, head_dim), (kv_heads, keys, head_dim), (kv_heads, keys, value_dim))
    grid = Grid(batch, heads, queries, keys)
    allowed = None if options.mask is None else options.mask.block(grid).expand(batch, heads, queries, keys)

    kept = kept_by_dropout(dropout, SEED, batch, heads, queries, keys) if dropout else None
    factors = None if kept is None else kept / (1 - dropout)

    def native(q, k, v):
        if dropout:
            return attend_with_seed(q, k, v, options, dropout, SEED)
        return hw.attend(q, k, v, mask=options.mask, **options.others, return_lse=True, backend="native")

    def plain(q, k, v):
        result = plain_attention(q, k, v, allowed, **options.others, factors=factors)
        return result.out, result.lse

    errors, limits = [0.0] * 5, [0.0] * 5
    for _ in range(sets):
        tensors = [torch.randn(batch, *shape).to(dtype) for shape in shapes]
        upstream = torch.randn(batch, heads, queries, value_dim)
        exact = results(plain, *(tensor.double() for tensor in tensors), upstream=upstream)
        ours, theirs = (results(each, *tensors, upstream=upstream) for each in (native, plain))
        for n, right in enumerate(exact):
            rounding = torch.finfo(theirs[n].dtype).eps / 2 * right.abs().max().item()
            if n < 2:
                errors[n] = max(errors[n], distance(ours[n], right))
                limits[n] = max(limits[n], 2 * max(distance(theirs[n], right), rounding))
            else:
                errors[n] = math.hypot(errors[n], (ours[n].double() - right).norm())
                limits[n] = math.hypot(limits[n], 2 * (theirs[n].double() - right).norm())
    names = ("out", "lse", "q", "k", "v")
    return {name: (error, limit) for name, error, limit in zip(names, errors, limits, strict=True) if error > limit}


def check_dropped_weights() -> None:
    """Check that the weights that are not 0, read from the output with the identity matrix as values, are those that an
    independent implementation of the generator keeps: with several tiles of keys that begin anywhere, heads of a group
    in one block, few rows, and probabilities whose lower bits count.
    """
    for batch, heads, kv_heads, queries, keys in ((2, 6, 3, 5, 37), (1, 3, 1, 70, 300), (3, 2, 2, 259, 131)):
        q, k = torch.randn(batch, heads, queries, 4), torch.randn(batch, kv_heads, keys, 4)
        v = torch.eye(keys).expand(batch, kv_heads, keys, keys)
        for mask in (None, hw.causal(), hw.window(77)):
            grid = Grid(batch, heads, queries, keys)
            allowed = torch.tensor(True) if mask is None else mask.block(grid)
            for dropout in (0.1, 0.5, 2**-17, 1 - 2**-17):
                seed = int(torch.randint(2**62, ()))
                kept = kept_by_dropout(dropout, seed, batch, heads, queries, keys)
                for dtype in (torch.float32, torch.bfloat16):
                    tensors = (tensor.to(dtype) for tensor in (q, k, v))
                    out, _ = attend_with_seed(*tensors, Options(mask), dropout, seed)
                    assert torch.equal(out > 0, kept & allowed), f"{dtype} {dropout} {mask}"


def check_statistics(dtype: torch.dtype) -> None:
    """Check the statistics of several tiles and blocks against those of blockwise attention."""
    q, k, v = (torch.randn(2, heads, length, 48).to(dtype) for heads, length in ((4, 211), (2, 331), (2, 331)))
    tokens = torch.randint(0, 40, (2, 331))
    real = torch.ones(2, 331, dtype=torch.bool)
    real[1, :9] = False
    gram = torch.randn(4, 48, 48)
    context = CallContext(tokens, tokens == 3, real[:, -211:], real)
    narrow = torch.randn(1, 4, 211, 331).bfloat16()
    window = hw.causal() & (hw.window(30) | hw.prefix(4))
    for mask, bias in (
        (None, None),
        (hw.causal(), narrow),
        (window, None),
        (hw.dense(torch.rand(211, 331) < 0.5), narrow),
    ):
        problem = Problem.checked(q, k, v, mask=mask, bias=bias, softcap=None if mask is None else 3.0)
        ours, theirs = Tally(gram @ gram.mT), Tally(gram @ gram.mT, measured=kernel_statistics.COMPUTED)
        assert kernel_statistics.why_not(problem, context) is None
        assert kernel_statistics.attend_tallied(problem, context, ours) is not None
        attend_observed(problem, theirs.add, context)
        assert ours.means().keys() == theirs.means().keys()
        for name, value in ours.means().items():
            # The kernels round weights to bfloat16 before they compute the output.
            is_rounded = dtype == torch.bfloat16 and name in ("output_norm", "written_norm")
            difference = (value / theirs.means()[name] - 1).abs().nan_to_num(0.0).max()
            assert difference < (1e-3 if is_rounded else 2e-5), f"{name}: {difference}"


def check_threads() -> None:
    """Check that results have the same bits with one and two threads."""
    q, k, v = (torch.randn(1, heads, 300, 32, requires_grad=True) for heads in (4, 2, 2))

    def steps() -> list[torch.Tensor]:
        """Return the outputs of steps of decoding, with several pieces of keys."""
        return [hw.attend(q[:, :, :1], *(x.repeat(1, 1, 5, 1) for x in (k, v)), backend="native")]

    def results_with(threads: int) -> list[torch.Tensor]:
        torch.set_num_threads(threads)
        out = hw.attend(q, k, v, mask=hw.causal(), backend="native")
        dropped, _ = attend_with_seed(q, k, v, Options(hw.causal()), 0.3, SEED)
        tally = Tally()
        with torch.no_grad():
            problem = Problem.checked(q, k, v, mask=hw.causal())
            kernel_statistics.attend_tallied(problem, CallContext(), tally)
        gradients = (torch.autograd.grad(result.sum(), (q, k, v)) for result in (out, dropped))
        return [out, dropped, *steps(), *chain(*gradients), *tally.means().values()]

    torch.testing.assert_close(results_with(1), results_with(2), rtol=0, atol=0)


def check_linear_maps(dtype: torch.dtype) -> None:
    """Check linear maps of odd sizes against whole numbers, whose products have no rounding errors; in float32 also
    those of transposed matrices, which end where their memory ends.
    """
    sizes_of_x = [(3, 37), (23, 1), (7, 38), (24, 131), (101, 16), (800, 129), (790, 258)]
    for (rows, width), out in product(sizes_of_x, (1, 17, 64, 130)):
        x, weight, bias = (torch.randint(-2, 3, sizes).to(dtype) for sizes in ((rows, width), (out, width), (out,)))
        exact = torch.nn.functional.linear(x.double(), weight.double(), bias.double()).to(dtype)
        layouts = [(x, weight)]
        if dtype == torch.float32:
            layouts.append((x.t().contiguous().t(), weight.t().contiguous().t()))
        for each, matrix in layouts:
            torch.testing.assert_close(torch.ops.headwise.linear_map(each, matrix, bias), exact, rtol=0, atol=0)


def check_mask_ranges() -> None:
    """Check that masks of odd sizes, which end where their memory ends, are read as the keys that they show."""
    for keys in (1, 15, 16, 17, 40):
        first = torch.randint(0, keys, (2, 3, 5, 1))
        mask = torch.arange(keys) >= first
        for each in (mask, torch.zeros(mask.shape).masked_fill(~mask, -torch.inf), mask.mT.contiguous().mT):
            ranges, number = torch.ops.headwise.mask_ranges(each, False)
            assert number == 0
            assert torch.equal(ranges, torch.stack([first, torch.full_like(first, keys)], -1).int())


def main() -> None:
    """Run all checks."""
    torch.manual_seed(0)
    reason = library.why_not_loaded()
    if reason is not None:
        print(reason)
        return
    for dtype in (torch.float32, torch.bfloat16):
        check_results(dtype)
        check_results(dtype, dropout=0.3)
        check_statistics(dtype)
        check_linear_maps(dtype)
    check_dropped_weights()
    check_threads()
    check_mask_ranges()
    print(library.instruction_set())


if __name__ == "__main__":
    if len(sys.argv) > 1:
        installed.LIBRARY = Path(sys.argv[1]).resolve()
    main()
