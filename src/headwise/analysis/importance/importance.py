"""Importance of heads: how much a loss depends on each head, by gradients, learned gates or ablation."""

import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import groupby
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from headwise.analysis.ablate import AblationProgress, measure_losses, table_of_losses
from headwise.analysis.ablation_result import Ablation
from headwise.analysis.head_pass import PassData, table_of_pass
from headwise.analysis.importance.gradients import (
    Gradient,
    GradientMethod,
    ImportanceTask,
    Integrated,
    Square,
)
from headwise.analysis.importance.hard_concrete import HardConcrete
from headwise.analysis.losses import EmbeddingDistance, Loss, options_of_loss, require_loss
from headwise.analysis.replacements import zero
from headwise.checks import flag, require_module
from headwise.data.batches import documents_of
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.runs.data_pass import Pass, prepare_texts
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow
from headwise.statistics.columns import Column

PER_LAYER = "_per_layer"
"""Suffix of a statistic's name if it is divided by its l2 norm over the heads of each layer."""


_SCORES = (
    Column("gradient", "Mean absolute derivative of the loss with respect to the head's gate."),
    Column("first_order", "Effect of removing the head, if the loss were linear in the head's gate.", is_signed=True),
    Column("square", "Mean squared derivative of the loss with respect to the head's gate."),
    Column(
        "integrated",
        "Derivative of the loss with respect to the head's gate, integrated over the value of all gates.",
        is_signed=True,
    ),
    Column("ablation", "Mean loss without the head, minus the mean loss with it.", is_signed=True),
    Column("open", "Probability that the head's learned gate is open."),
    Column("gate", "Value of the head's learned gate, without noise."),
)


class Importance(HeadTable[HeadRow]):
    """Table of how much a loss depends on each head, one row per head. The head with the largest value in the first
    column is the most important one.

    The columns are the statistics of the method: means over examples, with standard errors. With g the gate of a head,
    1 in the unchanged model, and L the loss of an example:

    | method          | columns                   | definition                                                         |
    | --------------- | ------------------------- | ------------------------------------------------------------------ |
    | "gradient"      | `gradient`, `first_order` | E abs(dL/dg) (Michel, Levy and Neubig 2019, equation 5), and       |
    |                 |                           | E[-dL/dg], the ablation effect if the loss were linear in g        |
    | "square"        | `square`                  | E (dL/dg)^2, the empirical Fisher information (Theis et al. 2018)  |
    | "integrated"    | `integrated`              | -dL/dg, integrated over the value of all gates from 0 to 1; its    |
    |                 |                           | sum over heads is the effect of removing all heads (Sundararajan,  |
    |                 |                           | Taly and Yan 2017); options `steps`, `most_steps`                  |
    | "ablation"      | `ablation`                | the loss without the head minus the loss with it, as by `ablate`   |
    | "hard_concrete" | `open`, `gate`            | learned gates (Louizos, Welling and Kingma 2018; Voita et al.      |
    |                 |                           | 2019): probability that the gate is open, and its value without    |
    |                 |                           | noise; mean and error are over fits. Options `sparsity`, `epochs`, |
    |                 |                           | `learning_rate`, `temperature`, `seeds`                            |

    Units are those of the loss; for `square`, its square; `open` and `gate` are from 0 to 1. All methods but "ablation"
    and "hard_concrete" need one backward pass per batch ("integrated": one per step) for all heads together.
    """

    NAME = "importance"
    COLUMNS = (
        *_SCORES,
        *(score.derived(score.name + PER_LAYER, "divided by the l2 norm of its layer") for score in _SCORES),
    )
    SAMPLES = "sample"

    def ranking(self) -> list[tuple[int, int]]:
        """Return every head as `(layer, head)`, the most important one first. Heads are sorted by the first statistic
        of the table in descending order; those with NaN come last.
        """
        first = self.statistics[0]
        values = {(head.layer, head.head): head.statistics[first].value for head in self.heads}
        return sorted(values, key=lambda head: math.inf if math.isnan(values[head]) else -values[head])


@dataclass(frozen=True)
class AblationMethod:
    """Importance method that measures the ablation effect of each head: the increase of the loss without the head."""

    progress_type: ClassVar[type[Any]] = AblationProgress

    def measure(self, task: ImportanceTask, data_pass: Pass[AblationProgress]) -> AblationProgress:
        return measure_losses(task.data, task.loss, zero(), "heads", data_pass, task.warnings)

    def rows(
        self, task: ImportanceTask, parts: Sequence[AblationProgress], metadata: dict[str, Any]
    ) -> tuple[list[HeadRow], dict[str, Any]]:
        table = table_of_losses(Ablation, parts, documents_of(task.data.dataset), metadata)
        rows = [HeadRow(**row.identifiers, statistics={"ablation": row.statistics["cost"]}) for row in table.rows]
        return rows, table.metadata["measured"]


