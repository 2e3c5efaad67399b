"""Calls of torch's `flex_attention` (read off torch 2.13), also of functions compiled from it.

The functions that a model passes to it are evaluated for blocks of queries and keys.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.attend import uniform_output
from headwise.attention.masks.base import Mask
from headwise.attention.masks.grid import Grid, Index
from headwise.attention.problem import Problem
from headwise.intercept.adapters.engine import Arguments, Engine, UnreadableCall
from headwise.intercept.attention_call import HEADS_FIRST, AttentionCall, KnownWeights
from headwise.intercept.received_mask import ReceivedMask
from headwise.intercept.session import current_session
from headwise.shapes import Bool, Int


def over_block(function: Callable[..., Tensor], *indices: Int[Tensor, " _"], scores: Tensor | None = None) -> Tensor:
    """Return the results of a `mask_mod` or `score_mod` for all combinations of the indices of sequences, heads,
    queries and keys, as `(sequences, heads, queries, keys)`. The function is called with single indices, as in
    FlexAttention. If `scores` are passed, its first argument is the score of the combination.

    Raises:
        UnreadableCall: the function cannot be evaluated in this way, as with conditions that depend on values.
    """
    mapped = function
    for axis in (3, 2, 1, 0):
        dims = [0 if other == axis else None for other in range(4)]
        mapped = torch.vmap(mapped, in_dims=tuple(dims if scores is None else [0, *dims]))
    try:
        return mapped(*(indices if scores is None else (scores, *indices)))
    except (RuntimeError, TypeError, IndexError) as error:
        name = getattr(function, "__name__", type(function).__name__)
        raise UnreadableCall(f"with {name}, which cannot be evaluated for a block ({_first_line(error)})") from error


def _first_line(error: Exception) -> str:
    """Return the first line of an error's message."""
    return next(iter(str(error).splitlines()), type(error).__name__)


@dataclass(frozen=True, eq=False)
class FlexMask(Mask):
    """Mask computed by a `mask_mod` of FlexAttention. The function receives the indices of query rows and keys, not
    their token positions.

    Attributes:
        rule: the function.
        first_sequence: index that the function receives for the first sequence of the grid.
        first_head: index that the function receives for the first head of the grid.
    """

    rule: Callable[..., Any]
    first_sequence: int = 0
    first_head: int = 0

    def allows(self, grid: Grid, b: Index, h: Index, i: Index, j: Index) -> Bool[Tensor, "..."]:
        return over_block(
            self.rule, b.flatten() + self.first_sequence, h.flatten() + self.first_head, i.flatten(), j.flatten()
        )

    def for_sequence(self, index: int) -> Mask:
        return FlexMask(self.rule, self.first_sequence + index, self.first_head)

    def for_head(self, index: int) -> Mask:
        return FlexMask(self.rule, self.first_sequence, self.first_head + index)


def read(name: str, arguments: Arguments) -> AttentionCall:
    """Translate a call of FlexAttention to an `AttentionCall` (headwise's form of a call). A `mask_mod` becomes a mask;
    a `score_mod` is applied to the whole matrix of scores.
    """
    arguments.ignore("enable_gqa", "return_lse", "return_aux", "kernel_options")
    q, k, v = (arguments.take(each) for each in ("query", "key", "value"))
    score_mod, scale, block_mask = (arguments.take(each) for each in ("score_mod", "scale", "block_mask"))
    options = {"mask": mask_of(block_mask, q, k), "scale": scale}
    if len(k) != len(q):
        k, v = (tensor.expand(len(q), -1, -1, -1) for tensor in (k, v))
    if score_mod is None:
        return AttentionCall(q, k, v, options, HEADS_FIRST, mask_origin=("flex_attention", block_mask))
    with current_session().paused():  # raises if it cannot be evaluated
        scores_modified_by(score_mod)(torch.zeros(1, 1, 1, 1, dtype=q.dtype, device=q.device))
    return ModifiedScores(q, k, v, options, HEADS_FIRST, score_mod=score_mod)


