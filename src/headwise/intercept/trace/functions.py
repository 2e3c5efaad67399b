"""Functions of torch as a model calls them: their arguments, kinds, products, and what they overwrite; and records of
tensors by identity.
"""

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NamedTuple, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.intercept.undropped import DROPOUT_NAMES

Functions = frozenset[Callable[..., Any]]


def functions_named(*names: str) -> Functions:
    """Return the functions of torch and the methods of tensors with these names."""
    functions = (getattr(owner, name, None) for owner in (torch, Tensor) for name in names)
    return frozenset(each for each in functions if callable(each))  # `torch.float` is none


_QUERY_NAMES = (
    *("size", "dim", "ndimension", "numel", "nelement", "stride", "storage_offset", "is_contiguous", "__len__"),
    *("is_floating_point", "is_complex", "element_size", "get_device", "data_ptr", "__hash__"),
)
VIEWING_GETTERS: Functions = frozenset(
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")
)
"""Properties of a tensor that are tensors with its elements."""

_GETTERS = [getattr(Tensor, name).__get__ for name in dir(Tensor) if inspect.isdatadescriptor(getattr(Tensor, name))]

QUERIES: Functions = frozenset(
    [getattr(Tensor, name) for name in _QUERY_NAMES] + [getter for getter in _GETTERS if getter not in VIEWING_GETTERS]
)
"""Methods and properties of a tensor, such as its shape, that contain no elements of it."""


