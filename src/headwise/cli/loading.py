"""Loading models for a command, without messages of the libraries underneath."""

from typing import Any

from headwise.analysis.losses import LOSSES, loss_by_name
from headwise.data.models import LoadedModel, lm_head_of, load
from headwise.errors import InputError


def load_with_loss(model: str, loss: str | None) -> tuple[LoadedModel, Any]:
    """Load a model and its tokenizer, with the output layer that the loss called `loss` needs, and return the loaded
    model and the loss function. If `loss` is None, the saved model determines the loss: next-token for a causal
    language model, masked-token for a masked one, otherwise embedding distance. Warnings and progress bars of
    transformers are turned off.

    Args:
        model: name, folder or hub id.
        loss: name of the loss; None for the one that the saved model determines.

    Raises:
        InputError: unknown loss, or the model cannot be loaded.
    """
    quiet_libraries()
    if loss is None:
        trained_head = lm_head_of(model)
        loss = next(name for name, head in LOSSES.items() if head == trained_head)
    if loss not in LOSSES:
        raise InputError("loss", expected=f"one of {', '.join(LOSSES)}", got=repr(loss))
    loaded = load(model, LOSSES[loss])
    return loaded, loss_by_name(loss, loaded.tokenizer)


def quiet_libraries() -> None:
    """Turn off the warnings and progress bars of transformers in this process, if transformers is installed. The
    conversion of a GGUF file, which takes minutes, still shows its progress.
    """
    try:
        from transformers.utils import logging
    except ImportError:
        return  # `load` reports the missing package
    logging.set_verbosity_error()
    logging.disable_progress_bar()
