"""Graph of the operators of a run, from storage to storage: where the scores of a softmax come from."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

PRODUCTS = ("bmm", "mm", "addmm", "baddbmm", "mv", "linear", "convolution", "_grouped_mm")
LOOKUPS = ("embedding",)
"""Operators whose results are no parameters, although all of their floating arguments are."""


COPIES = ("clone", "_to_copy", "cat", "stack", "index", "index_select", "copy", "constant_pad_nd", "roll")
"""Operators whose results consist of elements of their arguments."""

EXCHANGE = "exchange"
"""Operator that moves sequences of tokens to other places, and leaves the tokens of each sequence in their order."""


@dataclass(frozen=True)
class Scores:
    """Origin of the scores of a softmax: the products of two activations that were added up.

    Attributes:
        factors: sources of the two factors of each product.
    """

    factors: tuple[tuple["Sources", "Sources"], ...] = ()

    @property
    def is_product(self) -> bool:
        """True if the scores come from a product of two tensors, neither of which is a parameter."""
        return bool(self.factors)

    @property
    def is_direct(self) -> bool:
        """True if the factors of a product have a common source directly before their last linear layers."""
        return any(first.near & second.near for first, second in self.factors)

    @property
    def is_self(self) -> bool | None:
        """True if queries and keys of a product come from the same tensors; None if only some of their sources are the
        same, or if one of them has no linear layer. Other products are scores of relative positions.

        Without a common source directly before the last linear layers, one layer more decides. Keys of latent attention
        and of spatial reduction pass two linear layers.
        """
        kinds = [_is_same(first, second) for first, second in self.factors]
        return True if True in kinds else None if None in kinds or not kinds else False


@dataclass(frozen=True)
class Sources:
    """Tensors from which a factor was computed, as numbers of their storages.

    Attributes:
        near: inputs of the last linear layers before the factor, or the tensors that these inputs were copied from.
        far: the same, and the inputs of the linear layers before these.
        passed: the same, and all tensors from which these were computed without another product.
        exchanged: those of `near` in which sequences have other places.
    """

    near: frozenset[int]
    far: frozenset[int]
    passed: frozenset[int]
    exchanged: frozenset[int]


def _is_same(first: Sources, second: Sources) -> bool | None:
    if not first.near or not second.near:
        return None
    if first.exchanged != second.exchanged:
        return False
    if first.near & second.near:
        return True if first.near == second.near else None
    if first.far & second.far:
        return True
    return None if first.passed & second.passed else False


class OperatorGraph:
    """Operators by the storage that they wrote, with the storages that they read."""

    def __init__(self, model: nn.Module) -> None:
        state = [*model.parameters(), *model.buffers()]
        self._state = {tensor.untyped_storage()._cdata for tensor in state}
        self._writers: dict[int, list[tuple[str, tuple[int, ...]]]] = {}
        self._alive: list[Any] = [tensor.untyped_storage() for tensor in state]

    def add(self, name: str, arguments: Iterable[Tensor], results: Iterable[Tensor]) -> None:
        """Record an operator. Views are no operators here, since they share their storage."""
        inputs = self._keys(arguments)
        for key in self._keys(results):
            if name in PRODUCTS or key not in inputs or len(inputs) > 1:
                others = tuple(other for other in inputs if other != key or name in PRODUCTS)
                self._writers.setdefault(key, []).append((name, others))

    def _keys(self, tensors: Iterable[Tensor]) -> tuple[int, ...]:
        storages = [tensor.untyped_storage() for tensor in tensors if tensor.is_floating_point()]
        self._alive.extend(storages)
        return tuple(storage._cdata for storage in storages)

    def is_state(self, key: int, depth: int = 40) -> bool:
        """Return whether a storage has a parameter or buffer, or what elementwise functions or copies make of them."""
        if key in self._state:
            return True
        writers = self._writers.get(key, [])
        if not writers or not depth:
            return False
        inputs = [other for name, others in writers for other in others]
        if any(name in PRODUCTS or name in LOOKUPS for name, _ in writers) or not inputs:
            return False
        return all(self.is_state(other, depth - 1) for other in inputs)

    def scores(self, tensor: Tensor) -> Scores:
        """Return the origin of the scores of a softmax: the last products of two activations before it."""
        products = self._products_before(tensor.untyped_storage()._cdata)
        products = [factors for factors in products if not self._state_in(factors)]
        return Scores(tuple((self._both(first), self._both(second)) for first, second in products))

    def _both(self, factor: int) -> Sources:
        near = self._sources(factor)
        far = near.union(*(self._sources(source) for source in near))
        exchanged = frozenset(key for key in near if any(name == EXCHANGE for name, _ in self._writers.get(key, ())))
        return Sources(near, far, far.union(*(self._passed(source) for source in far)), exchanged)

    def _passed(self, start: int) -> frozenset[int]:
        """Return the activations from which a storage was computed without a product."""
        seen, todo = {start}, [start]
        while todo:
            for name, inputs in self._writers.get(todo.pop(), ()):
                new = [other for other in inputs if other not in seen and not self.is_state(other)]
                seen.update(new if name not in PRODUCTS else ())
                todo.extend(new if name not in PRODUCTS else ())
        return frozenset(seen)

    def _products_before(self, start: int) -> list[tuple[int, int]]:
        """Return the factors of the products whose results reach a storage without another product between."""
        products, seen, todo = [], {start}, [start]
        while todo:
            for name, inputs in self._writers.get(todo.pop(), ()):
                if name in PRODUCTS and len(inputs) > 1:
                    has_bias_last = name in ("linear", "convolution")
                    products.append((inputs[0], inputs[1]) if has_bias_last else (inputs[-2], inputs[-1]))
                    continue
                todo.extend(other for other in inputs if other not in seen)
                seen.update(inputs)
        return products

    def _state_in(self, factors: tuple[int, int]) -> bool:
        return any(self.is_state(factor) for factor in factors)

    def _sources(self, start: int) -> frozenset[int]:
        """Return the inputs of the linear layers (products with a parameter) before a factor of the scores."""
        sources: set[int] = set()
        for factors in self._products_before(start):
            if self._state_in(factors):
                for factor in [factor for factor in factors if not self.is_state(factor)] or factors[:1]:
                    sources |= self._originals(factor)
        return frozenset(sources)

    def _originals(self, key: int, depth: int = 8) -> set[int]:
        """Return the storages from which a storage was copied; itself if it was computed."""
        writers = [(name, inputs) for name, inputs in self._writers.get(key, ()) if inputs]
        if not depth or not writers or any(name not in COPIES for name, _ in writers):
            return {key}
        return {original for _, inputs in writers for other in inputs for original in self._originals(other, depth - 1)}
