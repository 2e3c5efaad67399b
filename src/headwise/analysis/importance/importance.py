"""`importance`: how much a loss depends on each head, by its gradient in the gates or by gates that are learned.

A gate, which is 1, multiplies what a head gives before the output projection. The derivative of the loss in it, one
backward pass for all heads, stands for what it would cost to remove them one by one; `ablate` measures that.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from torch import nn

from headwise.analysis.ablate import ablate
from headwise.analysis.importance.gate_parameters import Work
from headwise.analysis.importance.gradients import Gradient, GradientProgress, Integrated, Square
from headwise.analysis.importance.hard_concrete import HardConcrete
from headwise.analysis.losses import Loss
from headwise.analysis.recording import require_module
from headwise.checks import flag
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.runs.checkpoint import CheckpointedRun
from headwise.runs.data_pass import require_same_data
from headwise.runs.distributed import broadcast_from_rank0, rank_and_world_size
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.table import HeadTable

PER_LAYER = "_per_layer"
"""What is added to a statistic's name where it is divided by its l2 norm over the heads of each layer."""


class Importance(HeadTable[HeadRow]):
    """How important every head is; see `importance`."""

    NAME = "importance"
    ROW_TYPE = HeadRow

    def ranking(self) -> list[tuple[int, int]]:
        """Every `(layer, head)`, the most important first, by the first statistic; those without a value come last."""
        first = self.statistics[0]
        values = {(head.layer, head.head): head.statistics[first].value for head in self.heads}
        return sorted(values, key=lambda head: math.inf if math.isnan(values[head]) else -values[head])


@runtime_checkable
class Method(Protocol):
    """A way to tell how important heads are: a frozen dataclass whose fields are its options."""

    def measure(self, work: Work) -> tuple[list[HeadRow], dict[str, Any]]:
        """Every head with its statistics, the more important the greater the first, and what data that took."""


@dataclass(frozen=True)
class Ablated:
    """What the loss is more without the head, measured by `ablate` (Michel et al. 2019, section 3.2)."""

    def measure(self, work: Work) -> tuple[list[HeadRow], dict[str, Any]]:
        """See `Method`."""
        found = ablate(work.model, work.dataset, work.loss, progress=work.shown)
        heads = [HeadRow(**row.identifiers, statistics={"ablation": row.statistics["cost"]}) for row in found.rows]
        return heads, found.metadata["measured"]


METHODS: dict[str, type[Any]] = {
    "gradient": Gradient,
    "square": Square,
    "integrated": Integrated,
    "hard_concrete": HardConcrete,
    "ablation": Ablated,
}
"""By name; another one is another entry."""


