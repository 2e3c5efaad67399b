"""Importance of heads by the derivatives of a loss with respect to their gates, all heads in one backward pass.

Examples of a batch do not influence each other, so one backward pass gives the derivatives of every example: each has
gates of its own.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.importance.gate_gradients import (
    CreateGates,
    GateTensors,
    ImportanceTask,
    differentiable_gates,
    gate_dtype,
)
from headwise.analysis.losses import EmbeddingDistance, Loss, require_some_loss
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.runs.data_pass import SiteProgress, run_pass
from headwise.runs.distributed import gather_from_ranks
from headwise.runs.rows import HeadRow, moment_estimates
from headwise.shapes import Bool, Float
from headwise.statistics.moments import Clusters, ClusterSums, Moments, RunningMoments, Summary


@dataclass
class GradientProgress(SiteProgress):
    """Partial result of a gradient-based importance method in one process: running statistics of all heads, and the
    examples whose loss is not NaN.

    Attributes:
        counted: moments of a 0 for each example whose loss is not NaN.
        totals: sums over these examples that a method stores, by name.
    """

    totals: dict[str, float] = field(default_factory=dict)
    counted: RunningMoments = field(default_factory=lambda: _zeros(torch.zeros(0, dtype=torch.bool), None))

    def to_dict(self) -> dict[str, Any]:
        """Return the progress as plain containers and tensors for a checkpoint."""
        return super().to_dict() | {"counted": asdict(self.counted)}

    @classmethod
    def from_dict(cls, fields: dict[str, Any]) -> Any:
        """Create the progress from the dictionary that `to_dict` returned."""
        return super().from_dict(fields | {"counted": RunningMoments.from_dict(fields["counted"])})


@dataclass(frozen=True)
class GradientMethod:
    """Base class of importance methods that score heads by the derivatives of a loss with respect to gates, which are
    factors of the heads' outputs.
    """

    only_at_one: ClassVar[bool] = True
    """True if the derivative is taken only where all gates are 1, in the unchanged model."""

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """Compute the statistics of the importance method from `gradient`, the derivatives of the loss with respect to
        the gates of heads; return them by name, with a value for each example and head. Subclasses implement this.

        All statistics are 0 where the derivative is 0.
        """
        raise NotImplementedError

    def require_slope(self, loss: Loss) -> None:
        """Raise `InputError` if the derivatives of a loss are 0 wherever this method computes them."""
        if self.only_at_one and isinstance(loss, EmbeddingDistance):
            got, remedy = "EmbeddingDistance, which is minimal there", 'use method="ablation" or "integrated"'
            raise InputError("loss", expected="one with a slope at the unchanged model", got=got, remedy=remedy)

    def measure(self, task: ImportanceTask) -> tuple[list[HeadRow], dict[str, Any]]:
        """Differentiate the loss of each example with respect to the gates (factors of outputs) of all heads. Return a
        row per head with the means of its statistics over examples, and a summary of the data: numbers of sequences and
        tokens, and a hash.
        """
        before, progress = task.run.load_progress(), GradientProgress()
        with differentiable_gates(task.model) as gates:
            gates.merge(before.records)
            progress.records, progress.counted, progress.totals = gates.records, before.counted, dict(before.totals)

            def read_batch(batch: dict[str, Any], clusters: Clusters) -> None:
                gradients, has_loss = self.differentiate(task, gates, batch, progress)
                progress.counted = progress.counted.merge(_zeros(has_loss, clusters))
                progress.records = gates.records
                for record in progress.records:
                    if (gradient := gradients.get(record.site)) is not None:
                        statistics = self.statistics(gradient).items()
                        record.merge(
                            {name: RunningMoments.from_values(values, None, clusters) for name, values in statistics}
                        )

            run_pass(task.dataset, read_batch, task.run, before, progress, shown=task.show_progress)
        return self._rows(task, progress), progress.summary | self.report(progress)

    def differentiate(
        self, task: ImportanceTask, gates: GateTensors, batch: dict[str, Any], progress: GradientProgress
    ) -> tuple[dict[SiteKey, Float[Tensor, "examples heads"]], Bool[Tensor, " examples"]]:
        """Return the derivatives of each example's loss, and which examples have one, as `gradients_at` does. By
        default the derivatives are those in the unchanged model. `progress` may store more.
        """
        return self.gradients_at(task, gates, batch, [(1.0, 1.0)])

    def report(self, progress: GradientProgress) -> dict[str, Any]:
        """Return further entries for the metadata of the table, by name."""
        return {}

    def gradients_at(
        self, task: ImportanceTask, gates: GateTensors, batch: dict[str, Any], values: Sequence[tuple[float, float]]
    ) -> tuple[dict[SiteKey, Float[Tensor, "examples heads"]], Bool[Tensor, " examples"]]:
        """Return, for each attention site (a module's self- or cross-attention), the derivatives of each example's loss
        with respect to the gates of the site's heads. `values` has pairs of a gate value, one number for all heads of
        the model, and a weight. Derivatives at several gate values are added, each times its weight. An example with a
        NaN loss has NaN derivatives. Return also True for each example whose loss is not NaN.
        """
        batch, examples = task.start_batch(gates, batch)
        sums: dict[SiteKey, Tensor] = {}
        has_loss = torch.zeros(examples, dtype=torch.bool)
        for value, weight in values:
            losses = task.gated_losses(gates, constant_gates(examples, value), batch)
            has_loss = ~losses.isnan()
            if not gates.by_site:
                continue
            gradients = torch.autograd.grad(
                losses[has_loss].sum(), list(gates.by_site.values()), materialize_grads=True
            )
            for site, gradient in zip(gates.by_site, gradients, strict=True):
                if not bool(gradient[has_loss].isfinite().all()):
                    got = f"an infinite or undefined one in {site.path}"
                    raise InputError("loss", expected="one whose derivatives are finite", got=got)
                weighted = gradient.double().masked_fill(~has_loss[:, None], torch.nan).cpu() * weight
                sums[site] = sums.get(site, torch.zeros_like(weighted)) + weighted
        return sums, has_loss.cpu()

    def _rows(self, task: ImportanceTask, progress: GradientProgress) -> list[HeadRow]:
        """Combine the statistics of all processes, and return a row per head with their means and standard errors over
        examples. A head that did not run for an example counts with a derivative of 0.
        """
        registry, counted = SiteRegistry(task.model), _zeros(torch.zeros(0, dtype=torch.bool), None)
        for records, of_rank in gather_from_ranks((progress.records, progress.counted)):
            registry.merge(records)
            counted = counted.merge(of_rank)
        require_some_loss(int(counted.count))
        estimates = {}
        for record in registry.records:
            for name in self.statistics(torch.zeros(1, record.heads, dtype=torch.float64)):
                record.merge({name: _missing(counted, record.statistics.get(name), record.heads)})
            estimates[record.site] = {name: moment_estimates(moments) for name, moments in record.statistics.items()}
        return [
            HeadRow(
                **labels,
                statistics={name: heads[labels["head"]] for name, heads in estimates[record.site].items()},
            )
            for record, labels in registry.head_labels()
        ]


def _zeros(is_counted: Bool[Tensor, " examples"], clusters: Clusters | None) -> RunningMoments:
    """Return the moments of a 0 for each example at which `is_counted` is True."""
    return RunningMoments.from_values(is_counted[:, None].double() * 0.0, is_counted[:, None], clusters)


def _missing(counted: RunningMoments, measured: Summary | None, heads: int) -> RunningMoments:
    """Return the moments of a 0 for each head and counted example that is not among the measured ones."""
    none = torch.zeros(heads, dtype=torch.float64)
    alone, clusters = counted.alone.count + none, counted.clustered.counts + none
    if isinstance(measured, RunningMoments):
        alone = alone - measured.alone.count
        clusters = clusters - F.pad(
            measured.clustered.counts, (0, 0, 0, len(clusters) - len(measured.clustered.counts))
        )
    return RunningMoments(Moments(alone, none, none), ClusterSums(clusters, clusters * 0.0))


def constant_gates(examples: int, value: float) -> CreateGates:
    """Return a function that creates the gates of an attention site (a module's self- or cross-attention): a tensor
    `(examples, heads)` that requires gradients and is filled with `value`.
    """

    def create(call: Call, out: Tensor) -> Float[Tensor, "examples heads"]:
        size = (examples, call.grid.heads)
        return torch.full(size, value, dtype=gate_dtype(out), device=out.device, requires_grad=True)

    return create


@dataclass(frozen=True)
class Gradient(GradientMethod):
    """Importance method that scores each head by the derivative of the loss L with respect to the head's gate g (factor
    of its output): the mean over examples of the absolute derivative, E |dL/dg|, and E[-dL/dg], the ablation effect to
    first order.

    The first is equation 5 of Michel, Levy and Neubig (2019).
    """

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """Return two statistics for each example and head: "gradient", the absolute value of the derivative of the loss
        with respect to the head's gate, and "first_order", the negative of the derivative. The derivatives are the
        argument `gradient`.
        """
        return {"gradient": gradient.abs(), "first_order": -gradient}


@dataclass(frozen=True)
class Square(GradientMethod):
    """Importance method that scores each head by the mean over examples of the squared derivative of the loss L with
    respect to the head's gate g (factor of its output), E (dL/dg)^2: the empirical Fisher information of the gate.

    Sources: Theis et al. 2018; Molchanov et al. 2019.
    """

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """Return one statistic for each example and head: the squared derivative of the loss with respect to the head's
        gate, as `square`.
        """
        return {"square": gradient**2}
