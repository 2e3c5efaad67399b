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
- **Visible keys.** A key is hidden if its weight is 0 in float64. In float32, the weight of a visible key may be 0.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from research.plain_models.dispatcher import Operation, Run, record
from research.plain_models.marks import Product, hidden_rows, matrix_of, tokens_first, underflowing_keys, zeroed_columns
from research.plain_models.projections import projected, supported
from research.plain_models.token_tracing import tokens_of_keys, tokens_of_queries
from research.plain_models.tracing import Call, Tracing
from research.plain_models.weighted_products import is_scored, products_of


@dataclass
class Sequence:
    """Attention of one head over one set of keys.

    Attributes:
        weights: `(queries, keys)`, with 0 at hidden keys.
        visible: True at keys that a row sees.
        counted: True at rows that see a key.
        values: `(keys, value_dim)`.
        out: `(queries, value_dim)`.
        key_tokens: the token of each key, a row of the projection of the values; -1 at keys that are not tokens; None
            where unknown.
        query_tokens: the token of each query, a row of the output projection; None where unknown.
    """

    weights: Tensor
    visible: Tensor
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

    The first run is discarded: it may fill tables, such as those of rotary positions, that later runs read.
    """
    record(model, call)
    run = record(model, call)
    softmaxes = [operation for operation in run.operations.values() if operation.is_softmax]
    found = [_attention(Tracing(model, call, run, softmax)) for softmax in softmaxes]
    return run, [attention for attention in found if attention is not None]


def _attention(tracing: Tracing) -> Attention | None:
    """Return a softmax as attention; None if its result multiplies no values."""
    softmax, products = tracing.softmax, products_of(tracing)
    if products is not None and not products:
        return None
    result = Attention(softmax.number, softmax.path, [], [], None, is_scored(tracing))
    if products is None:
        result.reason = "weights are mixed"
        return result
    products = [product for product in products if product.keys.shape == products[0].keys.shape]
    shape = softmax.result.shape
    if products[0].rows.shape[1] == 1 and softmax.dim == len(shape) - 1 and shape[-2] > 1:
        result.reason = "each query has values of its own"
        return result
    for index, product in enumerate(products):
        found = projected(tracing, product) or supported(tracing, product)
        if found is None:
            result.reason = "the columns of the heads are mixed before the output projection"
            return result
        _add_heads(result, tracing, product, *found, is_first=not index)
    if not result.heads and not result.reason:
        result.reason = "no column of the output projection depends on one row alone"
    return result


def _add_heads(
    result: Attention,
    tracing: Tracing,
    product: Product,
    rows: Tensor,
    projections: list[Operation],
    *,
    is_first: bool,
) -> None:
    """Group the rows of a product by the columns that they supply, and add the groups to `result` as heads.

    Args:
        result: the attention.
        tracing: its softmax.
        product: the product.
        rows: row of the product from which each element of the projection's input comes, -1 for none.
        projections: the output projection, or those of several streams of tokens.
        is_first: True for the first product of the softmax.
    """
    columns_of: dict[int, set[int]] = {}
    tokens_of: dict[int, set[int]] = {}
    for token, column in (rows >= 0).nonzero().tolist():
        row = int(rows[token, column])
        columns_of.setdefault(row, set()).add(column)
        tokens_of.setdefault(row, set()).add(token)
    if any(len(tokens) > 1 for tokens in tokens_of.values()):
        if all(len(columns) == 1 for columns in columns_of.values()):
            result.reason, result.is_scored = "the softmax is over features", False
            return
        if is_first and result.is_scored:
            result.reason = "each row of weights averages the values of several tokens"
            return
    groups: dict[tuple[int, ...], list[int]] = {}
    for row, supplied in columns_of.items():
        groups.setdefault(tuple(sorted(supplied)), []).append(row)
    heads = sorted(groups.items())
    if sum(len(columns) for columns, _ in heads) != len(set().union(*(set(columns) for columns, _ in heads))):
        result.reason = "rows supply overlapping columns"
        return
    # Rows whose output the model discards have no token, and streams have no common order: that of the keys counts.
    has_tokens = not (len(columns_of) < product.rows.numel() and _add_unprojected(heads, product))
    matrix = matrix_of(projections[0]) if len(projections) == 1 else None
    token_of = {row: min(tokens) for row, tokens in tokens_of.items()}
    tokens = _tokens(tracing, product, token_of, len(rows)) if has_tokens and len(projections) < 2 else None
    for index, (columns, members) in enumerate(heads):
        if is_first:
            result.heads.append(_sequences(tracing.softmax, product, members, token_of, tokens))
            result.gate.append({"inputs": {}, "results": {}})
        for projection in projections if index < len(result.gate) else ():
            result.gate[index]["inputs"][projection.number] = zeroed_columns(columns, projection)
        if not projections and index < len(result.gate):
            factors = torch.ones(product.rows.numel(), dtype=torch.float64).index_fill(0, torch.tensor(members), 0.0)
            result.gate[index]["results"][product.operation.number] = product.scaled(factors.view(product.rows.shape))
        if is_first and matrix is not None:
            result.projection = [*(result.projection or []), matrix[list(columns)]]


def _tokens(tracing: Tracing, product: Product, token_of: dict[int, int], count: int) -> Tensor | None:
    """Return the token of each key of a product, `(batch, keys)`, -1 for none; None if they are unknown.

    The tokens of the queries, `token_of` each row, are rows of the output projection's input. They become the rows of
    the projection that the queries come from if these do not fit the tokens of the keys, as the model may put tokens
    into another order between both. If they have different numbers of rows, tokens of the keys are numbered from
    `count`, that of the output projection.
    """
    found = tokens_of_keys(tracing, product)
    if found is None:
        return None
    keys, projection = found
    if tokens_first(projection).shape[0] != count:
        return torch.where(keys >= 0, keys + count, -1)
    per_entry = product.rows.shape[1]
    if not all(bool((keys[row // per_entry] == token).any()) for row, token in token_of.items()):
        queries = tokens_of_queries(tracing, projection)
        if queries is not None:
            token_of.update({row: int(queries[product.rows.flatten()[row]]) for row in token_of})
    return keys


def _sequences(
    softmax: Operation, product: Product, members: list[int], token_of: dict[int, int], key_tokens: Tensor | None
) -> list[Sequence]:
    """Return the rows of one head, `members` of a product, as sequences: rows that share the keys."""
    batch, count = product.rows.shape
    sequences = []
    is_hidden, underflows = hidden_rows(softmax), underflowing_keys(softmax)
    for entry in range(batch):
        inside = sorted(row for row in members if row // count == entry)
        if not inside:
            continue
        index = torch.tensor([row % count for row in inside])
        tokens = torch.tensor([token_of.get(row, -2) for row in inside])
        order = product.rows[entry, index].argsort()
        index, tokens = index[order], tokens[order]
        weights, rows = product.weights[entry, index].double(), product.rows[entry, index]
        counted = ~is_hidden[rows] & (weights.abs().sum(-1) > 0)
        keys = product.keys[entry, index]
        is_visible = (weights > 0) | (underflows[rows].gather(1, keys.clamp(min=0)) & (keys >= 0))
        sequences.append(
            Sequence(
                torch.where(counted[:, None], weights, 0.0),
                is_visible,
                counted,
                product.values[entry].double(),
                product.out[entry, index].double(),
                None if key_tokens is None else key_tokens[entry],
                tokens,
            )
        )
    return sequences


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
