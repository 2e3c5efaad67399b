"""Numbers that multiply what the heads of a model give, and by which a loss is differentiated."""

import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.losses import Loss, losses_of, prepare_loss
from headwise.data.batches import count_sequences_and_tokens, device_of, evaluation_mode, to_device
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, Site
from headwise.intercept.sites import SiteRegistry
from headwise.runs.checkpoint import CheckpointedRun
from headwise.shapes import Float

Make = Callable[[Call, Tensor], Float[Tensor, "#examples heads"]]
"""The numbers of a site, made for its first call and what its heads gave in it."""


class Factors(SiteRegistry):
    """A visitor that multiplies each head's output by a number of its own, the same one in every call of a module.

    Attributes:
        of: the numbers, by site, since they were last `put`.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.of: dict[Site, Float[Tensor, "#examples heads"]] = {}
        self._make: Make | None = None
        self._lock = threading.Lock()

    def put(self, make: Make | None) -> None:
        """From now on heads have the numbers that `make` makes; None leaves them alone."""
        self.of, self._make = {}, make

    def change(self, call: Call) -> Change | None:
        """See `Interceptor`."""
        self.register(call)
        return None if self._make is None else lambda attended: self._multiplied(call, attended)

    def _multiplied(self, call: Call, attended: HeadOutput) -> Tensor:
        if not torch.is_grad_enabled():
            remedy = 'method="ablation" needs none'
            got = f"none kept in {call.site.path}"
            raise InputError("model", expected="one that keeps gradients", got=got, remedy=remedy)
        site, out = call.site, attended.out
        with self._lock:
            if site not in self.of:
                assert self._make is not None
                self.of[site] = self._make(call, out)
        factor = self.of[site]
        if factor.shape[0] not in (1, out.shape[0]):
            expected = f"batches of one example, as {call.site.path} does not attend example by example"
            got = f"a batch of {factor.shape[0]}, of which it makes one of {out.shape[0]}"
            raise InputError("dataset", expected=expected, got=got)
        # In float32 at least: its gradient is a sum over all that the head gave.
        return (out.to(factor.dtype) * factor[..., None, None]).to(out.dtype)


def gate_dtype(out: Tensor) -> torch.dtype:
    """In what the numbers are that multiply an output."""
    return torch.promote_types(out.dtype, torch.float32)


@contextmanager
def factors(model: nn.Module) -> Iterator[Factors]:
    """Within the context a loss is differentiated by the factors of the heads, and by nothing else.

    The model is in evaluation mode and its parameters are held; afterwards all is as it was.

    Raises:
        InputError: a compiled model; when the context ends, if the model ran and nothing was seen.

    Warns:
        UserWarning: when the context ends, of modules that ran and are called attention, but were not seen.
    """
    found = Factors(model)
    with ExitStack() as stack:
        for context in (evaluation_mode(model), held(model), torch.inference_mode(False)):  # which turns gradients on
            stack.enter_context(context)
        stack.enter_context(intercepted(model, found))
        yield found
    if not found.ran:
        raise InputError("loss", expected="one that calls the model it is given", got="one that does not")
    found.require_attention()
    found.warn_of_unread()


@contextmanager
def held(model: nn.Module) -> Iterator[None]:
    """Without gradients of the model's parameters; then each learns as it did."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


@dataclass(frozen=True)
class Work:
    """What is to be measured, and what keeps how far that is."""

    model: nn.Module
    dataset: Texts | Iterable[Any]
    loss: Loss
    run: CheckpointedRun[Any, Any]
    shown: bool

    def begin(self, gates: Factors, batch: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """A batch on the model's device, of which the loss has seen the whole model, and how many examples it has."""
        batch = to_device(batch, device_of(self.model))
        gates.put(None)
        prepare_loss(self.loss, self.model, batch)
        return batch, count_sequences_and_tokens(batch)[0]

    def losses(self, gates: Factors, make: Make, batch: dict[str, Any]) -> Float[Tensor, " examples"]:
        """The loss of each example with these factors. `InputError` where it is something else."""
        gates.put(make)
        losses = losses_of(self.loss, self.model, batch)
        if gates.of and not losses.requires_grad:
            remedy = 'method="ablation" needs none'
            raise InputError("loss", expected="one that keeps gradients", got="a tensor without", remedy=remedy)
        return losses
