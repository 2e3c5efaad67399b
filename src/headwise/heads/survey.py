"""Where a model attends, found by running it once."""

from collections.abc import Callable
from typing import Any

from torch import nn

from headwise.models.intercept import intercepted
from headwise.models.running import Call, Change, Look
from headwise.models.seen import Seen


class _Survey(Seen):
    """A visitor that looks at nothing and changes nothing."""

    def starts(self) -> None:
        """See `Visitor`."""

    def sees(self, call: Call) -> Look | None:
        """See `Visitor`."""
        self.site(call)
        return None

    def changes(self, call: Call) -> Change | None:
        """See `Visitor`."""
        return None


def survey(model: nn.Module, run: Callable[[], Any]) -> Seen:
    """The places where the model attends while it is run.

    Raises:
        InputError: it attends nowhere that can be seen.
    """
    seen = _Survey(model)
    with intercepted(model, seen):
        run()
    seen.require_some()
    return seen
