"""Runs of a model under `hw.watch`, with everything that they report."""

import warnings
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import headwise as hw


@dataclass(frozen=True)
class Watched:
    """Result of a run under `hw.watch`.

    Attributes:
        rows: one dict for each head; empty if watch refused.
        warned: text of the warnings of headwise.
        refused: message of the `InputError`, or "".
        output: what the run returned.
    """

    rows: list[dict[str, Any]]
    warned: str
    refused: str
    output: Any


def watch(model: nn.Module, run: Callable[[], Any], special: Collection[int] = ()) -> Watched:
    """Run a function under `hw.watch`."""
    output, rows, refused = None, [], ""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with torch.no_grad(), hw.watch(model, special=special) as heads:
                output = run()
            rows = heads.rows()
        except hw.InputError as error:
            refused = str(error)
    texts = [str(warning.message) for warning in caught if issubclass(warning.category, UserWarning)]
    return Watched(rows, "\n".join(text for text in texts if text), refused, output)
