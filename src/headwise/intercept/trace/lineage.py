"""Sources of all tensors of a running model, followed through the torch functions that it calls.

A source is a tensor that comes from outside, such as an input of the model, or the result of a mixing step: a product
of two activations, as in attention, a concatenation of different sources, or a selection of some of the tokens. Sets of
sources are the bits of whole numbers. They decide if attention is self- or cross-attention.
"""

from collections import defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.intercept.trace.functions import (
    ADDED_PRODUCTS,
    CONCATENATIONS,
    CONSTANTS,
    CONVOLUTIONS,
    PLACEMENTS,
    PRODUCTS,
    REORDERINGS,
    SELECTIONS,
    FunctionCall,
    TensorMap,
    contraction_of,
    is_parameter,
    tensors_among,
    version_of,
)
from headwise.intercept.trace.modules import RunningModule
from headwise.intercept.trace.tokens import INTEGERS, CallTokens, ComparedTokens, LookedUpIds, TokenNumbers


class Origin(NamedTuple):
    """Sources of one tensor: the earlier tensors on which it depends. They are stored in two groups: sources of the
    input of the tensor's last linear map, such as the query projection, and sources that were added after this map.

    Attributes:
        projected: sources of the input of the last linear map; 0 if there was none.
        joined: sources that were added, multiplied or concatenated after it, such as rotary tables and cached keys.
        maps: names of the weights of the last linear map, or of several whose results were joined.
        factors: origins of the two factors of each product of two activations that the tensor follows from without
            another linear map. Attention scores have the queries and the keys, and possibly the queries and positions.
    """

    projected: int = 0
    joined: int = 0
    maps: frozenset[Hashable] = frozenset()
    factors: "tuple[tuple[Origin, Origin], ...]" = ()

    @property
    def sources(self) -> int:
        """All sources of the tensor (tensors on which it depends), as the bits of an int."""
        return self.projected | self.joined


class CallOrigins(NamedTuple):
    """Origins of the queries, keys and values of one attention call. The origin of a tensor is the earlier tensors on
    which it depends.

    Attributes:
        q: origin of the queries.
        k: origin of the keys; None if it is unknown.
        v: origin of the values.
        tokens: tokens of the queries, keys and values; None if they are unknown.
        are_moved: True if the model has moved queries or keys of the scores to other places, and their tokens there
            are unknown.
        added: origins of the queries of further self-attention, whose scores are added to those of the call. A query of
            the call belongs to the same token as each query that is added to it.
    """

    q: Origin
    k: Origin | None
    v: Origin
    tokens: ComparedTokens | None = None
    are_moved: bool = False
    added: tuple[Origin, ...] = ()


NO_ORIGIN = Origin()
"""Origin of no tensor."""


def union_of(origins: Iterable[Origin]) -> Origin:
    """Return the origin (source tensors) of a tensor computed element by element from tensors with these origins."""
    result = NO_ORIGIN
    for origin in origins:
        if result is NO_ORIGIN:
            result = origin
        elif origin is not NO_ORIGIN and origin is not result and origin != result:
            maps = result.maps | origin.maps if result.maps and origin.maps else result.maps or origin.maps
            factors = result.factors + tuple(each for each in origin.factors if each not in result.factors)
            result = Origin(result.projected | origin.projected, result.joined | origin.joined, maps, factors)
    return result


