"""Attention scores: products of queries and keys, followed from the product to the softmax, with their places.

A softmax is attention only if its scores compare two activations. A softmax of a projection, over features, experts or
classes, is not. A product of queries and keys numbers its rows and its columns. Functions that select or reorder
elements are repeated with these numbers, from this product to that of the weights with the values.
"""

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.autocast import without_autocast
from headwise.attention.backends.reference import attention_weights, masked_scores, scaled_products
from headwise.attention.problem import Problem
from headwise.errors import InputError
from headwise.intercept.trace.axes import VIEWS, Axes, Factor, axes_after, axes_of, axes_of_product
from headwise.intercept.trace.functions import (
    ADDED_PRODUCTS,
    ASSIGNMENT,
    CONCATENATIONS,
    CONVOLUTIONS,
    PLACEMENTS,
    PRODUCTS,
    Contraction,
    FunctionCall,
    TensorVersions,
    contraction_of,
    functions_named,
    is_parameter,
    multiplied_and_averaged,
    multiplied_and_summed,
    product_with,
    tensors_among,
    version_of,
    written_by,
)
from headwise.intercept.trace.lineage import Origin
from headwise.intercept.trace.state import BroadcastProduct, ComparedAxes, Places, Scores, current_trace, paused
from headwise.intercept.trace.tokens import REPEATED, SORTS, ComparedTokens, NumberedTokens, numbers_after
from headwise.intercept.trace.weights import COPIES, DROPOUTS, weights_among
from headwise.intercept.undropped import DROPOUT_NAMES, random_state_kept
from headwise.intercept.unreadable_tensors import has_no_numbers, has_usual_values
from headwise.shapes import Float

_ELEMENTWISE_NAMES = frozenset(
    f"{start}{name}{end}"
    for name in (
        *("add", "sub", "mul", "truediv", "div", "pow", "neg", "abs", "square", "sqrt", "rsqrt", "exp", "log"),
        *("reciprocal", "addcmul", "addcdiv", "where", "masked_fill", "clamp", "clamp_min", "clamp_max", "clip"),
        *("nan_to_num", "tril", "triu", "maximum", "minimum", "sigmoid", "tanh", "relu", "gelu", "silu", "elu"),
        *("leaky_relu", "hardtanh", "softplus", "round", "floor", "ceil", "erf", "sin", "cos"),
    )
    for start, end in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"))
).union(
    ("layer_norm", "rms_norm", "group_norm", "batch_norm", "instance_norm", "normalize", "softmax", "log_softmax"),
    ("special_softmax", "special_log_softmax", "_softmax", "softmin"),
    ("quantize_per_tensor", "quantize_per_channel", "quantize_per_tensor_dynamic", "dequantize"),
    DROPOUT_NAMES,
)
"""Names of functions that compute each element from those at the same place, and of norms, which divide all features by
one number.
"""

TOLERANCE = 1e-4
"""Largest change of elements at other places, relative to that of the changed ones, that counts as rounding in float32.
In other dtypes, four times the distance between 1 and the next number may be more.
"""


def may_project(call: FunctionCall) -> bool:
    """Return True if a function call may be the output projection: if it is a product of tensors, or reads a parameter
    of a module. Also return True for an operator that torch does not define as a function, such as a quantised product.
    """
    is_operator = isinstance(call.function, torch._ops.OpOverload | torch._ops.OpOverloadPacket)
    return is_operator or call.function in PRODUCTS or any(map(is_parameter, call.tensors))


