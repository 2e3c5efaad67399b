"""Tokens of the keys and queries of an attention call: the rows of the projections that they come from."""

import torch
from torch import Tensor

from research.plain_models.dispatcher import Operation
from research.plain_models.marks import Product, marks_in, token_of_element, tokens_first
from research.plain_models.tracing import Tracing

LAST_OPERATIONS = 12
"""Number of operations before attention among which the projections of its values and queries are looked for."""


def tokens_of_keys(tracing: Tracing, product: Product) -> tuple[Tensor, Operation] | None:
    """Return the token from which each key's value comes, `(batch, keys)`, -1 at keys that come from none; and the
    projection in whose rows tokens are numbered. Return None if the values come from no projection unchanged.

    The result of a projection is replaced by 1, 2, 3, ... If the values consist of these numbers, they tell the row.
    """
    operations = tracing.run.operations.values()
    before = [each for each in operations if each.number < product.operation.number and not each.is_softmax]
    for projection in before[: -LAST_OPERATIONS - 1 : -1]:
        decoded = _marks_in_values(tracing, product, projection)
        if decoded is None:
            continue
        token = token_of_element(projection)[(decoded - 1).clamp(min=0)]
        token = torch.where(decoded > 0, token, -1)
        first = token.amax(-1)
        if bool(((token != first[..., None]) & (token >= 0)).any()):
            return None
        return first, projection
    return None


def tokens_of_queries(tracing: Tracing, projection: Operation) -> Tensor | None:
    """Return for each row of the softmax the token of its query, in the numbering of `projection`, that of the values.
    Return None if the queries are no projection of the same tokens.

    Half of the rows of the result of a projection are changed, in turn by each bit of their numbers. A row of scores
    belongs to a changed token if all its scores change that do so for the one half or the other.
    """
    tokens, softmax = tokens_first(projection), tracing.softmax
    operations = [each for each in tracing.run.operations.values() if each.number < softmax.number]
    for other in operations[: -LAST_OPERATIONS - 1 : -1]:
        if other.is_softmax or not torch.equal(tokens_first(other), tokens):
            continue
        rows = _rows_that_change(tracing, other, len(tokens))
        if rows is not None:
            return rows
    return None


def _rows_that_change(tracing: Tracing, projection: Operation, count: int) -> Tensor | None:
    """Return for each row of the softmax the row of `projection`, one of `count`, with which all its scores change, -1
    for a row whose scores never change; None if there is no such row for others.
    """
    softmax = tracing.softmax
    plain = softmax.factors[0].movedim(softmax.dim, -1).flatten(0, -2)
    token = token_of_element(projection).view(projection.result.shape)
    noise = torch.rand(projection.result.shape, dtype=torch.float64) + 0.5
    rows, is_known = torch.zeros(len(plain), dtype=torch.int64), torch.zeros(len(plain), dtype=torch.bool)
    for bit in range(max(1, (count - 1).bit_length())):
        changed = []
        for value in (0, 1):
            added = torch.where((token >> bit) & 1 == value, noise, 0.0)
            replaced = {projection.number: lambda result, added=added: result + added.to(result.dtype)}
            after = tracing.repeated(replaced, softmax.number).operations.get(softmax.number)
            if after is None or after.factors[0].shape != softmax.factors[0].shape:
                return None
            scores = after.factors[0].movedim(softmax.dim, -1).flatten(0, -2)
            changed.append(~torch.isclose(scores, plain, rtol=1e-6, atol=1e-6, equal_nan=True))
        ever = changed[0] | changed[1]
        is_own = [(each | ~ever).all(-1) & ever.any(-1) for each in changed]
        if not bool((is_own[0] ^ is_own[1] | ~ever.any(-1)).all()):
            return None
        rows += is_own[1].long() << bit
        is_known |= ever.any(-1)
    return torch.where(is_known, rows, -1) if bool(is_known.any()) else None


def _marks_in_values(tracing: Tracing, product: Product, operation: Operation) -> Tensor | None:
    """Return which element of an operation's result each element of the values is, numbered from 1, or 0 for none;
    None if the values do not consist of them. What is added to the result, such as a bias, does not matter: the
    values are compared between two runs, with marks and with twice these marks.
    """
    shape, number = operation.result.shape, product.operation.number
    marks = torch.arange(1, operation.result.numel() + 1, dtype=torch.float64).view(shape)
    values = []
    for factor in (1, 2):
        replaced = {operation.number: lambda result, factor=factor: (factor * marks).to(result.dtype)}
        try:
            run = tracing.repeated(replaced, number)
        except Exception:
            return None
        if number not in run.operations:
            return None
        values.append(Product(run.operations[number], product.rows, product.keys, product.is_second).values)
    if values[0].shape != values[1].shape:
        return None
    return marks_in(values[1] - values[0], marks.numel(), unique=False)
