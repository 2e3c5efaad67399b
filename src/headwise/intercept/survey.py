"""Finding the sites where a model attends, by running it once."""

from collections.abc import Callable
from typing import Any

from torch import nn

from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call
from headwise.intercept.sites import SiteRegistry


class _Survey(SiteRegistry):
    """Interceptor that records the sites of all calls, and observes and changes none."""

    def observe(self, call: Call) -> None:
        """Record the call's site."""
        self.register(call)


def survey(model: nn.Module, run: Callable[[], Any]) -> SiteRegistry:
    """Return the sites at which `model` attends during one call of `run`.

    Raises:
        InputError: no attention was intercepted, or the model did not run.
    """
    registry = _Survey(model)
    with intercepted(model, registry):
        run()
    registry.require_attention()
    return registry