def keeps_places(call: FunctionCall, argument: Tensor, number: int | None, axis: int) -> bool:
    """Return True if a function call keeps elements at their index along `axis`, counted from the end: each element of
    its result depends only on elements of `argument` with the same index. If there are several results, `number` is the
    index of one of them. To test this, the function is repeated with changed elements at some places. Return False if
    the test is not possible.
    """
    if call.function in COPIES | DROPOUTS or getattr(call.function, "__name__", "") in _ELEMENTWISE_NAMES:
        return True
    if has_no_numbers() or argument.is_meta:
        return False
    size, values = argument.shape[axis], argument.detach().nan_to_num()
    index = torch.arange(size, device=argument.device).view(-1, *(1,) * (-axis - 1))
    wave = torch.arange(argument.numel(), device=argument.device).view(argument.shape).mul(1.7).cos()
    others = values + ((1 + 2 * values.abs().amax()) * wave).to(values.dtype)
    tolerance = max(TOLERANCE, 4 * torch.finfo(values.dtype).eps) if values.is_floating_point() else TOLERANCE
    try:
        before = repeated(call, argument, values, number)
        for bit in range((size - 1).bit_length()):
            for is_other in ((index >> bit) % 2 == 1, (index >> bit) % 2 == 0):
                after = repeated(call, argument, torch.where(is_other, others, values), number)
                change = (after - before).abs().nan_to_num()
                if bool((change * ~is_other).amax() > tolerance * change.amax()):
                    return False
    except Exception:  # whatever a function raises for numbers that it was not written for
        return False
    return True


def repeated(call: FunctionCall, argument: Tensor, other: Tensor, number: int | None) -> Tensor:
    """Repeat a function call with the tensor `other` in place of its `argument`, and return the result. If the call
    returns several tensors, return the one with the index `number`. Tensors of the model are not overwritten.
    """
    first, out = call.tensors[0], call.kwargs.get("out")
    call = call.replaced(argument, other.clone())
    for written in (first, out):
        if isinstance(written, Tensor) and written is not argument:
            call = call.replaced(written, written.clone())
    with paused(), torch.no_grad(), random_state_kept(argument.device):
        result = written_by(call, call.run())
    tensor: Tensor = result if number is None else result[number]
    return tensor.to(torch.promote_types(tensor.dtype, torch.float32))


_MULTIPLICATIONS = functions_named("mul", "multiply", "__mul__", "__rmul__")
_SUMS = functions_named("sum")
_MEANS = functions_named("mean")


def contracted(call: FunctionCall, result: Any) -> FunctionCall:
    """Replace the `sum` or `mean` in a product of two tensors that a model writes as a broadcast `*` and a `sum` or
    `mean`: return an equivalent call of `multiplied_and_summed` or `multiplied_and_averaged`. For the `*`, store its
    factors as long as its `result` exists, and return the call unchanged. Return all other calls unchanged. These
    include a `sum` or `mean` if the product or a factor was changed in place, and a `mean` of attention weights, which
    divides the outputs of the heads.
    """
    trace = current_trace()
    if call.function in _MULTIPLICATIONS:
        is_product = len(call.tensors) == 2 and isinstance(result, Tensor) and not any(map(_is_scale, call.tensors))
        if is_product and any(_is_broadcast(factor, result) for factor in call.tensors):
            factors = call.tensors[0], call.tensors[1]
            record = BroadcastProduct(factors, version_of(result), TensorVersions(call.tensors))
            trace.attention.factors.set(result, record)
    elif call.function in _SUMS | _MEANS and call.tensors and trace.attention.factors:
        product = trace.attention.factors.get(call.tensors[0])
        arguments = dict(zip(("input", "dim", "keepdim"), call.args, strict=False)) | call.kwargs
        dims = arguments.get("dim", arguments.get("axis"))
        if product is None or product.version != version_of(call.tensors[0]) or product.versions.have_changed():
            return call
        if dims is not None and arguments.get("dtype") is None and "out" not in arguments:
            dims = (dims,) if isinstance(dims, int) else tuple(dims)
            function = multiplied_and_summed if call.function in _SUMS else multiplied_and_averaged
            if function is multiplied_and_averaged and any(map(trace.attention.weights.get, product.factors)):
                return call
            return FunctionCall(function, (*product.factors, dims, bool(arguments.get("keepdim"))), {})
    return call


