"""Rules that FlexAttention compiles into its kernel: for the keys that are visible, and for the scores.

The rules read tensors. Numbers that differ between calls, such as the width of a window, would each need a kernel of
their own, so a mask is passed as the ranges of keys of each query wherever it is ranges.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from headwise.attention.masks.base import Mask, OfParts
from headwise.attention.masks.key_ranges import VisibleKeys
from headwise.attention.masks.kinds import InRanges, Padding, Segments
from headwise.attention.problem import Problem

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of the indices of a sequence, head, query and key; True if the query attends to the key."""

ScoreRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of a score and the same indices that returns the score as it enters the softmax."""


def visibility_rule(visible: VisibleKeys) -> Rule:
    """Return the rule of a mask: a key is visible if it is in one of the ranges and all further masks allow it."""
    masks = [*([] if visible.ranges is None else [InRanges(visible.ranges)]), *visible.others]
    rules = [partial(on_device(mask, visible.grid.device).allows, visible.grid) for mask in masks]
    if len(rules) == 1:
        return rules[0]

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = rules[0](b, h, i, j)
        for rule in rules[1:]:
            allowed = allowed & rule(b, h, i, j)
        return allowed

    return allows


def on_device(mask: Mask, device: torch.device) -> Mask:
    """Return a mask whose numbers are on a device. A kernel reads them there, and cannot copy them."""
    if isinstance(mask, OfParts):
        return mask.with_parts(lambda part: on_device(part, device))
    if isinstance(mask, Padding):
        return replace(mask, lengths=mask.lengths_on(device))
    if isinstance(mask, Segments):
        return replace(mask, ids=mask.ids_on(device))
    return mask


def score_rule(problem: Problem) -> ScoreRule | None:
    """Return the rule by which scores that have no scale of their head, softcap and bias get them; None if they need
    none of them. A bias of -inf hides a key.
    """
    scale = problem.scale.flatten() if isinstance(problem.scale, Tensor) else None
    softcap, bias = problem.softcap, problem.bias
    if bias is not None:
        bias = bias.to(problem.score_dtype)  # the kernel adds up its gradient in its dtype
    if scale is None and softcap is None and bias is None:
        return None
    sizes = None if bias is None else bias.shape

    def finish(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if scale is not None:
            score = score * scale[h]
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None and sizes is not None:
            # An axis of size 1 repeats.
            indices = [n if size > 1 else n * 0 for n, size in zip((b, h, i, j), sizes, strict=True)]
            score = score + bias[tuple(indices)]
        return score

    return finish
