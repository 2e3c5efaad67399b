"""Attention of a model, derived from its operators alone: which softmax is attention, its heads, keys and positions.

Nothing is read from names, attributes or shapes that a library chose. Everything is traced with marked numbers:

- **Products.** The result of a softmax is replaced by the numbers 1, 2, 3, ... If a factor of a product then consists
  of these numbers, the product multiplies the weights. It is attention if it sums over the keys of each row.
- **Heads.** Each row of the product is multiplied by a number of its own. In the input of the output projection, the
  ratio to the unchanged input tells for each element from which row it comes. Rows that supply the same columns are a
  head. The row of the input is the query's token.
- **Positions.** The result of an earlier projection is replaced by 1, 2, 3, ... If the values then consist of these
  numbers, they tell which row of the projection, and so which token, each key comes from. A query's position is the
  index of the key that comes from its own token.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from research.plain_models.dispatcher import Operation, Run, aten, record
from research.plain_models.marks import (
    STEP,
    Product,
    batched,
    hidden_rows,
    inner,
    marks_in,
    matrix_of,
    row_indices,
    rows_by_ratio,
    token_of_element,
    tokens_first,
    zeroed_columns,
)

Call = Callable[[nn.Module], Any]


@dataclass
class Sequence:
    """Attention of one head over one set of keys.

    Attributes:
        weights: `(queries, keys)`, with 0 at hidden keys.
        counted: True at rows that see a key.
        values: `(keys, value_dim)`.
        out: `(queries, value_dim)`.
        key_tokens: the token of each key, a row of the projection of the values; -1 at keys that are not tokens; None
            where unknown.
        query_tokens: the token of each query, a row of the output projection; None where unknown.
    """

    weights: Tensor
    counted: Tensor
    values: Tensor
    out: Tensor
    key_tokens: Tensor | None
    query_tokens: Tensor | None


@dataclass
class Attention:
    """One softmax that is attention.

    Attributes:
        number: of the softmax among the operator calls.
        path: path of the innermost module in which it runs.
        heads: the sequences of each head.
        gate: for each head, the replacements of products' inputs and results that silence it.
        projection: for each head, the part of the output projection's matrix `(value_dim, width)`; None without one.
        is_scored: True if the scores are a product of two tensors that both depend on the input of the model.
        reason: why the heads could not be derived; empty if they could.
    """

    number: int
    path: str
    heads: list[list[Sequence]]
    gate: list[dict[str, dict[int, Callable[[Tensor], Tensor]]]]
    projection: list[Tensor] | None
    is_scored: bool
    reason: str = ""


def attention_of(model: nn.Module, call: Call) -> tuple[Run, list[Attention]]:
    """Run `call(model)` often enough to derive its attention. Return the plain run and one `Attention` for each softmax
    whose result multiplies values.
    """
    run = record(model, call)
    found = []
    for softmax in [operation for operation in run.operations.values() if operation.is_softmax]:
        attention = _Tracer(model, call, run, softmax).attention()
        if attention is not None:
            found.append(attention)
    return run, found


class _Tracer:
    """Derives one softmax's attention.

    Args:
        model: the model.
        call: a function that calls it.
        run: its plain run.
        softmax: the softmax in this run.
    """

    def __init__(self, model: nn.Module, call: Call, run: Run, softmax: Operation) -> None:
        self.model, self.call, self.run, self.softmax = model, call, run, softmax

    def attention(self) -> Attention | None:
        """Return the softmax as attention; None if its result multiplies no values."""
        products = self._products()
        if products is None:
            return Attention(
                self.softmax.number, self.softmax.path, [], [], None, self._is_scored(), "weights are mixed"
            )
        if not products:
            return None
        result = Attention(self.softmax.number, self.softmax.path, [], [], None, self._is_scored())
        products = [product for product in products if product.keys.shape == products[0].keys.shape]
        shape = self.softmax.result.shape
        if products[0].rows.shape[1] == 1 and self.softmax.dim == len(shape) - 1 and shape[-2] > 1:
            result.reason = "each query has values of its own"
            return result
        for index, product in enumerate(products):
            projected = self._projected(product) or self._supported(product)
            if projected is None:
                result.reason = "the columns of the heads are mixed before the output projection"
                return result
            self._add_heads(result, product, *projected, is_first=not index)
        if not result.heads and not result.reason:
            result.reason = "no column of the output projection depends on one row alone"
        return result

    # -- products ----------------------------------------------------------------------------------------------------

    def _products(self) -> list[Product] | None:
        """Return the products of this softmax's result with values. Return None if the result was changed otherwise
        than by moving, dropping and hiding elements, so that its products are unknown.
        """
        size, dim = self.softmax.result.numel(), self.softmax.dim
        marks = torch.arange(1, size + 1, dtype=torch.float64).view(self.softmax.result.shape)
        row_of = row_indices(self.softmax.result.shape, dim)
        key_of = torch.arange(self.softmax.result.shape[dim]).repeat_interleave(inner(self.softmax.result, dim))
        key_of = key_of.repeat(size // len(key_of))
        try:
            marked = record(self.model, self.call, results={self.softmax.number: lambda result: marks.to(result.dtype)})
        except Exception:
            return None
        products, is_changed = [], False
        for operation in marked.after(self.softmax.number):
            plain = self.run.operations.get(operation.number)
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
        if not products and (is_changed or self._is_followed(marked)):
            return None
        return products

    def _is_followed(self, marked: Run) -> bool:
        """Return True if a product after the softmax depends on its result, and the scores are a product."""
        if not self._is_scored():
            return False
        return any(
            operation.number in self.run.operations
            and not operation.is_softmax
            and operation.result.shape == self.run.operations[operation.number].result.shape
            and not torch.equal(operation.result, self.run.operations[operation.number].result)
            for operation in marked.after(self.softmax.number)
        )

    def _is_scored(self) -> bool:
        """Return True if the scores of the softmax come from a product of two tensors, neither of them a parameter: the
        last product before the softmax that it depends on.
        """
        for operation in reversed([each for each in self.run.operations.values() if each.number < self.softmax.number]):
            if operation.is_softmax:
                continue
            changed = record(
                self.model,
                self.call,
                results={operation.number: lambda result: result * 1.5 + 0.25 * torch.rand_like(result)},
                last=self.softmax.number,
            )
            scores = changed.operations.get(self.softmax.number)
            if scores is None or not torch.equal(scores.factors[0], self.softmax.factors[0]):
                return operation.operator is not aten.convolution.default and not any(operation.of_parameters)
        return False

    # -- heads -------------------------------------------------------------------------------------------------------

    def _projected(self, product: Product) -> tuple[Tensor, list[Operation]] | None:
        """Return for each element of the input of the output projection, `(tokens, columns)`, the row of the product
        from which it comes, -1 for none; and the projection. Streams of tokens that were attended jointly may have
        several. Return None if the next product that depends on this one is no projection of its rows.
        """
        count = product.rows.numel()
        factors = 2 + STEP * torch.arange(count, dtype=torch.float64).view(product.rows.shape)
        scaled = record(self.model, self.call, results={product.operation.number: product.scaled(factors)})
        parts: list[Tensor] = []
        others: list[Operation] = []
        first, covered = None, torch.zeros(count, dtype=torch.bool)
        for operation in scaled.after(product.operation.number):
            plain = self.run.operations.get(operation.number)
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
            first = first or plain
            others.append(plain)
            if bool(covered.all()):
                break
        if first is None or not bool(covered.all() | (len(parts) == 1)):
            return None
        width = max(part.shape[1] for part in parts)
        return torch.cat(
            [torch.nn.functional.pad(part, (0, width - part.shape[1]), value=-1) for part in parts]
        ), others

    def _supported(self, product: Product) -> tuple[Tensor, list[Operation]] | None:
        """Return for each element of the first product that depends on this one the row from which it comes, if each
        element depends on one row at most; otherwise None. This also follows functions of single elements, such as an
        activation. The gates of these heads multiply the product itself.
        """
        count = product.rows.numel()
        index = torch.arange(count).view(product.rows.shape)
        number, rows = None, torch.empty(0)
        for bit in range(max(1, (count - 1).bit_length())):
            changed = []
            for value in (0, 1):
                factors = torch.where((index >> bit) & 1 == value, 1.5, 1.0).double()
                run = record(self.model, self.call, results={product.operation.number: product.scaled(factors)})
                if number is None:
                    number = self._first_changed(run, product)
                if number is None:
                    return None
                plain = tokens_first(self.run.operations[number])
                after = tokens_first(run.operations[number])
                changed.append(~torch.isclose(plain, after, rtol=1e-9, atol=0, equal_nan=True))
            if bool((changed[0] & changed[1]).any()):
                return None
            rows = torch.zeros(changed[0].shape, dtype=torch.int64) if not bit else rows
            rows = torch.where(changed[0] | changed[1], rows + (changed[1].long() << bit), -count)
        return torch.where(rows >= 0, rows, -1), []

    def _first_changed(self, run: Run, product: Product) -> int | None:
        """Return the number of the first product after `product` with another first factor than in the plain run."""
        for operation in run.after(product.operation.number):
            plain = self.run.operations.get(operation.number)
            if operation.is_softmax or plain is None or plain.factors[0].shape != operation.factors[0].shape:
                continue
            if not torch.equal(plain.factors[0], operation.factors[0]):
                return operation.number
        return None

    def _add_heads(
        self,
        result: Attention,
        product: Product,
        rows: Tensor,
        projections: list[Operation],
        *,
        is_first: bool,
    ) -> None:
        """Group the rows of a product by the columns that they supply, and add the groups to `result` as heads."""
        columns_of: dict[int, set[int]] = {}
        tokens_of: dict[int, set[int]] = {}
        for token, column in (rows >= 0).nonzero().tolist():
            row = int(rows[token, column])
            columns_of.setdefault(row, set()).add(column)
            tokens_of.setdefault(row, set()).add(token)
        if all(len(columns) == 1 for columns in columns_of.values()) and any(
            len(each) > 1 for each in tokens_of.values()
        ):
            result.reason, result.is_scored = "the softmax is over features", False
            return
        token_of = {row: min(tokens) for row, tokens in tokens_of.items()}
        groups: dict[tuple[int, ...], list[int]] = {}
        for row, supplied in columns_of.items():
            groups.setdefault(tuple(sorted(supplied)), []).append(row)
        heads = sorted(groups.items())
        if sum(len(columns) for columns, _ in heads) != len(set().union(*(set(columns) for columns, _ in heads))):
            result.reason = "rows supply overlapping columns"
            return
        key_tokens = self._key_tokens(product, len(rows))
        if len(columns_of) < product.rows.numel() and _add_unprojected(heads, product):
            key_tokens = None  # rows whose output the model discards have no token; they are in the order of the keys
        matrix = matrix_of(projections[0]) if len(projections) == 1 else None
        if len(projections) > 1:  # tokens of several streams: their order is that of the keys
            key_tokens = None
        for index, (columns, members) in enumerate(heads):
            if is_first:
                result.heads.append(self._sequences(product, members, token_of, key_tokens))
                result.gate.append({"inputs": {}, "results": {}})
            for projection in projections if index < len(result.gate) else ():
                result.gate[index]["inputs"][projection.number] = zeroed_columns(columns, projection)
            if not projections and index < len(result.gate):
                factors = torch.ones(product.rows.numel(), dtype=torch.float64).index_fill(
                    0, torch.tensor(members), 0.0
                )
                result.gate[index]["results"][product.operation.number] = product.scaled(
                    factors.view(product.rows.shape)
                )
            if is_first and matrix is not None:
                result.projection = [*(result.projection or []), matrix[list(columns)]]

    def _sequences(
        self, product: Product, members: list[int], token_of: dict[int, int], key_tokens: Tensor | None
    ) -> list[Sequence]:
        """Return the rows of one head as sequences: rows that share the keys."""
        batch, count = product.rows.shape
        sequences = []
        is_hidden = hidden_rows(self.softmax)
        for entry in range(batch):
            inside = sorted(row for row in members if row // count == entry)
            if not inside:
                continue
            index = torch.tensor([row % count for row in inside])
            tokens = torch.tensor([token_of.get(row, -2) for row in inside])
            order = product.rows[entry, index].argsort()
            index, tokens = index[order], tokens[order]
            weights = product.weights[entry, index].double()
            counted = ~is_hidden[product.rows[entry, index]] & (weights.abs().sum(-1) > 0)
            sequences.append(
                Sequence(
                    torch.where(counted[:, None], weights, 0.0),
                    counted,
                    product.values[entry].double(),
                    product.out[entry, index].double(),
                    None if key_tokens is None else key_tokens[entry],
                    tokens,
                )
            )
        return sequences

    def _key_tokens(self, product: Product, count: int) -> Tensor | None:
        """Return the token from which each key's value comes, `(batch, keys)`, -1 at keys that come from none; None if
        the values come from no projection unchanged. If the projection has other than `count` tokens, they are not
        those of the queries, and are numbered from `count`.
        """
        before = [
            operation for operation in self.run.operations.values() if operation.number < product.operation.number
        ]
        for operation in [operation for operation in reversed(before) if not operation.is_softmax][:12]:
            decoded = self._marks_in_values(product, operation)
            if decoded is None:
                continue
            token = token_of_element(operation)[(decoded - 1).clamp(min=0)]
            token = torch.where(decoded > 0, token, -1)
            first = token.amax(-1)
            if bool(((token != first[..., None]) & (token >= 0)).any()):
                return None
            is_same = tokens_first(operation).shape[0] == count
            return first if is_same else torch.where(first >= 0, first + count, -1)
        return None

    def _marks_in_values(self, product: Product, operation: Operation) -> Tensor | None:
        """Return which element of an operation's result each element of the values is, numbered from 1, or 0 for none;
        None if the values do not consist of them. What is added to the result, such as a bias, does not matter: the
        values are compared between two runs, with marks and with twice these marks.
        """
        shape = operation.result.shape
        marks = torch.arange(1, operation.result.numel() + 1, dtype=torch.float64).view(shape)
        values = []
        for factor in (1, 2):
            replaced = {operation.number: lambda result, factor=factor: (factor * marks).to(result.dtype)}
            try:
                run = record(self.model, self.call, results=replaced, last=product.operation.number)
            except Exception:
                return None
            if product.operation.number not in run.operations:
                return None
            multiplied = run.operations[product.operation.number]
            values.append(Product(multiplied, product.rows, product.keys, product.is_second).values)
        if values[0].shape != values[1].shape:
            return None
        return marks_in(values[1] - values[0], marks.numel(), unique=False)


def _add_unprojected(heads: list[tuple[tuple[int, ...], list[int]]], product: Product) -> bool:
    """Add the rows of a product that are in no head to the head of the other rows with the same keys. Return True if
    there were any.
    """
    count = product.rows.shape[1]
    known = {row for _, members in heads for row in members}
    of_entry: dict[int, set[int]] = {}
    for index, (_, members) in enumerate(heads):
        for row in members:
            of_entry.setdefault(row // count, set()).add(index)
    added = False
    for row in set(range(product.rows.numel())) - known:
        owners = of_entry.get(row // count, set())
        if len(owners) == 1:
            heads[next(iter(owners))][1].append(row)
            added = True
    return added