def _is_scale(factor: Tensor) -> bool:
    """Return True for a parameter that is a vector or a number, such as the factors of a norm."""
    return is_parameter(factor) and sum(size > 1 for size in factor.shape) < 2


def _is_broadcast(factor: Tensor, result: Tensor) -> bool:
    """Return True if a factor of a product has the same elements in several places of the `result`."""
    if factor.layout is not torch.strided or factor.is_nested or result.ndim < 2 or not factor.ndim:
        return False
    is_smaller = factor.numel() < result.numel()
    return is_smaller or any(
        size > 1 and not stride for size, stride in zip(factor.shape, factor.stride(), strict=True)
    )


_WHERE = functions_named("where")
"""Functions that select elements of two tensors, but keep them at their places."""


class Order(NamedTuple):
    """Order in which the queries, or the keys, stand along one axis of attention scores or weights, compared with the
    product of queries and keys.

    Attributes:
        places: place of each of them in the product, from 1, or 0 if it has none; None if all are at their own places.
        is_known: False if the order is unknown, or differs between sequences or heads.
        is_common: False if the order differs along the other axis, so that each query has another order of its keys.
    """

    places: Tensor | None = None
    is_known: bool = True
    is_common: bool = True

    def of(self, tokens: NumberedTokens) -> NumberedTokens | None:
        """Return the tokens of the queries, or of the keys, in the order in which they stand along an axis of scores or
        weights. `tokens` has them in the order of the product of queries and keys. Return None if the order along the
        axis is unknown, or if `tokens` has too few.
        """
        if not self.is_known or self.places is None:
            return tokens if self.is_known else None
        numbers = F.pad(tokens.numbers, (1, 0))
        fits = int(self.places.amax()) < numbers.shape[-1]
        return tokens._replace(numbers=numbers[..., self.places]) if fits else None


def order_along(places: Places | None, along: Sequence[int], across: Sequence[int]) -> Order:
    """Return the order in which the queries, or the keys, stand in a tensor of scores or weights. For queries, `along`
    are the axes of the queries and `across` the axes of the keys; for keys, the other way round. `places` has the place
    of each element in the product of queries and keys; None if it is unknown.
    """
    if places is None:
        return Order(is_known=False)
    numbers = places.numbers
    for axis, stride in enumerate(numbers.stride()):
        numbers = numbers if stride or axis in along else numbers.narrow(axis, 0, 1)  # repetitions
    numbers = numbers - (places.first - 1)
    numbers = numbers.where((numbers > 0) & (numbers <= places.size), 0).long()
    own = numbers.amax(tuple(across), keepdim=True) if across else numbers
    is_common = bool(((numbers == own) | (numbers == 0)).all())
    others = [axis for axis in range(own.ndim) if axis not in along]
    own = own.permute(*others, *along).reshape(prod(own.shape[axis] for axis in others), -1)
    if not is_common or not bool((own == own[:1]).all()):
        return Order(is_known=False, is_common=is_common)
    places_in_order, is_whole = torch.arange(1, places.size + 1, device=own.device), own.shape[1] % places.size == 0
    for axis in (0, 1) if is_whole else ():  # the axis may be merged with another one, such as the heads
        split = own[0].view((-1, places.size) if axis == 0 else (places.size, -1))
        if bool((split == places_in_order.unsqueeze(axis)).all()):
            return Order()
    return Order(own[0])


def number_places(scores: Tensor, axes: Iterable[int]) -> None:
    """Assign numbers to the places (indices) along each of the `axes` of `scores`, the result of a product, so that
    elements can be followed through later functions.
    """
    places, attention = {}, current_trace().attention
    for axis in axes:
        first, size = attention.next_place, scores.shape[axis]
        numbers = torch.arange(first, first + size, device=scores.device)
        numbers = numbers.view([size if other == axis else 1 for other in range(scores.ndim)])
        places[axis] = Places(numbers.expand(scores.shape), first, size)
        attention.next_place += size
    attention.places.set(scores, places)


