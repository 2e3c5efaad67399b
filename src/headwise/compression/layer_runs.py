"""Runs of a model that begin at one of its layers: the earlier layers return outputs that were stored before.

The layers of a transformer form a chain, in which each takes the output of the one before. A run up to layer i needs
then only embeddings, masks and layer i itself, if the output of layer i - 1 is known.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from headwise.data.batches import call_model, copied
from headwise.intercept.layer_index import is_inside
from headwise.intercept.swap_forward import swap_forward


class _EndOfRunError(Exception):
    """Raised inside of a model to end a run after the last layer that is needed."""


def layer_of_site(modules: Mapping[str, nn.Module], path: str, sites: Sequence[str]) -> str:
    """Return the path of the layer that contains the attention module at `path`: its outermost ancestor in a list of
    modules of which several contain attention modules. Without such a list, return the path itself.
    """
    parts = path.split(".")
    for stop in range(1, len(parts) + 1):
        ancestor = ".".join(parts[:stop])
        siblings = modules.get(ancestor.rpartition(".")[0])
        if isinstance(siblings, nn.ModuleList | nn.Sequential):
            parent = ancestor.rpartition(".")[0]
            layers = {site[len(parent) + 1 :].partition(".")[0] for site in sites if is_inside(site, parent)}
            if len(layers) > 1:
                return ancestor
    return path


class LayerRuns:
    """Runs of a model on the batches of a data set, layer by layer.

    Args:
        model: the model, in evaluation mode.
        batches: arguments of the model.
        layers: paths of the layers, in the order in which the model runs them.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Mapping[str, Any]], layers: Sequence[str]) -> None:
        self._model, self._batches, self._layers = model, batches, layers
        self._modules = dict(model.named_modules())
        self._outputs: list[dict[str, Any]] = [{} for _ in batches]  # of the last computed layer of each list

    @torch.no_grad()
    def run(self, layer: str, on_batch: Callable[[int], Any]) -> None:
        """Run the model up to a layer on each batch, and call `on_batch` with the number of the batch after each run."""
        for index in range(len(self._batches)):
            self._run(layer, index, lambda output: None)
            on_batch(index)

    @torch.no_grad()
    def finish(self, layer: str) -> None:
        """Run the model up to a layer on each batch, and store the layer's outputs for later layers."""
        for index, outputs in enumerate(self._outputs):

            def store(output: Any, outputs: dict[str, Any] = outputs) -> None:
                outputs[layer.rpartition(".")[0]] = output

            self._run(layer, index, store)

    def _run(self, layer: str, index: int, on_output: Callable[[Any], Any]) -> None:
        """Run the model on one batch until the layer ends, and pass its output to `on_output`."""
        position = self._layers.index(layer)
        with self._stored_outputs(self._layers[:position], self._outputs[index]):
            module = self._modules[layer]
            forward = module.forward

            def last_forward(*args: Any, **kwargs: Any) -> Any:
                on_output(forward(*args, **kwargs))
                raise _EndOfRunError

            try:
                with swap_forward(module, last_forward):
                    call_model(self._model, copied(self._batches[index]))
            except _EndOfRunError:
                return
        raise AssertionError(f"{layer} did not run")

    @contextmanager
    def _stored_outputs(self, layers: Sequence[str], outputs: Mapping[str, Any]) -> Iterator[None]:
        """Let these layers return the stored output of the last layer in their list."""
        with ExitStack() as stack:
            for path in layers:
                output = outputs[path.rpartition(".")[0]]
                stack.enter_context(swap_forward(self._modules[path], lambda *_, _output=output, **__: _output))
            yield
