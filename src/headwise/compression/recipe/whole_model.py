"""Models that are loaded with all of their parts, because they are saved again."""

from typing import Any

import torch
from torch import nn

from headwise.analysis.losses import loss_by_name
from headwise.data.models import ModelSource
from headwise.errors import InputError
from headwise.settings import LOSSES


def load_whole_model(source: ModelSource, dtype: torch.dtype | None = None) -> nn.Module:
    """Load a model as the class that it was saved as, with its language-model head if it has one.

    Args:
        source: location of the model.
        dtype: data type of the weights; None for the saved one.

    Raises:
        InputError: the model cannot be loaded, or it was saved with another head, such as a classifier's, which would
            be lost.
    """
    model: Any = source.model(source.lm_head(), dtype)
    saved = getattr(model.config, "architectures", None) or [type(model).__name__]
    if type(model).__name__ not in saved:
        raise InputError(
            "model",
            expected="one without a head, or with that of a language model",
            got=f"a {saved[0]}",
            remedy=f"load it with transformers.{saved[0]}, and use the functions of headwise in Python",
        )
    loaded: nn.Module = model
    return loaded


def loss_of(source: ModelSource, tokenizer: Any) -> Any:
    """Return the loss function that a model was trained with: of the next token for a causal language model, of masked
    tokens for a masked one, and otherwise the distance of embeddings from those of the dense model.
    """
    trained_head = source.lm_head()
    return loss_by_name(next(name for name, head in LOSSES.items() if head == trained_head), tokenizer)
