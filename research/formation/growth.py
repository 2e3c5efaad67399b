"""A training whose attention logits grow until float16 cannot represent them, without and with QK-clip.

The model is a small Llama of `transformers` in mixed precision: autocast to float16, in which the products of queries
and keys overflow above 65,504. Both trainings have the same seed and the same data.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

import headwise as hw
from headwise.shapes import Int
from headwise.studies.training import build_seeded

BLAMED = ("q_proj.weight", "k_proj.weight")
"""Ends of the names of the parameters with a learning rate of their own."""


@dataclass(frozen=True)
class GrowthPlan:
    """Numbers of a training.

    Attributes:
        steps: number of optimizer steps; a training ends earlier when its loss is not finite.
        batch: rows of a batch.
        length: tokens of a row.
        rate: learning rate of AdamW for all parameters but the query and key projections.
        query_key_rate: that of the query and key projections, which is too high.
        threshold: threshold of QK-clip.
        width: features of a token.
        heads: heads of each layer.
    """

    steps: int = 500
    batch: int = 8
    length: int = 32
    rate: float = 5e-3
    query_key_rate: float = 0.15
    threshold: float = 100.0
    width: int = 64
    heads: int = 4


def llama(vocabulary: int, plan: GrowthPlan) -> nn.Module:
    """Return a Llama of two layers that computes its attention scores in the dtype of autocast."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=plan.width,
        intermediate_size=2 * plan.width,
        num_hidden_layers=2,
        num_attention_heads=plan.heads,
        use_cache=False,
        attn_implementation="eager",
    )
    return LlamaForCausalLM(config)


def growing_training(
    rows: Int[torch.Tensor, "rows length"], vocabulary: int, plan: GrowthPlan, seed: int, *, is_clipped: bool
) -> dict[str, Any]:
    """Train a model with or without QK-clip, and return the measurements as JSON-compatible values.

    Args:
        rows: rows of token ids.
        vocabulary: number of token ids.
        plan: numbers of the training.
        seed: seed of the weights and of the order of the rows.
        is_clipped: True to call `hw.qk_clip` after each step.
    """
    start, processor = time.monotonic(), time.process_time()
    model = build_seeded(lambda: llama(vocabulary, plan), seed).train()
    blamed = [parameter for name, parameter in model.named_parameters() if name.endswith(BLAMED)]
    others = [parameter for name, parameter in model.named_parameters() if not name.endswith(BLAMED)]
    groups = [{"params": blamed, "lr": plan.query_key_rate}, {"params": others, "lr": plan.rate}]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)
    order = torch.randperm(len(rows), generator=torch.Generator().manual_seed(seed))
    losses: list[float] = []
    logits: list[float] = []
    clips = 0
    with hw.monitor(model, every=1, statistics=["max_logit"]) as monitor:
        for step in range(plan.steps):
            places = torch.arange(step * plan.batch, (step + 1) * plan.batch) % len(rows)
            ids = rows[order[places], : plan.length]
            with torch.autocast("cpu", torch.float16):
                loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            monitor.step()
            losses.append(loss.item())
            logits.append(_largest(monitor.history.rows(step)))
            if not math.isfinite(losses[-1]):
                break
            if is_clipped:
                clips += len(hw.qk_clip(model, monitor, threshold=plan.threshold))
    return {
        "seed": seed,
        "is_clipped": is_clipped,
        "plan": asdict(plan),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "loss": losses,
        "max_logit": logits,
        "first_alarm": _first_alarm(monitor, "high logit"),
        "first_nonfinite_alarm": _first_alarm(monitor, "non-finite"),
        "nonfinite_step": None if math.isfinite(losses[-1]) else len(losses) - 1,
        "clips": clips,
        "seconds": time.monotonic() - start,
        "processor_seconds": time.process_time() - processor,
    }


def _largest(rows: Iterable[Mapping[str, Any]]) -> float:
    """Return the largest finite logit of all heads; NaN if there is none."""
    logits = [row.get("max_logit", math.nan) for row in rows]
    return max((logit for logit in logits if math.isfinite(logit)), default=math.nan)


def _first_alarm(monitor: hw.Monitor, kind: str) -> dict[str, Any] | None:
    """Return the first alarm of a kind; None if there was none."""
    return next((alarm._asdict() for alarm in monitor.alarms if alarm.kind == kind), None)
