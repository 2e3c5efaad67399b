"""Heads that attend on calibration data, and a check that the padding of the data is stated."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.compression.calibration.projection_inputs import stated_padding
from headwise.compression.calibration.scored_heads import ScoredHead
from headwise.data.batches import call_model, copied, name_of_mask
from headwise.errors import InputError
from headwise.intercept.call_contexts import CallContexts
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.progress import progress_bar


def heads_of_batches(model: nn.Module, batches: Sequence[dict[str, Any]]) -> tuple[ScoredHead, ...]:
    """Return the heads of a model that attend on some of the batches, in the order of the model. Sums over all tokens
    but padding can be computed on these batches.

    Raises:
        InputError: the model hides tokens as padding that no padding mask of the batch states, so that they would count
            as text; it is unknown which tokens it hides; or labels of -100 show padding of which no mask is given.
    """
    for batch in batches:
        _require_mask_of_labels(model, batch)
    registry = _PaddingSurvey(model)
    _run(model, batches, registry)
    return _heads(registry)


def heads_of_each_batch(model: nn.Module, batches: Sequence[dict[str, Any]]) -> tuple[ScoredHead, ...]:
    """Return the heads of a model that attend on each batch, in the order of the model.

    Raises:
        InputError: some modules attend on some batches alone.
    """
    registry = _Survey(model)
    _run(model, batches, registry)
    for record in registry.records:
        if any(record.site not in sites for sites in registry.sites_of_batches):
            expected = "batches on which the same modules attend"
            raise InputError("calibration", expected=expected, got=f"some without attention in {record.site.label}")
    return _heads(registry)


def _run(model: nn.Module, batches: Sequence[dict[str, Any]], registry: "_Survey") -> None:
    """Run a model on batches, and record where it attends."""
    bar = progress_bar("calibration", len(batches), "batches")
    with intercepted(model, registry), torch.no_grad(), bar as progress:
        for batch in progress.track(batches, step=1):
            registry.start(batch)
            call_model(model, copied(batch))
            if registry.problem is not None:
                raise registry.problem
    registry.require_attention()


def _heads(registry: SiteRegistry) -> tuple[ScoredHead, ...]:
    """Return the heads of all sites of a registry."""
    return tuple(ScoredHead(**labels) for _, labels in registry.head_labels())


class _Survey(SiteRegistry):
    """Interceptor that records the sites where a model attends on each batch.

    Attributes:
        sites_of_batches: the sites, by batch.
        problem: error to be raised after the batch; None without a problem.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sites_of_batches: list[set[SiteKey]] = []
        self.problem: InputError | None = None

    def start(self, batch: dict[str, Any]) -> None:
        """Begin with another batch."""
        self.sites_of_batches.append(set())

    def observe(self, call: Call) -> None:
        """Record the site of an attention call."""
        self.register(call)
        self.sites_of_batches[-1].add(call.site)


class _PaddingSurvey(_Survey):
    """Interceptor that also compares the padding of each attention call with that which the batch states."""

    def start(self, batch: dict[str, Any]) -> None:
        """Begin with another batch, whose sequences continue none of the others."""
        super().start(batch)
        self._batch, self._contexts = batch, CallContexts()

    def on_model_call(self) -> None:
        """Discard the data of the previous call of the model."""
        self._contexts.on_model_call()

    def observe(self, call: Call) -> None:
        """Record the site of an attention call, and compare its padding with that which the batch states."""
        super().observe(call)
        try:
            observed = self._contexts.read(call)
        except InputError as error:  # a mask that is not a tensor, as with FlexAttention
            masks = [value for name, value in self._batch.items() if "mask" in name and value is not None]
            if any(not isinstance(mask, Tensor) or mask.ndim != 2 for mask in masks):
                self.problem = self.problem or error
            return
        stated = stated_padding((call.grid.batch, call.grid.queries), self._batch)
        real = observed.context.real_queries
        hides = "an unknown number of tokens" if observed.lacks_rows and stated is None else _hidden(real, stated)
        if hides and self.problem is None:
            self.problem = InputError(
                "calibration",
                expected="padding that an attention_mask of shape (sequences, tokens) states",
                got=f"a mask that hides {hides} in {self._names([call.site.label])}",
                remedy="give such a mask (decoder_attention_mask for targets), or use batches without padding",
            )


def _hidden(real: Tensor | None, stated: Tensor | None) -> str | None:
    """Return how many tokens are padding, but not stated to be; None if none is."""
    if real is None:
        return None
    hidden = ~real if stated is None else ~real & stated
    count = int(hidden.sum())
    return f"{count} of {hidden.numel()} tokens" if count else None


def _require_mask_of_labels(model: Any, batch: dict[str, Any]) -> None:
    """Raise `InputError` if labels of -100, which often stand for padding, come without a mask of their tokens."""
    needed = name_of_mask(model)
    for name, labels in batch.items():
        if name.endswith("labels") and isinstance(labels, Tensor) and labels.ndim == 2 and bool((labels == -100).any()):
            mask = batch.get(needed)
            if not isinstance(mask, Tensor) or mask.shape != labels.shape:
                expected = f"the argument {needed} of shape {tuple(labels.shape)} with {name} of -100"
                remedy = "state which tokens are padding"
                raise InputError("calibration", expected=expected, got="none of this shape", remedy=remedy)
