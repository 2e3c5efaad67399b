"""Calls of torch functions as a model makes them, to be repeated with other tensors."""

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

_QUERY_NAMES = (
    "size",
    "dim",
    "ndimension",
    "numel",
    "nelement",
    "stride",
    "storage_offset",
    "is_contiguous",
    "__len__",
)
_OTHER_QUERY_NAMES = ("is_floating_point", "is_complex", "element_size", "get_device", "data_ptr", "__hash__")

VIEWING_GETTERS: frozenset[Callable[..., Any]] = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")
)
"""Properties of a tensor that are tensors with its elements."""

_GETTERS = [getattr(Tensor, name).__get__ for name in dir(Tensor) if inspect.isdatadescriptor(getattr(Tensor, name))]

QUERIES: frozenset[Callable[..., Any]] = frozenset(
    [getattr(Tensor, name) for name in (*_QUERY_NAMES, *_OTHER_QUERY_NAMES)]
    + [getter for getter in _GETTERS if getter not in VIEWING_GETTERS]
)
"""Methods and properties of a tensor, such as its shape, that contain no elements of it."""


_READING_NAMES = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero")

READINGS: frozenset[Callable[..., Any]] = frozenset(
    [getattr(Tensor, name) for name in (*_READING_NAMES, "equal", "allclose")]
    + [torch.equal, torch.allclose, torch.is_nonzero]
)
"""Functions that return numbers of a tensor to Python, where a model may decide by them what to compute."""


@dataclass(slots=True, eq=False)
class FunctionCall:
    """One call of a torch function: the function and its arguments. The call can be repeated with other tensors.

    Attributes:
        function: the function.
        args: arguments by position.
        kwargs: arguments by name.
        tensors: the tensors that the function reads: those among the arguments, also in lists, tuples and dicts, by
            position first. The tensor `out` is only written to.
    """

    function: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    tensors: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        read = self.kwargs
        if "out" in read:
            read = {name: value for name, value in read.items() if name != "out"}
        self.tensors = tensors_among((*self.args, *read.values()))

    def replaced(self, before: Any, after: Any) -> "FunctionCall":
        """Return the same call with the object `after` in place of the argument `before`, also inside lists, tuples and
        dicts.
        """
        args: list[Any] = _replaced(self.args, before, after)
        return FunctionCall(self.function, tuple(args), _replaced(self.kwargs, before, after))

    def run(self) -> Any:
        """Call the function and return its result."""
        return self.function(*self.args, **self.kwargs)

    def as_function_of(self, tensor: Tensor) -> Callable[[Tensor], Any]:
        """Return a function that repeats this call with a new tensor in place of its argument `tensor`. The returned
        function does not keep `tensor` in memory.
        """
        placeholder = object()
        template = self.replaced(tensor, placeholder)
        return lambda other: template.replaced(placeholder, other).run()


def tensors_among(arguments: Iterable[Any]) -> list[Tensor]:
    """Return all tensors in `arguments`, also those inside nested lists, tuples and dicts."""
    tensors: list[Tensor] = []
    for argument in arguments:
        if isinstance(argument, Tensor):
            tensors.append(argument)
        elif isinstance(argument, _CONTAINERS) and not isinstance(argument, torch.Size):
            tensors += tensors_among(argument.values() if isinstance(argument, dict) else argument)
    return tensors


_CONTAINERS = (tuple, list, dict)


def _replaced(argument: Any, before: Any, after: Any) -> Any:
    """Return `argument` with the object `after` in place of the object `before`, also inside nested lists, tuples and
    dicts. Where something is replaced, tuples become lists.
    """
    if isinstance(argument, list | tuple):
        elements = [_replaced(element, before, after) for element in argument]
        is_unchanged = all(new is old for new, old in zip(elements, argument, strict=True))
        return argument if is_unchanged else elements
    if isinstance(argument, dict):
        return {name: _replaced(element, before, after) for name, element in argument.items()}
    return after if argument is before else argument
