"""Products of the result of a softmax with values, found by marks: it is replaced by the numbers 1, 2, 3, ..."""

import torch

from research.plain_models.dispatcher import Run, aten
from research.plain_models.marks import Product, batched, inner, marks_in, row_indices
from research.plain_models.tracing import Tracing


def products_of(tracing: Tracing) -> list[Product] | None:
    """Return the products of a softmax's result with values. Return None if the result was changed otherwise than by
    moving, dropping and hiding elements, so that its products are unknown.
    """
    softmax, run = tracing.softmax, tracing.run
    size, dim = softmax.result.numel(), softmax.dim
    marks = torch.arange(1, size + 1, dtype=torch.float64).view(softmax.result.shape)
    row_of = row_indices(softmax.result.shape, dim)
    key_of = torch.arange(softmax.result.shape[dim]).repeat_interleave(inner(softmax.result, dim))
    key_of = key_of.repeat(size // len(key_of))
    try:
        marked = tracing.repeated({softmax.number: lambda result: marks.to(result.dtype)})
    except Exception:
        return None
    products, is_changed = [], False
    for operation in marked.after(softmax.number):
        plain = run.operations.get(operation.number)
        if operation.is_softmax or operation.operator is aten.convolution.default or plain is None:
            continue
        if plain.operator is not operation.operator or plain.result.shape != operation.result.shape:
            return None
        for is_second, factor in enumerate(operation.factors if operation.result.numel() else ()):
            decoded = marks_in(factor, size)
            if decoded is None:
                continue
            matrix = batched(decoded).mT if is_second else batched(decoded)
            rows, keys = row_of[(matrix - 1).clamp(min=0)], key_of[(matrix - 1).clamp(min=0)]
            row = torch.where(matrix > 0, rows, -1).amax(-1)
            if bool(((rows != row[..., None]) & (matrix > 0)).any()):
                is_changed = True  # a product over other axes, such as the heads
                continue
            products.append(Product(plain, row, torch.where(matrix > 0, keys, -1), bool(is_second)))
    if not products and (is_changed or _is_followed(tracing, marked)):
        return None
    return products


def is_scored(tracing: Tracing) -> bool:
    """Return True if the scores of the softmax come from a product of two tensors, neither of them a parameter: the
    last product before the softmax that it depends on.
    """
    softmax = tracing.softmax
    for operation in reversed([each for each in tracing.run.operations.values() if each.number < softmax.number]):
        if operation.is_softmax:
            continue
        replaced = {operation.number: lambda result: result * 1.5 + 0.25 * torch.rand_like(result)}
        scores = tracing.repeated(replaced, softmax.number).operations.get(softmax.number)
        if scores is None or not torch.equal(scores.factors[0], softmax.factors[0]):
            return operation.operator is not aten.convolution.default and not any(operation.of_parameters)
    return False


def _is_followed(tracing: Tracing, marked: Run) -> bool:
    """Return True if a product after the softmax depends on its result, and the scores are a product."""
    operations = tracing.run.operations
    return is_scored(tracing) and any(
        operation.number in operations
        and not operation.is_softmax
        and operation.result.shape == operations[operation.number].result.shape
        and not torch.equal(operation.result, operations[operation.number].result)
        for operation in marked.after(tracing.softmax.number)
    )
