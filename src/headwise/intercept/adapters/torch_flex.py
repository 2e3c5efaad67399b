"""Calls of torch's `flex_attention` (read off torch 2.13), also of functions compiled from it."""

from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.adapters.engine import HEADS_FIRST, Arguments, Engine, EngineCall, UnreadableCall
from headwise.intercept.adapters.flex_masks import FlexMask, over_block
from headwise.intercept.session import current_session


def read(name: str, arguments: Arguments) -> EngineCall:
    """Read a call. A `mask_mod` becomes a mask; a `score_mod` is applied to the whole matrix of scores."""
    arguments.ignore("enable_gqa", "return_lse", "return_aux", "kernel_options")
    q, k, v = (arguments.take(each) for each in ("query", "key", "value"))
    score_mod, scale, block_mask = (arguments.take(each) for each in ("score_mod", "scale", "block_mask"))
    mask, modified = mask_of(block_mask, q, k), None
    if len(k) != len(q):
        k, v = (tensor.expand(len(q), -1, -1, -1) for tensor in (k, v))
    if score_mod is not None:
        modified = scores_modified_by(score_mod)
        with current_session().paused():
            modified(torch.zeros(1, 1, 1, 1, dtype=q.dtype, device=q.device))  # raises if it cannot be evaluated
    origin = () if modified else ("flex_attention", block_mask)
    options = {"mask": mask, "scale": scale}
    return EngineCall(q, k, v, options, HEADS_FIRST, mask_origin=origin, modified_scores=modified)


def mask_of(block_mask: Any, q: Tensor, k: Tensor) -> FlexMask | None:
    """Return the mask of a `BlockMask` for these queries and keys; None without.

    Raises:
        UnreadableCall: its function cannot be evaluated, or its blocks hide keys that the function does not hide.
    """
    if block_mask is None:
        return None
    sizes = q.shape[2], k.shape[2]
    if _checked.get(block_mask) != sizes:
        with current_session().paused():
            _require_listed(block_mask, *sizes, q.device)
        _checked[block_mask] = sizes
    return FlexMask(block_mask.mask_mod)


_checked: WeakKeyDictionary[Any, tuple[int, int]] = WeakKeyDictionary()
"""Block masks that were checked, with their numbers of queries and keys."""


def _require_listed(block_mask: Any, queries: int, keys: int, device: torch.device) -> None:
    """Raise `UnreadableCall` if a `BlockMask` leaves out blocks in which its `mask_mod` allows a key: compiled code
    never computes those, and code that is not compiled does.
    """
    listed, (rows, columns) = block_mask.to_dense().bool(), block_mask.BLOCK_SIZE
    sequences, heads, all_keys = (torch.arange(size, device=device) for size in (*listed.shape[:2], keys))
    for start in range(0, queries, rows):
        block = torch.arange(start, min(start + rows, queries), device=device)
        allowed = over_block(block_mask.mask_mod, sequences, heads, block, all_keys).any(-2)
        allowed = F.pad(allowed, (0, -keys % columns))
        allowed = allowed.view(*allowed.shape[:-1], -1, columns).any(-1)
        if bool((allowed & ~listed[:, :, start // rows, : allowed.shape[-1]]).any()):
            raise UnreadableCall("with a block_mask that leaves out blocks which its mask_mod allows")


def scores_modified_by(score_mod: Callable[..., Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function that applies a `score_mod` to scores `(batch, heads, queries, keys)`."""

    def modified(scores: Tensor) -> Tensor:
        indices = (torch.arange(size, device=scores.device) for size in scores.shape)
        with torch.no_grad():
            return over_block(score_mod, *indices, scores=scores)

    return modified


FLEX = Engine(modules=("torch.nn.attention.flex_attention",), functions=("flex_attention",), read=read)
"""Torch's function."""
