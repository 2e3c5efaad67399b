"""Sources of the tensors in a running model: which tensors a result depends on, followed through torch's functions.

A source is a tensor that comes from outside of the followed functions, such as an input of the model, or the result of
a mixing step: a product of two activations, as in attention, or a concatenation of different sources. Sets of sources
are the bits of whole numbers.
"""

import weakref
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.intercept.module_call import ModuleCall

INPUT_AND_WEIGHT: frozenset[Any] = frozenset(
    {
        *(F.linear, F.embedding, F.conv1d, F.conv2d, F.conv3d, torch.conv1d, torch.conv2d, torch.conv3d),
        *(F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d),
    }
)
"""Functions whose first two arguments are an input and the weight of a linear map, or token ids and an embedding."""

PRODUCTS: frozenset[Any] = frozenset(
    {
        *(torch.matmul, Tensor.matmul, Tensor.__matmul__, Tensor.__rmatmul__, torch.mm, Tensor.mm),
        *(torch.bmm, Tensor.bmm, torch.einsum),
    }
)
"""Functions that multiply all their tensors."""

ADDED_PRODUCTS: frozenset[Any] = frozenset(
    {torch.addmm, Tensor.addmm, Tensor.addmm_, torch.baddbmm, Tensor.baddbmm, Tensor.baddbmm_}
)
"""Functions that add a tensor, the first argument, to the product of two others."""

CONCATENATIONS: frozenset[Any] = frozenset({torch.cat, torch.concat, torch.concatenate})
"""Functions that concatenate tensors."""


class Origin(NamedTuple):
    """Sources of one tensor, split by its last linear map, such as the projection of the queries.

    Attributes:
        projected: sources of the input of the last linear map; 0 if there was none.
        joined: sources that were added, multiplied or concatenated after it, such as rotary tables and cached keys.
        maps: names of the weights of the last linear map, or of several whose results were joined.
        factors: origins of the two factors, if the tensor follows from a product of two activations without another
            linear map, such as queries and keys for attention scores.
    """

    projected: int = 0
    joined: int = 0
    maps: frozenset[Hashable] = frozenset()
    factors: "tuple[Origin, Origin] | None" = None

    @property
    def sources(self) -> int:
        """All sources of the tensor."""
        return self.projected | self.joined


class CallOrigins(NamedTuple):
    """Origins of the queries, keys and values of one attention call; that of the keys is None if it is unknown."""

    q: Origin
    k: Origin | None
    v: Origin


NOTHING = Origin()
"""Origin of constants."""


