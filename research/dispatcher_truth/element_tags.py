"""Tags that follow single elements of tensors through copies, views and elementwise functions.

Tags are stored per storage, not per tensor. Every view of a storage therefore sees the tags of its elements, and only
operators that write new elements need a rule.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

UNTAGGED = 0.0
"""Tag of all elements that are not followed. Tags are whole numbers in float64, which every operator supports."""

MOVING = frozenset(
    {
        *("cat", "stack", "index", "index_select", "index_copy", "index_put", "gather", "scatter", "take"),
        *("slice_scatter", "select_scatter", "masked_scatter", "masked_select", "roll", "flip", "repeat"),
        *("constant_pad_nd", "tril", "triu", "im2col", "unfold_copy", "expand_copy", "permute_copy", "view_copy"),
        *("as_strided_copy", "reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
    }
)
"""Operators that only copy elements to other places: their rule is to apply them to the tags."""

COPYING = frozenset(
    ("clone", "_to_copy", "native_dropout", "alias_copy", "lift_fresh_copy", "masked_fill", "hardswish")
)
NORMALISING = frozenset(("native_layer_norm", "_fused_rms_norm", "native_group_norm", "native_batch_norm"))
"""Operators whose first result has the shape of their first argument, element for element."""


def name_of(function: Any) -> str:
    """Return the name of a dispatcher operator without its namespace, overload and the underscore of in-place ones."""
    name = function._schema.name.split("::")[-1]
    return name[:-1] if function._schema.is_mutable and name.endswith("_") else name


class ElementTags:
    """Tags of the elements of all followed storages. Storages are kept alive, so that their addresses stay theirs."""

    def __init__(self) -> None:
        self._by_storage: dict[int, tuple[Any, int, Tensor]] = {}

    def of(self, tensor: Any) -> Tensor | None:
        """Return the tags of a tensor's elements, in its shape; None if none of its storage is followed."""
        if not isinstance(tensor, Tensor) or not self._by_storage or tensor.layout != torch.strided:
            return None
        entry = self._by_storage.get(tensor.untyped_storage()._cdata)
        if entry is None or entry[1] != tensor.element_size():
            return None
        return entry[2].as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def set(self, tensor: Tensor, tags: Tensor | float) -> None:
        """Write tags, which broadcast to the tensor's shape, for its elements."""
        storage = tensor.untyped_storage()
        if storage._cdata not in self._by_storage:
            number = storage.nbytes() // tensor.element_size()
            blank = torch.full((number,), UNTAGGED, dtype=torch.float64)
            self._by_storage[storage._cdata] = (storage, tensor.element_size(), blank)
        view = self.of(tensor)
        if view is not None:
            view.copy_(torch.as_tensor(tags).expand(tensor.shape))

    def any(self, arguments: Any) -> bool:
        """Return whether any tensor in (nested) arguments has a followed storage."""
        return bool(self._by_storage) and any(self.of(tensor) is not None for tensor in tensors_in(arguments))

    # -- rules --------------------------------------------------------------------------------------------------------

    def follow(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any], result: Any) -> None:
        """Set the tags of an operator's result from those of its arguments. An operator without a rule gives an
        untagged result.
        """
        name, in_place = name_of(function), function._schema.is_mutable
        out = result[0] if isinstance(result, (tuple, list)) and result else result
        if not isinstance(out, Tensor) or not out.numel() or out.layout != torch.strided:
            return
        if in_place:
            self._follow_writing(name, function, args, kwargs, out)
        elif name in MOVING:
            self.set(out, self._moved(function, args, kwargs))
        elif name in COPYING or name in NORMALISING:
            tags = self.of(args[0])
            if tags is not None and tags.shape == out.shape:
                self.set(out, tags)
        elif torch.Tag.pointwise in function.tags and out.dtype != torch.bool:
            tags = self._first_tagged(args, kwargs, out)
            if tags is not None:
                self.set(out, tags)

    def _follow_writing(
        self, name: str, function: Any, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor
    ) -> None:
        """Set the tags of a tensor that an operator wrote into: its first argument, or `out=`."""
        if name in ("copy", "set_") and len(args) > 1:
            source = self.of(args[1])
            self.set(out, UNTAGGED if source is None else source)
        elif name in MOVING and function._schema.name.endswith("_"):
            self.set(out, self._moved(function, args, kwargs))
        elif torch.Tag.pointwise in function.tags or name in ("masked_fill", "native_dropout"):
            tags = self._first_tagged(args, {key: value for key, value in kwargs.items() if key != "out"}, out)
            self.set(out, UNTAGGED if tags is None else tags)
        elif self.of(out) is not None and name not in ("bernoulli", "resize", "set"):
            self.set(out, UNTAGGED)

    def _moved(self, function: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Tensor:
        """Return the tags that a moving operator gives, by applying it to the tags of its floating arguments."""

        def tags_of(value: Any) -> Any:
            if not isinstance(value, Tensor) or not value.is_floating_point():
                return value
            tags = self.of(value)
            return torch.full(value.shape, UNTAGGED, dtype=torch.float64) if tags is None else tags.clone()

        args, kwargs = tree_map(tags_of, (tuple(args), kwargs))
        if name_of(function) == "constant_pad_nd":
            args = args[:2]
        return function(*args, **kwargs)

    def _first_tagged(self, args: Sequence[Any], kwargs: dict[str, Any], out: Tensor) -> Tensor | None:
        """Return for each element of an elementwise result the tag of the first argument that has one there."""
        tags: Tensor | None = None
        for tensor in tensors_in((args, kwargs)):
            own = self.of(tensor) if tensor.dtype != torch.bool else None
            if own is None:
                continue
            new = own.expand(out.shape)
            tags = new.clone() if tags is None else torch.where(tags == UNTAGGED, new, tags)
        return tags


def tensors_in(arguments: Any) -> list[Tensor]:
    """Return all tensors in nested lists, tuples and dictionaries."""
    if isinstance(arguments, Tensor):
        return [arguments]
    if isinstance(arguments, dict):
        arguments = list(arguments.values())
    if isinstance(arguments, (list, tuple)):
        return [tensor for argument in arguments for tensor in tensors_in(argument)]
    return []
