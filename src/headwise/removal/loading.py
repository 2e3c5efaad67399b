"""Loading of saved models whose heads were removed."""

from typing import Any

import torch

from headwise.removal.remove_heads import RECORD, remove_recorded_heads


def class_of_saved(auto_class: Any, config: Any) -> Any:
    """Return the class whose `from_pretrained` loads a saved model: `auto_class` (of `transformers`) or, if heads were
    removed that the fields of the configuration cannot state, a class that makes such a model.

    Args:
        auto_class: an auto class of `transformers`, such as `AutoModel`.
        config: configuration of the saved model.
    """
    record: Any = getattr(config, RECORD, None)
    if record is None:
        return auto_class
    with torch.device("meta"):
        dense: Any = type(auto_class.from_config(config))

    class Pruned(dense):  # type: ignore[misc]
        """The dense class, with fewer heads."""

        def __init__(self, config: Any, *arguments: Any, **named: Any) -> None:
            super().__init__(config, *arguments, **named)
            remove_recorded_heads(self, record)

    # By these names, `transformers` finds the rules by which it converts saved weights.
    Pruned.__name__, Pruned.__qualname__, Pruned.__module__ = dense.__name__, dense.__qualname__, dense.__module__
    return Pruned
