"""Attention modules of a model with their output projections, and the size of models."""

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.intercept.layer_index import is_inside
from headwise.intercept.survey import survey
from headwise.removal.families import head_module


def attention_modules(model: nn.Module, run: Callable[[], Any]) -> tuple[list[str], list[str]]:
    """Return the paths of the modules that compute attention while `run` runs the model, and of their output
    projections where a family has these elsewhere, as BERT. No path is inside of another one. Also return the paths of
    modules whose attention cannot be seen.

    Raises:
        InputError: no attention was intercepted.
    """
    registry = survey(model, run)
    paths = {record.site.path for record in registry.records}
    for path in tuple(paths):
        try:
            paths.add(head_module(model, path).output)
        except InputError:  # a family of which no heads can be removed
            continue
    outermost = [path for path in paths if not any(is_inside(path, other) for other in paths)]
    order = {path: index for index, (path, _) in enumerate(model.named_modules())}
    return sorted(outermost, key=lambda path: order[path]), sorted(registry.unread)


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
