"""Importance of heads by the derivatives of a loss with respect to their gates, all heads in one backward pass.

A gate is a factor of a head's output. Examples of a batch do not influence each other, so one backward pass gives the
derivatives of every example: each has gates of its own.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.analysis.head_pass import PassData, merged_registry
from headwise.analysis.losses import Loss, finite_loss_per_example, prepare_loss, require_some_loss
from headwise.checks import whole_number
from headwise.data.batches import count_sequences_and_tokens, device_of, evaluation_mode, frozen_parameters, to_device
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.runs.checkpoint import storable
from headwise.runs.data_pass import Pass, SiteProgress
from headwise.runs.rows import HeadRow, moment_estimates
from headwise.shapes import Bool, Float
from headwise.statistics.moments import Clusters, ClusterSums, Moments, RunningMoments

LARGEST_GAP = 0.05
"""Largest completeness gap of integrated gradients that counts as converged."""

MOST_STEPS = 64
"""Default of the largest number of points of integrated gradients."""

Derivatives = tuple[dict[SiteKey, Float[Tensor, "examples heads"]], Bool[Tensor, " examples"]]
"""Derivatives of each example's loss with respect to the gates of each attention site (a module's self- or
cross-attention), and True for each example that has a loss; the others have derivatives of NaN.
"""

CreateGates = Callable[[Call, Tensor], Float[Tensor, "#examples heads"]]
"""Function from a site's first call and its head outputs to the gates of the site."""


class ImportanceTask(NamedTuple):
    """Inputs of an importance method: the model and data, the loss, and a list to which warnings are added.

    Attributes:
        warnings: messages about the measurement, which are issued at its end.
    """

    data: PassData
    loss: Loss
    warnings: list[str]


class GateTensors(SiteRegistry):
    """Interceptor that multiplies the output of every head by a gate, so that a loss can be differentiated with respect
    to the gates. Each attention module (in self- or cross-attention) has one gate per head. This gate is the same for
    all examples, or has one value per example. If a module is called several times in a run, all calls use the same
    gates.

    Attributes:
        by_site: gates of each site that was called in the last run.
        has_batches: True once there was a batch.
    """

    def __init__(self, task: ImportanceTask) -> None:
        super().__init__(task.data.model)
        self.has_batches = False
        self.by_site: dict[SiteKey, Float[Tensor, "#examples heads"]] = {}
        self._task = task
        self._create: CreateGates | None = None
        self._lock = threading.Lock()

    def start_batch(self, batch: dict[str, Any]) -> tuple[dict[str, Any], int]:
        """Prepare the loss for a batch, without gates. Return the batch on the model's device, and its number of
        examples.
        """
        batch = to_device(batch, device_of(self._task.data.model))
        self.by_site, self._create = {}, None
        prepare_loss(self._task.loss, self._task.data.model, batch)
        self.has_batches = True
        return batch, count_sequences_and_tokens(batch)[0]

    def losses(self, create: CreateGates, batch: dict[str, Any]) -> Float[Tensor, " examples"]:
        """Run the model with new gates on all heads, and return the loss of each example. The function `create` is
        called at the first call of each attention module, and returns the gates of this module.
        """
        self.by_site, self._create = {}, create
        losses = finite_loss_per_example(self._task.loss, self._task.data.model, batch)
        if self.by_site and not losses.requires_grad:
            remedy = 'use method="ablation", which needs none'
            raise InputError("loss", expected="one that records gradients", got="a tensor without", remedy=remedy)
        return losses

    def losses_at(self, value: float, batch: dict[str, Any], examples: int) -> Float[Tensor, " examples"]:
        """Run the model with all gates set to `value`, one gate per head and example, and return the loss of each
        example.
        """

        def create(call: Call, out: Tensor) -> Float[Tensor, "examples heads"]:
            size = (examples, call.grid.heads)
            return torch.full(size, value, dtype=gate_dtype(out), device=out.device, requires_grad=True)

        return self.losses(create, batch)

    def change(self, call: Call) -> Change | None:
        """Return the function that multiplies the head outputs of an attention call by the gates of its module. Return
        None while no gates are in use.
        """
        self.register(call)
        site, create = call.site, self._create
        if create is None:
            return None

        def multiply(attended: HeadOutput) -> Tensor:
            out = attended.out
            if not torch.is_grad_enabled():
                remedy = 'use method="ablation", which needs none'
                got = f"none in {site.path}"
                raise InputError("model", expected="one that records gradients", got=got, remedy=remedy)
            with self._lock:
                if site not in self.by_site:
                    self.by_site[site] = create(call, out)
            gates = self.by_site[site]
            if gates.shape[0] not in (1, out.shape[0]):
                expected = f"batches of one example, as {site.path} does not attend example by example"
                got = f"a batch of {gates.shape[0]}, for which it attends with a batch of {out.shape[0]}"
                raise InputError("dataset", expected=expected, got=got)
            return (out.to(gates.dtype) * gates[..., None, None]).to(out.dtype)

        return multiply


