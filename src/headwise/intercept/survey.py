"""Finding the sites where a model attends, by running it once."""

from collections.abc import Callable
from typing import Any

from torch import nn

from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call
from headwise.intercept.sites import SiteRegistry


class _Survey(SiteRegistry):
    """Interceptor that records at which sites (module, self or cross) a model attends, and neither observes nor changes
    the calls.
    """

    def observe(self, call: Call) -> None:
        """Record the site of an attention call; return None, so that its weights are not observed."""
        self.register(call)


def survey(model: nn.Module, run: Callable[[], Any]) -> SiteRegistry:
    """Return a registry of the sites (module, self or cross) at which `model` attends while `run`, a function that
    calls the model, runs once.

    Raises:
        InputError: no attention was intercepted, or the model did not run.
    """
    registry = _Survey(model)
    with intercepted(model, registry):
        run()
    registry.require_attention()
    return registry
