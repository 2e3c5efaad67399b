"""Tokens of the queries, keys and values of one attention call, by their numbers in the results of linear maps."""

from typing import NamedTuple

import torch
from torch import Tensor

from headwise.shapes import Int


class LinearMapCall:
    """One call of a linear map, such as the query projection. The tokens in its result are numbered from 1, so that
    they can be recognised after later functions reorder or select them.

    Attributes:
        shape: axes of the tokens, such as `(batch, length)`.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape


class NumberedTokens(NamedTuple):
    """For each element of one tensor, the number of the token that it belongs to. Tokens are numbered in the result of
    the last linear map from which the tensor was computed.

    Attributes:
        numbers: number of the token of each element; 0 where it has none, or it is unknown.
        linear_map: the linear map in whose result the tokens are numbered.
        depend_on_data: True if the elements were selected or reordered by numbers that may differ in another call of
            the model, such as an index that sorts.
    """

    numbers: Int[Tensor, "*shape"]
    linear_map: LinearMapCall
    depend_on_data: bool = False

    def differ_from(self, others: "NumberedTokens") -> bool:
        """Return True if, at some index, the elements of this object and of `others` are known to belong to tokens with
        different numbers. Each object numbers the tokens in the result of a linear map. Return False if these two
        results have different axes, so that the numbers cannot be compared.
        """
        one, other = self.numbers, others.numbers
        if one is other and self.linear_map.shape == others.linear_map.shape:
            return False
        if self.linear_map.shape != others.linear_map.shape or one.shape != other.shape:
            return False
        return bool(((one != other) & (one != 0) & (other != 0)).any())


class ComparedTokens(NamedTuple):
    """Token numbers of the queries, keys and values of one attention call, as tensors `(..., length)`. A token number
    is not a token id: it is the place of a token in the result of a linear map, such as the query projection, counted
    from 1 over all sequences. Comparing token numbers shows whether query i and key i belong to the same token, and
    whether the model has reordered the queries after their projection, or divided them among several attention calls.

    Attributes:
        queries: token numbers of the queries.
        keys: token numbers of the keys.
        values: token numbers of the values; None if they are unknown.
    """

    queries: NumberedTokens
    keys: NumberedTokens
    values: NumberedTokens | None = None

    @property
    def has_reordered_queries(self) -> bool:
        """True if the queries are known to be in another order than the tokens in the result of the query
        projection.
        """
        numbers = self.queries.numbers
        return bool(((numbers[..., 1:] < numbers[..., :-1]) & (numbers[..., 1:] > 0)).any())

    @property
    def differ(self) -> bool:
        """True if, for some index i, query i and key i, or key i and value i, are known to have different tokens."""
        return self.queries.differ_from(self.keys) or self._values_differ

    @property
    def _values_differ(self) -> bool:
        """True if, for some index i, key i and value i are known to belong to different tokens."""
        return self.values is not None and self.keys.differ_from(self.values)

    def own_key_of_first_query(self) -> int | None:
        """Return the index of the key that belongs to the same token as the first query. Return None unless the keys
        are successive tokens, and the queries are a contiguous part of these tokens in the same order.
        """
        queries, keys = self.queries.numbers, self.keys.numbers
        if self.queries.linear_map.shape != self.keys.linear_map.shape or queries.shape[:-1] != keys.shape[:-1]:
            return None
        first = int((queries[..., 0] - keys[..., 0]).flatten()[0])
        successive = keys[..., :1] + torch.arange(keys.shape[-1], dtype=keys.dtype, device=keys.device)
        is_known = first >= 0 and bool((keys > 0).all()) and torch.equal(keys, successive)
        own = keys[..., max(first, 0) : first + queries.shape[-1]]
        return first if is_known and torch.equal(queries, own) and not self._values_differ else None

    def has_queries_of(self, other: "ComparedTokens") -> bool:
        """Return True if this attention call and `other` have some queries in common: queries that the same call of the
        query projection computed for the same tokens.
        """
        queries, others = self.queries.numbers, other.queries.numbers
        if self.queries.linear_map is not other.queries.linear_map:
            return False
        return bool(torch.isin(queries[queries > 0], others[others > 0]).any())

    def is_other_part(self, other: "ComparedTokens") -> bool:
        """Return True if this attention call and `other` compute attention for different parts of the same queries.
        They have no query in common, but their queries come from the same call of the query projection, and both attend
        to the same first key.
        """
        of_both = ((self.queries, other.queries), (self.keys, other.keys))
        if any(one.linear_map is not another.linear_map for one, another in of_both):
            return False
        first, first_of_other = self.keys.numbers[..., 0], other.keys.numbers[..., 0]
        if not torch.equal(first, first_of_other) or not bool((first > 0).all()):
            return False
        queries = self.queries.numbers
        return bool((queries > 0).all()) and not bool(
            torch.isin(queries.flatten(), other.queries.numbers.flatten()).any()
        )
