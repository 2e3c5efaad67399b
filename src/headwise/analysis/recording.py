"""Records each head's output, before the output projection, in a run of a model."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, Interceptor, Site
from headwise.intercept.layer_index import module_path_of_layer
from headwise.shapes import Float


class Reader(Interceptor):
    """A visitor that is told what every head gave, and changes nothing."""

    def __init__(self, modules: Collection[str] | None = None) -> None:
        self.modules = modules

    def change(self, call: Call) -> Change | None:
        """See `Interceptor`."""
        if self.modules is not None and call.site.path not in self.modules:
            return None

        def unchanged(attended: HeadOutput) -> Tensor:
            self.reads(call, attended.out)
            return attended.out

        return unchanged

    def reads(self, call: Call, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """A call gave this."""


class Outputs(Reader):
    """The output of heads in the last run in which their module attended, call by call.

    Attributes:
        of: `(batch, heads, queries, value_dim)` of each call, by module and whether it attended to something else.
    """

    def __init__(self, modules: Collection[str] | None = None) -> None:
        super().__init__(modules)
        self.of: dict[Site, list[Float[Tensor, "batch heads queries value_dim"]]] = {}

    def reads(self, call: Call, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """See `Reader`."""
        before = self.of.get(call.site, [])[: call.index]
        self.of[call.site] = [*before, out.detach()]

    def call(self, site: Site, number: int) -> Float[Tensor, "batch heads queries value_dim"]:
        """What a call of a module gave. `InputError` where it made none such."""
        calls = self.of.get(site, [])
        if number >= len(calls):
            raise InputError("run", expected=f"at least {number + 1} calls of {site.path} in it", got=len(calls))
        return calls[number]


@contextmanager
def record_outputs(model: Any, layers: Collection[int | str] | None = None) -> Iterator[Outputs]:
    """Within the context, what every head gives is kept: memory for `batch x heads x queries x value_dim` a layer.

    Of several runs the last is kept. Inside of a `gate`, what is kept is what the gate made of the heads.

    Args:
        model: any module that `watch` can see into.
        layers: only these, by number or by the path of the module that attends; all by default.

    Raises:
        InputError: no module; a compiled one; a layer that is not there.
    """
    require_module(model)
    outputs = Outputs(None if layers is None else {module_path_of_layer(model, layer) for layer in layers})
    with intercepted(model, outputs):
        yield outputs


def require_module(model: Any) -> nn.Module:
    """The model; `InputError` where it is none."""
    if not isinstance(model, nn.Module):
        raise InputError("model", expected="a torch module", got=type(model).__name__)
    return model


class Means(Reader):
    """The mean of each head's output over tokens that are no padding, call by call."""

    def __init__(self, modules: Collection[str] | None = None) -> None:
        super().__init__(modules)
        self._sums: dict[tuple[Site, int], tuple[Float[Tensor, "heads value_dim"], float]] = {}

    def reads(self, call: Call, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """See `Reader`."""
        batch, _, queries, _ = out.shape
        out, tokens = out.detach(), float(batch * queries)
        if call.padding is not None and call.padding.shape == (batch, queries):
            real = call.padding.bool()
            out, tokens = out.masked_fill(~real[:, None, :, None], 0.0), float(real.sum())
        total, key = out.sum((0, 2), dtype=torch.float64), (call.site, call.index)
        before, counted = self._sums.get(key, (torch.zeros_like(total), 0.0))
        self._sums[key] = before + total, counted + tokens

    def call(self, site: Site, number: int) -> Float[Tensor, "heads value_dim"]:
        """The mean of a module's heads in a call. `InputError` where it made none such."""
        if (site, number) not in self._sums:
            expected = f"batches in which {site.path} attends {number + 1} times"
            raise InputError("dataset", expected=expected, got="none")
        total, tokens = self._sums[site, number]
        return total / max(tokens, 1.0)