def places_of(tensor: Tensor) -> dict[int, Places]:
    """Return the places of the elements of a tensor in a product of queries and keys (their numbered indices), for each
    axis of the product. Return an empty dict if they are unknown.
    """
    return current_trace().attention.places.get(tensor) or {}


def follow_places(call: FunctionCall, result: Any) -> None:
    """Record the places of the elements in the `result` of a function call: their indices in a product of queries and
    keys, if these are known for an argument. If several products are added, such as those of queries with keys and with
    shifted positions, record the places in the product that was not rearranged.
    """
    trace = current_trace()
    known = [tensor for tensor in call.tensors if places_of(tensor)] if trace.attention.places else []
    if not known:
        return

    def numbers_of(axis: int, tensor: Tensor) -> Tensor | None:
        places = places_of(tensor).get(axis)
        return None if places is None else places.numbers

    first, function = min(known, key=_are_rearranged), call.function
    places = places_of(first)
    if len(known) > 1:
        added = tuple(dict.fromkeys(pair for each in known if each.shape == first.shape for pair in _products_of(each)))
        places = {axis: each._replace(added=added) for axis, each in places.items()}
    is_target = function in PLACEMENTS and len(known) == 1 and first is call.args[0]  # such as a mask by an index
    is_target |= function in _WHERE and len(known) == 1
    repeats = (function in REPEATED or function in SORTS) and not is_target
    kept: list[Tensor] = []
    if not repeats and function not in PRODUCTS and all(_agree(places, places_of(each)) for each in known):
        kept = _results_in_place(call, first, result, is_kept=is_target)
    after: dict[int, tuple[Tensor, dict[int, Places]]] = {}
    for axis, before in places.items():
        numbers: list[tuple[Tensor, Tensor | None]] = [(tensor, before.numbers.expand(tensor.shape)) for tensor in kept]
        if repeats:
            numbers = numbers_after(call, result, partial(numbers_of, axis), torch.inf)
        elif function in PRODUCTS and isinstance(result, Tensor):
            numbers = [(result, _numbers_of_product(call, first, before.numbers, result))]
        for tensor, each in numbers:
            of_tensor = after.setdefault(id(tensor), (tensor, {}))[1]
            of_tensor |= {} if each is None else {axis: before._replace(numbers=each)}
    for tensor, of_tensor in after.values():
        is_comparison = function not in PRODUCTS or len(of_tensor) == len(places)
        trace.attention.places.set(tensor, of_tensor if is_comparison else {})


def _are_rearranged(tensor: Tensor) -> bool:
    """Return True if elements of a tensor may have moved since the product of queries and keys: the numbers of their
    places along one axis of the product differ along several axes of the tensor.
    """
    return any(len(_steps(each.numbers)) > 1 for each in places_of(tensor).values())


def _products_of(scores: Tensor) -> tuple[tuple[Origin, Origin], ...]:
    """Return the origins (source tensors) of the queries and keys of each product in a sum of scores. Return an empty
    tuple if the queries or keys of the scores are not all in the order of the product.
    """
    trace, places = current_trace(), places_of(scores).values()
    lengths = [max(_steps(each.numbers), default=1) for each in places]
    if _are_rearranged(scores) or lengths != [each.size for each in places]:
        return ()
    factors = trace.lineage.origin(scores, trace.module_calls).factors
    return factors if len(factors) < 2 else next(iter(places)).added


def _steps(numbers: Tensor) -> list[int]:
    """Return the sizes of the axes along which `numbers`, the places of elements in a product, differ."""
    return [size for size, stride in zip(numbers.shape, numbers.stride(), strict=True) if stride]


