"""What is promised, and which figures say whether it holds."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks.ablating import WHOLE
from benchmarks.attention_only import SDPA
from benchmarks.decoding import STEPS
from benchmarks.measure import Row
from benchmarks.memory import SIZES
from benchmarks.oracle import YARDSTICK
from benchmarks.peers import FASTEST, GEMM, LLAMA, TORCH_LAYER
from benchmarks.watching import CALL_EXTRA, EAGER, MODEL_EXTRA, PLAIN
from benchmarks.windows import GROWTH, SHORT_AND_LONG


@dataclass(frozen=True)
class Claim:
    """A promise: every figure that it covers is `target` at least, or at most."""

    says: str
    target: float
    covers: Callable[[str, Row], bool]
    """Given the name of a benchmark and one of its rows."""
    at_most: bool = False

    def met(self, row: Row) -> bool:
        """Whether a figure is as promised."""
        return row.ratio.median <= self.target if self.at_most else row.ratio.median >= self.target

    def worst(self, rows: Sequence[Row]) -> Row:
        """The figure that is furthest from the promise, or nearest to breaking it."""
        return (max if self.at_most else min)(rows, key=lambda row: row.ratio.median)


def _plain(row: Row, dtype: str, *masks: str, training: bool) -> bool:
    regime = row.regime
    return regime.length >= 1024 and (regime.dtype, regime.training) == (dtype, training) and regime.mask in masks


def _fastest(training: bool) -> Callable[[str, Row], bool]:
    return lambda _, row: (row.against, row.regime.dtype, row.regime.training) == (FASTEST, "float32", training)


def _torch_layer(mask: str) -> Callable[[str, Row], bool]:
    return lambda name, row: (
        name == "layer" and row.against == TORCH_LAYER and _plain(row, "float32", mask, training=False)
    )


def _sdpa_block(training: bool) -> Callable[[str, Row], bool]:
    return lambda name, row: (
        name in ("layer", "grouped")
        and row.against == YARDSTICK
        and _plain(row, "bfloat16", "full", "causal", training=training)
    )


def _share(dtype: str) -> Callable[[str, Row], bool]:
    return lambda _, row: (
        (row.against, row.regime.mask, row.regime.dtype, row.regime.length)
        == (
            GEMM,
            "full",
            dtype,
            1024,
        )
    )


def _window(training: bool) -> Callable[[str, Row], bool]:
    return lambda name, row: (
        (name, row.against, row.regime.mask, row.regime.length, row.regime.training)
        == (
            "windows",
            SDPA,
            "window",
            8192,
            training,
        )
    )


def _padded(against: str) -> Callable[[str, Row], bool]:
    return lambda name, row: (name, row.against, row.regime.training) == ("padding", against, False)


def _decoded(name: str, row: Row) -> bool:
    return name == "decoding" and row.regime.length == 4096 + STEPS and row.against.startswith(LLAMA)


def _watched(against: str, length: int) -> Callable[[str, Row], bool]:
    return lambda name, row: (name, row.against, row.regime.length) == ("watching", against, length)


CLAIMS = (
    Claim("against the fastest peer, float32, every regime, forward", 1.0, _fastest(training=False)),
    Claim("against the fastest peer, float32, every regime, training", 1.0, _fastest(training=True)),
    Claim(f"against `{TORCH_LAYER}`, float32, 1,024 and more, forward, full", 1.4, _torch_layer("full")),
    Claim(f"against `{TORCH_LAYER}`, float32, 1,024 and more, forward, causal", 2.5, _torch_layer("causal")),
    Claim(f"against the {YARDSTICK}, bfloat16, 1,024 and more, forward", 2.0, _sdpa_block(training=False)),
    Claim(f"against the {YARDSTICK}, bfloat16, 1,024 and more, training", 1.5, _sdpa_block(training=True)),
    Claim("share of the GEMM rate, whole layer, forward, full, 1,024, float32", 0.85, _share("float32")),
    Claim("share of the GEMM rate, whole layer, forward, full, 1,024, bfloat16", 0.60, _share("bfloat16")),
    Claim(
        f"attention alone, window 256 at 8,192, against {SDPA} with that mask, forward", 15.0, _window(training=False)
    ),
    Claim(
        f"attention alone, window 256 at 8,192, against {SDPA} with that mask, training", 10.0, _window(training=True)
    ),
    Claim(f"padded batch, forward, against `{TORCH_LAYER}` with `key_padding_mask`", 3.0, _padded(TORCH_LAYER)),
    Claim(f"padded batch, forward, against the {YARDSTICK} with a mask", 1.5, _padded(YARDSTICK)),
    Claim(f"decoding step, 4,096 keys, against `{LLAMA}` with its cache", 1.3, _decoded),
    Claim(
        "cost growth from 4,096 to 32,768 tokens with window 256",
        9.0,
        lambda _, row: (row.against, row.regime.length) == (GROWTH, SHORT_AND_LONG[1]),
        at_most=True,
    ),
    Claim(
        "peak extra memory of blockwise forward with backward at 8,192, over inputs and outputs",
        2.0,
        lambda name, row: name == "memory" and row.against == SIZES and row.regime.length == 8192,
        at_most=True,
    ),
    Claim("SmolLM2 watched, 2,048 tokens, over its plain forward", 1.4, _watched(PLAIN, 2048), at_most=True),
    Claim("SmolLM2 watched, 8,192 tokens, over its plain forward", 1.6, _watched(PLAIN, 8192), at_most=True),
    Claim(f"SmolLM2 watched, 2,048 tokens, against {EAGER} and statistics from it", 3.0, _watched(EAGER, 2048)),
    Claim(
        "peak extra memory of watching SmolLM2, 8,192 tokens, over 300 MB",
        1.0,
        _watched(MODEL_EXTRA, 8192),
        at_most=True,
    ),
    Claim(
        "peak extra memory of one attention call with statistics, 32,768 tokens, 8 heads of 64, over 1 GB",
        1.0,
        _watched(CALL_EXTRA, 32768),
        at_most=True,
    ),
    Claim(
        "every head of SmolLM2 removed, one at a time, 16 sequences of 256 tokens, against whole forwards",
        1.8,
        lambda name, row: (name, row.against, row.regime.batch) == ("ablating", WHOLE, 16),
    ),
)


def judged(results: Sequence[dict]) -> list[tuple[Claim, list[Row]]]:
    """Each claim with the rows it covers; none where nothing was measured."""
    rows = [(each["benchmark"], Row.read(row)) for each in results for row in each["rows"]]
    return [(claim, [row for name, row in rows if claim.covers(name, row)]) for claim in CLAIMS]


def in_part(claim: Claim, results: Sequence[dict]) -> bool:
    """Whether a run that left regimes out, or does not say that it did not, is among those a claim is judged by."""
    parts = [each for each in results if each["quick"] or each.get("only") != ""]
    return any(claim.covers(each["benchmark"], Row.read(row)) for each in parts for row in each["rows"])


HEADERS = ("claim", "target", "worst median", "spread", "where", "regimes", "")


def table(results: Sequence[dict]) -> list[tuple[str, ...]]:
    """A line a claim, under `HEADERS`."""
    lines = []
    for claim, rows in judged(results):
        target = f"{'at most' if claim.at_most else 'at least'} {claim.target:g}"
        if not rows:
            lines.append((claim.says, target, "", "", "", "", "not measured"))
            continue
        worst, met = claim.worst(rows), sum(map(claim.met, rows))
        spread = f"{worst.ratio.lowest:.2f} to {worst.ratio.highest:.2f}"
        where = f"{worst.regime.name} {worst.note}".strip()
        verdict = (
            "**missed**" if met < len(rows) else "met in part of the regimes" if in_part(claim, results) else "met"
        )
        lines.append((claim.says, target, f"{worst.ratio.median:.2f}", spread, where, f"{met} of {len(rows)}", verdict))
    return lines
