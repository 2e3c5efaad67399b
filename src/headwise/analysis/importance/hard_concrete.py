"""Importance of heads by learned gates: heads that a model keeps open if every open head has a cost.

A hard concrete gate is 0 with some probability, 1 with another, and between otherwise. The expected number of open
gates is therefore differentiable (Louizos, Welling and Kingma 2018, section 2.2; for heads Voita et al. 2019, section
5.2). The model itself is not changed.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.analysis.head_pass import SequenceProgress, merged_registry
from headwise.analysis.importance.gradients import GateTensors, ImportanceTask, differentiable_gates, gate_dtype
from headwise.checks import finite_number, whole_number
from headwise.data.batches import iterate_batches
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, SiteKey
from headwise.progress import progress_bar
from headwise.runs.data_pass import Pass
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.shapes import Float

LOW, HIGH = -0.1, 1.1
"""Range to which a gate is stretched before it is clipped to [0, 1]."""

INITIAL_LOG_ALPHA = 2.0
"""Logarithm of alpha before learning: the gate is nearly always open."""

LOG_ALPHA = "log_alpha"
"""Name of the learned parameters among the values of a fit."""


@dataclass(frozen=True)
class HardConcrete:
    """Importance method that learns one random gate per head, a factor from 0 to 1 by which the head's output is
    multiplied. Adam minimises the mean loss plus `sparsity` times the expected number of open gates (gates that are not
    0).

    Attributes:
        sparsity: cost of an open gate, in units of the loss.
        epochs: number of passes over the data.
        learning_rate: learning rate of Adam.
        temperature: temperature of the distribution; Voita et al. use 0.33.
        seeds: seeds of the noise: one, or several, each of which is a separate fit.
    """

    sparsity: float = 0.01
    epochs: int = 10
    learning_rate: float = 0.1
    temperature: float = 2 / 3
    seeds: int | Iterable[int] = 0
    progress_type: ClassVar[type[Any]] = SequenceProgress

    def __post_init__(self) -> None:
        if not finite_number("sparsity", self.sparsity) >= 0:
            raise InputError("sparsity", expected="a number of 0 or more", got=self.sparsity)
        whole_number("epochs", self.epochs, least=1)
        finite_number("learning_rate", self.learning_rate, above=0.0)
        finite_number("temperature", self.temperature, above=0.0)
        seeds = self.seeds if isinstance(self.seeds, Iterable) else [self.seeds]
        object.__setattr__(self, "seeds", [whole_number("seeds", seed, least=0) for seed in seeds])
        if not self.seeds:
            raise InputError("seeds", expected="at least one", got="none")

    def open_probability(self, log_alpha: Tensor) -> Tensor:
        """Return the probability that a gate with the learned parameter `log_alpha` is not 0 (Louizos et al. 2018,
        equation 12).
        """
        return torch.sigmoid(log_alpha - self.temperature * math.log(-LOW / HIGH))

    def measure(self, task: ImportanceTask, data_pass: Pass[SequenceProgress]) -> SequenceProgress:
        """Learn the gates of all heads, once for each seed. Return the learned parameters of each attention module for
        each seed. With several processes, each process learns from all data for every seed. There are no checkpoints.
        """
        assert isinstance(self.seeds, list)
        dataset, progress = task.data.dataset, SequenceProgress()
        progress.begin(dataset)
        with progress_bar("gates", None, "batches", shown=data_pass.shows_progress) as bar:
            bar.step = 1
            for number, seed in enumerate(self.seeds):
                fit = _GateFit(self, seed)
                with differentiable_gates(task) as gates:
                    for epoch in range(self.epochs):
                        batches = 0
                        for batch in iterate_batches(dataset):
                            batches += 1
                            if number == epoch == 0:
                                progress.count_batch(batch)
                            fit.step(gates, batch)
                            bar.advance()
                        if not batches:
                            raise InputError(
                                "dataset",
                                expected="at least one batch in every pass",
                                got="none" if epoch == 0 else "an iterator, which can be read once",
                                remedy="a list of batches can be read again",
                            )
                    if number == 0:
                        progress.records = gates.records
                progress.values[number] = {site: {LOG_ALPHA: each.detach()} for site, each in fit.log_alpha.items()}
        return progress

    def rows(
        self, task: ImportanceTask, parts: Sequence[SequenceProgress], _metadata: dict[str, Any]
    ) -> tuple[list[HeadRow], dict[str, Any]]:
        """Return one table row per head with two statistics. `open` is the probability that the head's gate is not 0,
        and `gate` is the gate's value without noise (Louizos et al. 2018, equation 13). Both are means over the seeds
        for which the first process learned gates.
        """
        rows: list[HeadRow] = []
        fits = parts[0].values.values()
        for record, labels in merged_registry(task.data.model, parts[:1]).head_labels():
            log_alpha = torch.stack([fit[record.site][LOG_ALPHA][labels["head"]] for fit in fits])
            values = {"open": self.open_probability(log_alpha), "gate": _stretched(torch.sigmoid(log_alpha))}
            statistics = {name: MeanEstimate.of(of_fits.tolist()) for name, of_fits in values.items()}
            rows.append(HeadRow(**labels, statistics=statistics))
        return rows, {}


def _stretched(gates: Tensor) -> Tensor:
    """Stretch gates from the range [0, 1] to [-0.1, 1.1], and clip the result to [0, 1]. So a gate can be exactly 0 or
    1.
    """
    return (gates * (HIGH - LOW) + LOW).clamp(0.0, 1.0)


class _GateFit:
    """One fit of the random gates of all heads, with its own Adam optimiser. Other fits differ in `seed`, the seed of
    the random noise of the gates.

    Attributes:
        log_alpha: the learned parameter of each head's gate, by site.
    """

    def __init__(self, method: HardConcrete, seed: int) -> None:
        self.log_alpha: dict[SiteKey, Float[Tensor, " heads"]] = {}
        self._method, self._noise = method, torch.Generator().manual_seed(seed)
        self._adam = torch.optim.Adam([{"params": []}], lr=method.learning_rate)

    def step(self, gates: GateTensors, batch: dict[str, Any]) -> None:
        """Run the model on a batch with random gates, and make one step of Adam on the learned parameters of the gates.
        Skip the step if no example has a loss, or no attention call has been intercepted.
        """
        batch, examples = gates.start_batch(batch)

        def create(call: Call, out: Tensor) -> Float[Tensor, "#examples heads"]:
            heads = call.grid.heads
            if call.site not in self.log_alpha:
                log_alpha = torch.full((heads,), INITIAL_LOG_ALPHA, device=out.device, requires_grad=True)
                self.log_alpha[call.site] = log_alpha
                self._adam.add_param_group({"params": [log_alpha]})
            # In a module that does not attend example by example, all examples share their gates.
            rows = examples if out.shape[0] == examples else 1
            noise = torch.rand(rows, heads, generator=self._noise).to(out.device)
            # Louizos et al. 2018, equations 10 and 11.
            logits = (torch.logit(noise, 1e-6) + self.log_alpha[call.site]) / self._method.temperature
            return _stretched(torch.sigmoid(logits)).to(gate_dtype(out))

        losses = gates.losses(create, batch)
        has_loss = ~losses.isnan()
        if not self.log_alpha or not bool(has_loss.any()):
            return
        parameters = list(self.log_alpha.values())
        expected_open = sum(self._method.open_probability(log_alpha).sum().to(losses) for log_alpha in parameters)
        objective = losses[has_loss].mean() + self._method.sparsity * expected_open
        gradients = torch.autograd.grad(objective, parameters, materialize_grads=True)
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        self._adam.step()