METHODS: dict[str, Any] = {
    "gradient": Gradient,
    "square": Square,
    "integrated": Integrated,
    "hard_concrete": HardConcrete,
    "ablation": AblationMethod,
}
"""Importance methods by name; a new method is a new entry. A method is a frozen dataclass whose fields are its options.
It has the class of its partial results, `progress_type`; `measure`, which measures this process's share of the data,
except for what its checkpoint already includes; and `rows`, which returns a row of statistics per head, the first of
which is larger for more important heads, and further entries for what was measured.
"""


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
    """Measure how much a loss depends on each head, by gradients, learned gates or ablation.

    `Importance` defines the statistics of each method, with units and sources.

        scores = hw.importance(model, texts, hw.next_token_loss)
        scores.ranking()                                    # [(29, 4), ...], the most important head first
        hw.agreement(scores, hw.ablate(model, texts, hw.next_token_loss)).spearman

    The model runs in evaluation mode with frozen parameters, and is unchanged afterwards. With torch.distributed, each
    process returns the whole table; the processes share the batches, except for "hard_concrete".

    Args:
        model: any module that `watch` supports.
        dataset: `Texts`, or batches in the same order each time: tensors, or mappings of the model's arguments. If a
            module does not attend example by example, each batch needs to be one example.
        loss: function `(model, batch) -> (batch,)` whose values do not depend on other examples, such as
            `next_token_loss`. Examples whose loss is NaN do not count.
        method: "gradient", "square", "integrated", "ablation" or "hard_concrete".
        normalise: divide each statistic by its l2 norm over the heads of a layer (Michel et al. 2019), and add
            `_per_layer` to its name.
        out: folder for the table; the same call resumes an interrupted run ("hard_concrete": restarts it).
        force: replace the results of another run in that folder.
        progress: show a progress bar on standard error.
        title: name of the model in the results.
        options: options of the method, such as `steps=32` for "integrated".

    Raises:
        InputError: an unknown method or option; `dataset` or `out` cannot be used; the loss is not one number per
            example, or has no finite gradients; no attention is intercepted, or with another batch size than the data.
        MissingExtra: a package that `out`, `progress` or the data set needs is not installed.
    """
    require_module(model)
    require_loss(loss)
    chosen = create_method(method, options, loss, normalise=flag("normalise", normalise))
    data = PassData(model, prepare_texts(dataset, model, out, shown=progress), [])
    task = ImportanceTask(data, loss, [])

    def make_table(parts: list[Any], metadata: dict[str, Any]) -> Importance:
        rows, further = chosen.rows(task, parts, metadata)
        rows = list(_normalised_per_layer(rows)) if normalise else rows
        return Importance(tuple(rows), {**metadata, "measured": metadata["measured"] | further})

    of_run: dict[str, Any] = {"out": out, "force": force, "progress": progress, "title": title}
    table = table_of_pass(
        data,
        Importance,
        chosen.progress_type,
        lambda data_pass: chosen.measure(task, data_pass),
        make_table,
        method={"name": method, **asdict(chosen)},
        loss=getattr(loss, "__qualname__", type(loss).__qualname__),
        loss_options=options_of_loss(loss),
        normalise=normalise,
        **of_run,
    )
    for message in task.warnings:
        warnings.warn(message, stacklevel=2)
    return table


def create_method(name: str, options: Mapping[str, Any], loss: Loss, *, normalise: bool) -> Any:
    """Create the importance method called `name` with the given options. Raise `InputError` for an unknown name or
    option, or if the method cannot use the loss. Also raise it if `normalise` is set for a method whose statistics are
    probabilities.
    """
    if not isinstance(name, str) or name not in METHODS:
        raise InputError("method", expected=f"one of {', '.join(METHODS)}", got=repr(name))
    known = [option.name for option in fields(METHODS[name])]
    for option, value in options.items():
        if option not in known:
            expected = f"{' or '.join(known) or 'no option'} with method={name!r}"
            raise InputError(option, expected=expected, got=repr(value))
    method = METHODS[name](**options)
    if isinstance(method, GradientMethod) and method.only_at_one and isinstance(loss, EmbeddingDistance):
        got, remedy = "EmbeddingDistance, which is minimal there", 'use method="ablation" or "integrated"'
        raise InputError("loss", expected="one with a slope at the unchanged model", got=got, remedy=remedy)
    if normalise and isinstance(method, HardConcrete):
        raise InputError("normalise", expected="False for statistics that are probabilities", got=True)
    return method


def _normalised_per_layer(rows: Iterable[HeadRow]) -> Iterator[HeadRow]:
    """Yield the row of each head, in which every statistic and its standard error are divided by the l2 norm of the
    statistic over the heads of the layer. A norm of 0 is replaced by 1.
    """
    for _, rows_of_layer in groupby(rows, key=lambda row: row.layer):
        layer = list(rows_of_layer)
        norms = {
            name: math.hypot(*(row.statistics[name].value for row in layer)) or 1.0 for name in layer[0].statistics
        }
        for row in layer:
            statistics = {
                name + PER_LAYER: estimate._replace(value=estimate.value / norms[name], sem=estimate.sem / norms[name])
                for name, estimate in row.statistics.items()
            }
            yield replace(row, statistics=statistics)