def gate_dtype(out: Tensor) -> torch.dtype:
    """Return the dtype of gates for head outputs `out`. It is at least float32, since the gradient of a gate is a sum
    over all queries and features of its head.
    """
    return torch.promote_types(out.dtype, torch.float32)


@contextmanager
def differentiable_gates(task: ImportanceTask) -> Iterator[GateTensors]:
    """Multiply head outputs by gates while the context is active, in evaluation mode and with frozen parameters. Yield
    the interceptor that sets the gates.
    """
    model, gates = task.data.model, GateTensors(task)
    # Leaving inference mode also turns gradients on.
    with evaluation_mode(model), frozen_parameters(model), torch.inference_mode(False), intercepted(model, gates):
        yield gates
    if gates.has_batches and not gates.ran:
        raise InputError("loss", expected="one that calls the model it is given", got="one that does not")
    if gates.has_batches:
        gates.require_attention()
    gates.warn_of_unread()


@storable
@dataclass
class GradientProgress(SiteProgress):
    """Partial result of one process for a method that computes the importance of heads from gradients: the statistics
    that it has measured so far.

    Attributes:
        counted: moments of a 0 for each example whose loss is not NaN.
        totals: sums over these examples that a method stores, by name.
    """

    totals: dict[str, float] = field(default_factory=dict)
    counted: RunningMoments = field(default_factory=lambda: _zeros(torch.zeros(0, dtype=torch.bool), None))


@dataclass(frozen=True)
class GradientMethod:
    """Base class of importance methods that compute a score per head from the derivatives of the loss with respect to
    gates (factors by which head outputs are multiplied).
    """

    only_at_one: ClassVar[bool] = True
    """True if the derivative is taken only where all gates are 1, in the unchanged model."""

    progress_type: ClassVar[type[Any]] = GradientProgress

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """Return the scores of the method, by name, for each example and head: functions of the derivative of the loss
        with respect to the head's gate. Every score is 0 where the derivative is 0.
        """
        raise NotImplementedError

    def measure(self, task: ImportanceTask, data_pass: Pass[GradientProgress]) -> GradientProgress:
        """Measure the scores of all heads on the batches of this process, and return running means over examples."""
        resumed, progress = data_pass.resumed, GradientProgress()
        with differentiable_gates(task) as gates:
            gates.merge(resumed.records)
            progress.records, progress.counted, progress.totals = gates.records, resumed.counted, dict(resumed.totals)

            def process_batch(batch: dict[str, Any], clusters: Clusters) -> None:
                gradients, has_loss = self.differentiate(gates, batch, progress)
                progress.counted = progress.counted.merge(_zeros(has_loss, clusters))
                progress.records = gates.records
                for record in progress.records:
                    if (gradient := gradients.get(record.site)) is not None:
                        statistics = self.statistics(gradient).items()
                        record.merge(
                            {name: RunningMoments.from_values(values, None, clusters) for name, values in statistics}
                        )

            return data_pass.over(task.data.dataset, process_batch, progress)

    def rows(
        self, task: ImportanceTask, parts: Sequence[GradientProgress], _metadata: dict[str, Any]
    ) -> tuple[list[HeadRow], dict[str, Any]]:
        """Return one table row per head, with means of the scores over the examples of all processes. Also return
        additional entries for the table's metadata. If a head did not run in an example, its derivative in this example
        counts as 0.
        """
        registry, counted = merged_registry(task.data.model, parts), _zeros(torch.zeros(0, dtype=torch.bool), None)
        for part in parts:
            counted = counted.merge(part.counted)
        require_some_loss(int(counted.count))
        estimates = {}
        for record in registry.records:
            for name in self.statistics(torch.zeros(1, record.heads, dtype=torch.float64)):
                record.merge({name: _missing(counted, record.statistics.get(name), record.heads)})
            estimates[record.site] = {name: moment_estimates(moments) for name, moments in record.statistics.items()}
        rows = [
            HeadRow(
                **labels, statistics={name: heads[labels["head"]] for name, heads in estimates[record.site].items()}
            )
            for record, labels in registry.head_labels()
        ]
        return rows, self.report(task, parts)

    def differentiate(self, gates: GateTensors, batch: dict[str, Any], progress: GradientProgress) -> Derivatives:
        """Return the derivatives of each example's loss with respect to the gates, by default with all gates at 1.
        Subclasses may store further sums in `progress`.
        """
        return self.gradients_at(gates, batch, [(1.0, 1.0)])

    def report(self, task: ImportanceTask, parts: Sequence[GradientProgress]) -> dict[str, Any]:
        """Return additional entries for the metadata of the table, by name; by default none."""
        return {}

    def gradients_at(
        self, gates: GateTensors, batch: dict[str, Any], values: Sequence[tuple[float, float]]
    ) -> Derivatives:
        """Return a weighted sum of the derivatives of each example's loss with respect to the gates. Each element of
        `values` is a pair: a value to which all gates are set, and the weight in the sum of the derivatives at this
        value.
        """
        batch, examples = gates.start_batch(batch)
        sums: dict[SiteKey, Tensor] = {}
        has_loss = torch.zeros(examples, dtype=torch.bool)
        for value, weight in values:
            losses = gates.losses_at(value, batch, examples)
            has_loss = ~losses.isnan()
            if not gates.by_site:
                continue
            tensors = list(gates.by_site.values())
            gradients = torch.autograd.grad(losses[has_loss].sum(), tensors, materialize_grads=True)
            for site, gradient in zip(gates.by_site, gradients, strict=True):
                if not bool(gradient[has_loss].isfinite().all()):
                    got = f"an infinite or undefined one in {site.path}"
                    raise InputError("loss", expected="one whose derivatives are finite", got=got)
                weighted = gradient.double().masked_fill(~has_loss[:, None], torch.nan).cpu() * weight
                sums[site] = sums.get(site, torch.zeros_like(weighted)) + weighted
        return sums, has_loss.cpu()


