"""Attention on a GPU: `hw.attend` with its own choice of backend, against torch's SDPA kernels and FlexAttention.

Regime: bfloat16, lengths 1,024 to 32,768 with batch times length 32,768, head dim 64 (32 heads) and 128 (16 heads);
full, causal, and a causal window of 256; forward, and forward with backward. Time is measured by device events. Every
implementation is first compared with the definition in float64, on the first sequence and on the first, a middle and
the last block of 512 rows; gradients are those of these rows alone. The error of headwise may be at most twice that of
torch's default.

    python -m benchmarks.gpu [--quick] [--rounds N] [--only "window"]

Without a GPU the script exits with a message; with --tiny it then runs on the CPU, to test the code.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import product
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import headwise as hw
from benchmarks import oracle
from benchmarks.command_line import arguments
from benchmarks.measure import Call, Ratio, Row, interleaved, report, show
from benchmarks.oracle import ROWS, WrongError
from benchmarks.regime import Regime

KERNELS = {
    "SDPA": None,
    "SDPA, cuDNN": SDPBackend.CUDNN_ATTENTION,
    "SDPA, flash": SDPBackend.FLASH_ATTENTION,
    "SDPA, efficient": SDPBackend.EFFICIENT_ATTENTION,
}
OURS, FLEX, TOKENS = "ours", "FlexAttention", 32768
LARGEST_MASK = 2**28
"""Largest number of entries of a boolean mask that is passed to SDPA; SDPA is left out above it."""


@dataclass(frozen=True)
class DeviceCall(Call):
    """A call that is timed by events on the GPU instead of a clock on the CPU."""

    def seconds(self, times: int, clock: Callable[[], float]) -> float:
        """Return the mean seconds of one run over `times` runs, from two device events; `clock` is not used."""
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            self.run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / times


def functions(regime: Regime, device: str) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Return every implementation that can compute the regime on the device, by name; each maps q, k, v to the heads'
    output.
    """
    mask = {"causal": hw.causal(), "window": hw.window(256)}.get(regime.mask)
    by_name = {OURS: lambda q, k, v: hw.attend(q, k, v, mask=mask)}
    is_causal, sdpa_mask = regime.mask == "causal", None
    if regime.mask == "window" and regime.length**2 <= LARGEST_MASK:
        sdpa_mask = regime.allowed().to(device)
    if regime.mask != "window" or sdpa_mask is not None:
        for name, kernel in KERNELS.items():
            by_name[name] = lambda q, k, v, kernel=kernel: _sdpa(q, k, v, sdpa_mask, is_causal, kernel)
    if device == "cuda":
        by_name[FLEX] = _flex(regime, device)
    return by_name


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: SDPBackend | None) -> Tensor:
    """Return the output of torch's SDPA, restricted to one kernel; None allows all kernels."""
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def _flex(regime: Regime, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    """Return compiled FlexAttention with the block mask of the regime."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    rules = {"causal": lambda b, h, i, j: j <= i, "window": lambda b, h, i, j: (j <= i) & (i - j < 256)}
    mask = None
    if regime.mask in rules:
        mask = create_block_mask(rules[regime.mask], None, None, regime.length, regime.length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def blocks(regime: Regime) -> list[int]:
    """Return the first row of each block of `ROWS` rows that is compared with float64: the first, a middle and the last
    one.
    """
    middle = regime.length // 2 // ROWS * ROWS
    return sorted({0, middle, max(regime.length - ROWS, 0)})


def compare(regime: Regime, rounds: int, device: str) -> tuple[list[Row], dict[str, str]]:
    """Check and time every implementation in a regime. Return one row for each correct one other than headwise, and the
    reasons why others were left out.
    """
    torch.manual_seed(0)
    shape = (regime.batch, regime.heads, regime.length, regime.head_dim)
    q, k, v, upstream = (torch.randn(shape, device=device).to(regime.torch_dtype) for _ in range(4))
    leaves = [tensor.requires_grad_(regime.training) for tensor in (q, k, v)]
    checked_rows = torch.zeros(regime.length, 1, dtype=torch.bool, device=device)
    for start in blocks(regime):
        checked_rows[start : start + ROWS] = True
    names = ("out", "q", "k", "v") if regime.training else ("out",)

    def run(function: Callable[[Tensor, Tensor, Tensor], Tensor], upstream: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(regime.training):
            out = function(*leaves)
            return [out, *(torch.autograd.grad(out, leaves, upstream) if regime.training else [])]

    def named(tensors: Sequence[Tensor]) -> oracle.Results:
        out, *gradients = (tensor.detach().cpu() for tensor in tensors)
        by_token = (tensor.transpose(1, 2).flatten(2) for tensor in (out * checked_rows.cpu(), *gradients))
        return dict(zip(names, by_token, strict=True))

    first_sequence = [tensor.detach()[:1].cpu() for tensor in (q, k, v, upstream * checked_rows)]
    one_sequence = Regime(1, *shape[2:3], regime.embed, regime.heads, regime.mask, regime.dtype, regime.training)
    exact = named(
        oracle.attention(
            *first_sequence[:3], one_sequence, first_sequence[3] if regime.training else None, blocks(regime)
        )
    )
    correct, left_out = {}, {}
    for name, function in functions(regime, device).items():
        try:
            results = named([tensor[:1] for tensor in run(function, upstream * checked_rows)])
            oracle.sane(results, exact, one_sequence)
        except Exception as error:  # a kernel that does not support the device or mask is listed as left out
            if name == OURS:
                raise SystemExit(f"{regime.name}: {error}") from error
            left_out[f"{name}, {regime.name}"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        correct[name] = (function, results)
    if "SDPA" in correct:
        try:
            oracle.check(correct[OURS][1], correct["SDPA"][1], exact, one_sequence)
        except WrongError as reason:
            raise SystemExit(f"{regime.name}: {reason}") from reason
    timer = DeviceCall if device == "cuda" else Call
    calls = {name: timer(lambda function=function: run(function, upstream)) for name, (function, _) in correct.items()}
    seconds_by_name = interleaved(calls, rounds)
    medians = {name: median(seconds) for name, seconds in seconds_by_name.items()}
    rows = [
        Row(regime, name, Ratio.of(seconds_by_name[name], seconds_by_name[OURS]), medians[OURS], medians[name])
        for name in correct
        if name != OURS
    ]
    return rows, left_out


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every regime, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        raise SystemExit("gpu: no GPU is available; nothing was measured")
    rows, left_out = [], {}
    lengths = [64] if options.tiny else [1024, 4096] if options.quick else [1024, 2048, 4096, 8192, 16384, 32768]
    for length, heads, mask, training in product(lengths, (32, 16), ("full", "causal", "window"), (False, True)):
        batch = 2 if options.tiny else TOKENS // length
        regime = Regime(batch, length, 2048, heads, mask, "bfloat16", training)
        if options.wants(regime):
            regime_rows, regime_left_out = compare(regime, options.rounds, device)
            for row in regime_rows:
                show(row)
            rows += regime_rows
            left_out |= regime_left_out
    return report("gpu", rows, options, left_out)


if __name__ == "__main__":
    main()
