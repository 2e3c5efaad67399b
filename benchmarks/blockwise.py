"""Attention over blocks of rows next to `F.scaled_dot_product_attention`: time, growth with length, and memory.

Regime: CPU, heads of 64, float32 and bfloat16, forward alone and forward with backward. Each case first compares output
and gradients with plain attention in float64, on rows picked over the whole length, and allows twice the error of SDPA
in that dtype. Then the two by turns in one process, and the median of the ratios. SDPA is given what it needs: the
causal flag where that says it, otherwise the boolean mask, made beforehand. Growth is the time at 32,768 tokens over
that at 4,096 under a window of 256, forward with backward. Memory is the peak that forward with backward at 8,192
tokens allocates, in an interpreter of its own, over the size of the tensors that go in and come out (q, k, v, the
output and their gradients).

    python benchmarks/blockwise.py [rounds] [part of a case's name]
"""

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

import headwise as hw
from headwise.attention.masks import Grid, Mask

ROUNDS = int(sys.argv[1]) if len(sys.argv) > 1 else 5
ONLY = sys.argv[2] if len(sys.argv) > 2 else ""
WINDOW = hw.window(256)


@dataclass(frozen=True)
class Case:
    """Sizes and a mask; `flag` where SDPA has a word for the mask."""

    name: str
    length: int
    mask: Mask | None = None
    batch: int = 1
    heads: int = 8
    kv_heads: int = 8
    flag: bool = False

    def tensors(self, dtype: torch.dtype) -> list[Tensor]:
        """q, k, v, and the gradient of the output."""
        torch.manual_seed(0)
        counts = (self.heads, self.kv_heads, self.kv_heads, self.heads)
        tensors = [torch.randn(self.batch, count, self.length, 64, dtype=dtype) for count in counts]
        return [*(tensor.requires_grad_() for tensor in tensors[:3]), tensors[3]]

    def block(self, rows: range | None = None) -> Tensor | None:
        """The mask's values on some rows or all."""
        grid = Grid(self.batch, self.heads, self.length, self.length)
        return None if self.mask is None else self.mask.block(grid, rows)


CASES = [
    Case("full, 1,024", 1024),
    Case("causal, 1,024", 1024, hw.causal(), flag=True),
    Case("full, 4,096", 4096),
    Case("causal, 4,096", 4096, hw.causal(), flag=True),
    Case("window 256, 8,192", 8192, WINDOW),
    Case("half the heads window 128, half causal, 4,096", 4096, hw.window([128] * 4 + [None] * 4)),
    Case("padded, 8 of 64 to 1,024", 1024, hw.padding([64, 201, 338, 475, 613, 750, 887, 1024]), batch=8),
    Case("12 heads on 4, 1,024", 1024, heads=12, kv_heads=4),
]


def calls(case: Case, dtype: torch.dtype) -> dict[str, tuple[Callable[[], Tensor], list[Tensor]]]:
    """Both ways to the output, with the tensors that they differentiate in."""
    *inputs, upstream = case.tensors(dtype)
    attn_mask = None if case.flag else case.block()
    options = {"is_causal": True} if case.flag else {}
    grouped = {"enable_gqa": True} if case.kv_heads != case.heads else {}
    return {
        "ours": (lambda: hw.attend(*inputs, mask=case.mask, backend="blockwise"), [*inputs, upstream]),
        "sdpa": (
            lambda: F.scaled_dot_product_attention(*inputs, attn_mask=attn_mask, **options, **grouped),
            [*inputs, upstream],
        ),
    }


def with_gradients(call: Callable[[], Tensor], inputs: list[Tensor]) -> list[Tensor]:
    """The output and its gradients in q, k and v."""
    out = call()
    return [out.detach(), *torch.autograd.grad(out, inputs[:3], inputs[3])]


def check(case: Case, dtype: torch.dtype) -> None:
    """Both against float64; ours at most twice as far off as SDPA, and nothing that is not a number."""
    results = {name: with_gradients(*call) for name, call in calls(case, dtype).items()}
    exact = by_definition(case, dtype)
    for what, ours, theirs, wanted in zip(("out", "q", "k", "v"), results["ours"], results["sdpa"], exact, strict=True):
        mine, other = ((tensor.double() - wanted).norm() / wanted.norm() for tensor in (ours, theirs))
        if not mine <= 2 * other:
            raise SystemExit(f"{case.name}, {dtype}: {what} is off by {mine:.1e} of its size, SDPA by {other:.1e}")


