"""Keys that a mask hides from all query rows: padding, or keys that no row of content-sparse attention selected."""

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from headwise.intercept.received_mask import HIDING_DIFFERENCE, MaskFacts, ReceivedMask
from headwise.shapes import Bool, Int


def shaped_as_padding(arguments: Iterable[Mapping[str, Any]], batch: int, keys: int) -> list[Tensor]:
    """Return those arguments of the running modules around an attention call that have the shape `(batch, keys)` of a
    padding mask. Arguments of the innermost module come first.
    """
    values = [value for module_arguments in arguments for value in module_arguments.values()]
    return [value for value in values if isinstance(value, Tensor) and value.shape == (batch, keys)]


def selects_keys(facts: MaskFacts, received: ReceivedMask) -> bool:
    """Return True if a mask hides keys from all query rows, and does not follow from positions: in the rest of the
    mask, rows see neither an interval of the other keys each, nor the same keys as in other sequences with other hidden
    keys. So the hidden keys may be padding, or keys that no row has selected, as in top-k attention. `facts` are facts
    about the mask `received`.
    """
    return not bool(facts.is_seen.all()) and not _follows_from_positions(facts, received)


def without_unselected(facts: MaskFacts, arguments: Iterable[Tensor], batch: int) -> MaskFacts:
    """Return `facts` about a mask that may select keys, changed for the keys that it hides from all query rows. Such a
    key stays hidden only if a padding mask among the arguments of a module marks it. Otherwise it counts as seen.

    Args:
        facts: facts about the mask.
        arguments: arguments of the modules around the call that have the shape of a padding mask.
        batch: number of sequences.
    """
    marked = _marked_as_padding(~facts.is_seen.expand(batch, -1), arguments)
    is_seen = torch.ones_like(facts.is_seen) if marked is None else ~marked
    return replace(facts, is_seen=is_seen, selects_keys=True)


def _follows_from_positions(facts: MaskFacts, received: ReceivedMask) -> bool:
    """Return True if a mask hides keys by their position alone in each head, as causal and window masks do, and not by
    a choice of keys for each query. Keys that are hidden from all queries, such as padding, are not counted. `facts`
    are facts about the mask `received`.
    """
    if received.has_equal_rows:
        return True
    is_seen, counted = facts.is_seen, facts.sees_any
    if counted.shape[1] == is_seen.shape[1]:
        counted = counted & is_seen  # rows of padding may see any key
    is_interval, is_shared = True, len(is_seen) > 1 and bool((is_seen != is_seen[:1]).any())
    ends: list[tuple[Tensor, Tensor]] = []
    for rows, visible in received.by_head():
        of_rows, of_keys = counted[:, None, rows.start : rows.stop], is_seen[:, None, : visible.shape[-1]]
        first, last = _ends(visible)
        ranks = of_keys.cumsum(-1).expand(*visible.shape[:2], -1)
        length = ranks.gather(-1, last) - ranks.gather(-1, first) + 1
        is_interval &= bool(((length == visible.sum(-1)) | ~of_rows).all())
        is_shared &= bool(((visible == visible.any(0)) | ~of_keys[:, :, None] | ~of_rows[..., None]).all())
        if not is_interval and not is_shared:
            return False
        ends.append((first, last))
    are_increasing = (_increases(torch.cat(each, -1), counted[:, None]) for each in zip(*ends, strict=True))
    return is_shared or all(are_increasing)


def _ends(visible: Bool[Tensor, "*rows keys"]) -> tuple[Int[Tensor, "*rows"], Int[Tensor, "*rows"]]:
    """Return the index of the first and of the last key that each query row sees. For a row that sees no key, the
    indices are arbitrary.
    """
    numbers = visible.to(torch.uint8)
    return numbers.argmax(-1), visible.shape[-1] - 1 - numbers.flip(-1).argmax(-1)


def _increases(keys: Int[Tensor, "#batch heads rows"], counted: Bool[Tensor, "#batch 1 rows"]) -> bool:
    """Return True if the key indices in `keys` never decrease from one query row to a later one. Only rows where
    `counted` is True are compared.
    """
    return bool((keys.masked_fill(~counted, -1).cummax(-1).values <= keys).logical_or(~counted).all())


def _marked_as_padding(
    hidden: Bool[Tensor, "batch keys"], arguments: Iterable[Tensor]
) -> Bool[Tensor, "batch keys"] | None:
    """Return True at the keys that a padding mask marks as padding. Of the tensors in `arguments`, the first one that
    can be such a mask is used: all keys that it marks must be in `hidden`. Return None if there is no such tensor.
    """
    for value in arguments:
        if not bool(((value == 0) | (value == 1) | (value <= -HIDING_DIFFERENCE)).all()):
            continue
        for marked in (value == 0, value != 0):
            if bool(marked.any()) and bool((hidden | ~marked).all()):
                return marked
    return None