class Lineage:
    """Record of the sources of each tensor in a running model: the earlier tensors on which it depends. The sources of
    queries and keys show whether attention is self- or cross-attention. Each session (state of interception) has its
    own record.

    Args:
        before: the record of earlier calls of the model; None if there is none.

    Attributes:
        given: sources that are arguments of the outermost running module.
        outside: sources that are other tensors from outside of the model call, such as cached keys, or parts of these.
        state: sources that are parameters or buffers of the model.
        mixing: sources that are the result of a mixing step.
        concatenations: those of them that are a concatenation.
        selections: those of them that are a selection.
        weighted: those of them that are a selection from a product of two activations, such as weighted sums of the
            outputs of several layers, so that it may be one of these sums for the same tokens.
        placed: source of tensors in which tokens were written to other places, since the last linear map.
        mixed: sources that are a product of tokens with a matrix that does not depend on them, such as a permutation.
            Each token of the result may contain several tokens.
        self_attention_keys: weights that computed the keys of self-attention, with the contents of these keys, so that
            layers may share them.
        recurrent_keys: those of them that contain keys of earlier calls.
        reorderings: those of them that contain all sequences or their tokens in another order.
        tokens: numbers of the tokens in the tensors.
        ids: token ids that the model looks up.
        depends_on_indices: True if a derived fact depends on the numbers in a tensor by which the model selects. Such a
            tensor may have other numbers in the next call.
    """

    def __init__(self, before: "Lineage | None" = None) -> None:
        self._origins: TensorMap[Origin] = TensorMap()
        self._origins_before: TensorMap[Origin] = self._origins if before is None else before._origins_before
        self.restart()

    def restart(self, given: Iterable[Any] = ()) -> None:
        """Start the record of a new model call, whose arguments are the tensors in `given`. The record of the previous
        call is kept only to recognise its tensors and the weights that computed them.
        """
        self._origins_before = self._origins or self._origins_before
        self._origins = TensorMap()
        self._bits: dict[Hashable, int] = {}
        self._names: dict[int, Hashable] = {}
        self._maps_before: dict[int, frozenset[Hashable]] = {}
        self.state = self.mixing = self.outside = 0
        self.concatenations = self.selections = self.reorderings = self.weighted = self.mixed = 0
        self.placed = self._state_bit("placed")
        self.self_attention_keys: set[tuple[frozenset[Hashable], int]] = set()
        self.recurrent_keys: set[tuple[frozenset[Hashable], int]] = set()
        self.tokens, self.ids, self.depends_on_indices = TokenNumbers(), LookedUpIds(), False
        self.given = union_of(self.origin(tensor, ()) for tensor in tensors_among(given)).sources
        self.outside = 0

    def record(self, call: FunctionCall, result: Any, module_calls: Sequence[RunningModule]) -> None:
        """Record the sources (earlier tensors on which a tensor depends) of the `result` of a function call. By default
        they are the sources of all arguments together. Linear maps, products and concatenations of tokens have other
        rules; a concatenation of features of the same tokens follows the default. `module_calls` are the running
        modules, which own the parameters and buffers.
        """
        function, tensors = call.function, call.tensors
        written = call.args[0] if function is Tensor.__setitem__ else result
        results = [written] if isinstance(written, Tensor) else tensors_among((written,))
        if not results:
            return
        origins = [self._origins.get(tensor) or self.origin(tensor, module_calls) for tensor in tensors]
        joins_features = function in CONCATENATIONS and len({each.shape[:-1] for each in (*tensors, *results)}) == 1
        if joins_features:  # or the keys of scores
            origin = self._union(tensors, origins)
            origin = origin._replace(factors=self._joined_factors(origins) or origin.factors)
        else:
            origin = (_RULES.get(function, Lineage._union) if tensors else Lineage._of_constant)(self, tensors, origins)
            if function in PRODUCTS:
                origin = self._multiplied_by_matrix(call, tensors, origins, origin)
        if function in SELECTIONS:
            arguments = (*call.args, *call.kwargs.values())
            selection = (function, *map(_key_of, arguments[1:]))
            for index, tensor in enumerate(results):
                is_selected = _selects_tokens(function, arguments, tensor)
                after = self._selected(origin, origins[0], (index, *selection)) if is_selected else origin
                self.set(tensor, after)
                is_of_sequences = tensors[0].is_floating_point() and tensors[0].ndim == tensor.ndim > 2
                is_whole = is_selected and is_of_sequences and tensors[0].shape == tensor.shape
                if is_whole and _moves_tokens(call, tensors[0]):
                    self.reorderings |= after.joined & ~origin.joined
                elif is_whole and len(tensors) > 1:  # by an index that has changed nothing
                    self.depends_on_indices = True
        else:
            for tensor in results:
                self.set(tensor, origin)
        is_written = "out" in call.kwargs or (tensors and written is tensors[0])
        if is_written and written._base is not None:  # possibly a write to a part of a tensor
            base = written._base
            self.set(base, self._written([self.origin(base, module_calls), origin]))

    def record_tokens(self, call: FunctionCall, result: Any, module_calls: Sequence[RunningModule]) -> None:
        """Record to which tokens the elements of the `result` of a function call belong, and the token ids that the
        call looks up in a table of embeddings. The ids become a further source of the result (a tensor on which it
        depends).
        """
        self.tokens.record(call, result)
        self.ids.tokens.record_after(call, result, self.tokens)
        integers = [tensor for tensor in call.tensors if tensor.dtype in INTEGERS]
        if not integers:
            return

        def is_table(tensor: Tensor) -> bool:
            return not self.origin(tensor, module_calls).sources & ~self.state

        def mark(tensor: Tensor, source: Hashable) -> int:
            bit, origin = self._bit(source), self.origin(tensor, module_calls)
            self.set(tensor, origin._replace(joined=origin.joined | bit))
            return bit

        self.ids.record(call, integers, result, module_calls, is_table, mark)

    def tokens_of_call(
        self, argument: Tensor | None, origins: CallOrigins, sizes: tuple[int, int], modules: Sequence[RunningModule]
    ) -> CallTokens:
        """Return the token ids of the queries of an attention call, for `sizes`, the numbers of sequences and queries.
        If the queries depend on no ids, as queries made from positions, return the ids of other queries, whose scores
        are added to the scores of the call. `argument` is the ids that the model around the attention was called with;
        None if there were none.
        """
        given = 0 if argument is None else self.origin(argument, modules).sources & ~self.state
        content = self.content(origins.q) & ~self.state if origins.q.sources else None
        if content is not None and not self.ids.are_read_by(content):
            for query in origins.added:
                content |= self.content(query) & ~self.state
        if argument is not None and origins.tokens is not None and tuple(argument.shape) == sizes:
            are_moved, depends_on_indices = self.ids.order_of(origins.tokens.queries, argument)
            self.depends_on_indices |= depends_on_indices
            if are_moved:
                return CallTokens(None, True, True)
        return self.ids.of_call(argument, content, sizes, given, self.reorderings)

    def record_module(self, arguments: Iterable[Any], output: Any, module_calls: Sequence[RunningModule]) -> None:
        """Record the sources (earlier tensors on which a tensor depends) of a module's `output` if they are unknown, as
        when a library other than torch computed it. They are the sources of all `arguments`. If the arguments have
        different sources, the module itself is another source. The module counts as a linear map; its call is the last
        one in `module_calls`.
        """
        unknown = [tensor for tensor in tensors_among((output,)) if self._origins.get(tensor) is None]
        if not unknown:
            return
        origins = [self.origin(argument, module_calls) for argument in tensors_among(arguments)]
        module, sources = id(module_calls[-1].module), union_of(origins).sources
        contents = tuple(content for origin in origins if (content := self.content(origin) & ~self.state))
        if len(set(contents)) > 1:
            bit = self._bit(("module", module, contents))
            self.mixing |= bit
            sources |= bit
        for tensor in unknown:
            self.set(tensor, Origin(sources, maps=frozenset([module])))

    def origin(self, tensor: Tensor, module_calls: Sequence[RunningModule]) -> Origin:
        """Return the origin of a tensor: its sources, the earlier tensors on which it depends. A tensor that no
        recorded function has computed is its own source: a parameter or buffer of a running module, or a tensor from
        outside of the model call.
        """
        known = self._origins.get(tensor)
        if known is not None:
            return known
        source = "tensor", len(self._bits)
        name = _name_in(module_calls, tensor) or (id(tensor) if isinstance(tensor, nn.Parameter) else None)
        if name is None:
            bit = self._bit(source)
            self.outside |= bit
            before = self._origins_before.get(tensor)
            self._maps_before[bit] = before.maps if before is not None else frozenset()
        else:
            bit = self._state_bit(source)
        self._names[bit] = name
        self.set(tensor, Origin(joined=bit))
        return Origin(joined=bit)

    def mark(self, tensors: Iterable[Tensor]) -> int:
        """Record that these tensors have a source of their own, and return it as a bit."""
        bit = self._bit(("mark", len(self._bits)))
        for tensor in tensors:
            self.set(tensor, Origin(joined=bit))
        return bit

    def is_of_input(self, tensor: Tensor) -> bool:
        """Return True if a tensor is known to depend on an input of the model. Return False if it depends only on
        parameters, buffers and tensors from outside of the model call, or if this is unknown.
        """
        origin = self._origins.get(tensor)
        return origin is not None and bool(origin.sources & ~self.state & ~self.outside)

    def is_known(self, tensor: Tensor) -> bool:
        """Return True if the origin (source tensors) of a tensor is recorded in this call of the model."""
        return self._origins.get(tensor) is not None

    def is_new(self, tensor: Tensor, module_calls: Sequence[RunningModule]) -> bool:
        """Return True if the origin of a tensor is unknown: no recorded function has computed it, in this call of the
        model or the one before, and it is neither a parameter nor a buffer of a running module.
        """
        is_known = self.is_known(tensor) or self._origins_before.get(tensor) is not None
        return not is_known and not isinstance(tensor, nn.Parameter) and _name_in(module_calls, tensor) is None

    def discard(self, tensor: Tensor) -> None:
        """Discard the origin (source tensors) and the token numbers recorded for a tensor, since the model replaces its
        content.
        """
        self._origins.discard(tensor)
        self.tokens.discard(tensor)
        self.ids.tokens.discard(tensor)

    def move(self, tensor: Tensor, other: Tensor, module_calls: Sequence[RunningModule]) -> None:
        """Record for the tensor `other` the origin (source tensors), token numbers and token ids of `tensor`."""
        self.set(other, self.origin(tensor, module_calls))
        self.tokens.move(tensor, other)
        self.ids.move(tensor, other)

    def set(self, tensor: Tensor, origin: Origin) -> None:
        """Store the origin of a tensor: the earlier tensors on which it depends."""
        self._origins.set(tensor, origin)

    def set_attended(self, out: Tensor, origins: CallOrigins) -> None:
        """Store the origin (source tensors) of the head outputs `out` of an attention call whose inputs have the
        origins `origins`.
        """
        self.set(out, self.product(origins.q, origins.v))

    def linear(self, source: Origin, weight: Origin, offset: int = 0) -> Origin:
        """Return the origin (source tensors) of the result of a linear map: the sources of its input, whose origin is
        `source`, and the name of its `weight`. `offset` is the index of the weight's first element in the memory of a
        larger tensor.
        """
        names = frozenset((self._names.get(bit), offset) for bit in _bits_of(weight.sources & self.state))
        return Origin(source.sources & ~self.placed or weight.sources, maps=names)

    def product(self, left: Origin, right: Origin) -> Origin:
        """Return the origin (source tensors) of a product of two activations, such as queries and keys. It has the
        sources of the left factor. The product itself is a further source, since it mixes tokens.
        """
        left, right = left._replace(factors=()), right._replace(factors=())
        bit = self._bit(("product", right))
        self.mixing |= bit
        return left._replace(joined=left.joined | bit, factors=((left, right),))

    def content(self, origin: Origin) -> int:
        """Return the sources (earlier tensors) on which the content of a tensor depends, as the bits of an int. For a
        projected tensor, they are the sources of the input of its last linear map. Parameters and buffers count only if
        there are no other sources.
        """
        sources = origin.projected or origin.joined
        return sources & ~self.state or sources

    def _union(self, _: list[Tensor], origins: list[Origin]) -> Origin:
        """Return the union of `origins`, each the sources of one tensor. Origins that are parameters and buffers alone
        are left out, unless there are no others.
        """
        first = origins[0]
        if all(origin is first for origin in origins):
            return first
        return union_of([origin for origin in origins if origin.sources & ~self.state] or origins)

    def _of_constant(self, _: list[Tensor], __: list[Origin]) -> Origin:
        return Origin(joined=self._state_bit("constant"))

    def _mapped(self, tensors: list[Tensor], origins: list[Origin]) -> Origin:
        """Return the origin (source tensors) of the product of the first tensor with the second. If the second depends
        on parameters and buffers alone, it is the weight of a linear map; otherwise both are activations.
        """
        if origins[1].sources & ~self.state:
            return self._multiplied(tensors, origins)
        return self.linear(origins[0], origins[1], _offset(tensors[1]))

    def _multiplied(self, tensors: list[Tensor], origins: list[Origin]) -> Origin:
        """Return the origin (source tensors) of a product of `tensors` with these `origins`. A factor that depends on
        parameters and buffers alone counts as the weight of a linear map of the other factors.
        """
        result, offset = origins[0], _offset(tensors[0])
        for other, tensor in zip(origins[1:], tensors[1:], strict=True):
            are_weights = [not each.projected and not each.joined & ~self.state for each in (result, other)]
            if all(are_weights):
                result = union_of((result, other))
            elif any(are_weights):
                result = (
                    self.linear(other, result, offset)
                    if are_weights[0]
                    else self.linear(result, other, _offset(tensor))
                )
            else:
                result = self.product(result, other)
        return result

    def _multiplied_by_matrix(
        self, call: FunctionCall, tensors: list[Tensor], origins: list[Origin], product: Origin
    ) -> Origin:
        """Return the origin (source tensors) of a product of a tensor with a matrix that does not depend on it. If the
        product may sum over tokens, the product itself is a further source. A matrix from outside of the model call
        that is multiplied with features counts as the weight of a linear map. It is also recorded as a factor, since it
        may be cached keys. For any other product return `product`, its origin by the rules for linear maps and for two
        activations.
        """
        first = call.function in ADDED_PRODUCTS
        factors = list(zip(origins, tensors, strict=True))[first : first + 2]
        is_other = call.function in CONVOLUTIONS or any(tensor.is_nested for tensor in tensors)
        contraction = None if is_other else contraction_of(call.function, call.args, call.kwargs)
        if contraction is None or len(contraction.operands) != 2:
            return product
        ranks = [self._rank_of_matrix(origin) for origin, _ in factors]
        (matrix, weight), (origin, tensor) = factors if ranks[0] < ranks[1] else factors[::-1]
        rank, labels, are_inputs = min(ranks), contraction.labels_of(tensor), ranks == [_GIVEN, _GIVEN]
        summed = [axis for axis, size in enumerate(tensor.shape) if size > 1 and labels[axis] in contraction.summed]
        is_matrix = ranks[0] != ranks[1] or are_inputs
        if not is_matrix or not summed or origin.factors or matrix.sources & origin.sources & ~self.state:
            return product
        pair = ((factors[0][0]._replace(factors=()), factors[1][0]._replace(factors=())),)
        if are_inputs or self.tokens.are_summed(tensor, summed, is_trusted=rank == _STATE and is_parameter(weight)):
            is_view = matrix.sources in self._names and weight.layout is torch.strided
            view = (_offset(weight), weight.shape, weight.stride(), version_of(weight)) if is_view else len(self._bits)
            bit = self._bit(("mixed", self.content(origin), matrix.sources, view))
            self.mixed |= bit
            of_both = union_of([origin, matrix]) if are_inputs else origin
            base = product if rank == _STATE else of_both._replace(factors=pair)
            return base._replace(joined=base.joined | bit)
        if rank == _OUTSIDE:
            joined = origin.joined if origin.projected else 0
            return Origin(origin.projected or origin.joined, joined, origin.maps, pair)
        return product if rank == _STATE else union_of([product, origin])._replace(factors=pair)

    def _rank_of_matrix(self, origin: Origin) -> int:
        """Return a rank for one factor of a product, by the kind of its sources, which are in `origin`. The smaller the
        rank, the more likely the factor is a matrix that does not depend on the other factor.
        """
        sources = origin.sources & ~self.state
        if origin.projected or origin.factors:
            return _NO_MATRIX
        if not sources:
            return _STATE
        if not sources & ~self.outside and not any(self._maps_before.get(bit) for bit in _bits_of(sources)):
            return _OUTSIDE
        return _NO_MATRIX if sources & ~(self.given | self.outside) else _GIVEN

    def are_mixed(self, origins: CallOrigins) -> bool:
        """Return True if a matrix may have mixed tokens of an attention call, so that query i and key i, or key i and
        value i, need not be the same token. Such a matrix mixes queries, keys or values after their projection, or only
        some of the three before it.
        """
        q, k, v = origins.q, origins.k or origins.q, origins.v
        before = self.content(q) ^ self.content(k) | self.content(k) ^ self.content(v)
        after = [origin.joined for origin in (q, k, v) if origin.projected]
        return any(sources & self.mixed for sources in (before, *after))

    def _placed(self, tensors: list[Tensor], origins: list[Origin]) -> Origin:
        """Return the origin (source tensors) of the first of `tensors` after the others were written into it, as by
        `index_copy`. Integers are indices and do not count, unless the first tensor has the same dtype.
        """
        is_content = [tensor.is_floating_point() or tensor.dtype == tensors[0].dtype for tensor in tensors]
        origin = self._written([origin for origin, counts in zip(origins, is_content, strict=True) if counts])
        return origin._replace(joined=origin.joined | self.placed)

    def _written(self, origins: list[Origin]) -> Origin:
        """Return the origin (source tensors) of a tensor after other tensors were written into parts of it. `origins`
        are the origins of all of them.
        """
        union = union_of(origins)
        factors = self._joined_factors(list(dict.fromkeys(each for each in origins if each.factors)))
        return union._replace(factors=factors) if factors else union

    def _concatenated(self, tensors: list[Tensor], origins: list[Origin]) -> Origin:
        """Return the origin (source tensors) of concatenated tensors, without the empty ones. If the tensors have
        different sources, the concatenation is a further source: the same one whenever the same contents are
        concatenated in the same order. Sources that may be cached tensors are not compared. These come from outside of
        the model call, and the previous call computed them by no weights, or by weights that also computed one of the
        concatenated tensors.
        """
        return self._joined([origin for origin, tensor in zip(origins, tensors, strict=True) if tensor.numel()])

    def _joined(self, origins: list[Origin]) -> Origin:
        union, maps = union_of(origins), {frozenset[Hashable](), *(origin.maps for origin in origins)}
        cached = sum(bit for bit in _bits_of(union.sources & self.outside) if self._maps_before.get(bit) in maps)
        of_projected = self._concatenation([origin.projected for origin in origins], cached)
        of_all = self._concatenation([origin.projected or origin.joined for origin in origins], cached)
        factors = self._joined_factors(origins) or union.factors
        return union._replace(projected=union.projected | of_projected, joined=union.joined | of_all, factors=factors)

    def _joined_factors(self, origins: list[Origin]) -> tuple[tuple[Origin, Origin], ...]:
        """Return the factors (queries and keys) of concatenated scores. If the scores are products of the same queries,
        the factors are these queries and the concatenated keys; if of the same keys, the concatenated queries and these
        keys. Otherwise return an empty tuple.
        """
        pairs = [pair for origin in origins for pair in origin.factors]
        if len(origins) < 2 or any(len(origin.factors) != 1 for origin in origins):
            return ()
        lefts, rights = [left for left, _ in pairs], [right for _, right in pairs]
        if all(left == lefts[0] for left in lefts):
            return ((lefts[0], self._joined(rights)),)
        return ((self._joined(lefts), rights[0]),) if all(right == rights[0] for right in rights) else ()

    def _concatenation(self, contents: list[int], cached: int) -> int:
        """Return the bit that stands for a concatenation of tensors whose sources are `contents`. Return 0 if all
        tensors have the same sources, apart from parameters, buffers and the sources in `cached`.
        """
        contents = [content & ~self.state for content in contents]
        if len({content & ~cached for content in contents} - {0}) < 2:
            return 0
        bit = self._bit(("concatenation", tuple(contents)))
        self.mixing |= bit
        self.concatenations |= bit
        return bit

    def _selected(self, origin: Origin, whole: Origin, selection: Hashable) -> Origin:
        """Return the `origin` (source tensors) of tokens that were selected from a tensor with the origin `whole`, with
        the selection as a further source. Selections of the same tokens from the same content are the same source.
        """
        content = self.content(whole)
        if not content & ~self.state:
            return origin
        bit = self._bit(("selection", content, selection))
        self.mixing |= bit
        self.selections |= bit
        self.weighted |= bit if whole.factors else 0
        if not content & ~self.state & ~self.outside:  # such as cached keys without the oldest ones
            self.outside |= bit
        return origin._replace(joined=origin.joined | bit)

    def _state_bit(self, source: Hashable) -> int:
        bit = self._bit(source)
        self.state |= bit
        return bit

    def _bit(self, source: Hashable) -> int:
        return self._bits.setdefault(source, 1 << len(self._bits))


