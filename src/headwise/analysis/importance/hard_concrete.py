"""Gates that are learned: which heads a model keeps open where every open head costs something.

A gate is 0 with some probability, 1 with another, and in between otherwise, so that how many are open has a gradient:
the hard concrete distribution (Louizos, Welling and Kingma 2018, section 2.2), for heads as Voita et al. 2019, section
5.2, have it. The model itself stays what it is.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.importance.gate_parameters import Factors, Work, factors, gate_dtype
from headwise.checks import finite_number, whole_number
from headwise.data.batches import iterate_batches
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, Site
from headwise.intercept.sites import SiteRegistry
from headwise.runs.data_pass import SiteProgress
from headwise.runs.distributed import rank_and_world_size
from headwise.runs.progress import progress_bar
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.shapes import Float

LOW, HIGH = -0.1, 1.1
"""To where a gate is stretched, before what is below 0 or above 1 is cut."""

FIRST = 2.0
"""The logarithm of alpha where learning begins: nearly always open."""


@dataclass(frozen=True)
class HardConcrete:
    """Gates learned by Adam: the loss, and `sparsity` times the number of heads expected to be open, are least.

    Attributes:
        sparsity: what an open head costs, in the units of the loss.
        epochs: how often the data is read.
        learning_rate: of Adam.
        temperature: of the distribution; Voita et al. have 0.33.
        seeds: of the noise: one, or several, each a fit of its own.
    """

    sparsity: float = 0.01
    epochs: int = 10
    learning_rate: float = 0.1
    temperature: float = 2 / 3
    seeds: int | Iterable[int] = 0

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

    def open(self, log_alpha: Tensor) -> Tensor:
        """The probability that a gate is not 0 (Louizos et al. 2018, equation 12)."""
        return torch.sigmoid(log_alpha - self.temperature * math.log(-LOW / HIGH))

    def gate(self, log_alpha: Tensor) -> Tensor:
        """The gate without noise (equation 13)."""
        return (torch.sigmoid(log_alpha) * (HIGH - LOW) + LOW).clamp(0.0, 1.0)

    def sample(self, log_alpha: Tensor, noise: Float[Tensor, "examples heads"]) -> Float[Tensor, "examples heads"]:
        """Gates of noise that is even between 0 and 1 (equations 10 and 11)."""
        stretched = torch.sigmoid((torch.logit(noise, 1e-6) + log_alpha) / self.temperature) * (HIGH - LOW) + LOW
        return stretched.clamp(0.0, 1.0)

    def measure(self, work: Work) -> tuple[list[HeadRow], dict[str, Any]]:
        """See `Method`."""
        assert isinstance(self.seeds, list)
        fits = [_Fit(self, work, seed) for seed in self.seeds]
        with progress_bar("gates", None, "batches", shown=work.shown and rank_and_world_size()[0] == 0) as advance:
            for fit in fits:
                fit.learn(advance)
        heads = []
        for record, where in fits[0].seen.head_labels():
            found = torch.stack([fit.log_alpha[record.site].detach()[where["head"]] for fit in fits])
            statistics = {"open": self.open(found), "gate": self.gate(found)}
            measured = {name: MeanEstimate.of(each.tolist()) for name, each in statistics.items()}
            heads.append(HeadRow(**where, statistics=measured))
        return heads, fits[0].data.summary


class _Fit:
    """Gates that are learned once."""

    def __init__(self, method: HardConcrete, work: Work, seed: int) -> None:
        self.method, self.work, self.seen, self.data = method, work, SiteRegistry(work.model), SiteProgress()
        self.log_alpha: dict[Site, Float[Tensor, " heads"]] = {}
        self._noise = torch.Generator().manual_seed(seed)
        self._adam: torch.optim.Adam | None = None

    def learn(self, advance: Callable[[int, bool], None]) -> None:
        """Read the data as often as it is asked for, and tell of every batch."""
        with factors(self.work.model) as gates:
            for epoch in range(self.method.epochs):
                number = 0
                for batch in iterate_batches(self.work.dataset):
                    number += 1
                    if epoch == 0:
                        self.data.count_batch(batch)
                    self._step(gates, batch)
                    advance(1, False)
                if not number:
                    raise InputError(
                        "dataset",
                        expected="at least one batch, each time it is read",
                        got="none" if epoch == 0 else "an iterator, which is read once",
                        remedy="a list of batches can be read again",
                    )
            self.seen.merge(gates.records)

    def _step(self, gates: Factors, batch: dict[str, Any]) -> None:
        batch, examples = self.work.begin(gates, batch)

        def make(call: Call, out: Tensor) -> Float[Tensor, "#examples heads"]:
            site, heads = call.site, call.grid.heads
            if site not in self.log_alpha:
                self.log_alpha[site] = torch.full((heads,), FIRST, device=out.device, requires_grad=True)
            # Of a module that does not attend example by example, all examples have the same gates.
            rows = examples if out.shape[0] == examples else 1
            noise = torch.rand(rows, heads, generator=self._noise).to(out.device)
            return self.method.sample(self.log_alpha[site], noise).to(gate_dtype(out))

        losses = self.work.losses(gates, make, batch)
        there = ~losses.isnan()
        if not self.log_alpha or not bool(there.any()):
            return
        gates_of = list(self.log_alpha.values())
        opened = sum(self.method.open(each).sum().to(losses) for each in gates_of)
        gradients = torch.autograd.grad(
            losses[there].mean() + self.method.sparsity * opened, gates_of, materialize_grads=True
        )
        for each, gradient in zip(gates_of, gradients, strict=True):
            each.grad = gradient
        self._optimizer(gates_of).step()

    def _optimizer(self, gates: list[Tensor]) -> torch.optim.Adam:
        """Adam over all gates that were met so far."""
        if self._adam is None:
            self._adam = torch.optim.Adam(gates, lr=self.method.learning_rate)
        known = sum(len(group["params"]) for group in self._adam.param_groups)
        if gates[known:]:
            self._adam.add_param_group({"params": gates[known:]})
        return self._adam
