"""Attention on a GPU: ours as it chooses, against torch's kernels by name and FlexAttention.

Regime: bfloat16, lengths 1,024 to 32,768 with batch times length 32,768, heads of 64 (32 of them) and of 128 (16 of
them); full, causal and a causal window of 256; forward, and forward with backward. Time is the device's own, between
two of its events. Each is first compared with the definition in float64, in the first sequence, on the first, a middle
and the last block of 512 rows, and with gradients that come from these alone; ours may be at most twice as far off as
torch's default.

    python -m benchmarks.gpu [--quick] [--rounds N] [--only "window"]

Where there is no GPU it says so and ends; with --tiny it then runs on the CPU, to show that it runs.
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
"""Entries of a boolean mask beyond which SDPA is not given one."""


@dataclass(frozen=True)
class DeviceCall(Call):
    """Timed by the device's events."""

    def seconds(self, times: int, clock: Callable[[], float]) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(times):
            self.run()
        end.record()
        torch.cuda.synchronize()
        return start.elapsed_time(end) / 1e3 / times


def functions(regime: Regime, device: str) -> dict[str, Callable[[Tensor, Tensor, Tensor], Tensor]]:
    """Every way to the heads' output that there is here."""
    mask = {"causal": hw.causal(), "window": hw.window(256)}.get(regime.mask)
    found = {OURS: lambda q, k, v: hw.attend(q, k, v, mask=mask)}
    causal, given = regime.mask == "causal", None
    if regime.mask == "window" and regime.length**2 <= LARGEST_MASK:
        given = regime.allowed().to(device)
    if regime.mask != "window" or given is not None:
        for name, kernel in KERNELS.items():
            found[name] = lambda q, k, v, kernel=kernel: _sdpa(q, k, v, given, causal, kernel)
    if device == "cuda":
        found[FLEX] = _flex(regime, device)
    return found


def _sdpa(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, kernel: SDPBackend | None) -> Tensor:
    with nullcontext() if kernel is None else sdpa_kernel(kernel):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal)


def _flex(regime: Regime, device: str) -> Callable[[Tensor, Tensor, Tensor], Tensor]:
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    rules = {"causal": lambda b, h, i, j: j <= i, "window": lambda b, h, i, j: (j <= i) & (i - j < 256)}
    mask = None
    if regime.mask in rules:
        mask = create_block_mask(rules[regime.mask], None, None, regime.length, regime.length, device=device)
    compiled = torch.compile(flex_attention, dynamic=False)
    return lambda q, k, v: compiled(q, k, v, block_mask=mask)


def blocks(regime: Regime) -> list[int]:
    """First rows of the blocks that are compared."""
    middle = regime.length // 2 // ROWS * ROWS
    return sorted({0, middle, max(regime.length - ROWS, 0)})


def compare(regime: Regime, rounds: int, device: str) -> tuple[list[Row], dict[str, str]]:
    """Rows for what is right, and what was left out."""
    torch.manual_seed(0)
    shape = (regime.batch, regime.heads, regime.length, regime.head_dim)
    q, k, v, upstream = (torch.randn(shape, device=device).to(regime.torch_dtype) for _ in range(4))
    leaves = [tensor.requires_grad_(regime.training) for tensor in (q, k, v)]
    wanted = torch.zeros(regime.length, 1, dtype=torch.bool, device=device)
    for start in blocks(regime):
        wanted[start : start + ROWS] = True
    names = ("out", "q", "k", "v") if regime.training else ("out",)

    def run(function: Callable[[Tensor, Tensor, Tensor], Tensor], upstream: Tensor) -> list[Tensor]:
        with torch.set_grad_enabled(regime.training):
            out = function(*leaves)
            return [out, *(torch.autograd.grad(out, leaves, upstream) if regime.training else [])]

    def named(tensors: Sequence[Tensor]) -> oracle.Results:
        out, *gradients = (tensor.detach().cpu() for tensor in tensors)
        by_token = (each.transpose(1, 2).flatten(2) for each in (out * wanted.cpu(), *gradients))
        return dict(zip(names, by_token, strict=True))

    some = [tensor.detach()[:1].cpu() for tensor in (q, k, v, upstream * wanted)]
    one = Regime(1, *shape[2:3], regime.embed, regime.heads, regime.mask, regime.dtype, regime.training)
    exact = named(oracle.attention(*some[:3], one, some[3] if regime.training else None, blocks(regime)))
    right, left_out = {}, {}
    for name, function in functions(regime, device).items():
        try:
            results = named([tensor[:1] for tensor in run(function, upstream * wanted)])
            oracle.sane(results, exact, one)
        except Exception as error:  # a kernel that is not for this device or mask is named, and left out
            if name == OURS:
                raise SystemExit(f"{regime.name}: {error}") from error
            left_out[f"{name}, {regime.name}"] = f"{type(error).__name__}: {str(error).strip().splitlines()[0]}"
            continue
        right[name] = (function, results)
    if "SDPA" in right:
        try:
            oracle.check(right[OURS][1], right["SDPA"][1], exact, one)
        except WrongError as reason:
            raise SystemExit(f"{regime.name}: {reason}") from reason
    timer = DeviceCall if device == "cuda" else Call
    calls = {name: timer(lambda function=function: run(function, upstream)) for name, (function, _) in right.items()}
    taken = interleaved(calls, rounds)
    of = {name: median(seconds) for name, seconds in taken.items()}
    rows = [Row(regime, name, Ratio.of(taken[name], taken[OURS]), of[OURS], of[name]) for name in right if name != OURS]
    return rows, left_out


def main(given: Sequence[str] | None = None) -> dict:
    """Every regime, and a line of JSON last."""
    options = arguments(__doc__, given)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.tiny:
        raise SystemExit("gpu: there is no GPU here; nothing was measured")
    rows, left_out = [], {}
    lengths = [64] if options.tiny else [1024, 4096] if options.quick else [1024, 2048, 4096, 8192, 16384, 32768]
    for length, heads, mask, training in product(lengths, (32, 16), ("full", "causal", "window"), (False, True)):
        batch = 2 if options.tiny else TOKENS // length
        regime = Regime(batch, length, 2048, heads, mask, "bfloat16", training)
        if options.wants(regime):
            found, missing = compare(regime, options.rounds, device)
            for row in found:
                show(row)
            rows += found
            left_out |= missing
    return report("gpu", rows, options, left_out)


if __name__ == "__main__":
    main()