_RULES: dict[Any, Callable[[Lineage, list[Tensor], list[Origin]], Origin]] = {
    **dict.fromkeys(CONSTANTS, Lineage._of_constant),
    **dict.fromkeys(CONCATENATIONS, Lineage._concatenated),
    **dict.fromkeys(PRODUCTS, Lineage._multiplied),
    **dict.fromkeys(
        CONVOLUTIONS | {F.linear, F.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d}, Lineage._mapped
    ),
    **dict.fromkeys(ADDED_PRODUCTS, lambda self, tensors, origins: self._multiplied(tensors[1:], origins[1:])),
    **dict.fromkeys(PLACEMENTS, Lineage._placed),
}
"""Methods that return the origin of the result of a function; that of other functions is the union of all origins."""


_STATE, _OUTSIDE, _GIVEN, _NO_MATRIX = range(4)
"""Kinds of factors of a product: those that depend on parameters and buffers alone, on tensors from outside of the
model call, or on arguments of the model, and activations.
"""


def _offset(tensor: Tensor) -> int:
    """Return the index of the first element of a tensor in the memory that it shares with other views."""
    return int(tensor.storage_offset()) if type(tensor) is Tensor and tensor.layout is torch.strided else 0


def _bits_of(sources: int) -> Iterator[int]:
    while sources:
        bit = sources & -sources
        yield bit
        sources ^= bit