_READING_NAMES = ("item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "__array__", "is_nonzero")

READINGS: Functions = frozenset(
    [getattr(Tensor, name) for name in (*_READING_NAMES, "equal", "allclose")]
    + [torch.equal, torch.allclose, torch.is_nonzero]
)
"""Functions that return numbers of a tensor to Python, where a model may decide by them what to compute."""

_SIZED_BY_NUMBERS = functions_named(
    *("nonzero", "argwhere", "masked_select", "unique", "unique_consecutive", "bincount", "repeat_interleave")
)
_SIZED_BY_ARGUMENTS = functions_named(
    *("arange", "linspace", "zeros", "ones", "full", "empty", "rand", "randn", "randint", "eye", "tile", "repeat"),
    *("new_zeros", "new_ones", "new_full", "new_empty", "expand", "broadcast_to", "reshape", "view", "unflatten"),
    *("narrow", "split", "split_with_sizes", "chunk", "tensor_split", "as_strided"),
)


def is_sized_by_numbers(function: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Return True if the size of a function's result may depend on the values of the elements of its tensors, as that
    of `nonzero`. A model may decide by such a size what to compute, for example which experts.
    """
    if function in {torch.where, Tensor.where}:
        return len(args) + len(kwargs) == 1
    if function is F.one_hot:
        classes = args[1] if len(args) > 1 else kwargs.get("num_classes", -1)
        return not isinstance(classes, int) or classes < 0
    if function is not Tensor.__getitem__:
        numbers = [each for each in tensors_among((*args, *kwargs.values())) if not each.ndim]
        has_number = any(not each.is_floating_point() for each in numbers)
        return function in _SIZED_BY_NUMBERS or (has_number and function in _SIZED_BY_ARGUMENTS)
    indices = args[1] if isinstance(args[1], tuple | list) else args[1:]
    bounds = [bound for each in indices if isinstance(each, slice) for bound in (each.start, each.stop, each.step)]
    is_mask = any(isinstance(each, Tensor) and each.dtype in (torch.bool, torch.uint8) for each in indices)
    return is_mask or any(isinstance(each, Tensor) for each in bounds)


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
        """Return the same call with the object `after` in place of the argument `before`, also inside containers."""
        args: list[Any] = _replaced(self.args, before, after)
        return FunctionCall(self.function, tuple(args), _replaced(self.kwargs, before, after))

    def run(self) -> Any:
        """Call the function and return its result."""
        return self.function(*self.args, **self.kwargs)

    def as_function_of(self, tensor: Tensor) -> Callable[[Tensor], Any]:
        """Return a function that repeats this call with a new tensor in place of its argument `tensor`. The function
        does not keep `tensor` in memory.
        """
        placeholder = object()
        template = self.replaced(tensor, placeholder)
        return lambda other: template.replaced(placeholder, other).run()


def tensors_among(arguments: Iterable[Any]) -> list[Tensor]:
    """Return all tensors in `arguments`, also those inside nested lists, tuples and dicts. Each container is read once,
    so a container that contains itself is permitted.
    """
    tensors: list[Tensor] = []
    read: dict[int, Any] = {}
    waiting = [iter(arguments)]
    while waiting:
        for argument in waiting[-1]:
            if isinstance(argument, Tensor):
                tensors.append(argument)
            elif isinstance(argument, _CONTAINERS) and type(argument) is not torch.Size and id(argument) not in read:
                read[id(argument)] = argument
                waiting.append(iter(_elements(argument)))
                break
        else:
            waiting.pop()
    return tensors


MOST_NESTED = 100
"""Largest number of containers inside each other whose elements are compared or changed."""


def are_nested_deeply(arguments: Iterable[Any]) -> bool:
    """Return True if containers in `arguments` are nested more than about 100 deep, as in a list or a dict that
    contains itself.
    """
    containers: list[Any] = [list(arguments)]
    for _ in range(MOST_NESTED):
        elements = (element for container in containers for element in _elements(container))
        containers = list({id(each): each for each in elements if isinstance(each, (*_CONTAINERS, Mapping))}.values())
        if not containers:
            return False
    return True


def _elements(container: Any) -> Iterable[Any]:
    return container.values() if isinstance(container, Mapping) else container


_CONTAINERS = (tuple, list, dict)


def _replaced(argument: Any, before: Any, after: Any) -> Any:
    if isinstance(argument, list | tuple):
        elements = [_replaced(element, before, after) for element in argument]
        is_unchanged = all(new is old for new, old in zip(elements, argument, strict=True))
        return argument if is_unchanged else elements
    if isinstance(argument, dict):
        return {name: _replaced(element, before, after) for name, element in argument.items()}
    return after if argument is before else argument


_OPERATORS = frozenset(
    f"__i{name}__" for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor")
)
"""Names of the methods for operators such as `+=`."""

_WITHOUT_WRITING = frozenset({"requires_grad_", "detach_", "share_memory_", "rename_"})
"""Names of methods that end like those that overwrite a tensor, but change no element."""


def version_of(tensor: Tensor) -> int | None:
    """Return torch's count of the in-place changes of a tensor; None for tensors made in inference mode."""
    return None if tensor.is_inference() else tensor._version


class TensorVersions:
    """Version counters of some tensors at one time, to detect later in-place changes. Torch increments a tensor's
    counter at each in-place change, except in inference mode.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        self._versions = [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]

    def have_changed(self) -> bool:
        """Return True if one of the recorded tensors was changed in place since this record was created."""
        return any(tensor._version != version for tensor, version in self._versions)


def share_memory(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors are views of the same memory, or the same tensor."""
    if one is other or not type(one) is type(other) is Tensor or one.is_nested or one.is_sparse:
        return one is other
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def overwritten_tensors(call: FunctionCall) -> list[Tensor]:
    """Return the tensors that a function call overwrites in place, such as the argument of `add_`, the tensor passed as
    `out`, or the tensors in the list that `_foreach_mul_` receives.
    """
    name = getattr(call.function, "__name__", "")
    if "out" in call.kwargs:
        return tensors_among((call.kwargs["out"],))
    if name.startswith("_foreach_"):
        return tensors_among(call.args[:1]) if name.endswith("_") else []
    if name in DROPOUT_NAMES and not call.kwargs.get("training", True):
        return []
    is_method = name.endswith("_") and not name.startswith("_") and name not in _WITHOUT_WRITING
    if is_method or name in _OPERATORS or name == "__setitem__" or call.kwargs.get("inplace"):
        return call.tensors[:1]
    return []


def overwritten_tensor(call: FunctionCall) -> Tensor | None:
    """Return the first tensor that a function call overwrites in place; None if it overwrites none."""
    return next(iter(overwritten_tensors(call)), None)


BMM = torch.bmm
"""Torch's own function, also while another one replaces it."""

MATMULS = functions_named("matmul", "__matmul__", "bmm", "mm") | {torch.linalg.matmul}
ADDED_PRODUCTS = functions_named("baddbmm", "addmm") | {Tensor.baddbmm_, Tensor.addmm_}
CONVOLUTIONS = functions_named("conv1d", "conv2d", "conv3d") | {F.conv1d, F.conv2d, F.conv3d}


def multiplied_and_summed(left: Tensor, right: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Return the sum of the product of two tensors over the axes `dims`, as models write it by `*` and `sum`."""
    return (left * right).sum(tuple(dims), keepdim=keepdim)


def multiplied_and_averaged(left: Tensor, right: Tensor, dims: Sequence[int], keepdim: bool) -> Tensor:
    """Return the mean of the product of two tensors over the axes `dims`, as models write it by `*` and `mean`."""
    return (left * right).mean(tuple(dims), keepdim=keepdim)


PRODUCTS = (MATMULS | ADDED_PRODUCTS | CONVOLUTIONS) | {
    *(Tensor.__rmatmul__, F.linear, torch.einsum, torch.tensordot, multiplied_and_summed, multiplied_and_averaged)
}
"""Functions that sum products of two or more tensors over an axis."""

Label = str | int
"""Name of an axis in a product; the same in all tensors that share the axis."""


class Contraction(NamedTuple):
    """Product of tensors, as in Einstein notation: elements are multiplied, and the products are summed over all axes
    that the result does not have.

    Attributes:
        operands: the multiplied tensors.
        labels: labels of the axes of each operand; None for an axis of size 1 that is broadcast.
        result: labels of the axes of the result.
    """

    operands: tuple[Tensor, ...]
    labels: tuple[tuple[Label | None, ...], ...]
    result: tuple[Label, ...]

    def labels_of(self, tensor: Tensor) -> tuple[Label | None, ...]:
        """Return the labels of the axes of `tensor`, one of the multiplied tensors."""
        return next(labels for operand, labels in zip(self.operands, self.labels, strict=True) if operand is tensor)

    def multiplies(self, tensor: Tensor) -> bool:
        """Return True if `tensor` is one of the multiplied tensors."""
        return any(operand is tensor for operand in self.operands)

    @property
    def summed(self) -> set[Label | None]:
        """Labels of the axes over which the products are summed."""
        return {label for labels in self.labels for label in labels} - set(self.result) - {None}

    @property
    def shared_by_all(self) -> set[Label]:
        """Labels of the axes that the result and all multiplied tensors have."""
        return {label for label in self.result if all(label in labels for labels in self.labels)}


def contraction_of(function: Callable[..., Any], args: Sequence[Any], kwargs: dict[str, Any]) -> Contraction | None:
    """Return the product of tensors that a call of `function` computes, with a label for every axis. Return None if the
    function computes no such product, or if its arguments cannot be interpreted.
    """
    if function in _READERS:
        return _READERS[function](*args, **kwargs)
    operands = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if function is F.linear and len(operands) > 1:
        x, weight = operands[:2]
        rows: tuple[Label, ...] = tuple(range(x.ndim - 1))
        return Contraction((x, weight), ((*rows, "in"), ("out", "in")[-weight.ndim :]), (*rows, "out"))
    if function in CONVOLUTIONS and len(operands) > 1:
        x, weight = operands[:2]
        batch: tuple[Label, ...] = ("batch",)[: x.ndim - weight.ndim + 1]
        space: tuple[Label, ...] = tuple(range(weight.ndim - 2))
        kernel = tuple(f"kernel {axis}" for axis in space)
        return Contraction((x, weight), ((*batch, "in", *space), ("out", "in", *kernel)), (*batch, "out", *space))
    if function in ADDED_PRODUCTS:
        operands = operands[1:]
    elif function is Tensor.__rmatmul__:
        operands.reverse()
    elif function not in MATMULS:
        return None
    return _matmul(*operands[:2]) if len(operands) > 1 else None


def product_with(call: FunctionCall, tensor: Tensor) -> Contraction | None:
    """Return the product that a function call computes of `tensor` and other tensors; None if it computes none."""
    product = contraction_of(call.function, call.args, call.kwargs) if call.function in PRODUCTS else None
    return product if product is not None and product.multiplies(tensor) else None


def adds_to_product(call: FunctionCall) -> bool:
    """Return True if a call of a function in `PRODUCTS` (products of tensors, such as `addmm`) also adds another
    tensor, such as a bias, or multiplies the product by a factor.
    """
    function, kwargs = call.function, call.kwargs
    if function in ADDED_PRODUCTS:
        added = call.tensors[0]
        is_written = "out" in kwargs or function.__name__.endswith("_") or added.is_meta
        adds = kwargs.get("beta", 1) != 0 and (is_written or bool((added != 0).any()))
        return adds or kwargs.get("alpha", 1) != 1
    return (function is F.linear or function in CONVOLUTIONS) and len(call.tensors) > 2


def _matmul(left: Tensor, right: Tensor) -> Contraction | None:
    rank = max(left.ndim, right.ndim) - 2

    def batch(tensor: Tensor) -> tuple[Label | None, ...]:
        sizes = tensor.shape[:-2]
        return tuple(rank - len(sizes) + axis if size > 1 else None for axis, size in enumerate(sizes))

    if not left.ndim or not right.ndim:
        return None
    rows: tuple[Label, ...] = ("left",) if left.ndim > 1 else ()
    columns: tuple[Label, ...] = ("right",) if right.ndim > 1 else ()
    labels = (*batch(left), *rows, "summed"), (*batch(right), "summed", *columns)
    return Contraction((left, right), labels, (*range(rank), *rows, *columns))


def _tensordot(a: Tensor, b: Tensor, dims: Any = 2, out: Any = None) -> Contraction | None:
    """Return the product that a call of `torch.tensordot` computes, as a `Contraction` (multiplied tensors with
    labelled axes); None if `dims` is a tensor.
    """
    if isinstance(dims, Tensor):
        return None
    of_a, of_b = (range(-dims, 0), range(dims)) if isinstance(dims, int) else dims
    summed = {axis % a.ndim: f"summed {index}" for index, axis in enumerate([of_a] if isinstance(of_a, int) else of_a)}
    others = {axis % b.ndim: f"summed {index}" for index, axis in enumerate([of_b] if isinstance(of_b, int) else of_b)}
    left = tuple(summed.get(axis, f"left {axis}") for axis in range(a.ndim))
    right = tuple(others.get(axis, f"right {axis}") for axis in range(b.ndim))
    return Contraction((a, b), (left, right), tuple(each for each in (*left, *right) if not each.startswith("summed")))


def _multiplied_and_summed(left: Tensor, right: Tensor, dims: Sequence[int], keepdim: bool) -> Contraction:
    """Return the product of two tensors, summed over the axes `dims`, as a `Contraction` (multiplied tensors with
    labelled axes). Axes that are broadcast have no label: those of size 1, and those that were expanded.
    """
    rank = max(left.ndim, right.ndim)
    summed = {dim % rank for dim in dims}

    def labels(tensor: Tensor) -> tuple[Label | None, ...]:
        first = rank - tensor.ndim
        axes = zip(tensor.shape, tensor.stride(), strict=True)
        return tuple(first + axis if size > 1 and stride else None for axis, (size, stride) in enumerate(axes))

    result: list[Label] = [f"kept {axis}" if axis in summed else axis for axis in range(rank)]
    return Contraction(
        (left, right),
        (labels(left), labels(right)),
        tuple(label for axis, label in enumerate(result) if keepdim or axis not in summed),
    )


def _einsum(equation: Any, *arguments: Any) -> Contraction | None:
    """Return the product that a call of `torch.einsum` computes, as a `Contraction` (multiplied tensors with labelled
    axes). Return None if the equation is not a string, or repeats a letter in a term.
    """
    operands = arguments[0] if len(arguments) == 1 and isinstance(arguments[0], list | tuple) else arguments
    if not isinstance(equation, str):
        return None
    terms, arrow, result = equation.replace(" ", "").partition("->")
    inputs = terms.split(",")
    if len(inputs) != len(operands) or any(
        len(set(term.replace(".", ""))) != len(term.replace(".", "")) for term in inputs
    ):
        return None
    letters = terms.replace(",", "").replace(".", "")
    dots = "..." if "." in terms else ""
    result = result if arrow else dots + "".join(sorted(x for x in set(letters) if letters.count(x) == 1))
    labels = [_expanded(term, operand.ndim, operand.shape) for term, operand in zip(inputs, operands, strict=True)]
    most = max(operand.ndim - len(term.replace(".", "")) for term, operand in zip(inputs, operands, strict=True))
    return Contraction(tuple(operands), tuple(labels), _expanded(result, len(result.replace(".", "")) + most))  # type: ignore[arg-type]


_READERS: dict[Callable[..., Any], Callable[..., Contraction | None]] = {
    torch.einsum: _einsum,
    torch.tensordot: _tensordot,
    multiplied_and_summed: _multiplied_and_summed,
    multiplied_and_averaged: _multiplied_and_summed,
}
"""Functions that read the arguments of a product which states its axes."""


def _expanded(term: str, ndim: int, shape: Sequence[int] | None = None) -> tuple[Label | None, ...]:
    """Return the labels of the axes in one term of an einsum equation. An ellipsis stands for axes with the labels ...,
    -2, -1. Where such an axis has size 1 in `shape`, it is broadcast, and its label is None.
    """
    before, dots, after = term.partition("...")
    count = ndim - len(before) - len(after) if dots else 0
    numbers: list[Label | None] = [-position for position in range(count, 0, -1)]
    if shape is not None:
        numbers = [None if shape[len(before) + i] == 1 else number for i, number in enumerate(numbers)]
    return (*before, *numbers, *after)


def is_parameter(tensor: Tensor) -> bool:
    """Return True for a parameter of a module, and for a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(tensor._base, nn.Parameter)


CONCATENATIONS = functions_named("cat", "concat", "concatenate")
"""Functions that concatenate tensors."""

REORDERINGS = functions_named("flip", "roll", "fliplr", "flipud")
"""Functions that move tokens to other places."""

SELECTIONS = REORDERINGS | functions_named(
    *("__getitem__", "chunk", "split", "split_with_sizes", "tensor_split", "unbind", "select", "narrow"),
    *("index_select", "gather", "take_along_dim", "masked_select"),
)
"""Functions that may return some of the tokens of a tensor."""

ASSIGNMENT = functions_named("__setitem__")
"""Function that assigns to an index of a tensor."""

PLACEMENTS = ASSIGNMENT | functions_named(
    *("index_copy", "index_add", "index_put", "scatter", "scatter_add"),
    *("index_copy_", "index_add_", "index_put_", "scatter_", "scatter_add_"),
)
"""Functions that write tokens to places in another tensor, perhaps by an index."""

CONSTANTS = functions_named(
    *("zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like"),
    *("new_zeros", "new_ones", "new_full", "new_empty"),
)
"""Functions whose result does not depend on the numbers in a tensor that is passed to them."""


def written_by(call: FunctionCall, result: Any) -> Any:
    """Return the tensors that contain what a function call computed: the tensor `x` of an assignment `x[i] = y`, and
    the result of any other call.
    """
    return call.args[0] if call.function in ASSIGNMENT else result


Value = TypeVar("Value")


class TensorMap(Generic[Value]):
    """Mapping with tensors as keys, compared by identity. It keeps no key in memory: an entry disappears when its
    tensor no longer exists. A value must therefore not refer to its own key.
    """

    def __init__(self) -> None:
        self._entries: dict[int, tuple[weakref.ref[Tensor], Value]] = {}

    def __bool__(self) -> bool:
        return bool(self._entries)

    def get(self, tensor: Tensor) -> Value | None:
        """Return the value stored for a tensor; None if there is none."""
        entry = self._entries.get(id(tensor))
        return entry[1] if entry is not None and entry[0]() is tensor else None

    def items(self) -> list[tuple[Tensor, Value]]:
        """Return all tensors with their values."""
        pairs = [(reference(), value) for reference, value in self._entries.values()]
        return [(tensor, value) for tensor, value in pairs if tensor is not None]

    def set(self, tensor: Tensor, value: Value) -> None:
        """Store the value of a tensor, in place of an earlier one."""
        self._entries[id(tensor)] = weakref.ref(tensor, partial(_discard, self._entries, id(tensor))), value

    def discard(self, tensor: Tensor) -> None:
        """Remove the value stored for a tensor, if there is one."""
        self._entries.pop(id(tensor), None)

    def move(self, tensor: Tensor, other: Tensor) -> None:
        """Store the value of `tensor`, if there is one, for the tensor `other` instead."""
        value = self.get(tensor)
        if value is not None:
            self.discard(tensor)
            self.set(other, value)


def _discard(entries: dict[int, tuple[weakref.ref[Tensor], Any]], key: int, reference: weakref.ref[Tensor]) -> None:
    entry = entries.get(key)
    if entry is not None and entry[0] is reference:
        del entries[key]
