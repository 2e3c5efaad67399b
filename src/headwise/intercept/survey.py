"""Finding the sites where a model attends, by running it once."""

from collections.abc import Callable
from typing import Any

from torch import nn

from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call
from headwise.intercept.sites import SiteRegistry


class _Survey(SiteRegistry):
    """Interceptor that records the sites (attention modules, in self- or cross-attention) at which a model attends. It
    neither reads attention weights nor changes head outputs.
    """

    def observe(self, call: Call) -> None:
        """Record the site of an attention call (its attention module, self or cross). Return None, so that the
        attention weights of the call are not observed.
        """
        self.register(call)


def survey(model: nn.Module, run: Callable[[], Any]) -> SiteRegistry:
    """Call the function `run`, which calls `model`, once. Return a registry of the sites (attention modules, in self-
    or cross-attention) at which the model attended during this call.

    Raises:
        InputError: no attention was intercepted, or the model did not run.
    """
    registry = _Survey(model)
    with intercepted(model, registry):
        run()
    registry.require_attention()
    return registry
