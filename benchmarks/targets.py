"""Targets for speed and memory, and the rows of results that each target covers."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from benchmarks import calls, models
from benchmarks.ablating import WHOLE
from benchmarks.attention import WITH_SHARE
from benchmarks.attention_only import FLEX, SDPA
from benchmarks.decoding import COMPILED, STEPS
from benchmarks.measure import GEMM, Row
from benchmarks.memory import LIMIT
from benchmarks.monitoring import EVERY_1, EVERY_100
from benchmarks.oracle import YARDSTICK
from benchmarks.peers import FASTEST, TORCH_LAYER
from benchmarks.pruned_attention import ALL, DECODING, PROMPT
from benchmarks.regime import MASKS
from benchmarks.watching import CALL_EXTRA, EAGER, MODEL_EXTRA, PLAIN
from benchmarks.windows import GROWTH, SHORT_AND_LONG


@dataclass(frozen=True)
class Target:
    """A bound on the median ratio of every row that the target covers.

    Attributes:
        description: of the comparison, for the report.
        bound: smallest accepted ratio, or the largest one if `at_most`.
        covers: returns whether a row belongs to the target, given the name of its benchmark and the row.
        at_most: whether the bound is an upper one.
    """

    description: str
    bound: float
    covers: Callable[[str, Row], bool]
    at_most: bool = False

    def met(self, row: Row) -> bool:
        """Return whether the median ratio of a row is within the bound."""
        return row.ratio.median <= self.bound if self.at_most else row.ratio.median >= self.bound

    def worst(self, rows: Sequence[Row]) -> Row:
        """Return the row with the worst median ratio."""
        return (max if self.at_most else min)(rows, key=lambda row: row.ratio.median)


LAYERS = ("layer", "windows", "padding", "grouped")
"""Scripts that compare whole layers with the fastest peer."""


def _is(
    row: Row,
    *,
    dtype: str | None = None,
    training: bool | None = None,
    length: int | None = None,
    masks: Sequence[str] = tuple(MASKS),
) -> bool:
    """Return whether the regime of a row has these properties; None and the default masks accept all."""
    regime = row.regime
    return (
        dtype in (None, regime.dtype)
        and training in (None, regime.training)
        and length in (None, regime.length)
        and regime.mask in masks
    )


def _alone(dtype: str, training: bool) -> Callable[[str, Row], bool]:
    """Return the condition for rows of attention alone against SDPA."""
    return lambda name, row: (name, row.against) == ("attention", SDPA) and _is(row, dtype=dtype, training=training)


def _alone_share(name: str, row: Row) -> bool:
    """Return whether a row has the share of the matrix-multiplication rate of attention alone, in bfloat16."""
    return (name, row.against) == ("attention", GEMM) and _is(row, dtype="bfloat16", length=WITH_SHARE)


def _fastest(dtype: str | None = None, training: bool | None = None) -> Callable[[str, Row], bool]:
    """Return the condition for rows of whole layers against the fastest peer."""
    return lambda name, row: name in LAYERS and row.against == FASTEST and _is(row, dtype=dtype, training=training)


def _torch_layer(mask: str) -> Callable[[str, Row], bool]:
    """Return the condition for forward rows of the layer benchmark against torch's layer, in float32 under the mask."""
    return lambda name, row: (
        (name, row.against) == ("layer", TORCH_LAYER)
        and _is(row, dtype="float32", training=False, masks=[mask])
        and row.regime.length >= 1024
    )


def _sdpa_block(training: bool) -> Callable[[str, Row], bool]:
    """Return the condition for bfloat16 rows against the block around SDPA, full or causal, with equal or grouped
    heads.
    """
    return lambda name, row: (
        name in ("layer", "grouped")
        and row.against == YARDSTICK
        and _is(row, dtype="bfloat16", training=training, masks=["full", "causal"])
        and row.regime.length >= 1024
    )


def _share(dtype: str) -> Callable[[str, Row], bool]:
    """Return the condition for rows with the share of the matrix-multiplication rate of whole layers, at 1,024 tokens
    under the full mask.
    """
    return lambda name, row: (
        (name, row.against) == ("layer", GEMM) and _is(row, dtype=dtype, length=1024, masks=["full"])
    )


def _window(against: str, training: bool) -> Callable[[str, Row], bool]:
    """Return the condition for rows of window attention without projections, at 8,192 tokens, against the named
    implementation.
    """
    return lambda name, row: (
        (name, row.against) == ("windows", against) and _is(row, training=training, length=8192, masks=["window"])
    )


def _padded(against: str) -> Callable[[str, Row], bool]:
    """Return the condition for forward rows of padded batches against the named peer."""
    return lambda name, row: (name, row.against, row.regime.training) == ("padding", against, False)


def _decoded(dtype: str, compiled: bool) -> Callable[[str, Row], bool]:
    """Return the condition for rows of decoding after 4,096 tokens against the fastest peer with the same cache."""
    return lambda name, row: (
        (name, row.against, row.note.endswith(COMPILED)) == ("decoding", FASTEST, compiled)
        and _is(row, dtype=dtype, length=4096 + STEPS)
    )


