"""Token ids that a running model looks up in its tables of embeddings, in place of those that it was called with."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.axes import VIEWS
from headwise.intercept.call_tokens import CallTokens
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.module_call import ModuleCall, named_arguments
from headwise.intercept.source_rules import CONSTANTS, PLACEMENTS, SELECTIONS
from headwise.intercept.tensor_map import TensorMap
from headwise.intercept.token_numbers import REPEATED, SORTS

INTEGERS = frozenset({torch.int64, torch.int32})
"""Types of token ids."""

_KEEPING_PLACES = (VIEWS - SELECTIONS) | {torch.where, Tensor.where, Tensor.copy_}
"""Functions that select or rearrange elements, but keep the order of tokens."""

_KEEPING_NAMES = frozenset(
    {"to", "type", "type_as", "long", "int", "clone", "contiguous", "detach", "masked_fill", "masked_fill_"}
    | {"index_fill", "index_fill_", "fill_", "masked_scatter", "masked_scatter_"}
)
"""Names of functions whose results have the ids of their arguments, or other ids, but no numbers computed from ids."""


class _Derived(NamedTuple):
    """Record of the computation of an integer tensor from others.

    Attributes:
        roots: tensors from which it was computed, such as an argument of the model.
        is_moved: True if elements may be at other places.
        is_computed: True if it may have other numbers than ids, such as hashes of them.
    """

    roots: tuple[Tensor, ...]
    is_moved: bool = False
    is_computed: bool = False


class _Lookup(NamedTuple):
    """One lookup of token ids in a table of embeddings.

    Attributes:
        ids: the ids.
        derived: how they were computed from arguments of the model.
        source: source of the embeddings, a bit that tensors computed from them have.
        is_argument: True if the tensor of ids is the argument itself, perhaps in another shape.
    """

    ids: Tensor
    derived: _Derived
    source: int
    is_argument: bool


class LookedUpIds:
    """Record of the token ids that a running model looks up in tables of embeddings."""

    def __init__(self) -> None:
        self._derived: TensorMap[_Derived] = TensorMap()
        self._lookups: list[_Lookup] = []

    def record(
        self,
        call: FunctionCall,
        integers: list[Tensor],
        result: Any,
        module_calls: Sequence[ModuleCall],
        is_table: Callable[[Tensor], bool],
        mark: Callable[[Tensor, object], int],
    ) -> None:
        """Record a function call that looks up token ids, or computes integers from others.

        Args:
            call: the call.
            integers: tensors of integers among its arguments.
            result: what it returned.
            module_calls: the running modules.
            is_table: function that returns True if a tensor depends on parameters and buffers alone.
            mark: function that adds a named source to a tensor, and returns it as a bit.
        """
        if call.function in CONSTANTS or any(tensor.is_meta for tensor in integers):
            return
        ids = _looked_up(call, integers, is_table)
        if ids is not None and isinstance(result, Tensor):
            if self._are_ids([ids], module_calls):
                same = [number for number, each in enumerate(self._lookups) if _are_equal(each.ids, ids)]
                number = same[0] if same else len(self._lookups)
                source = mark(result, ("ids", number))
                if not same:
                    derived = self._of(ids)
                    is_argument = any(_is_same_memory(ids, root) for root in derived.roots)
                    self._lookups.append(_Lookup(ids.detach().clone(), derived, source, is_argument))
            return
        written = call.args[0] if call.function is Tensor.__setitem__ else result
        for tensor in written if isinstance(written, list | tuple) else (written,):
            if isinstance(tensor, Tensor) and tensor.dtype in INTEGERS:
                self._derived.set(tensor, self._after(call, integers, module_calls))

    @property
    def are_of_arguments(self) -> bool:
        """True if all ids that were looked up are arguments of the model, unchanged. Other ids may be equal to those of
        an argument in one call, and differ in the next.
        """
        return all(each.is_argument for each in self._lookups)

    def of_call(
        self, argument: Tensor | None, content: int | None, sizes: tuple[int, int], given: int, reorderings: int
    ) -> CallTokens:
        """Return the token ids of an attention call: those that the model has looked up for its queries.

        If these are computed from the argument and differ from it in every token, but stand for the same tokens, as
        hashes do, return the argument.

        Args:
            argument: ids that the model around the attention was called with; None if there were none.
            content: sources of the queries; None if they are unknown.
            sizes: number of the sequences of the call, and of its queries.
            given: sources of the argument.
            reorderings: sources that are another order of tokens.
        """
        if argument is None or content is None:
            return CallTokens(argument)
        roots = self._of(argument).roots
        of_argument = [each for each in self._lookups if any(a is b for a in each.derived.roots for b in roots)]
        read = [each for each in of_argument if each.source & content]
        if not of_argument and content & given:
            return CallTokens(argument)
        fits = len(argument) == sizes[0] and argument.shape[1] >= sizes[1]
        if not read or content & reorderings:
            return CallTokens(None, fits, bool(read))
        others = [each for each in read if not _are_of_argument(each.ids, argument)]
        if not others or _are_parts(read, argument) or _are_names(others, argument, len(read) > len(others)):
            return CallTokens(argument)
        ids, (_, is_moved, is_computed), *_ = others[0]
        if len(read) > 1 or is_computed or ids.ndim != 2:
            return CallTokens(None, fits, True)
        return CallTokens(ids, fits and (len(ids) != sizes[0] or ids.shape[1] < sizes[1]), is_moved)

    def _of(self, tensor: Tensor) -> _Derived:
        """Return how an integer tensor was computed; by default, it is an argument or a constant."""
        return self._derived.get(tensor) or _Derived((tensor,))

    def _are_ids(self, tensors: Sequence[Tensor], module_calls: Sequence[ModuleCall]) -> bool:
        """Return True if some of `tensors` were computed from the token ids that a running module was called with."""
        return any(_is_argument(root, module_calls) for tensor in tensors for root in self._of(tensor).roots)

    def _after(self, call: FunctionCall, integers: list[Tensor], module_calls: Sequence[ModuleCall]) -> _Derived:
        """Return how the result of a function call was computed from the `integers` among its arguments."""
        function, first = call.function, call.tensors[0]
        is_view = (function in VIEWS or function in SELECTIONS) and first is integers[0]
        content, indices = (integers[:1], integers[1:]) if is_view else (integers, [])
        is_remapped = (
            function in SELECTIONS and not self._are_ids(content, module_calls) and self._are_ids(indices, module_calls)
        )
        before = [self._of(each) for each in (*content, *(indices if is_remapped else []))]
        keeps = function in REPEATED or function in SORTS or getattr(function, "__name__", "") in _KEEPING_NAMES
        is_moved = function in SORTS or (function in REPEATED and function not in _KEEPING_PLACES)
        if is_remapped or (function in PLACEMENTS and call.tensors[-1] is first):  # by a table, or by a mask
            is_moved = False
        return _Derived(
            tuple({id(root): root for each in before for root in each.roots}.values()),
            is_moved or any(each.is_moved for each in before),
            is_remapped or not keeps or any(each.is_computed for each in before),
        )


def _looked_up(call: FunctionCall, integers: list[Tensor], is_table: Callable[[Tensor], bool]) -> Tensor | None:
    """Return the ids that a function call looks up in a table of embeddings. Return None if it does something else."""
    function, tensors = call.function, call.tensors
    if function in {F.embedding, torch.embedding, F.one_hot}:
        return integers[0]
    if function not in {Tensor.__getitem__, torch.index_select, Tensor.index_select} or len(tensors) != 2:
        return None
    table, ids = tensors
    is_whole = function is not Tensor.__getitem__ or call.args[1] is ids
    return ids if is_whole and table.is_floating_point() and table.ndim == 2 and is_table(table) else None


def _is_argument(tensor: Tensor, module_calls: Sequence[ModuleCall]) -> bool:
    """Return True if a running module was called with `tensor` as its token ids."""
    arguments = [named_arguments(module_call.arguments) for module_call in module_calls]
    return any(value is tensor for each in arguments for name, value in each.items() if name.endswith("input_ids"))


def _is_same_memory(ids: Tensor, argument: Tensor) -> bool:
    """Return True if two tensors have the same elements in the same memory."""
    is_dense = ids.is_contiguous() and argument.is_contiguous() and ids.dtype == argument.dtype
    return is_dense and ids.numel() == argument.numel() and ids.data_ptr() == argument.data_ptr()


def _are_equal(ids: Tensor, others: Tensor) -> bool:
    """Return True if two tensors have the same shape and the same numbers."""
    return ids.shape == others.shape and ids.device == others.device and bool((ids == others).all())


def _are_of_argument(ids: Tensor, argument: Tensor) -> bool:
    """Return True if `ids` are those of the `argument`, perhaps in another shape."""
    if ids.numel() != argument.numel():
        return False
    return (ids.ndim == 2 and _are_equal(ids.T, argument)) or _are_equal(ids.reshape(argument.shape), argument)


def _are_parts(lookups: list[_Lookup], argument: Tensor) -> bool:
    """Return True if the ids of `lookups`, one after the other, are those of the `argument`."""
    if any(each.ids.ndim != 2 or len(each.ids) != len(argument) for each in lookups):
        return False
    return _are_equal(torch.cat([each.ids.to(argument) for each in lookups], 1), argument)


def _are_names(lookups: list[_Lookup], argument: Tensor, are_known: bool) -> bool:
    """Return True if the ids of `lookups`, taken together, are other names of the tokens in `argument`, as hashes or
    ids with an offset are: equal for equal tokens, and different for different ones. Where a single lookup has some ids
    of the argument, the model has changed the others.

    Args:
        lookups: lookups of computed ids.
        argument: ids that the model was called with.
        are_known: True if the model also looks up the ids of the argument, so that the others may be any numbers.
    """
    if not all(each.derived.is_computed for each in lookups):
        return False
    if are_known or any(each.derived.is_moved or each.ids.shape != argument.shape for each in lookups):
        return are_known
    names = argument.flatten()[None]
    looked_up = torch.stack([each.ids.flatten() for each in lookups]).to(argument)
    if len(lookups) == 1 and bool((looked_up == names).any()):
        return False
    counts = {torch.unique(each, dim=1).shape[1] for each in (names, looked_up, torch.cat([names, looked_up]))}
    return len(counts) == 1
