"""Loading of saved models whose heads were removed."""

from typing import Any

import torch
from torch import nn

from headwise.removal.remove_heads import RECORD, remove_recorded_heads


def has_record(config: Any) -> bool:
    """Return True if a configuration lists the remaining heads of a model."""
    return getattr(config, RECORD, None) is not None


def class_of_saved(loader: Any, config: Any) -> Any:
    """Return the class whose `from_pretrained` loads a saved model: `loader` or, if heads were removed that the fields
    of the configuration cannot state, a class that makes such a model. The model is then one of the dense class.

    Args:
        loader: class of a model of `transformers`, or an auto class such as `AutoModel`.
        config: configuration of the saved model.
    """
    if not has_record(config):
        return loader
    dense: Any = loader
    if not (isinstance(loader, type) and issubclass(loader, nn.Module)):
        with torch.device("meta"):
            dense = type(loader.from_config(config))

    class Pruned(dense):  # type: ignore[misc]
        """The dense class, with fewer heads."""

        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(config, *arguments, **named)
            remove_recorded_heads(self, getattr(config, RECORD))
            self.__class__ = dense  # pickle finds this class by its name

    # By these names, `transformers` finds the rules by which it converts saved weights.
    Pruned.__name__, Pruned.__qualname__, Pruned.__module__ = dense.__name__, dense.__qualname__, dense.__module__
    return Pruned
