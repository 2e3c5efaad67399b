"""Registry of plain PyTorch models: functions that build a tiny random model and calls of it."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Case:
    """One way to call a model.

    Attributes:
        name: short name, such as "left padding".
        call: function that calls the model.
        alone: calls of the sequences of a padded batch, each alone and without padding; their mean is the truth. Empty
            if the call itself is the truth.
    """

    name: str
    call: Callable[[Any], Any]
    alone: tuple[Callable[[Any], Any], ...] = ()


@dataclass(frozen=True)
class Built:
    """A tiny random model and calls of it.

    Attributes:
        model: the model.
        cases: calls of it.
        cross: parts of the paths of modules that compute cross-attention, where the truth cannot see it because queries
            and keys have the same length.
        not_attention: parts of the paths of modules in which a softmax is not attention over keys.
        same: model with the same parameters that computes the same by a softmax of torch and products of matrices. The
            truth is derived from it, since it does not see other forms of attention. By default it is `model`.
    """

    model: nn.Module
    cases: tuple[Case, ...]
    cross: tuple[str, ...] = ()
    not_attention: tuple[str, ...] = ()
    same: nn.Module | None = None


@dataclass(frozen=True)
class PlainModel:
    """A model of the registry.

    Attributes:
        name: name in the report.
        library: name of the package on the index; "hand-written" for models of the study.
        category: such as "vision".
        build: returns the model and its calls.
        float32: True if the model computes in float32 only.
    """

    name: str
    library: str
    category: str
    build: Callable[[], Built]
    float32: bool = field(default=False)


MODELS: dict[str, PlainModel] = {}
"""All models of the study by name."""


def plain_model(
    library: str, category: str, *, name: str = "", float32: bool = False
) -> Callable[[Callable[[], Built]], Callable[[], Built]]:
    """Return a decorator that adds a builder to `MODELS` as "library: name"; the name is by default the function's."""

    def register(build: Callable[[], Built]) -> Callable[[], Built]:
        label = f"{library}: {name or build.__name__}"
        assert label not in MODELS, label
        MODELS[label] = PlainModel(label, library, category, build, float32)
        return build

    return register


def build(entry: PlainModel) -> Built:
    """Build a model of the registry from a fixed seed, and make sure that each of its layers matters: parameters that
    are initialised with zeros or with tiny constants, such as the scales of layers, become random numbers.
    """
    torch.manual_seed(0)
    built = entry.build()
    built.model.eval()
    with torch.no_grad():
        for parameter in built.model.parameters():
            is_number = parameter.is_floating_point() and parameter.numel() > 0
            if is_number and not 1e-2 <= float(parameter.abs().max()) < 1e3:  # NaN, too
                parameter.normal_(std=0.5)
    return built


def simple(model: nn.Module, *arguments: Any, **named: Any) -> Built:
    """Return a built model with one call, `model(*arguments, **named)`."""
    return Built(model, (called(*arguments, **named),))


def called(*arguments: Any, case: str = "plain", alone: Iterable[tuple[Any, ...]] = (), **named: Any) -> Case:
    """Return the case that calls a model with these arguments.

    Args:
        arguments: positional arguments of the model.
        case: name of the case.
        alone: positional arguments of each sequence alone.
        named: named arguments of the model.
    """
    calls = tuple(lambda model, each=each: model(*each) for each in alone)
    return Case(case, lambda model: model(*arguments, **named), calls)
