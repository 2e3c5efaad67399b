"""Report of a compression: size and held-out loss of the model after each step."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from headwise.checks import is_whole
from headwise.compression.parameter_counts import count_parameters
from headwise.compression.recipe.inputs import HeldOutText
from headwise.runs.json_result import JsonResult, is_number, require_each
from headwise.runs.rows import MeanEstimate

STAGES = "dense", "pruned", "merged", "healed"
"""Names of the dense model and of the models after each step, in their order."""

LOADERS = "transformers", "headwise"
"""Packages that load a smaller model."""


@dataclass(frozen=True)
class Stage:
    """Model after one step.

    Attributes:
        name: "dense", "pruned", "merged" or "healed".
        parameters: number of parameters.
        loss: mean loss of the held-out sequences, with its standard error clustered by document.
        difference: the same of the difference of each sequence's loss from that of the dense model.
    """

    name: str
    parameters: int
    loss: MeanEstimate
    difference: MeanEstimate

    @staticmethod
    def of(
        name: str, model: nn.Module, held_out: HeldOutText, losses: Sequence[float], baseline: Sequence[float]
    ) -> "Stage":
        """Return the row of the model after a step, from the losses of this model and of the dense one (`baseline`) on
        each sequence of the held-out text.
        """
        differences = [loss - dense for loss, dense in zip(losses, baseline, strict=True)]
        return Stage(name, count_parameters(model), held_out.mean(losses), held_out.mean(differences))


@dataclass(frozen=True)
class RecipeResult(JsonResult):
    """Result of `hw.compress`.

    Attributes:
        model: name of the dense model.
        loader: what loads the smaller model: "transformers", or "headwise" where only `headwise.load` can.
        loss: name of the loss.
        documents: number of held-out documents.
        stages: the dense model, and the model after each step.
    """

    ARGUMENT, NOUN = "report", "a report of hw.compress"

    model: str
    loader: str
    loss: str
    documents: int
    stages: tuple[Stage, ...]

    def records(self) -> list[dict[str, Any]]:
        """Return one dictionary per step: its name, the parameters, and mean, standard error (`_sem`), sample size
        (`_n`) and degrees of freedom (`_df`) of loss and difference.
        """
        return [
            {
                "step": each.name,
                "parameters": each.parameters,
                **each.loss.columns("loss"),
                **each.difference.columns("difference"),
            }
            for each in self.stages
        ]

    def require_consistent(self) -> None:
        """Raise `InputError` unless values have their types, and the stages are those of a recipe."""
        names = [each.name for each in self.stages]
        are_in_order = names[:1] == ["dense"] and names == [name for name in STAGES if name in names]
        require_each(
            self.ARGUMENT,
            (
                (self.model, isinstance(self.model, str), "the name of the model"),
                (self.loader, self.loader in LOADERS, f"a loader of {', '.join(LOADERS)}"),
                (self.loss, isinstance(self.loss, str), "the name of the loss"),
                (self.documents, is_whole(self.documents, 1), "a number of documents"),
                (names, are_in_order, f"some of {', '.join(STAGES)}"),
                *(
                    (each.parameters, is_whole(each.parameters, 0), f"a number of parameters of {each.name}")
                    for each in self.stages
                ),
                *(
                    (
                        estimate,
                        _is_estimate(estimate),
                        f"mean, standard error, number and degrees of freedom for {each.name}",
                    )
                    for each in self.stages
                    for estimate in (each.loss, each.difference)
                ),
            ),
        )


def _is_estimate(estimate: MeanEstimate) -> bool:
    """Return True for an estimate whose parts have their types."""
    return (
        is_number(estimate.value)
        and is_number(estimate.sem, 0.0)
        and is_whole(estimate.n, 0)
        and is_number(estimate.df, 0.0)
    )
