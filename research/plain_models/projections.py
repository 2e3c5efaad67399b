"""Output projection after a product of weights with values, and the row of the product that each element comes from."""

import torch
from torch import Tensor

from research.plain_models.dispatcher import Operation, Run
from research.plain_models.marks import STEP, Product, rows_by_ratio, tokens_first
from research.plain_models.tracing import Tracing


def projected(tracing: Tracing, product: Product) -> tuple[Tensor, list[Operation]] | None:
    """Return for each element of the input of the output projection, `(tokens, columns)`, the row of the product from
    which it comes, -1 for none; and the projection. Streams of tokens that were attended jointly may have several.
    Return None if the next product that depends on this one is no projection of its rows.

    Each row of the product is multiplied by a number of its own, which the ratio to the unchanged input tells.
    """
    run, number, count = tracing.run, product.operation.number, product.rows.numel()
    factors = 2 + STEP * torch.arange(count, dtype=torch.float64).view(product.rows.shape)
    scaled = tracing.repeated({number: product.scaled(factors)})
    parts: list[Tensor] = []
    projections: list[Operation] = []
    covered = torch.zeros(count, dtype=torch.bool)
    for operation in scaled.after(number):
        plain = run.operations.get(operation.number)
        if operation.is_softmax or plain is None or plain.factors[0].shape != operation.factors[0].shape:
            continue
        before, after = tokens_first(plain), tokens_first(operation)
        if torch.equal(before, after):
            if not torch.equal(plain.factors[1], operation.factors[1]):
                break
            continue
        rows = rows_by_ratio(before, after, count)
        if rows is None or bool(covered[rows[rows >= 0]].any()):
            break
        covered[rows[rows >= 0]] = True
        parts.append(rows)
        projections.append(plain)
        if bool(covered.all()):
            break
    if not parts or not bool(covered.all() | (len(parts) == 1)):
        return None
    width = max(part.shape[1] for part in parts)
    padded = [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts]
    return torch.cat(padded), projections


def supported(tracing: Tracing, product: Product) -> tuple[Tensor, list[Operation]] | None:
    """Return for each element of the first product that depends on this one the row from which it comes, if each
    element depends on one row at most; otherwise None. This also follows functions of single elements, such as an
    activation. The gates of these heads multiply the product itself.
    """
    count, own_number = product.rows.numel(), product.operation.number
    index = torch.arange(count).view(product.rows.shape)
    number, rows = None, torch.empty(0)
    for bit in range(max(1, (count - 1).bit_length())):
        changed = []
        for value in (0, 1):
            factors = torch.where((index >> bit) & 1 == value, 1.5, 1.0).double()
            run = tracing.repeated({own_number: product.scaled(factors)})
            if number is None:
                number = _first_changed(tracing.run, run, own_number)
            if number is None:
                return None
            plain, after = tokens_first(tracing.run.operations[number]), tokens_first(run.operations[number])
            changed.append(~torch.isclose(plain, after, rtol=1e-9, atol=0, equal_nan=True))
        if bool((changed[0] & changed[1]).any()):
            return None
        rows = torch.zeros(changed[0].shape, dtype=torch.int64) if not bit else rows
        rows = torch.where(changed[0] | changed[1], rows + (changed[1].long() << bit), -count)
    return torch.where(rows >= 0, rows, -1), []


def _first_changed(before: Run, after: Run, number: int) -> int | None:
    """Return the number of the first product after the operator call `number` whose first factor differs between two
    runs.
    """
    for operation in after.after(number):
        plain = before.operations.get(operation.number)
        if operation.is_softmax or plain is None or plain.factors[0].shape != operation.factors[0].shape:
            continue
        if not torch.equal(plain.factors[0], operation.factors[0]):
            return operation.number
    return None
