"""What decides the numbers of a run: the model bit by bit, the data, the versions, what was asked for."""

import json
from typing import Any

import torch
from torch import Tensor, nn

from headwise.data.batches import digest_of
from headwise.data.texts import Texts

SAMPLE = 64
"""How many numbers of each weight say whether a model is the same: training changes nearly all."""


def run_settings(model: nn.Module, texts: Texts | None, title: str | None, **settings: Any) -> dict[str, Any]:
    """All that decides the numbers, but for the data itself: a run goes on only with the same.

    Args:
        model: that is run.
        texts: what it reads, if it reads texts.
        title: the model's name, to show.
        settings: what else was asked for, as JSON takes it.
    """
    weights = digest_of(
        part
        for name, each in model.state_dict().items()
        for part in (name, each.flatten()[:: max(1, each.numel() // SAMPLE)] if isinstance(each, Tensor) else None)
    )
    of_texts = None
    if texts is not None:
        names = ("context", "documents", "batch", "limit", "column")
        of_texts = {"source": texts.name} | {name: getattr(texts, name) for name in names}
    parameter = next((each for each in model.parameters() if each.is_floating_point()), torch.empty(0))
    found = {
        "model": {
            "name": title or getattr(getattr(model, "config", None), "name_or_path", None) or type(model).__name__,
            "class": type(model).__name__,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": parameter.device.type,
            "weights": weights,
        },
        "data": of_texts,
        "versions": _versions(),
        "settings": settings,
    }
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def _versions() -> dict[str, str]:
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("headwise", "torch", "transformers"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found