def _name_in(module_calls: Sequence[RunningModule], tensor: Tensor) -> Hashable | None:
    """Return a name for a parameter or buffer of a running module, the same in every call of the model: the module's id
    and the attribute's name. Return None for other tensors.
    """
    for module_call in reversed(module_calls):
        module = module_call.module
        for members in (module._parameters, module._buffers):
            for name, member in members.items():
                if member is tensor:
                    return id(module), name
    return None


def _selects_tokens(function: Any, arguments: Sequence[Any], result: Tensor) -> bool:
    """Return True if a function such as indexing has selected or reordered tokens: the `result` is shorter along an
    axis other than the last, or in another order.
    """
    before = arguments[0]
    if not isinstance(before, Tensor):
        return False
    if before.numel() == result.numel():
        return function in REORDERINGS or bool(tensors_among(arguments[1:]))
    return before.ndim != result.ndim or before.shape[:-1] != result.shape[:-1]


def _moves_tokens(call: FunctionCall, before: Tensor) -> bool:
    """Return True if a function moves tokens of `before` to other places, and not only features along its last axis. To
    test this, the call is repeated with a tensor that has the number of each token in place of its features.
    """
    if before.is_meta or "out" in call.kwargs:
        return True
    tokens = before.shape[:-1]
    numbers = torch.arange(tokens.numel(), device=before.device).view(*tokens, 1).expand(before.shape)
    moved = call.replaced(before, numbers).run()
    return not torch.equal(moved, numbers)


