"""Attention modules of a model with their output projections, and the size of models."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.intercept.layer_index import is_inside
from headwise.intercept.survey import survey
from headwise.removal.families import head_module


def attention_modules(model: nn.Module, run: Callable[[], Any]) -> list[str]:
    """Return the paths of the modules that compute attention while `run` runs the model, and of their output
    projections where a family has these elsewhere, as BERT. No path is inside of another one.

    Raises:
        InputError: no attention was intercepted.
    """
    paths = {record.site.path for record in survey(model, run).records}
    for path in tuple(paths):
        try:
            paths.add(head_module(model, path).output)
        except InputError:  # a family of which no heads can be removed
            continue
    return [path for path, _ in model.named_modules() if path in paths and not any(is_inside(path, p) for p in paths)]


def count_parameters(model: nn.Module, paths: Sequence[str] = ("",)) -> int:
    """Return the number of parameters in modules of a model, by default in all. Shared parameters count once."""
    return sum(parameter.numel() for parameter in _parameters(model, paths))


def weight_bytes(model: nn.Module) -> int:
    """Return the bytes of all parameters of a model. Shared parameters count once."""
    return sum(parameter.nbytes for parameter in _parameters(model, ("",)))


def _parameters(model: nn.Module, paths: Sequence[str]) -> list[nn.Parameter]:
    """Return the distinct parameters in modules of a model."""
    found = (parameter for path in paths for parameter in model.get_submodule(path).parameters())
    return list({id(parameter): parameter for parameter in found}.values())
