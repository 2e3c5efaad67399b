"""Recording of head outputs, before the output projection, while a model runs."""

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headwise.checks import collection_of, require_module
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, Interceptor, SiteKey
from headwise.intercept.layer_index import module_path_of_layer
from headwise.intercept.sites import SiteRegistry
from headwise.shapes import Float


class OutputReader(Interceptor):
    """Base class of interceptors that read head outputs (attention weights times values, before the output projection),
    and leave them unchanged. They read the attention modules whose paths are in `modules`, or all attention modules if
    `modules` is None.
    """

    def __init__(self, modules: Collection[str] | None = None) -> None:
        self.modules = modules

    def change(self, call: Call) -> Change | None:
        """Return a function that passes the head outputs of an attention call to `read` and returns them unchanged.
        Return None if the outputs of the call's module are not read, or if the call repeats an earlier one in a
        backward pass (activation checkpointing).
        """
        if call.is_recomputation or (self.modules is not None and call.site.label not in self.modules):
            return None

        def read_and_return(attended: HeadOutput) -> Tensor:
            self.read(call, attended.out)
            return attended.out

        return read_and_return

    def read(self, call: Call, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Receive the head outputs of one attention call. Subclasses override this method; here it does nothing."""


class RecordedOutputs(OutputReader):
    """Interceptor that records head outputs, before the output projection, as one tensor per attention call. For each
    attention module (separately for self- and cross-attention), it keeps the outputs of the last run in which the
    module attended. A run is a call of the model, or a direct call of one of its modules.

    Attributes:
        by_site: tensors `(batch, heads, queries, value_dim)` of each site `(module path, is cross-attention)`, in the
            order of the site's calls.
    """

    def __init__(self, modules: Collection[str] | None = None) -> None:
        super().__init__(modules)
        self.by_site: dict[SiteKey, list[Float[Tensor, "batch heads queries value_dim"]]] = {}
        self._runs = 0
        self._last_run: dict[SiteKey, int] = {}

    def on_model_call(self) -> None:
        """Count one more run of the model. This method is called when a run starts."""
        self._runs += 1

    def read(self, call: Call, out: Float[Tensor, "batch heads queries value_dim"]) -> None:
        """Store the head outputs of one attention call. A module can attend several times in a run of the model; its
        outputs are stored in the order of its calls. The first call in a run discards the module's outputs of the
        previous run.
        """
        earlier_calls = self.by_site.get(call.site, [])[: call.index]
        self.by_site[call.site] = [*earlier_calls, out.detach()]
        self._last_run[call.site] = self._runs

    def output_of_call(self, site: SiteKey, index: int) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return the recorded head outputs of one attention call in the last run of the model. `site` is the module's
        self- or cross-attention, and `index` the number of its call in the run, from 0.
        """
        outputs = self.by_site.get(site, [])
        if outputs and self._last_run[site] != self._runs:
            remedy = "record one run of the model, in which all patched modules run"
            got = f"run {self._last_run[site]} of {self._runs}"
            raise InputError("run", expected=f"the last run to include {site.path}", got=got, remedy=remedy)
        if index >= len(outputs):
            raise InputError("run", expected=f"at least {index + 1} calls of {site.path} in it", got=len(outputs))
        return outputs[index]


class RecordedRun(SiteRegistry, RecordedOutputs):
    """Interceptor that records the head outputs of a model's last run. It also registers each attention module that
    ran, with the number of its heads and their labels (layer, head, module, kind).
    """

    def __init__(self, model: nn.Module) -> None:
        SiteRegistry.__init__(self, model)
        RecordedOutputs.__init__(self)

    def change(self, call: Call) -> Change | None:
        self.register(call)
        return super().change(call)


@contextmanager
def record_outputs(model: Any, layers: Collection[int | str] | None = None) -> Iterator[RecordedOutputs]:
    """Record head outputs, before the output projection, while the context is active. The context yields an object with
    the outputs of all attention modules, or of those in `layers`.

    The tensors of the last run in which a module attended are kept in memory: `batch * heads * queries * value_dim`
    numbers per layer.
    Inside a `gate`, the gated outputs are recorded.

        with hw.record_outputs(model) as run:
            model(**clean)
        with hw.gate(model, {(3, 5): hw.replacements.patch(run)}):
            model(**corrupted)

    Args:
        model: any module that `watch` supports.
        layers: layers to record, each the layer's number or the path of its attention module; all by default.

    Raises:
        InputError: `model` is not a module, or is compiled; a layer does not exist.
    """
    require_module(model)
    modules = None
    if layers is not None:
        modules = {module_path_of_layer(model, layer) for layer in collection_of("layers", layers, of="layers")}
    outputs = RecordedOutputs(modules)
    with intercepted(model, outputs, context="hw.record_outputs"):
        yield outputs
