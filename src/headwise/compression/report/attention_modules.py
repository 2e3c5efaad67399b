"""Attention modules of a model with their output projections."""

from collections.abc import Callable
from typing import Any

from torch import nn

from headwise.errors import InputError
from headwise.families.registry import head_module
from headwise.intercept.layer_index import is_inside
from headwise.intercept.survey import survey


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