def _key_of(argument: Any) -> Hashable:
    """Return a hashable key for an argument that determines which tokens are selected."""
    if isinstance(argument, Tensor):
        return id(argument)
    return tuple(map(_key_of, argument)) if isinstance(argument, tuple | list) else repr(argument)


UNKNOWN_KIND = (
    "it is unknown if queries and keys of these modules come from the same tokens, so they are reported as "
    "cross-attention, without statistics of positions; state kind= in hw.Site (see docs/watch.md)"
)
"""Reason for modules whose attention is neither known to be self-attention nor to be cross-attention."""


def is_cross_attention(origins: CallOrigins, lineage: Lineage) -> bool | None:
    """Return True for cross-attention, False for self-attention. The kind is derived from the sources of the queries,
    keys and values (tensors on which they depend). Return None if the sources do not determine the kind.

    It is self-attention if queries and keys have the same content. Sources that only one of the two has are
    permitted, such as position embeddings, unless they come from a mixing step: the output of attention, or a
    concatenation with other tokens. Keys that an earlier layer used for self-attention may be shared by later layers,
    and keys of earlier tokens may be concatenated with those of the queries.
    """
    if origins.k is None:
        return None
    is_cross = _is_cross(origins.q, origins.k, origins.v, lineage)
    if is_cross is False:
        keys = origins.k.maps, lineage.content(origins.k)
        if attends_to_earlier_calls(origins.q, origins.k, lineage):
            lineage.recurrent_keys.add(keys)
        lineage.self_attention_keys.add(keys)
    return is_cross


