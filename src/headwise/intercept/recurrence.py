"""Attention calls of one model call that attend to keys of each other, block by block: they have the same sequences."""

import threading
from dataclasses import replace

from headwise.intercept.interceptor import Call, SiteKey


class Recurrence(threading.local):
    """Calls that began the sequences of the later calls of the same site in one call of the model, in one thread."""

    def __init__(self) -> None:
        self._first_calls: dict[SiteKey, int] = {}

    def on_model_call(self) -> None:
        """Forget the calls of the previous call of the model."""
        self._first_calls = {}

    def with_first_call(self, call: Call) -> Call:
        """Return an attention call with the number of the call at its site that began its sequences: an earlier one if
        it attends to keys of earlier calls, otherwise its own.
        """
        if not call.sources.is_recurrent:
            self._first_calls[call.site] = call.index
        return replace(call, index=self._first_calls.get(call.site, call.index))