def by_definition(case: Case, dtype: torch.dtype) -> list[Tensor]:
    """Output and gradients in float64, a few rows at a time."""
    q, k, v, upstream = (tensor.detach().double() for tensor in case.tensors(dtype))
    k, v = (tensor.repeat_interleave(case.heads // case.kv_heads, 1).requires_grad_() for tensor in (k, v))
    q.requires_grad_()
    outs = []
    for start in range(0, case.length, 512):
        rows = slice(start, start + 512)
        scores = q[:, :, rows] @ k.mT / 8.0
        allowed = case.block(range(start, min(start + 512, case.length)))
        if allowed is not None:
            scores = scores.masked_fill(~allowed, -torch.inf)
        out = torch.softmax(scores, -1) @ v
        torch.autograd.backward(out, upstream[:, :, rows])
        outs.append(out.detach())
    groups = (case.batch, case.kv_heads, -1, case.length, 64)
    return [torch.cat(outs, 2), q.grad, *(tensor.grad.view(groups).sum(2) for tensor in (k, v))]


def seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def ratio(ours: Callable[[], object], theirs: Callable[[], object]) -> list[float]:
    """The median of theirs over ours, and the smallest and largest, by turns."""
    ours(), theirs()
    ratios = [seconds(theirs) / seconds(ours) for _ in range(ROUNDS)]
    return [round(each, 2) for each in (statistics.median(ratios), min(ratios), max(ratios))]


def compare(case: Case, dtype: torch.dtype) -> dict[str, list[float]]:
    """How many times faster than SDPA, forward and training."""
    both = calls(case, dtype)
    (ours, inputs), (theirs, _) = both["ours"], both["sdpa"]
    with torch.no_grad():
        forward = ratio(ours, theirs)
    training = ratio(lambda: with_gradients(ours, inputs), lambda: with_gradients(theirs, inputs))
    return {"forward": forward, "training": training}


def growth(dtype: torch.dtype) -> float:
    """The time at 32,768 over that at 4,096 tokens."""
    short, long = (calls(Case("", length, WINDOW), dtype)["ours"] for length in (4096, 32768))
    with_gradients(*short), with_gradients(*long)
    rounds = [seconds(lambda: with_gradients(*long)) / seconds(lambda: with_gradients(*short)) for _ in range(ROUNDS)]
    return statistics.median(rounds)


PEAK = """
import sys, torch, headwise as hw
dtype, mask = getattr(torch, sys.argv[1]), {"full": None, "causal": hw.causal(), "window": hw.window(256)}[sys.argv[2]]
def kept(name):
    return next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith(name))
def step():
    q, k, v = (torch.randn(1, 8, 8192, 64, dtype=dtype).requires_grad_() for _ in range(3))
    out = hw.attend(q, k, v, mask=mask, backend="blockwise")
    grads = torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
    return sum(tensor.nbytes for tensor in (q, k, v, out, out, *grads))
step()
open("/proc/self/clear_refs", "w").write("5")  # the peak from here on
before = kept("VmRSS")
sizes = step()
print((kept("VmHWM") - before - sizes) / sizes)
"""


def extra_memory(dtype: torch.dtype, mask: str) -> float:
    """The peak beside inputs, outputs and gradients, over their size.

    In the second step, and with what is freed given back at once: the first keeps what oneDNN compiles for each shape.
    """
    program = [sys.executable, "-c", PEAK, str(dtype).removeprefix("torch."), mask]
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1000000"}
    done = subprocess.run(program, capture_output=True, text=True, check=True, env=environment)
    return round(float(done.stdout), 2)


def main() -> None:
    """A line a case, and one of JSON last."""
    found: dict[str, object] = {}
    for case in CASES:
        for dtype in (torch.float32, torch.bfloat16):
            if ONLY not in case.name:
                continue
            check(case, dtype)
            found[f"{case.name}, {dtype}"] = result = compare(case, dtype)
            print(f"forward {result['forward'][0]:6.2f}  training {result['training'][0]:6.2f}  {case.name}, {dtype}")
    if not ONLY:
        for dtype in (torch.float32, torch.bfloat16):
            found[f"32,768 / 4,096 tokens, window 256, {dtype}"] = round(growth(dtype), 2)
            for mask in ("full", "causal", "window"):
                found[f"extra memory / inputs and outputs, 8,192, {mask}, {dtype}"] = extra_memory(dtype, mask)
    print(json.dumps({"torch": torch.__version__, "threads": torch.get_num_threads(), "sdpa / ours": found}))


if __name__ == "__main__":
    main()