def _watched(against: str, length: int) -> Callable[[str, Row], bool]:
    """Return the condition for rows of a watched model of this length, against the named peer or limit."""
    return lambda name, row: (name, row.against) == ("watching", against) and _is(row, length=length)


def _accelerated(dtype: str, length: int) -> Callable[[str, Row], bool]:
    """Return the condition for rows of an accelerated model against its plain forward pass."""
    return lambda name, row: (name, row.against) == ("accelerating", PLAIN) and _is(row, dtype=dtype, length=length)


def _models(against: str, dtype: str | None = None) -> Callable[[str, Row], bool]:
    """Return the condition for rows of accelerated encoders against the named peer."""
    return lambda name, row: (name, row.against) == ("models", against) and _is(row, dtype=dtype)


def _pruned(phase: str) -> Callable[[str, Row], bool]:
    """Return the condition for rows of attention with half of its heads, on a prompt or while decoding."""
    return lambda name, row: name == "pruned_attention" and row.against == ALL and row.note.startswith(phase)


def _monitored(against: str) -> Callable[[str, Row], bool]:
    """Return the condition for rows of a monitored training at this interval."""
    return lambda name, row: (name, row.against) == ("monitoring", against)


def _short(against: str) -> Callable[[str, Row], bool]:
    """Return the condition for rows of short calls minus these calls."""
    return lambda name, row: (name, row.against) == ("calls", against)


TARGETS = (
    Target(f"attention alone, against {SDPA}, float32, forward", 2.2, _alone("float32", training=False)),
    Target(f"attention alone, against {SDPA}, float32, training", 1.7, _alone("float32", training=True)),
    Target(f"attention alone, against {SDPA}, bfloat16, forward", 3.8, _alone("bfloat16", training=False)),
    Target(f"attention alone, against {SDPA}, bfloat16, training", 2.5, _alone("bfloat16", training=True)),
    Target("share of the GEMM rate, attention alone, forward, 4,096, bfloat16", 0.70, _alone_share),
    Target("against the fastest peer, float32, every regime, forward", 1.8, _fastest("float32", training=False)),
    Target("against the fastest peer, float32, every regime, training", 1.4, _fastest("float32", training=True)),
    Target("against the fastest peer, bfloat16, every regime, forward", 1.3, _fastest("bfloat16", training=False)),
    Target("against the fastest peer, bfloat16, every regime, training", 1.2, _fastest("bfloat16", training=True)),
    Target("against the fastest peer, every dtype and regime, on any machine", 0.97, _fastest()),
    Target(f"against `{TORCH_LAYER}`, float32, 1,024 and more, forward, full", 1.4, _torch_layer("full")),
    Target(f"against `{TORCH_LAYER}`, float32, 1,024 and more, forward, causal", 2.5, _torch_layer("causal")),
    Target(f"against the {YARDSTICK}, bfloat16, 1,024 and more, forward", 2.0, _sdpa_block(training=False)),
    Target(f"against the {YARDSTICK}, bfloat16, 1,024 and more, training", 1.5, _sdpa_block(training=True)),
    Target("share of the GEMM rate, whole layer, forward, full, 1,024, float32", 0.85, _share("float32")),
    Target("share of the GEMM rate, whole layer, forward, full, 1,024, bfloat16", 0.60, _share("bfloat16")),
    Target(
        f"attention alone, window 256 at 8,192, against {SDPA} with that mask, forward",
        60.0,
        _window(SDPA, training=False),
    ),
    Target(
        f"attention alone, window 256 at 8,192, against {SDPA} with that mask, training",
        35.0,
        _window(SDPA, training=True),
    ),
    Target(f"attention alone, window 256 at 8,192, against {FLEX}, forward", 2.0, _window(FLEX, training=False)),
    Target(f"padded batch, forward, against `{TORCH_LAYER}` with `key_padding_mask`", 3.0, _padded(TORCH_LAYER)),
    Target(f"padded batch, forward, against the {YARDSTICK} with a mask", 1.5, _padded(YARDSTICK)),
    Target("decoding step, 4,096 keys, against the fastest peer, float32", 1.3, _decoded("float32", compiled=False)),
    Target("decoding step, 4,096 keys, against the fastest peer, bfloat16", 2.0, _decoded("bfloat16", compiled=False)),
    Target("compiled decoding step, against the fastest peer, float32", 1.5, _decoded("float32", compiled=True)),
    Target("compiled decoding step, against the fastest peer, bfloat16", 3.0, _decoded("bfloat16", compiled=True)),
    Target(
        "cost growth from 4,096 to 32,768 tokens with window 256",
        9.0,
        lambda _, row: (row.against, row.regime.length) == (GROWTH, SHORT_AND_LONG[1]),
        at_most=True,
    ),
    Target(
        f"peak extra memory of attention at 8,192 beyond inputs and outputs, forward and training, over {LIMIT}",
        1.0,
        lambda name, row: (name, row.against) == ("memory", LIMIT) and _is(row, length=8192),
        at_most=True,
    ),
    Target("SmolLM2 watched, 2,048 tokens, over its plain forward", 0.9, _watched(PLAIN, 2048), at_most=True),
    Target("SmolLM2 watched, 8,192 tokens, over its plain forward", 0.7, _watched(PLAIN, 8192), at_most=True),
    Target(f"SmolLM2 watched, 2,048 tokens, against {EAGER} and statistics from it", 6.0, _watched(EAGER, 2048)),
    Target("SmolLM2 accelerated, 2,048 tokens, float32, against plain", 1.2, _accelerated("float32", 2048)),
    Target("SmolLM2 accelerated, 8,192 tokens, float32, against plain", 1.5, _accelerated("float32", 8192)),
    Target("SmolLM2 accelerated, 2,048 tokens, bfloat16, against plain", 1.5, _accelerated("bfloat16", 2048)),
    Target("SmolLM2 accelerated, 8,192 tokens, bfloat16, against plain", 2.0, _accelerated("bfloat16", 8192)),
    Target("accelerated models, float32, against plain", 1.6, _models(models.PLAIN, "float32")),
    Target("accelerated models, bfloat16, against plain", 1.3, _models(models.PLAIN, "bfloat16")),
    Target(
        f"accelerated models, against the fastest of {', '.join(models.PEERS)}",
        1.0,
        _models(FASTEST),
    ),
    Target(
        "peak extra memory of watching SmolLM2, 8,192 tokens, over 300 MB",
        1.0,
        _watched(MODEL_EXTRA, 8192),
        at_most=True,
    ),
    Target(
        "peak extra memory of one attention call with statistics, 32,768 tokens, 8 heads of 64, over 1 GB",
        1.0,
        _watched(CALL_EXTRA, 32768),
        at_most=True,
    ),
    Target(
        "every head of SmolLM2 removed, one at a time, 16 sequences of 256 tokens, against whole forwards",
        1.8,
        lambda name, row: (name, row.against, row.regime.batch) == ("ablating", WHOLE, 16),
    ),
    Target("attention with half of the heads, a prompt, over all heads", 0.6, _pruned(PROMPT), at_most=True),
    Target(
        "attention with half of the heads, decoding after 1,024, over all heads", 0.6, _pruned(DECODING), at_most=True
    ),
    Target("training step monitored with every=100, over the plain step", 1.01, _monitored(EVERY_100), at_most=True),
    Target("training step monitored with every=1, over the plain step", 1.5, _monitored(EVERY_1), at_most=True),
    Target(
        "microseconds of `attend` over SDPA, 1 to 64 tokens, full and causal", 12.0, _short(calls.SDPA), at_most=True
    ),
    Target("microseconds of a mask that was seen before, 1 to 64 tokens", 15.0, _short(calls.UNMASKED), at_most=True),
    Target("microseconds of `MultiHeadAttention` over the block by hand", 25.0, _short(calls.BLOCK), at_most=True),
    Target(
        "microseconds of `compat.MultiheadAttention` over `nn.MultiheadAttention`",
        25.0,
        _short(calls.TORCH_LAYER),
        at_most=True,
    ),
    Target("microseconds of a decoding step over the step by hand", 40.0, _short(calls.STEP), at_most=True),
)