def _agree(places: dict[int, Places], others: dict[int, Places]) -> bool:
    """Return False if elements at the same index of two tensors are known to come from different places of one product
    of queries and keys; True otherwise. `places` and `others` are the places of the elements of the two tensors.
    """
    for axis, one in places.items():
        other = others.get(axis)
        if other is None or other.first != one.first or other.numbers is one.numbers:
            continue
        if not torch.equal(*torch.broadcast_tensors(one.numbers, other.numbers)):  # type: ignore[no-untyped-call]
            return False
    return True


def _results_in_place(call: FunctionCall, before: Tensor, result: Any, *, is_kept: bool) -> list[Tensor]:
    """Return the tensors in the `result` of a function call that have each element at the same index as its argument
    `before`. `is_kept` is True if this is known; otherwise it is tested.
    """
    tensors = [call.args[0]] if call.function in ASSIGNMENT else tensors_among((result,))
    return [
        tensor
        for index, tensor in enumerate(tensors)
        # A comparison with a threshold has other values, but is no score.
        if tensor.is_floating_point() and tensor.numel() and _broadcasts(before.shape, tensor.shape)
        if is_kept
        or all(
            keeps_places(call, before, index if isinstance(result, list | tuple) else None, axis - before.ndim)
            for axis in range(before.ndim)
        )
    ]


def _broadcasts(shape: torch.Size, other: torch.Size) -> bool:
    return len(shape) <= len(other) and all(a in (1, b) for a, b in zip(reversed(shape), reversed(other), strict=False))


def _numbers_of_product(call: FunctionCall, before: Tensor, numbers: Tensor | None, result: Tensor) -> Tensor | None:
    """Return the place numbers of the elements in the `result` of a product of scores or weights with a parameter, such
    as a matrix that mixes heads. `numbers` are the place numbers of the scores or weights, `before`. Return None if the
    product sums over the numbered axis, or if a convolution changes its length.
    """
    contraction = product_with(call, before)
    if numbers is None or not result.numel() or contraction is None:
        return None
    labels = contraction.labels_of(before)
    for axis, label in enumerate(labels):
        if label not in contraction.result:
            first = numbers.narrow(axis, 0, 1)
            if numbers.stride(axis) and not torch.equal(first.expand(numbers.shape), numbers):
                return None
            numbers = first
    kept = [axis for axis, label in enumerate(labels) if label in contraction.result]
    others = [axis for axis in range(len(labels)) if axis not in kept]
    numbers = numbers.permute(*others, *kept)[(0,) * len(others)]
    order = sorted(range(len(kept)), key=lambda index: contraction.result.index(labels[kept[index]]))
    numbers = numbers.permute(order)
    for axis, label in enumerate(contraction.result):
        numbers = numbers if label in labels else numbers.unsqueeze(axis)
    return numbers.expand(result.shape) if _broadcasts(numbers.shape, result.shape) else None


_LENGTHENING = CONCATENATIONS | {F.pad}


_SCALINGS = functions_named("mul", "__mul__", "__rmul__", "multiply", "div", "__truediv__", "divide")
"""Functions that multiply scores by factors."""

EXPONENTIALS = functions_named("exp")
_NORMALISATIONS = _SCALINGS | EXPONENTIALS | {F.normalize, Tensor.div_, Tensor.__itruediv__}
"""Functions whose result may be attention weights, if a model writes its softmax as an exponential and a sum."""

_WITHOUT_MASK = _SCALINGS | VIEWS | COPIES | PRODUCTS
"""Functions of scores that hide no keys."""


