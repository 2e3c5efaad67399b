"""How much a loss depends on heads by its derivatives in their gates: of all heads in one backward pass.

Examples do not mix in a model, so that one pass gives the derivatives of every example of a batch: each has gates of
its own.
"""

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from headwise.analysis.importance.gate_parameters import Factors, Make, Work, factors, gate_dtype
from headwise.analysis.losses import EmbeddingDistance
from headwise.checks import whole_number
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, Site
from headwise.intercept.sites import SiteRegistry
from headwise.runs.data_pass import SiteProgress, run_pass
from headwise.runs.distributed import gather_from_ranks
from headwise.runs.rows import HeadRow, head_estimates
from headwise.shapes import Float
from headwise.statistics.moments import RunningMoments


@dataclass
class GradientProgress(SiteProgress):
    """How far a process is, and of how many examples there was a loss."""

    counted: int = 0


@dataclass(frozen=True)
class Differentiated:
    """What the methods that differentiate have in common."""

    at_the_whole: ClassVar[bool] = True
    """Whether the derivative is taken where every gate is 1, and nowhere else."""

    def nodes(self) -> list[tuple[float, float]]:
        """Values of the gate of all heads, and how much the derivative at each of them counts."""
        return [(1.0, 1.0)]

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """Of each example, by name; 0 of a derivative of 0."""
        raise NotImplementedError

    def measure(self, work: Work) -> tuple[list[HeadRow], dict[str, Any]]:
        """See `Method`."""
        if self.at_the_whole and isinstance(work.loss, EmbeddingDistance):
            got, remedy = "EmbeddingDistance, which is least there", 'method="ablation" and "integrated" take it'
            raise InputError("loss", expected="one with a slope at the whole model", got=got, remedy=remedy)
        before, state = work.run.load_progress(), GradientProgress()
        with factors(work.model) as gates:
            gates.merge(before.records)
            state.records, state.counted = gates.records, before.counted

            def read(batch: dict[str, Any]) -> None:
                found, examples = self._gradients(work, gates, batch)
                state.counted += examples
                state.records = gates.records
                for record in state.records:
                    if (gradient := found.get(record.site)) is not None:
                        statistics = self.statistics(gradient)
                        record.merge({name: RunningMoments.from_values(each) for name, each in statistics.items()})

            run_pass(work.dataset, read, work.run, before, state, shown=work.shown)
        return self._heads(work, state), state.summary

    def _gradients(
        self, work: Work, gates: Factors, batch: dict[str, Any]
    ) -> tuple[dict[Site, Float[Tensor, "examples heads"]], int]:
        """The derivative of each example's loss, NaN where it has none, and how many have one."""
        batch, examples = work.begin(gates, batch)
        total: dict[Site, Tensor] = {}
        counted = 0
        for value, weight in self.nodes():
            losses = work.losses(gates, _filled(examples, value), batch)
            there = ~losses.isnan()
            counted = int(there.sum())
            if not gates.of:
                continue
            gradients = torch.autograd.grad(losses[there].sum(), list(gates.of.values()), materialize_grads=True)
            for site, gradient in zip(gates.of, gradients, strict=True):
                if not bool(gradient[there].isfinite().all()):
                    got = f"an infinite or undefined one in {site.path}"
                    raise InputError("loss", expected="one whose derivatives are finite", got=got)
                each = gradient.double().masked_fill(~there[:, None], torch.nan).cpu() * weight
                total[site] = total.get(site, torch.zeros_like(each)) + each
        return total, counted

    def _heads(self, work: Work, state: GradientProgress) -> list[HeadRow]:
        """Of all processes. A head that did not run for an example has a derivative of 0 there."""
        seen, counted = SiteRegistry(work.model), 0
        for records, number in gather_from_ranks((state.records, state.counted)):
            seen.merge(records)
            counted += number
        measured = {}
        for record in seen.records:
            zeros = torch.zeros(1, record.heads, dtype=torch.float64)
            for name, each in self.statistics(zeros).items():
                rest = counted - record.statistics[name].count if name in record.statistics else zeros[0] + counted
                record.merge({name: RunningMoments(rest, each[0].abs(), zeros[0])})
            measured[id(record)] = {name: head_estimates(spread) for name, spread in record.statistics.items()}
        return [
            HeadRow(**where, statistics={name: of[where["head"]] for name, of in measured[id(record)].items()})
            for record, where in seen.head_labels()
        ]


def _filled(examples: int, value: float) -> Make:
    """Gates that have this value, for each example its own."""

    def make(call: Call, out: Tensor) -> Float[Tensor, "examples heads"]:
        size = (examples, call.grid.heads)
        return torch.full(size, value, dtype=gate_dtype(out), device=out.device, requires_grad=True)

    return make


@dataclass(frozen=True)
class Gradient(Differentiated):
    """E |dL/dg| (Michel, Levy and Neubig 2019, equation 5), and E[-dL/dg], which predicts what removal costs."""

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """See `Differentiated`."""
        return {"gradient": gradient.abs(), "first_order": -gradient}


@dataclass(frozen=True)
class Square(Differentiated):
    """E (dL/dg)^2, the empirical Fisher information of the gate (Theis et al. 2018; Molchanov et al. 2019)."""

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """See `Differentiated`."""
        return {"square": gradient**2}


@dataclass(frozen=True)
class Integrated(Differentiated):
    """-int_0^1 dL/dg da, a the gate of all heads (Sundararajan, Taly and Yan 2017): each head's part of L(0) - L(1).

    Attributes:
        steps: at how many values of the gate the derivative is taken, those of Gauss and Legendre.
    """

    steps: int = 16
    at_the_whole: ClassVar[bool] = False

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, least=1)

    def nodes(self) -> list[tuple[float, float]]:
        """See `Differentiated`; by the eigenvalues of the Jacobi matrix (Golub and Welsch 1969)."""
        order = torch.arange(1, self.steps, dtype=torch.float64)
        beside = order / (4 * order**2 - 1).sqrt()
        values, vectors = torch.linalg.eigh(torch.diag(beside, 1) + torch.diag(beside, -1))
        return list(zip(((values + 1) / 2).tolist(), (vectors[0] ** 2).tolist(), strict=True))

    def statistics(self, gradient: Float[Tensor, "examples heads"]) -> dict[str, Float[Tensor, "examples heads"]]:
        """See `Differentiated`."""
        return {"integrated": -gradient}