def attends_to_earlier_calls(query: Origin, key: Origin | None, lineage: Lineage) -> bool:
    """Return True if a call attends to its own tokens and, concatenated with them, to keys of earlier self-attention
    calls in the same run of the model. The earlier keys must come from the same projection weights as the call's own
    keys. Recurrent models attend to one block of tokens after the other in this way.
    """
    if key is None:
        return False
    q, k = lineage.content(query), lineage.content(key)
    if (key.maps, k) in lineage.self_attention_keys:
        return (key.maps, k) in lineage.recurrent_keys
    added, earlier = k & ~q, 0
    for maps, content in lineage.self_attention_keys:
        earlier |= content if maps == key.maps else 0
    is_known = not added & ~(earlier | lineage.concatenations | lineage.selections)
    return is_known and not q & ~k and bool(added & lineage.concatenations) and bool(added & earlier)


def query_and_key(scores: Origin, value: Origin, lineage: Lineage) -> tuple[Origin, Origin | None]:
    """Return the origins (source tensors) of the queries and the keys that were multiplied to compute scores with the
    origin `scores`. If no product is known, return `scores` and None. Scores may be a sum of products, for example of
    queries with keys and of queries with position embeddings. Of several products, choose one whose two factors come
    from the same tokens, or if there is none, the one with most sources in common with the values.
    """

    def rank(factors: tuple[Origin, Origin]) -> tuple[bool, int]:
        left, right = factors
        common = (lineage.content(left) | lineage.content(right)) & lineage.content(value)
        return bool(common) and _is_cross(left, right, value, lineage) is False, common.bit_count()

    if len(scores.factors) < 2:
        return scores.factors[0] if scores.factors else (scores, None)
    return max(scores.factors, key=rank)