def follow_scores(call: FunctionCall, result: Any) -> None:
    """Record the `result` of a function call as possible attention scores. It is recorded if the function multiplies
    two activations, or an activation by a learned query on its left. It is also recorded if an argument is recorded as
    scores and the function adds to them, scales, masks or reshapes them, or mixes heads.
    """
    is_map = call.function is F.linear and len(call.args) > 1 and is_parameter(call.args[1])
    trace = current_trace()
    if call.function in PRODUCTS and not is_map and isinstance(result, Tensor):
        contraction = contraction_of(call.function, call.args, call.kwargs)
        query = contraction.operands[0] if contraction and _has_learned_query(call, contraction, result) else None
        if contraction is not None and (query is not None or not any(map(is_parameter, contraction.operands))):
            tokens = {
                axis: trace.lineage.tokens.along(contraction, operand, label)
                for axis, label in enumerate(contraction.result)
                for operand, labels in zip(contraction.operands, contraction.labels, strict=True)
                if label in labels and sum(label in each for each in contraction.labels) == 1 and operand is not query
            }
            is_masked = call.function in ADDED_PRODUCTS
            factors = None
            if query is not None:
                lineage, module_calls = trace.lineage, trace.module_calls
                origins = [lineage.origin(operand, module_calls) for operand in contraction.operands]
                factors = origins[0], origins[1]
            first = contraction.labels[call.function is Tensor.__rmatmul__]
            of_first = frozenset(axis for axis in tokens if contraction.result[axis] in first)
            versions = is_masked, version_of(result)
            scores = Scores(axes_of(result.shape), frozenset(tokens), tokens, *versions, of_first, object(), factors)
            trace.attention.scores.set(result, scores)
            if result.numel() and not weights_among(call):
                number_places(result, tokens)
            return
    for tensor in call.tensors if trace.attention.scores else ():
        followed = trace.attention.scores.get(tensor)
        if followed is None:
            continue
        is_masked = may_be_masked(tensor) or call.function not in _WITHOUT_MASK
        exponents = tensor.detach() if call.function in EXPONENTIALS else followed.exponents
        before_map = followed.before_map
        if call.function in PRODUCTS:
            before_map = trace.lineage.origin(tensor, trace.module_calls).factors or before_map
        for other, axes in _axes_after(call, followed, tensor, result):
            scores = followed._replace(
                axes=axes,
                may_be_masked=is_masked,
                version=version_of(other),
                exponents=exponents if other.shape == tensor.shape else None,
                before_map=before_map,
            )
            trace.attention.scores.set(other, scores)
        return


def _has_learned_query(call: FunctionCall, contraction: Contraction, result: Tensor) -> bool:
    """Return True if a product may multiply learned queries, a parameter on its left, with the keys of all tokens.
    Return False for a linear map: its parameter is on the right, or it is a function such as `F.linear`, or it mixes
    the heads of scores.
    """
    is_other = call.function is F.linear or call.function in ADDED_PRODUCTS or call.function in CONVOLUTIONS
    operands = contraction.operands
    if len(operands) != 2 or is_other or not is_parameter(operands[0]) or is_parameter(operands[1]):
        return False
    scores = current_trace().attention.scores.get(operands[1])
    return scores is None or not _axes_after(call, scores, operands[1], result)


def written_softmax(call: FunctionCall, result: Any) -> tuple[Tensor, Tensor, int] | None:
    """Return three values if the `result` of a function call is a softmax that the model has written as an exponential
    divided by its sum. They are the argument of the call that was computed from attention scores, the scores, and the
    axis of the softmax. Return None for other results.

    A number for each row that is added to the sum is the exponential of a further score, without a value. The sum of a
    row of weights is then less than 1.
    """
    if call.function not in _NORMALISATIONS or not isinstance(result, Tensor):
        return None
    trace = current_trace()
    followed = trace.attention.scores.get(result)
    if followed is None or followed.exponents is None:
        return None
    exponents, tolerance = followed.exponents, torch.finfo(result.dtype).eps ** 0.5
    if has_no_numbers() or not has_usual_values(result) or exponents.shape != result.shape:
        return None
    dims = [dim for dim in reversed(range(result.ndim)) if compares_activations(result, dim)]
    for dim in sorted(dims, key=lambda dim: result.shape[dim] == 1):  # the axis of a single key comes last
        with torch.no_grad():
            sums = result.sum(dim, keepdim=True)
            difference = (result - (sums * exponents.softmax(dim)).nan_to_num()).abs()  # a row may be hidden
            is_row = result.shape[dim] > 1 and _divides_rows(call, sums)
            has_sum = (sums <= 1 + tolerance) if is_row else ((sums - 1).abs() <= tolerance)
        if bool((((difference <= tolerance) & has_sum) | result.isnan()).all()):
            return next(each for each in call.tensors if trace.attention.scores.get(each)), exponents, dim
    return None