@dataclass(eq=False)
class ModifiedScores(AttentionCall):
    """Call of FlexAttention in which a function of the model, the `score_mod`, changes the scores. Its attention
    weights are computed as the whole matrix of queries and keys.

    Attributes:
        score_mod: the function that changes the score of a query and a key.
    """

    score_mod: Callable[..., Tensor] = lambda score, *indices: score
    has_weights = True

    @cached_property
    def scores(self) -> Tensor:
        """Attention scores of all queries and keys, after the changes by the call's `score_mod`; -inf where a key is
        hidden.
        """
        problem = self.problem
        q, k = (tensor.to(problem.score_dtype) for tensor in (problem.q, problem.k))
        k = k.repeat_interleave(q.shape[1] // k.shape[1], 1)
        scores = scores_modified_by(self.score_mod)(q @ k.mT * problem.scale)
        if problem.mask is not None:
            scores = scores.masked_fill(~problem.mask.block(problem.grid), -torch.inf)
        return scores

    @cached_property
    def visible(self) -> Problem:
        """A `Problem` (tensors and options of a call) with the visible keys of the call. Its scores are without the
        changes by the call's `score_mod`.
        """
        return Problem.checked(self.problem.q, self.problem.k, self.problem.v, mask=self.scores != -torch.inf)

    def stated_problem(self) -> None:
        """Return None, since a `Problem` (tensors and options of a call) cannot state scores that a `score_mod` has
        changed.
        """

    def received(self) -> ReceivedMask:
        """Return the mask of the call. A key is also hidden if its score, as changed by the `score_mod`, is -inf."""
        return ReceivedMask.of_problem(self.visible)

    def weights(self, out: Tensor) -> KnownWeights:
        """Return the attention weights of the call. They are 0 in the rows of queries without a visible key."""
        is_empty = (self.scores == -torch.inf).all(-1, keepdim=True)
        weights = self.scores.softmax(-1).masked_fill(is_empty, 0.0)
        return KnownWeights(weights, out, self.problem.v.to(weights.dtype), lambda: (self.scores, None))

    def uniform_output(self) -> Tensor:
        """Return the output of each head if every query attended with equal weights to all keys that it may see."""
        return uniform_output(self.visible)


def mask_of(block_mask: Any, q: Tensor, k: Tensor) -> FlexMask | None:
    """Return the mask that FlexAttention's `block_mask` states for these queries and keys; None if `block_mask` is
    None.

    Raises:
        UnreadableCall: its function cannot be evaluated, or its blocks hide keys that the function does not hide.
    """
    if block_mask is None:
        return None
    sizes = (*q.shape[:3], k.shape[2])
    if _checked.get(block_mask) != sizes:
        with current_session().paused():
            _require_listed(block_mask, sizes, q.device)
        _checked[block_mask] = sizes
    return FlexMask(block_mask.mask_mod)


_checked: WeakKeyDictionary[Any, tuple[int, ...]] = WeakKeyDictionary()
"""Block masks that were checked, with the sizes of the call: sequences, heads, queries and keys."""


def _require_listed(block_mask: Any, sizes: tuple[int, ...], device: torch.device) -> None:
    """Raise `UnreadableCall` if a `BlockMask` leaves out blocks in which its `mask_mod` allows a key, or lists blocks
    as full in which the `mask_mod` hides one. The result of the call would then be unknown: compiled code does not
    compute the former and does not mask the latter, and code that is not compiled applies the `mask_mod` everywhere.
    """
    listed, (rows, columns) = block_mask.to_dense().bool(), block_mask.BLOCK_SIZE
    full = torch.zeros_like(listed)
    if block_mask.full_kv_num_blocks is not None:
        of_full = block_mask.full_kv_num_blocks, block_mask.full_kv_indices
        full = type(block_mask).from_kv_blocks(*of_full, BLOCK_SIZE=block_mask.BLOCK_SIZE).to_dense().bool()
    *others, queries, keys = (torch.arange(size, device=device) for size in sizes)
    for index, block in enumerate(torch.split(queries, rows)):
        allowed = over_block(block_mask.mask_mod, *others, block, keys)
        for axis in (0, 1):  # the mask is usually the same for all sequences and heads
            allowed = allowed if allowed.stride(axis) else allowed.narrow(axis, 0, 1)
        padding = (0, -len(keys) % columns)
        has_key, hides_key = (
            F.pad(each.any(-2), padding).reshape(*each.shape[:-2], -1, columns).any(-1) for each in (allowed, ~allowed)
        )
        blocks = slice(has_key.shape[-1])
        if bool((has_key & ~listed[:, :, index, blocks]).any()):
            raise UnreadableCall("with a block_mask that leaves out blocks which its mask_mod allows")
        if bool((hides_key & full[:, :, index, blocks]).any()):
            raise UnreadableCall("with a block_mask that lists blocks as full in which its mask_mod hides keys")


def scores_modified_by(score_mod: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that applies a `score_mod` to scores `(batch, heads, queries, keys)`."""

    def modified(scores: Tensor) -> Tensor:
        indices = (torch.arange(size, device=scores.device) for size in scores.shape)
        with torch.no_grad():
            return over_block(score_mod, *indices, scores=scores)

    return modified


FLEX = Engine(modules=("torch.nn.attention.flex_attention",), functions=("flex_attention",), read=read)
"""Torch's function."""
