"""The whole layer: `hw.MultiHeadAttention` against `nn.MultiheadAttention`, in bfloat16, with the same weights."""

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks.gpu.attend_checks import Errors, distance
from benchmarks.gpu.budget import Budget
from benchmarks.gpu.checks import CheckError
from benchmarks.gpu.timing import rounds_of, rows_against, timer
from benchmarks.measure import Row, show
from benchmarks.regime import Regime

OURS, TORCH = "ours", "nn.MultiheadAttention"
WIDTH, TOKENS = 1024, 32768
LENGTHS = (4096, 1024, 16384)


def layer_regimes(*, tiny: bool) -> list[Regime]:
    """Return the regimes: lengths, head dims of 64 and 128, causal and full, forward and training."""
    if tiny:
        return [Regime(2, 24, 32, 4, mask, "bfloat16", True) for mask in ("full", "causal")]
    return [
        Regime(TOKENS // length, length, WIDTH, heads, mask, "bfloat16", training)
        for length in LENGTHS
        for heads in (16, 8)
        for mask in ("causal", "full")
        for training in (True, False)
    ]


def time_layers(
    device: str, budget: Budget, share: float, *, tiny: bool, only: str
) -> tuple[list[Row], dict[str, str]]:
    """Check and time every regime until a share of the time is used. Return the rows, and the errors by regime."""
    rows: list[Row] = []
    failed: dict[str, str] = {}
    for regime in layer_regimes(tiny=tiny):
        name = f"layer: {regime.name}"
        if only not in name or not budget.allows(name, share):
            continue
        try:
            regime_rows = compare(regime, device)
        except CheckError as error:
            failed[name] = str(error)
            print(f"FAILED  {name}: {error}", flush=True)
            continue
        for row in regime_rows:
            show(row)
        rows += regime_rows
    return rows, failed


def compare(regime: Regime, device: str) -> list[Row]:
    """Check and time both layers in a regime. Raises `CheckError` if the output of headwise, or the gradient of x, has
    more than twice the error of torch's layer. Both are compared with torch's layer in float32.
    """
    torch.manual_seed(0)
    torch_layer = nn.MultiheadAttention(
        regime.embed, regime.heads, batch_first=True, device=device, dtype=torch.bfloat16
    ).train(regime.training)
    ours = hw.fuse_projections(hw.from_torch(torch_layer))
    ours.mask = hw.causal() if regime.mask == "causal" else None
    runs: dict[str, Callable[[Tensor], Tensor]] = {
        OURS: ours,
        TORCH: _torch_run(torch_layer, regime, device, torch.bfloat16),
        "exact": _torch_run(copy.deepcopy(torch_layer).float(), regime, device, torch.float32),
    }
    x, upstream = (
        torch.randn(regime.batch, regime.length, regime.embed, device=device, dtype=torch.bfloat16) for _ in range(2)
    )
    x.requires_grad_(regime.training)

    def run(layer: Callable[[Tensor], Tensor]) -> None:
        with torch.set_grad_enabled(regime.training):
            out = layer(x)
            if regime.training:
                parameters = (ours if layer is ours else torch_layer).parameters()
                torch.autograd.grad(out, [x, *parameters], upstream)

    _require_small_errors(runs, x, upstream)
    calls = {name: timer(device)(lambda name=name: run(runs[name])) for name in (OURS, TORCH)}
    return rows_against(regime, rounds_of(calls), OURS)


def _torch_run(
    layer: nn.MultiheadAttention, regime: Regime, device: str, dtype: torch.dtype
) -> Callable[[Tensor], Tensor]:
    """Return a function that calls torch's layer, with a causal mask and its flag if the regime is causal."""
    options: dict = {}
    if regime.mask == "causal":
        mask = nn.Transformer.generate_square_subsequent_mask(regime.length, device=device, dtype=dtype)
        options = {"attn_mask": mask, "is_causal": True}
    return lambda x: layer(x, x, x, need_weights=False, **options)[0]


def _require_small_errors(runs: dict[str, Callable[[Tensor], Tensor]], x: Tensor, upstream: Tensor) -> None:
    """Raise `CheckError` if the output of ours, or the gradient of x, has more than twice the error of torch's layer.
    Only the first sequence is compared.
    """
    results = {}
    for name, run in runs.items():
        leaf = x.detach()[:1].to(torch.float32 if name == "exact" else x.dtype).requires_grad_()
        out = run(leaf)
        (gradient,) = torch.autograd.grad(out, leaf, upstream[:1].to(out.dtype))
        results[name] = {"out": out.detach(), "gradient of x": gradient}
    for name, exact in results["exact"].items():
        ours, theirs = (distance(results[which][name], exact.double()) for which in (OURS, TORCH))
        size = distance(torch.zeros_like(exact), exact.double())
        least = Errors(torch.finfo(torch.bfloat16).eps / 4 * size.mean, 0.0)
        if not ours.mean <= 2 * theirs.or_larger(least).mean:
            raise CheckError(f"{name}: an error of {ours.mean:.2g}, that of torch's layer is {theirs.mean:.2g}")