def _zeros(is_counted: Bool[Tensor, " examples"], clusters: Clusters | None) -> RunningMoments:
    """Return the running moments (count, mean, squared deviations) of zeros: one value 0 for each example at which
    `is_counted` is True.
    """
    return RunningMoments.from_values(is_counted[:, None].double() * 0.0, is_counted[:, None], clusters)


def _missing(counted: RunningMoments, measured: RunningMoments | None, heads: int) -> RunningMoments:
    """Return the running moments of zeros for each head: one value 0 for each example that is in `counted` but not in
    `measured`. These are the examples in which the head did not run.
    """
    none = torch.zeros(heads, dtype=torch.float64)
    alone, clusters = counted.alone.count + none, counted.clustered.counts + none
    if measured is not None:
        alone = alone - measured.alone.count
        counts = measured.clustered.counts
        clusters = clusters - F.pad(counts, (0, 0, 0, len(clusters) - len(counts)))
    return RunningMoments(Moments(alone, none, none), ClusterSums(clusters, clusters * 0.0))


@dataclass(frozen=True)
class Gradient(GradientMethod):
    """Importance method that uses the derivative dL/dg of the loss L with respect to a head's gate g (a factor of the
    head's output). The first score is the mean over examples of |dL/dg| (Michel, Levy and Neubig 2019, equation 5). The
    second is the mean of -dL/dg, a first-order estimate of the ablation effect.
    """

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        return {"gradient": gradient.abs(), "first_order": -gradient}


@dataclass(frozen=True)
class Square(GradientMethod):
    """Importance method that uses the derivative dL/dg of the loss L with respect to a head's gate g (a factor of the
    head's output). The score is the mean over examples of (dL/dg)^2, the empirical Fisher information of the gate
    (Theis et al. 2018; Molchanov et al. 2019).
    """

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        return {"square": gradient**2}


