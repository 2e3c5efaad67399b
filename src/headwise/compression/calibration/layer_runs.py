"""Runs of a model that begin at one of its layers: the layers before return outputs that were stored.

The layers of a transformer form a chain, in which each takes the output of the one before. If that output is known, a
run up to layer i needs embeddings, masks and layer i alone. `LayerRuns` checks on two batches that this holds, by a
comparison with complete runs; in a model for which it does not hold, all layers are computed each time.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.data.batches import call_model, copied, count_sequences_and_tokens
from headwise.intercept.layer_index import is_inside
from headwise.intercept.swap_forward import swap_forward
from headwise.progress import progress_bar


class _EndOfRunError(Exception):
    """Raised inside of a model to end a run after the last layer that is needed."""


_DID_NOT_RUN = object()
"""Stands for the output of a layer that did not run."""


def layer_of_site(modules: Mapping[str, nn.Module], path: str, sites: Sequence[str]) -> str:
    """Return the path of the layer that contains the attention module at `path`: its outermost ancestor in a list of
    modules of which several contain attention modules. Without such a list, return the path itself.

    Args:
        modules: all modules of the model by path.
        path: path of the attention module.
        sites: paths of all attention modules.
    """
    parts = path.split(".")
    for stop in range(1, len(parts) + 1):
        parent = ".".join(parts[: stop - 1])
        if isinstance(modules.get(parent), nn.ModuleList | nn.Sequential):
            inside = {site[len(parent) + 1 :].partition(".")[0] for site in sites if is_inside(site, parent)}
            if len(inside) > 1:
                return ".".join(parts[:stop])
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
        self._outputs: list[dict[str, Any]] = [{} for _ in batches]  # of the latest layer of each list
        self._reuses = True
        self._reuses = self._is_chain()

    def run(self, layer: str, around: Callable[[int], Any], *, store: bool) -> None:
        """Run the model up to a layer on each batch, each time in the context manager `around(number of the batch)`.

        Args:
            layer: path of the layer.
            around: function that returns a context manager for the run on a batch.
            store: store the output of the layer, for runs up to later layers.
        """
        for index, outputs in enumerate(self._outputs):
            with around(index):
                output = self._run(layer, index)
            if store and output is not _DID_NOT_RUN:
                outputs[layer.rpartition(".")[0]] = output

    @torch.no_grad()
    def _run(self, layer: str, index: int) -> Any:
        """Run the model on one batch until a layer ends, and return its output; `_DID_NOT_RUN` if the layer did not.
        If layers do not form a chain, run all of the model, since it may run the layer again.
        """
        before = self._layers[: self._layers.index(layer)] if self._reuses else []
        module, outputs = self._modules[layer], []
        forward = module.forward

        def last_forward(*args: Any, **kwargs: Any) -> Any:
            outputs.append(forward(*args, **kwargs))
            if self._reuses:
                raise _EndOfRunError
            return outputs[-1]

        try:
            with self._stored_outputs(before, self._outputs[index]), swap_forward(module, last_forward):
                call_model(self._model, copied(self._batches[index]))
        except _EndOfRunError:
            pass
        return outputs[-1] if outputs else _DID_NOT_RUN

    @contextmanager
    def _stored_outputs(self, layers: Sequence[str], outputs: Mapping[str, Any]) -> Iterator[None]:
        """Let these layers return the stored output of the latest layer in their list."""
        with ExitStack() as stack:
            for path in layers:
                output = outputs.get(path.rpartition(".")[0])  # None if no layer of the list ran
                stack.enter_context(swap_forward(self._modules[path], lambda *_, _output=output, **__: _output))
            yield

    @torch.no_grad()
    def _is_chain(self) -> bool:
        """Return True if each layer runs once, and runs with stored outputs return the same as a complete run, on the
        batches with the fewest and the most tokens.
        """
        tokens = [count_sequences_and_tokens(batch)[1] for batch in self._batches]
        chosen = {tokens.index(min(tokens)), tokens.index(max(tokens))}
        return all(self._is_chain_on(index) for index in sorted(chosen))

    @torch.no_grad()
    def _is_chain_on(self, index: int) -> bool:
        """Return True if each layer runs once on a batch, and runs with stored outputs return the same as a complete
        run.
        """
        expected: dict[str, list[Any]] = {path: [] for path in self._layers}

        def record(path: str) -> Callable[..., None]:
            return lambda module, arguments, output: expected[path].append(output)

        with ExitStack() as stack:
            for path in self._layers:
                stack.callback(self._modules[path].register_forward_hook(record(path)).remove)
            call_model(self._model, copied(self._batches[index]))
        if any(len(outputs) != 1 for outputs in expected.values()):
            return False
        try:
            with progress_bar("runs of single layers", len(self._layers), "layers") as bar:
                for path in bar.track(self._layers):
                    output = self._run(path, index)
                    if not _are_equal(output, expected[path][0]):
                        return False
                    self._outputs[index][path.rpartition(".")[0]] = output
        except Exception:  # such as a KeyError, for a value that a skipped layer did not leave
            return False
        finally:
            self._outputs[index].clear()
        return True


def _are_equal(value: Any, other: Any) -> bool:
    """Return True if two outputs of a layer contain the same tensors."""
    tensors, others = (
        [leaf for leaf in pytree.tree_leaves(each) if isinstance(leaf, Tensor)] for each in (value, other)
    )
    return len(tensors) == len(others) and all(map(torch.equal, tensors, others))
