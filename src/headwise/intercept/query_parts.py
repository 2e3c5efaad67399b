"""Attention calls of one module call that attend with parts of the same queries, whose rows belong together."""

import threading
from typing import NamedTuple

import torch

from headwise.intercept.compared_tokens import ComparedTokens
from headwise.intercept.interceptor import Call, SiteKey


class _Queries(NamedTuple):
    """Queries of a call and of the later calls with other parts of them.

    Attributes:
        site: where in the model.
        first_call: number of the first of these calls.
        sizes: numbers of sequences and heads.
        tokens: tokens of the first call, with the queries of all these calls.
    """

    site: SiteKey
    first_call: int
    sizes: tuple[int, int]
    tokens: ComparedTokens


class QueryParts(threading.local):
    """Parts of the queries in the attention calls of one call of the model, in one thread. A model that computes
    attention in parts to save memory calls it in a loop over the queries, with the same keys.
    """

    def __init__(self) -> None:
        self._so_far: list[_Queries] = []

    def on_model_call(self) -> None:
        """Forget the calls of the previous call of the model."""
        self._so_far = []

    def attends_again(self, call: Call) -> bool:
        """Return True if some queries of an attention call have attended before in the same call of the model, at the
        same site.
        """
        tokens, sizes = call.sources.tokens, (call.grid.batch, call.grid.heads)
        return tokens is not None and any(
            (whole.site, whole.sizes) == (call.site, sizes) and tokens.has_queries_of(whole.tokens)
            for whole in self._so_far
        )

    def sequences_of(self, call: Call, continues: bool) -> tuple[int, bool]:
        """Return the index of the first call at this site on the same sequences, by default that of this call. Also
        return True if this call continues that first call: with the same keys, and other queries of the same
        projection. If the tokens of the call are unknown, return its own index and `continues`.

        Args:
            call: the call.
            continues: True if this call continues the sequences of an earlier call of the model.
        """
        tokens, sizes = call.sources.tokens, (call.grid.batch, call.grid.heads)
        if tokens is None:
            return call.index, continues
        for place, whole in enumerate(self._so_far):
            if (whole.site, whole.sizes) == (call.site, sizes) and tokens.is_other_part(whole.tokens):
                of_both = torch.cat([whole.tokens.queries.numbers, tokens.queries.numbers], -1)
                queries = tokens.queries._replace(numbers=of_both)
                self._so_far[place] = whole._replace(tokens=whole.tokens._replace(queries=queries))
                return whole.first_call, True
        self._so_far.append(_Queries(call.site, call.index, sizes, tokens))
        return call.index, continues