@dataclass(frozen=True)
class Integrated(GradientMethod):
    """Importance method that uses integrated gradients (Sundararajan, Taly and Yan 2017). L is the loss, and a head's
    gate g is a factor of the head's output. The score is -dL/dg, integrated while all gates rise together from 0 to 1.
    For each example, the scores of all heads add up to the effect of removing all heads, up to the error of numerical
    integration.

    The completeness gap is the sum over examples of the absolute difference between this sum of scores and the effect,
    divided by the sum of the absolute effects. So errors of opposite sign do not cancel. For each batch, the number of
    points is doubled until the gap is at most 5 %. In some models the loss varies so fast along this path that no
    affordable number of points is enough: the gap is in the metadata of the table, and a warning names one above 5 %.

    Attributes:
        steps: number of points of the Gauss-Legendre quadrature at first.
        most_steps: largest number of points; by default 64, or `steps` if that is more.
    """

    steps: int = 16
    most_steps: int | None = None
    only_at_one: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, least=1)
        if self.most_steps is not None:
            whole_number("most_steps", self.most_steps, least=self.steps)

    def differentiate(self, gates: GateTensors, batch: dict[str, Any], progress: GradientProgress) -> Derivatives:
        """Return the derivatives of each example's loss with respect to the gates, integrated while all gates rise
        together from 0 to 1. Add to `progress` sums over examples of the scores, of the effects of removing all heads,
        and of their differences.
        """
        moved, examples = gates.start_batch(batch)
        without, whole = (gates.losses_at(value, moved, examples).detach().double().cpu() for value in (0.0, 1.0))
        effects, steps = without - whole, self.steps
        most = max(MOST_STEPS, steps) if self.most_steps is None else self.most_steps
        while True:
            gradients, has_loss = self.gradients_at(gates, batch, gauss_legendre(steps))
            scores = sum((-gradient.sum(1) for gradient in gradients.values()), torch.zeros_like(effects))
            one, other = scores[has_loss], effects[has_loss]
            values = {"scores": one, "effect": other, "effects": other.abs(), "differences": (one - other).abs()}
            sums = {name: float(of_examples.nansum()) for name, of_examples in values.items()}
            if sums["differences"] <= LARGEST_GAP * sums["effects"] or 2 * steps > most:
                break
            steps *= 2
        for name, value in sums.items():
            progress.totals[name] = progress.totals.get(name, 0.0) + value
        progress.totals["steps"] = max(progress.totals.get("steps", 0.0), float(steps))
        return gradients, has_loss

    def report(self, task: ImportanceTask, parts: Sequence[GradientProgress]) -> dict[str, Any]:
        """Return how well the scores of all heads add up to the effect of removing all heads, as entries for the
        table's metadata. The entries are the mean over examples of the sum of scores, the mean effect, and the relative
        difference between sum and effect. This difference is computed for each example and for the means. The last
        entry is the largest number of integration steps.
        """
        examples = sum(int(part.counted.count) for part in parts)
        scores, effect, effects, differences = (
            sum(part.totals.get(name, 0.0) for part in parts) / examples
            for name in ("scores", "effect", "effects", "differences")
        )
        gap, mean_gap = _relative(differences, effects), _relative(abs(scores - effect), abs(effect))
        steps = int(max(part.totals.get("steps", 0.0) for part in parts))
        if gap > LARGEST_GAP:
            task.warnings.append(
                f"integrated gradients did not converge: for each example, the sum of all scores differs by "
                f"{differences:.4g} from the effect of removing all heads, which is {effects:.4g} (means of absolute "
                f"values; completeness gap {gap:.0%} after {steps} steps)"
            )
        completeness = {"scores": scores, "effect": effect, "gap": gap, "gap_of_means": mean_gap, "steps": steps}
        return {"completeness": completeness}

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        return {"integrated": -gradient}


def gauss_legendre(steps: int) -> list[tuple[float, float]]:
    """Return pairs (point, weight) for numerical integration from 0 to 1 with `steps` points by Gauss-Legendre
    quadrature.

    The points are eigenvalues of the Jacobi matrix (Golub and Welsch 1969). Polynomials of degree up to
    `2 * steps - 1` are integrated exactly.
    """
    order = torch.arange(1, steps, dtype=torch.float64)
    off_diagonal = order / (4 * order**2 - 1).sqrt()
    points, vectors = torch.linalg.eigh(torch.diag(off_diagonal, 1) + torch.diag(off_diagonal, -1))
    return list(zip(((points + 1) / 2).tolist(), (vectors[0] ** 2).tolist(), strict=True))


def _relative(difference: float, effect: float) -> float:
    """Return `difference / effect` for two non-negative numbers. Return infinity if only the effect is 0, and 0 if both
    are.
    """
    return difference / effect if effect else float("inf") if difference else 0.0
