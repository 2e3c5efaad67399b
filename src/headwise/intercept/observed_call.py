"""Data about one attention call from which statistics are computed."""

from typing import NamedTuple

from headwise.attention.backends.blockwise.call_context import CallContext


class ObservedCall(NamedTuple):
    """Data about one attention call that its statistics depend on: the tokens, padding and positions of the call, and
    whether the call continues the sequences of an earlier call.

    Attributes:
        context: tokens, padding and positions of the call.
        continues: True if the call adds rows to the sequences of the latest call of the same site.
        first_token: number of the token of the first key, counted from the start of its sequence.
        lacks_positions: True if the positions of the queries among the keys could not be established.
        lacks_rows: True if it is unknown which sequences the call belongs to, or which of its queries are padding.
        lacks_tokens: True if it is unknown which token ids the queries have.
    """

    context: CallContext
    continues: bool = False
    first_token: int = 0
    lacks_positions: bool = False
    lacks_rows: bool = False
    lacks_tokens: bool = False
