"""Attention scores: products of queries and keys, followed from the product to the softmax.

A softmax is attention only if its scores compare two activations. A softmax of a projection, over features, experts or
classes, is not.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.intercept.axes import VIEWS, Axes, Factor, axes_after, axes_of, other_axis
from headwise.intercept.compared_tokens import ComparedTokens, NumberedTokens
from headwise.intercept.contractions import (
    ADDED_PRODUCTS,
    CONVOLUTIONS,
    PRODUCTS,
    Contraction,
    contraction_of,
    is_parameter,
)
from headwise.intercept.function_call import FunctionCall
from headwise.intercept.in_place_changes import version_of
from headwise.intercept.origin import Origin
from headwise.intercept.score_places import number_places
from headwise.intercept.session import current_session
from headwise.intercept.softmax_weights import COPIES, weights_among
from headwise.intercept.unreadable_tensors import has_no_numbers, has_usual_values

CONCATENATIONS: frozenset[Callable[..., Any]] = frozenset({torch.cat, torch.concat, torch.concatenate})
_LENGTHENING = CONCATENATIONS | {F.pad}


_SCALINGS: frozenset[Callable[..., Any]] = frozenset(
    getattr(owner, name)
    for owner in (torch, Tensor)
    for name in ("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide")
    if hasattr(owner, name)
)
"""Functions that multiply scores by factors."""

_EXPONENTIALS: frozenset[Callable[..., Any]] = frozenset({torch.exp, Tensor.exp})
_NORMALISATIONS = _SCALINGS | _EXPONENTIALS | {F.normalize, Tensor.div_, Tensor.__itruediv__}
"""Functions whose result may be attention weights, if a model writes its softmax as an exponential and a sum."""

_WITHOUT_MASK = _SCALINGS | VIEWS | COPIES | PRODUCTS
"""Functions of scores that hide no keys."""


class _Scores(NamedTuple):
    """Record of a tensor computed from a product of two activations. The tensor may be attention scores, and the
    product that of queries and keys.

    Attributes:
        axes: its axes, as factors of the axes of the product.
        compared: axes of the product that only one of the activations has: its queries and its keys.
        tokens: tokens along each of these axes; None where they are unknown.
        may_be_masked: True if a function, such as a sum with a mask, may have hidden keys by large negative numbers.
        version: number of changes of the tensor in place, as torch counts them; None if unknown.
        of_first: those of the compared axes that are in the first factor of the product.
        product: identity of the product.
        factors: sources of a learned query and of the keys that it was multiplied with; None for two activations.
        exponents: scores of which the tensor is the exponential, perhaps with factors; None if there are none.
    """

    axes: Axes
    compared: frozenset[int]
    tokens: dict[int, NumberedTokens | None]
    may_be_masked: bool
    version: int | None
    of_first: frozenset[int]
    product: object
    factors: tuple[Origin, Origin] | None = None
    exponents: Tensor | None = None


class ComparedAxes(NamedTuple):
    """Axes of the product of queries and keys from which the scores of a softmax were computed.

    Attributes:
        of_scores: axes of the product that are in each axis of the scores.
        key: axis of the keys in the product.
        tokens: tokens of the queries and keys in the product; None if they are unknown.
        is_key_first: True if the keys are the first factor of the product.
        product: identity of the product.
    """

    of_scores: tuple[tuple[int, ...], ...]
    key: int
    tokens: ComparedTokens | None
    is_key_first: bool
    product: object


def follow_scores(call: FunctionCall, result: Any) -> None:
    """Record the `result` of a function call as possible attention scores. It is recorded if the function multiplies
    two activations, or an activation by a learned query on its left. It is also recorded if an argument is recorded as
    scores and the function adds to them, scales, masks or reshapes them, or mixes heads.
    """
    is_map = call.function is F.linear and len(call.args) > 1 and is_parameter(call.args[1])
    session = current_session()
    if call.function in PRODUCTS and not is_map and isinstance(result, Tensor):
        contraction = contraction_of(call.function, call.args, call.kwargs)
        query = contraction.operands[0] if contraction is not None and _has_learned_query(call, contraction) else None
        if contraction is not None and (query is not None or not any(map(is_parameter, contraction.operands))):
            tokens = {
                axis: session.lineage.tokens.along(contraction, operand, label)
                for axis, label in enumerate(contraction.result)
                for operand, labels in zip(contraction.operands, contraction.labels, strict=True)
                if label in labels and sum(label in each for each in contraction.labels) == 1 and operand is not query
            }
            is_masked = call.function in ADDED_PRODUCTS
            factors = None
            if query is not None:
                lineage, module_calls = session.lineage, session.module_calls
                origins = [lineage.origin(operand, module_calls) for operand in contraction.operands]
                factors = origins[0], origins[1]
            first = contraction.labels[call.function is Tensor.__rmatmul__]
            of_first = frozenset(axis for axis in tokens if contraction.result[axis] in first)
            versions = is_masked, version_of(result)
            scores = _Scores(axes_of(result.shape), frozenset(tokens), tokens, *versions, of_first, object(), factors)
            session.attention.scores.set(result, scores)
            if result.numel() and not weights_among(call):
                number_places(result, tokens)
            return
    for tensor in call.tensors if session.attention.scores else ():
        followed: _Scores | None = session.attention.scores.get(tensor)
        if followed is None:
            continue
        is_masked = may_be_masked(tensor) or call.function not in _WITHOUT_MASK
        exponents = tensor.detach() if call.function in _EXPONENTIALS else followed.exponents
        for other, axes in _axes_after(call, followed, tensor, result):
            scores = followed._replace(
                axes=axes,
                may_be_masked=is_masked,
                version=version_of(other),
                exponents=exponents if other.shape == tensor.shape else None,
            )
            session.attention.scores.set(other, scores)
        return


def _has_learned_query(call: FunctionCall, contraction: Contraction) -> bool:
    """Return True if a product may be that of learned queries, a parameter on its left, with the keys of all tokens. A
    linear map has its parameter on the right, or is a function of its own.
    """
    is_other = call.function is F.linear or call.function in ADDED_PRODUCTS or call.function in CONVOLUTIONS
    operands = contraction.operands
    return len(operands) == 2 and not is_other and is_parameter(operands[0]) and not is_parameter(operands[1])


def written_softmax(call: FunctionCall, result: Any) -> tuple[Tensor, Tensor, int] | None:
    """Return three values if the `result` of a function call is the softmax of scores, which the model has written as
    an exponential, divided by its sum: the argument of the call that follows from the scores, the scores, and the axis
    of the softmax. Return None for other results.

    A number for each row that is added to the sum is the exponential of a further score, without a value. The sum of a
    row of weights is then less than 1.
    """
    if call.function not in _NORMALISATIONS or not isinstance(result, Tensor):
        return None
    session = current_session()
    followed: _Scores | None = session.attention.scores.get(result)
    if followed is None or followed.exponents is None:
        return None
    exponents, tolerance = followed.exponents, torch.finfo(result.dtype).eps ** 0.5
    if has_no_numbers() or not has_usual_values(result) or exponents.shape != result.shape:
        return None
    for dim in reversed(
        [dim for dim, size in enumerate(result.shape) if size > 1 and compares_activations(result, dim)]
    ):
        with torch.no_grad():
            sums = result.sum(dim, keepdim=True)
            difference = (result - (sums * exponents.softmax(dim)).nan_to_num()).abs()  # a row may be hidden
            is_row = _divides_rows(call, sums)
            has_sum = (sums <= 1 + tolerance) if is_row else ((sums - 1).abs() <= tolerance)
        if bool((((difference <= tolerance) & has_sum) | result.isnan()).all()):
            return next(each for each in call.tensors if session.attention.scores.get(each)), exponents, dim
    return None


def _divides_rows(call: FunctionCall, sums: Tensor) -> bool:
    """Return True if a function call divides a tensor by a number for each row, a tensor of the shape of `sums`."""
    divisor = call.args[1] if len(call.args) > 1 else None
    is_division = getattr(call.function, "__name__", "") in ("div", "div_", "divide", "__truediv__", "__itruediv__")
    return is_division and isinstance(divisor, Tensor) and divisor.shape == sums.shape


def may_be_masked(scores: Tensor) -> bool:
    """Return False if `scores` are known to contain no mask, since products of activations were only scaled and
    rearranged. A large negative number is then a score, not a hidden key.
    """
    followed: _Scores | None = current_session().attention.scores.get(scores)
    if followed is None or followed.may_be_masked or followed.version is None:
        return True
    return followed.version != version_of(scores)


def compares_activations(scores: Tensor, dim: int) -> bool:
    """Return True if `scores` come from a product of two activations, or of a learned query with an activation, and
    only one factor of the product has the axis `dim` of the scores. The axis of keys in attention scores is such an
    axis.
    """
    followed: _Scores | None = current_session().attention.scores.get(scores)
    return followed is not None and {factor.axis for factor in followed.axes[dim]} <= followed.compared


def compares_two(tensor: Tensor) -> bool:
    """Return True if a tensor was computed from a product of two activations, without another linear map since then."""
    followed: _Scores | None = current_session().attention.scores.get(tensor)
    return followed is not None and followed.factors is None


def with_learned_query(scores: Tensor, origin: Origin) -> Origin:
    """Return the `origin` (sources) of attention scores. If they are a product of a learned query with keys, add the
    sources of both as its factors.
    """
    followed: _Scores | None = current_session().attention.scores.get(scores)
    if followed is None or followed.factors is None or origin.factors:
        return origin
    return origin._replace(factors=(followed.factors,))


def compared_axes(scores: Tensor, dim: int) -> ComparedAxes | None:
    """Return the axes of the product from which attention `scores` were computed, and the tokens along these. The keys
    are along axis `dim` of the scores. Return None if the scores are not known to come from such a product.
    """
    followed: _Scores | None = current_session().attention.scores.get(scores)
    if followed is None:
        return None
    factors = followed.axes[dim]  # none for a single key
    key = factors[0].axis if factors else max(followed.tokens, default=None)
    if key is None:
        return None
    keys, others = followed.tokens.get(key), [each for axis, each in followed.tokens.items() if axis != key]
    queries = others[0] if len(others) == 1 else None
    tokens = None if queries is None or keys is None else ComparedTokens(queries, keys)
    of_scores = tuple(tuple(factor.axis for factor in each) for each in followed.axes)
    return ComparedAxes(of_scores, key, tokens, key in followed.of_first, followed.product)


def _axes_after(call: FunctionCall, scores: _Scores, before: Tensor, result: Any) -> list[tuple[Tensor, Axes]]:
    """Return the tensors in the `result` of a function call that were computed from `before`, a tensor recorded as
    attention `scores`. Each comes with its axes, written as parts of the axes of the original product. Return an empty
    list for a linear map over queries or keys, since its result is not scores.
    """
    if call.function in PRODUCTS:  # with a parameter
        contraction = contraction_of(call.function, call.args, call.kwargs)
        if contraction is None or not any(operand is before for operand in contraction.operands):
            return []
        factors = dict(zip(contraction.labels_of(before), scores.axes, strict=True))
        summed = {factor.axis for label in contraction.summed for factor in factors.get(label, ())}
        if summed & scores.compared:  # a projection of features, whose result compares nothing
            return []
        known = tuple(
            factors[label] if label in factors else other_axis(size)
            for label, size in zip(contraction.result, result.shape, strict=True)
        )
        return [(result, known)]
    if call.function in _LENGTHENING and result.ndim == before.ndim:  # keys are added
        return [
            (result, tuple(_of_size(factors, size) for factors, size in zip(scores.axes, result.shape, strict=True)))
        ]
    return axes_after(call, scores.axes, before, result)


def _of_size(factors: tuple[Factor, ...], size: int) -> tuple[Factor, ...]:
    """Return the factors of an axis of concatenated tensors, which has another `size` than in one of these tensors, but
    the same kind of elements.
    """
    is_longer = len(factors) == 1 and factors[0].size != size
    return (Factor(factors[0].axis, 1, size),) if is_longer else factors