def rows_by_target(results: Sequence[dict]) -> list[tuple[Target, list[Row]]]:
    """Return each target with the rows that it covers; the list is empty if nothing was measured."""
    rows = [(result["benchmark"], Row.read(row)) for result in results for row in result["rows"]]
    return [(target, [row for name, row in rows if target.covers(name, row)]) for target in TARGETS]


def is_partial(target: Target, results: Sequence[dict]) -> bool:
    """Return whether a target covers rows of a run that left out regimes."""
    parts = [result for result in results if result["quick"] or result.get("only") != ""]
    return any(target.covers(part["benchmark"], Row.read(row)) for part in parts for row in part["rows"])


HEADERS = ("target", "bound", "worst median", "spread", "regime", "regimes met", "")


def table(results: Sequence[dict]) -> list[tuple[str, ...]]:
    """Return one row for each target, with the columns `HEADERS`."""
    lines = []
    for target, rows in rows_by_target(results):
        bound = f"{'at most' if target.at_most else 'at least'} {target.bound:g}"
        if not rows:
            lines.append((target.description, bound, "", "", "", "", "not measured"))
            continue
        worst, met = target.worst(rows), sum(map(target.met, rows))
        spread = f"{worst.ratio.lowest:.2f} to {worst.ratio.highest:.2f}"
        where = f"{worst.regime.name} {worst.note}".strip()
        verdict = "**missed**" if met < len(rows) else "met in some regimes" if is_partial(target, results) else "met"
        figures = (f"{worst.ratio.median:.2f}", spread, where, f"{met} of {len(rows)}")
        lines.append((target.description, bound, *figures, verdict))
    return lines
