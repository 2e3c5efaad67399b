"""Where a model attends, found by running it once."""

from collections.abc import Callable
from typing import Any

from torch import nn

from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Observation
from headwise.intercept.sites import SiteRegistry


class _Survey(SiteRegistry):
    """A visitor that looks at nothing and changes nothing."""

    def observe(self, call: Call) -> Observation | None:
        """See `Interceptor`."""
        self.register(call)
        return None


def survey(model: nn.Module, run: Callable[[], Any]) -> SiteRegistry:
    """The places where the model attends while it is run.

    Raises:
        InputError: it attends nowhere that can be seen.
    """
    seen = _Survey(model)
    with intercepted(model, seen):
        run()
    seen.require_attention()
    return seen
