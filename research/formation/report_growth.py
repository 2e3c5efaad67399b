"""Section of docs/formation.md about a training whose attention logits grow."""

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from research.markdown import markdown_table, wrap

LARGEST_FLOAT16 = 65504
"""Largest number in float16."""

LAST = 50
"""Number of last steps over which a loss is averaged."""

SETTING = """\
The model of this experiment is a Llama of `transformers` with two layers and {parameters:,} parameters, with
`attn_implementation="eager"` and autocast to float16. It trains on rows of {length} tokens of the Bible text,
without added repeats. The learning rate of AdamW is {rate} for most parameters, and {query_key_rate} for the query
and key projections, which is too high on purpose. There is no clipping of gradients. The products of queries and keys
are float16 numbers, whose largest value is 65,504. A logit is such a product divided by the square root of the
{head_dim} features of a head, so the largest logit is {limit:,.0f}. If a logit is larger, the attention weights of its
row become NaN, and so does the loss.

For each seed, the Llama model is trained twice, and `hw.monitor` observes every step. The second training differs
from the first only in one call of `hw.qk_clip` after each step, with a threshold of {threshold:.0f}. The two
trainings have the same initial weights, and the same data in the same order."""


def section(growing: Sequence[Mapping[str, Any]], clipped: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the lines of the section."""
    plan = growing[0]["plan"]
    head_dim = plan["width"] // plan["heads"]
    numbers = {**plan, "head_dim": head_dim, "limit": LARGEST_FLOAT16 / math.sqrt(head_dim)}
    return [
        "## Growing logits, and QK-clip",
        "",
        "![Loss and largest attention logit without and with QK-clip](pictures/formation-logits.png)",
        "",
        wrap(SETTING.format(**numbers, parameters=growing[0]["parameters"])),
        "",
        *table(growing, clipped),
        wrap(conclusion(growing, clipped)),
        "",
    ]


def last_loss(result: Mapping[str, Any]) -> float:
    """Return the mean of the last finite losses of a training."""
    return statistics.fmean([loss for loss in result["loss"] if loss is not None][-LAST:])


def table(growing: Sequence[Mapping[str, Any]], clipped: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return the table of all seeds."""
    headers = (
        "seed",
        "first alarm, step",
        "loss is not finite, step",
        "largest logit before",
        "loss before",
        "with QK-clip: loss is not finite, step",
        "largest logit",
        "loss at the end",
    )
    rows = [
        (
            one["seed"],
            "none" if one["first_alarm"] is None else one["first_alarm"]["step"],
            _step(one),
            f"{_largest(one):,.0f}",
            f"{last_loss(one):.2f}",
            _step(other),
            f"{_largest(other):,.0f}",
            f"{last_loss(other):.2f}",
        )
        for one, other in zip(growing, clipped, strict=True)
    ]
    return markdown_table(headers, rows)


def conclusion(growing: Sequence[Mapping[str, Any]], clipped: Sequence[Mapping[str, Any]]) -> str:
    """Return what the table shows."""
    failed = [one for one in growing if one["nonfinite_step"] is not None]
    warned = [
        one["nonfinite_step"] - one["first_alarm"]["step"]
        for one in failed
        if one["first_alarm"] is not None and one["first_alarm"]["step"] < one["nonfinite_step"]
    ]
    rescued = [other for other in clipped if other["nonfinite_step"] is None]
    steps = clipped[0]["plan"]["steps"]
    text = (
        f"Losses in the table are means over {LAST} steps. Without QK-clip, the loss becomes NaN in {len(failed)} of "
        f"{len(growing)} trainings. With QK-clip, {len(rescued)} of {len(clipped)} trainings reach step {steps:,} with "
        "a finite loss."
    )
    if warned:
        text += (
            f" In {len(warned)} of the {len(failed)} failed trainings, the alarm `high logit` comes first, "
            f"{min(warned)} to {max(warned)} steps before the loss is NaN."
        )
    named = [one for one in failed if (one["first_nonfinite_alarm"] or {}).get("step") == one["nonfinite_step"]]
    if named:
        text += (
            f" In {len(named)} of them, the alarm `non-finite` names a head in the step in which the loss becomes NaN, "
            "and no such alarm comes before this step."
        )
    return (
        f"{text} QK-clip acts after a step, so the logits of the next step can be above its threshold. The alarm "
        "`high logit` does not by itself predict that a training fails: in float32 or bfloat16, whose largest numbers "
        "are far "
        "larger, the same logits do not overflow. QK-clip bounds the logits. It does not correct the learning rate."
    )


def _step(result: Mapping[str, Any]) -> object:
    """Return the step at which a loss is not finite."""
    return "none" if result["nonfinite_step"] is None else result["nonfinite_step"]


def _largest(result: Mapping[str, Any]) -> float:
    """Return the largest logit of a training."""
    return max(logit for logit in result["max_logit"] if logit is not None)