def queries_of_self_attention(products: Iterable[tuple[Origin, Origin]], lineage: Lineage) -> tuple[Origin, ...]:
    """Return the origins (source tensors) of the queries in those `products` (pairs of queries and keys) that are
    self-attention.
    """
    return tuple(query for query, key in products if _is_cross(query, key, key, lineage) is False)


def may_be_cached(origins: CallOrigins, lineage: Lineage) -> bool:
    """Return True if some keys of a call may come from a cache: the keys depend on all sources of the queries, and on
    no others except tensors from outside of the model call.
    """
    if origins.k is None:
        return False
    q, k = lineage.content(origins.q), lineage.content(origins.k)
    return not q & ~k and not k & ~q & ~lineage.outside


def _is_cross(query: Origin, key: Origin, value: Origin, lineage: Lineage) -> bool | None:
    """Return True for cross-attention, False for self-attention, None if the sources (tensors on which queries, keys
    and values depend) do not determine the kind. Unlike `is_cross_attention`, record nothing in `lineage`.
    """
    q, k, v = (lineage.content(origin) & ~lineage.mixed for origin in (query, key, value))
    if not q or not k:
        return None
    if not q & k:  # tensors that neither the model received nor a known function computed may have one source
        is_learned = not q & ~lineage.state
        return True if query.projected or is_learned or not (q | k) & ~lineage.given else None
    is_shared = bool(key.maps) and (key.maps, k) in lineage.self_attention_keys
    is_shared = is_shared or attends_to_earlier_calls(query, key, lineage)
    mixed = (q ^ k) & lineage.mixing & ~lineage.outside
    if not is_shared and mixed:
        return None if (query.sources ^ key.sources) & lineage.placed or not mixed & ~lineage.weighted else True
    if q != k and not is_shared and v & ~(q & k):
        return True if q & ~k and k & ~q else None
    return False