def _divides_rows(call: FunctionCall, sums: Tensor) -> bool:
    divisor = call.args[1] if len(call.args) > 1 else None
    is_division = getattr(call.function, "__name__", "") in ("div", "div_", "divide", "__truediv__", "__itruediv__")
    return is_division and isinstance(divisor, Tensor) and divisor.shape == sums.shape


def may_be_masked(scores: Tensor) -> bool:
    """Return False if `scores` certainly contain no mask: they are products of activations that were only scaled and
    rearranged. A large negative number is then a score, not a hidden key. Return True otherwise.
    """
    followed = current_trace().attention.scores.get(scores)
    if followed is None or followed.may_be_masked or followed.version is None:
        return True
    return followed.version != version_of(scores)


def compares_activations(scores: Tensor, dim: int) -> bool:
    """Return True if `scores` come from a product of two activations, or of a learned query with an activation, and
    only one factor of the product has the axis `dim` of the scores. The axis of keys in attention scores is such an
    axis.
    """
    followed = current_trace().attention.scores.get(scores)
    return followed is not None and {factor.axis for factor in followed.axes[dim]} <= followed.compared


def compares_two(tensor: Tensor) -> bool:
    """Return True if a tensor was computed from a product of two activations, without another linear map since then."""
    followed = current_trace().attention.scores.get(tensor)
    return followed is not None and followed.factors is None


def with_factors(scores: Tensor, origin: Origin) -> Origin:
    """Return the `origin` (source tensors) of attention scores. If they are a product of a learned query with keys, or
    if a linear map has mixed their heads, add the sources of queries and keys as its factors.
    """
    followed = current_trace().attention.scores.get(scores)
    if followed is None or origin.factors:
        return origin
    return origin._replace(factors=followed.before_map if followed.factors is None else (followed.factors,))


def compared_axes(scores: Tensor, dim: int) -> ComparedAxes | None:
    """Return the axes of the product from which attention `scores` were computed, and the tokens along these axes. The
    keys are along axis `dim` of the scores. Return None if the scores are not known to come from such a product.
    """
    followed = current_trace().attention.scores.get(scores)
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


def _axes_after(call: FunctionCall, scores: Scores, before: Tensor, result: Any) -> list[tuple[Tensor, Axes]]:
    """Return the tensors in the `result` of a function call that were computed from `before`, recorded as `scores`,
    each with its axes. The axes are stated as parts of the axes of the product of queries and keys. The list is empty
    for a linear map over queries or keys.
    """
    if call.function in PRODUCTS:  # with a parameter
        product = product_with(call, before)
        labels = () if product is None else product.labels_of(before)
        pairs = zip(labels, scores.axes, strict=False)
        if product is None or any(
            label in product.summed and factor.axis in scores.compared for label, factors in pairs for factor in factors
        ):
            return []  # such as a projection of features, whose result compares nothing
        return [(result, axes_of_product(product, before, scores.axes, result))]
    if call.function in _LENGTHENING and result.ndim == before.ndim:  # keys are added
        return [
            (result, tuple(_of_size(factors, size) for factors, size in zip(scores.axes, result.shape, strict=True)))
        ]
    return axes_after(call, scores.axes, before, result)


