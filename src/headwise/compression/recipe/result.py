"""Report of a compression: size and held-out loss of the model after each step."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from torch import nn

from headwise.compression.parameter_counts import count_parameters
from headwise.compression.recipe.held_out import HeldOutText
from headwise.removal.remove_heads import RECORD
from headwise.runs.json_result import JsonResult
from headwise.runs.rows import MeanEstimate


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


def stage_of(
    name: str, model: nn.Module, held_out: HeldOutText, losses: Sequence[float], baseline: Sequence[float]
) -> Stage:
    """Return the row of a model.

    Args:
        name: name of the step.
        model: the model after it.
        held_out: the held-out text.
        losses: the model's loss on each of its sequences.
        baseline: the same of the dense model.
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

    @staticmethod
    def of(name: str, model: Any, stages: Sequence[Stage], held_out: HeldOutText, loss: Any) -> "RecipeResult":
        """Return the report of a finished compression.

        Args:
            name: name of the dense model.
            model: the smaller model.
            stages: one row per step.
            held_out: the held-out text.
            loss: the loss function.
        """
        loader = "headwise" if hasattr(model.config, RECORD) else "transformers"
        documents = len(set(held_out.documents))
        return RecipeResult(name, loader, getattr(loss, "__name__", type(loss).__name__), documents, tuple(stages))

    def records(self) -> list[dict[str, Any]]:
        """Return one dictionary per step: its name, the parameters, and mean, standard error (`_sem`) and sample size
        (`_n`) of loss and difference.
        """
        return [
            {"step": each.name, "parameters": each.parameters}
            | {
                name + suffix: value
                for name, estimate in (("loss", each.loss), ("difference", each.difference))
                for suffix, value in zip(("", "_sem", "_n"), estimate, strict=True)
            }
            for each in self.stages
        ]

    def content(self) -> dict[str, Any]:
        """Return the content as values that JSON can express; NaN becomes null."""
        content = asdict(self)
        for stage in content["stages"]:
            for name in ("loss", "difference"):
                stage[name] = [None if math.isnan(value) else value for value in stage[name]]
        return content

    @classmethod
    def of_content(cls, content: dict[str, Any]) -> "RecipeResult":
        """Return the report that has this content."""
        stages = tuple(
            Stage(each["name"], each["parameters"], _estimate(each["loss"]), _estimate(each["difference"]))
            for each in content.pop("stages")
        )
        return cls(**content, stages=stages)


def _estimate(values: Sequence[Any]) -> MeanEstimate:
    """Return an estimate from the numbers in a JSON file."""
    value, sem, number = (math.nan if each is None else each for each in values)
    return MeanEstimate(float(value), float(sem), int(number))