def importance(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    loss: Loss,
    method: str = "gradient",
    *,
    normalise: bool = False,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
    **options: Any,
) -> Importance:
    """How important every head is to a loss: the mean over examples of what a method finds, and its standard error.

    | method          | columns                   | which are                                                          |
    | --------------- | ------------------------- | ------------------------------------------------------------------ |
    | "gradient"      | `gradient`, `first_order` | E abs(dL/dg) and E[-dL/dg], g the gate of a head; the second is    |
    |                 |                           | what removing it costs, if the loss were straight                  |
    | "square"        | `square`                  | E (dL/dg)^2                                                        |
    | "integrated"    | `integrated`              | -dL/dg on the way of all gates from 0 to 1: over all heads, it     |
    |                 |                           | adds up to what removing all of them costs; option `steps`         |
    | "ablation"      | `ablation`                | the loss without the head, less that of the whole model: `ablate`  |
    | "hard_concrete" | `open`, `gate`            | gates that are learned: the probability that one is open, and what |
    |                 |                           | it is without noise, over fits in place of examples; options       |
    |                 |                           | `sparsity`, `epochs`, `learning_rate`, `temperature`, `seeds`      |

    They are in units of the loss, but for `square`, in its square, and for gates, 0 to 1. Sources: Michel, Levy and
    Neubig 2019; Theis et al. 2018; Sundararajan, Taly and Yan 2017; Louizos, Welling and Kingma 2018 and Voita et al.
    2019.

    The model runs in evaluation mode, its parameters are held, and it is left as it was. Where torch.distributed is
    initialized, the processes share the batches among them, but for "hard_concrete", and each returns all.

    Args:
        model: any module that `watch` can see into.
        dataset: `Texts`, or batches as the model takes them: mappings of its arguments, or tensors, in the same order
            each time. Where a model does not attend example by example, batches of one example.
        loss: `(model, batch) -> (batch,)`, one number an example, which do not depend on each other; see
            `next_token_loss` and others. Examples whose loss is NaN do not count.
        method: one of these.
        normalise: divide by the l2 norm over the heads of each layer, as Michel et al. do; the names then end in
            `_per_layer`.
        out: a folder for the table. A run that was stopped goes on there when it is called again with the same
            arguments, but for "hard_concrete", which begins again.
        force: replace another run in that folder.
        progress: show a bar on standard error.
        title: the model's name, to show.
        options: of the method.

    Raises:
        InputError: a method or an option that there is not; data or a folder that cannot be used; no batch; a loss that
            is not one number an example, or without finite gradients; a model that `watch` refuses, of which nothing
            was seen, or whose modules attend in other batches than the data's.
        MissingExtra: what `out`, `progress` or the data needs is not installed.
    """
    require_module(model)
    chosen = _method(method, options)
    if not callable(loss):
        raise InputError("loss", expected="a function of model and batch", got=type(loss).__name__)
    if flag("normalise", normalise) and isinstance(chosen, HardConcrete):
        raise InputError("normalise", expected="False where numbers are probabilities", got=True)
    texts = None
    if isinstance(dataset, Texts):
        dataset = texts = dataset.within(model)
    rank, processes = rank_and_world_size()
    settings = run_settings(
        model,
        texts,
        title,
        method={"name": method, **asdict(chosen)},
        loss=getattr(loss, "__qualname__", type(loss).__qualname__),
        normalise=normalise,
        processes=processes,
    )
    run = CheckpointedRun(GradientProgress, Importance, out, settings, rank)
    broadcast_from_rank0(lambda: run.claim_folder(force=force))
    finished = broadcast_from_rank0(run.finished_table)
    if finished is not None:
        return require_same_data(finished, dataset, run)
    heads, data = chosen.measure(Work(model, dataset, loss, run, progress))
    heads = list(_per_layer(heads)) if normalise else heads
    found = Importance(tuple(heads), {**settings, "measured": data})
    broadcast_from_rank0(lambda: run.finish(found))
    return found


def _method(name: str, options: Mapping[str, Any]) -> Any:
    """The method of that name with these options."""
    if name not in METHODS:
        raise InputError("method", expected=f"one of {', '.join(METHODS)}", got=repr(name))
    known = [each.name for each in fields(METHODS[name])]
    for option, value in options.items():
        if option not in known:
            expected = f"{' or '.join(known) or 'no option'} with method={name!r}"
            raise InputError(option, expected=expected, got=repr(value))
    return METHODS[name](**options)


def _per_layer(heads: Iterable[HeadRow]) -> Iterator[HeadRow]:
    """Each statistic, and its error, divided by its l2 norm over the heads of a layer; a layer of zeros stays one."""
    for _, layer in groupby(heads, key=lambda head: head.layer):
        of_layer = list(layer)
        norms = {
            name: math.hypot(*(head.statistics[name].value for head in of_layer)) or 1.0
            for name in of_layer[0].statistics
        }
        for head in of_layer:
            yield replace(
                head,
                statistics={
                    name + PER_LAYER: MeanEstimate(each.value / norms[name], each.sem / norms[name], each.n)
                    for name, each in head.statistics.items()
                },
            )