OTHER_AXIS: frozenset[Hashable] = frozenset({"other axis"})
"""Names for queries that no weights project, in a softmax over the other axis of the scores of layer 0."""


class SiteParts:
    """List of the attention layers that one module computes itself, without a submodule for each. Two attention calls
    belong to the same layer if the same weights project their queries. Layers are numbered in the order of their first
    calls.
    """

    def __init__(self) -> None:
        self._weights: dict[bool, list[frozenset[Hashable]]] = defaultdict(list)
        self._of_self_attention: set[frozenset[Hashable]] = set()

    def was_self_attention(self, origins: CallOrigins) -> bool:
        """Return True if, in an earlier call of self-attention, the keys were projected by the same weights as in this
        call. `origins` states the weights.
        """
        return origins.k is not None and origins.k.maps in self._of_self_attention

    def add_self_attention(self, key_maps: frozenset[Hashable]) -> None:
        """Record that the weights with these names, which project the keys of a call, were used in self-attention."""
        if key_maps:
            self._of_self_attention.add(key_maps)

    def index(self, cross: bool, origins: CallOrigins | None) -> int:
        """Return the number of the attention layer that a call belongs to. Layers of the same kind (self or cross) in
        the module are numbered from 0. A call whose queries and keys are not projected by weights belongs to layer 0.

        Args:
            cross: True for cross-attention.
            origins: sources of the call's queries, keys and values.
        """
        return self.index_of(cross, names_of_layer(origins))

    def index_of(self, cross: bool, weights: frozenset[Hashable]) -> int:
        """Return the number of the attention layer whose queries are projected by the weights with these names."""
        if not weights:
            return 0
        layers = self._weights[cross]
        if weights == OTHER_AXIS and not layers:
            layers.append(frozenset())
        for index, others in enumerate(layers):
            if weights & others:
                layers[index] = weights | others
                return index
        layers.append(weights)
        return len(layers) - 1


def names_of_layer(origins: CallOrigins | None) -> frozenset[Hashable]:
    """Return the names of the weights by which attention layers of one module are distinguished: those that project the
    queries of a call, or else its keys.
    """
    if origins is None:
        return frozenset()
    return origins.q.maps or (frozenset() if origins.k is None else origins.k.maps)