class Lineage:
    """Origins of the tensors of one running model, in one thread.

    Attributes:
        given: sources that are arguments of the outermost running module.
        state: sources that are parameters or buffers of the model.
        mixing: sources that are the result of a mixing step.
        self_attention_keys: weights that computed the keys of self-attention, so that layers may share these keys.
    """

    def __init__(self) -> None:
        self.restart()

    def restart(self, given: Iterable[Any] = ()) -> None:
        """Forget all tensors and sources. The tensors among `given`, the arguments of a module call that starts, are
        the first new sources.
        """
        self._origins: dict[int, tuple[weakref.ref[Tensor], Origin]] = {}
        self._bits: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self.state = self.mixing = 0
        self.self_attention_keys: set[frozenset[Hashable]] = set()
        self.given = _union(self.origin(tensor, ()) for tensor in _tensors(given)).sources

    def record(self, function: Any, arguments: Sequence[Any], result: Any, module_calls: Sequence[ModuleCall]) -> None:
        """Record the origin of the `result` of a torch function: the origins of its arguments together, except for
        linear maps, products and concatenations.

        Args:
            function: the function.
            arguments: its arguments, those passed by name last.
            result: what it returned.
            module_calls: the running modules, to which parameters and buffers may belong, the innermost last.
        """
        written = arguments[0] if function is Tensor.__setitem__ else result
        results = [written] if isinstance(written, Tensor) else list(_tensors((written,)))
        if not results:
            return
        tensors = list(_tensors(arguments))
        origin = self._of_result(function, tensors, [self.origin(tensor, module_calls) for tensor in tensors])
        for tensor in results:
            self.set(tensor, origin)
        if tensors and written is tensors[0] and written._base is not None:  # possibly a write to a part of a tensor
            base = written._base
            self.set(base, _union((self.origin(base, module_calls), origin)))

    def record_module(self, arguments: Iterable[Any], output: Any, module_calls: Sequence[ModuleCall]) -> None:
        """Record the origin of the `output` of a module where it is unknown, as the module computed it by other
        functions than torch's: the origins of the module's `arguments` together, after a linear map. The last of the
        running modules is the module.
        """
        for tensor in _tensors((output,)):
            if id(tensor) not in self._origins:
                union = _union(self.origin(argument, module_calls) for argument in _tensors(arguments))
                self.set(tensor, Origin(union.sources, maps=frozenset([id(module_calls[-1].module)])))

    def origin(self, tensor: Tensor, module_calls: Sequence[ModuleCall]) -> Origin:
        """Return the origin of a tensor. If it is not the result of a recorded function, it is a new source: a
        parameter or buffer of one of the running modules, or a tensor from outside.
        """
        entry = self._origins.get(id(tensor))
        if entry is not None:
            return entry[1]
        bit = self._bit(("tensor", len(self._bits)))
        name = _name_in(module_calls, tensor) or (id(tensor) if isinstance(tensor, nn.Parameter) else None)
        if name is not None:
            self.state |= bit
            self._names[bit] = name
        self.set(tensor, Origin(joined=bit))
        return Origin(joined=bit)

    def set(self, tensor: Tensor, origin: Origin) -> None:
        """Store the origin of a tensor for as long as the tensor exists."""
        key, origins = id(tensor), self._origins
        entry = origins.get(key)
        reference = weakref.ref(tensor, lambda _: origins.pop(key, None)) if entry is None else entry[0]
        origins[key] = reference, origin

    def set_attended(self, out: Tensor, origins: CallOrigins) -> None:
        """Store the origin of the head outputs `out` of an attention call."""
        self.set(out, self.product(origins.q, origins.v))

    def linear(self, source: Origin, weight: Origin, offset: int = 0) -> Origin:
        """Return the origin of the result of a linear map.

        Args:
            source: origin of its input.
            weight: origin of its weight.
            offset: first element of the weight in the memory of a larger tensor.
        """
        names = frozenset((self._names[bit], offset) for bit in _bits_of(weight.sources & self.state))
        return Origin(source.sources or weight.sources, maps=names)

    def product(self, left: Origin, right: Origin) -> Origin:
        """Return the origin of a product of two activations: that of the left factor, such as the queries, with the
        mixing step as another source.
        """
        left, right = left._replace(factors=None), right._replace(factors=None)
        bit = self._bit(("product", right))
        self.mixing |= bit
        return left._replace(joined=left.joined | bit, factors=(left, right))

    def content(self, origin: Origin) -> int:
        """Return the sources on which the content of a projected tensor depends: those before its last linear map if
        there was one, without parameters and buffers if there are others.
        """
        sources = origin.projected or origin.joined
        return sources & ~self.state or sources

    def _of_result(self, function: Any, tensors: list[Tensor], origins: list[Origin]) -> Origin:
        """Return the origin of the result of a function that was called with these tensors, of these origins."""
        if function in CONCATENATIONS:
            return self._concatenated(origins)
        selected = slice(2) if function in INPUT_AND_WEIGHT else slice(1, 3) if function in ADDED_PRODUCTS else None
        selected = slice(None) if function in PRODUCTS else selected
        if selected is None or not origins[selected]:
            return _union(origins)
        offsets = [_offset(tensor) for tensor in tensors[selected]]
        (result, *others), (offset, *other_offsets) = origins[selected], offsets
        for other, other_offset in zip(others, other_offsets, strict=True):
            if not result.sources or not other.sources:
                result = _union((result, other))
            elif not other.sources & ~self.state:
                result = self.linear(result, other, other_offset)
            elif not result.sources & ~self.state:
                result = self.linear(other, result, offset)
            else:
                result = self.product(result, other)
        return result

    def _concatenated(self, origins: list[Origin]) -> Origin:
        """Return the origin of concatenated tensors. If their contents have different sources, the concatenation is a
        source too: the same source for all that concatenate the same contents in the same order.
        """
        union = _union(origins)
        of_projected = self._concatenation([origin.projected for origin in origins])
        of_all = self._concatenation([origin.projected or origin.joined for origin in origins])
        return union._replace(projected=union.projected | of_projected, joined=union.joined | of_all)

    def _concatenation(self, contents: list[int]) -> int:
        """Return the bit of a concatenation of tensors with these sources; 0 if they have the same sources, without
        parameters and buffers.
        """
        contents = [content & ~self.state for content in contents]
        if len({content for content in contents if content}) < 2:
            return 0
        bit = self._bit(("concatenation", tuple(contents)))
        self.mixing |= bit
        return bit

    def _bit(self, source: Hashable) -> int:
        """Return the bit of a source: a new one at its first use."""
        return self._bits.setdefault(source, 1 << len(self._bits))


def _union(origins: Iterable[Origin]) -> Origin:
    """Return the origin of a tensor that follows, element by element, from tensors with these origins."""
    result = NOTHING
    for origin in origins:
        if result is NOTHING or result == origin:
            result = origin
        elif origin != NOTHING:
            maps = result.maps | origin.maps if result.maps and origin.maps else result.maps or origin.maps
            factors = result.factors or origin.factors
            if result.factors is not None and origin.factors is not None:
                left, right = (_union(pair) for pair in zip(result.factors, origin.factors, strict=True))
                factors = left, right
            result = Origin(result.projected | origin.projected, result.joined | origin.joined, maps, factors)
    return result


def _tensors(arguments: Iterable[Any]) -> Iterator[Tensor]:
    """Yield the tensors among arguments, and those in lists, tuples and dicts among them."""
    for argument in arguments:
        if isinstance(argument, Tensor):
            yield argument
        elif isinstance(argument, tuple | list):
            yield from _tensors(argument)
        elif isinstance(argument, dict):
            yield from _tensors(argument.values())


def _offset(tensor: Tensor) -> int:
    """Return the position of a tensor's first element in the memory of the tensor that it is a view of."""
    return int(tensor.storage_offset()) if type(tensor) is Tensor and tensor.layout is torch.strided else 0


def _bits_of(sources: int) -> Iterator[int]:
    """Yield each bit of a set of sources."""
    while sources:
        bit = sources & -sources
        yield bit
        sources ^= bit


def _name_in(module_calls: Sequence[ModuleCall], tensor: Tensor) -> Hashable | None:
    """Return a name of a parameter or buffer of one of the running modules, which is the same in every call. Return
    None for other tensors.
    """
    for module_call in reversed(module_calls):
        module = module_call.module
        for name, own in (*module._parameters.items(), *module._buffers.items()):
            if own is tensor:
                return id(module), name
    return None
