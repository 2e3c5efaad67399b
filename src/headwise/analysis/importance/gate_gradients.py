"""Gates on the heads of a model as tensors by which a loss is differentiated."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.losses import Loss, finite_loss_per_example, prepare_loss
from headwise.data.batches import count_sequences_and_tokens, device_of, evaluation_mode, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.runs.checkpoint import CheckpointedRun
from headwise.shapes import Float

CreateGates = Callable[[Call, Tensor], Float[Tensor, "#examples heads"]]
"""Function from a site's first call and its head outputs to the gates of the site."""


class GateTensors(SiteRegistry):
    """Interceptor that multiplies head outputs by gates, tensors with respect to which a loss can be differentiated. An
    attention site (a module's self- or cross-attention) has one gate per head, either for each example or shared by all
    examples. All calls of a site use the same gates.

    Attributes:
        by_site: gates of each site that was called since the last `reset`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.by_site: dict[SiteKey, Float[Tensor, "#examples heads"]] = {}
        self._create: CreateGates | None = None
        self._lock = threading.Lock()

    def reset(self, create: CreateGates | None) -> None:
        """Remove all gates of heads. If `create` is a function, it creates the gates of each attention site (a module's
        self- or cross-attention) at the next call of the site. If `create` is None, head outputs stay unchanged.
        """
        self.by_site, self._create = {}, create

    def change(self, call: Call) -> Change | None:
        """Register the site (a module's self- or cross-attention) of an attention call, and return the function that
        multiplies the call's head outputs by the gates of the site. Return None while gates are turned off, as after
        `reset(None)`.
        """
        self.register(call)
        return None if self._create is None else lambda attended: self._multiply(call, attended)

    def _multiply(self, call: Call, attended: HeadOutput) -> Tensor:
        """Return the head outputs of an attention call times the gates of its site (a module's self- or
        cross-attention), one gate per head. The first call of a site creates the gates of the site.
        """
        if not torch.is_grad_enabled():
            remedy = 'use method="ablation", which needs none'
            got = f"none in {call.site.path}"
            raise InputError("model", expected="one that records gradients", got=got, remedy=remedy)
        site, out = call.site, attended.out
        with self._lock:
            if site not in self.by_site:
                assert self._create is not None
                self.by_site[site] = self._create(call, out)
        gates = self.by_site[site]
        if gates.shape[0] not in (1, out.shape[0]):
            expected = f"batches of one example, as {site.path} does not attend example by example"
            got = f"a batch of {gates.shape[0]}, for which it attends with a batch of {out.shape[0]}"
            raise InputError("dataset", expected=expected, got=got)
        # In float32 at least: the gate's gradient is a sum over all queries and features of the head.
        return (out.to(gates.dtype) * gates[..., None, None]).to(out.dtype)


def gate_dtype(out: Tensor) -> torch.dtype:
    """Return the dtype in which head outputs with the dtype of `out` are multiplied by gates: float32, or float64 for
    float64 outputs.
    """
    return torch.promote_types(out.dtype, torch.float32)


@contextmanager
def differentiable_gates(model: nn.Module) -> Iterator[GateTensors]:
    """Intercept a model and yield a `GateTensors`, the object that multiplies head outputs by gates (factors with
    respect to which a loss can be differentiated). While the context is active, the model is in evaluation mode and its
    parameters are frozen; both are restored afterwards.

    Raises:
        InputError: a compiled model; at the end of the context, if the loss did not call the model, or no attention was
            intercepted.

    Warns:
        UserWarning: at the end of the context, modules that are called attention were not intercepted.
    """
    gates = GateTensors(model)
    with ExitStack() as stack:
        # Leaving inference mode also turns gradients on.
        for context in (evaluation_mode(model), frozen_parameters(model), torch.inference_mode(False)):
            stack.enter_context(context)
        stack.enter_context(intercepted(model, gates))
        yield gates
    if not gates.ran:
        raise InputError("loss", expected="one that calls the model it is given", got="one that does not")
    gates.require_attention()
    gates.warn_of_unread()


@contextmanager
def frozen_parameters(model: nn.Module) -> Iterator[None]:
    """Turn off the gradients of all model parameters while the context is active, and afterwards turn them on again for
    the parameters that required gradients before.
    """
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in trainable:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class ImportanceTask:
    """Model, data and loss for which the importance of heads is measured. The field `run` saves progress in a folder,
    and `show_progress` turns on a progress bar.

    Attributes:
        model: the model.
        dataset: `Texts` or batches.
        loss: function `(model, batch) -> (batch,)`.
        run: folder in which progress is saved.
        show_progress: True to show a progress bar.
    """

    model: nn.Module
    dataset: Texts | Iterable[Any]
    loss: Loss
    run: CheckpointedRun[Any, Any]
    show_progress: bool

    def start_batch(self, gates: GateTensors, batch: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Move a batch to the model's device, remove all gates, and call the loss's method `prepare`, if it has one, on
        the unchanged model. Return the moved batch and its number of examples.
        """
        batch = to_device(batch, device_of(self.model))
        gates.reset(None)
        prepare_loss(self.loss, self.model, batch)
        return batch, count_sequences_and_tokens(batch)[0]

    def gated_losses(
        self, gates: GateTensors, create: CreateGates, batch: dict[str, Any]
    ) -> Float[Tensor, " examples"]:
        """Run the model on a batch with new gates (factors of head outputs) on all heads, made by `create`, and return
        the loss of each example.

        Raises:
            InputError: the loss is not one number per example, or has no gradient.
        """
        gates.reset(create)
        losses = finite_loss_per_example(self.loss, self.model, batch)
        if gates.by_site and not losses.requires_grad:
            remedy = 'use method="ablation", which needs none'
            raise InputError("loss", expected="one that records gradients", got="a tensor without", remedy=remedy)
        return losses
