"""Token ids of one attention call of a model."""

from typing import NamedTuple

from torch import Tensor

TOKENS_UNKNOWN = (
    "it is unknown which tokens the queries of these modules stand for, since the model changes or reorders its "
    "input_ids, so statistics that need token ids are left out"
)
"""Reason for modules whose token ids are unknown."""

OF_TOKENS = frozenset({"special", "confidence_content", "duplicate", "induction"})
"""Statistics that need token ids."""


class CallTokens(NamedTuple):
    """Token ids of one attention call.

    Attributes:
        ids: ids of the tokens of the queries, or of all tokens so far; None if there are none, or if they are unknown.
        are_unknown: True if the model reads token ids, but it is unknown which of them the queries stand for.
        are_moved: True if the tokens have other places than in the arguments of the model.
    """

    ids: Tensor | None
    are_unknown: bool = False
    are_moved: bool = False