def _of_size(factors: tuple[Factor, ...], size: int) -> tuple[Factor, ...]:
    """Return the factors (parts of axes) of an axis that was lengthened to `size` by a concatenation: more elements of
    the same kind. `factors` are those before it.
    """
    is_longer = len(factors) == 1 and factors[0].size != size
    return (Factor(factors[0].axis, 1, size),) if is_longer else factors


ScoreTensor = Float[torch.Tensor, "batch heads queries keys"]


def scores_behind(
    weights: Float[torch.Tensor, "batch heads queries keys"], read_problem: Callable[[], Problem]
) -> tuple[ScoreTensor | None, ScoreTensor | None]:
    """Return the scores from which attention `weights` were computed, and the scores before the softcap (None without a
    softcap). They are computed again from the attention call, which `read_problem` returns as a `Problem` (its tensors
    and options). Both are None if that is not possible, or if the softmax of the scores differs from `weights` by more
    than rounding.

    Args:
        weights: weights that the function returned.
        read_problem: function that states the call as a `Problem`.
    """
    try:
        problem = read_problem()
    except InputError:
        return None, None
    if problem.talking is not None or problem.grid.keys != weights.shape[-1]:
        return None, None
    eps = max(torch.finfo(dtype).eps for dtype in _dtypes(weights, problem))
    with torch.no_grad(), without_autocast(problem.q.device):
        scores = masked_scores(problem)
        expected = attention_weights(scores, problem.sinks)
        if not _are_weights_of(scores, expected, weights.to(expected.dtype), eps):
            return None, None
        if problem.softcap is None:
            return scores, None
        return scores, scaled_products(problem).where(scores > -torch.inf, -torch.inf)


def _are_weights_of(scores: ScoreTensor, expected: ScoreTensor, weights: ScoreTensor, eps: float) -> bool:
    """Return True if `weights` equal `expected`, the softmax of `scores`, up to rounding. `eps` is the relative
    rounding error of scores and weights.

    A score s is rounded by up to eps |s|, so a weight may differ by a factor. Large scores in float16 would seem to be
    other scores without this: at 300, the rounding is 0.3.
    """
    is_visible = scores > -torch.inf
    largest = scores.amax(-1, keepdim=True)
    rounding = (2 * eps * (scores.abs() + largest.abs())).where(is_visible, 0.0)
    logarithms = torch.where(expected > 0, expected.log(), scores - largest)  # weights that underflow
    tolerance = eps**0.5
    is_low_enough = weights <= (logarithms + rounding).clamp(max=0.0).exp() + tolerance
    is_high_enough = weights >= (logarithms - rounding).exp() - tolerance
    has_key = is_visible.any(-1, keepdim=True)
    return bool(((is_low_enough & is_high_enough) | ~has_key).all())  # False if a weight is NaN


def unshifted(scores: ScoreTensor) -> ScoreTensor | None:
    """Return `scores`, the input of a softmax, if the model seems not to have subtracted a number from each row by
    hand; otherwise None, since the original scores are unknown. A model may subtract the maximum of a row, perhaps only
    where it is positive, or the log-sum-exp. Then no score is above 0, and the largest score of some row, or the
    log-sum-exp of every row, is 0.
    """
    largest = scores.amax(-1) if scores.numel() else None
    if largest is None or not bool((largest <= 0).all()):
        return scores
    tolerance = torch.finfo(scores.dtype).eps ** 0.5
    is_shifted = bool((largest == 0).any()) or bool((scores.logsumexp(-1).abs() <= tolerance).all())
    return None if is_shifted else scores


def _dtypes(weights: torch.Tensor, problem: Problem) -> list[torch.dtype]:
    """Return the dtypes in which a model may have computed its attention weights; `transformers` uses float32."""
    device = weights.device.type
    of_autocast = [torch.get_autocast_dtype(device)] if torch.is_autocast_enabled(device) else []
    return [weights.dtype, problem.q.dtype, torch.float32, *of_autocast]
