"""`save_model`: a saved model that is complete or absent."""

from pathlib import Path
from typing import Any

from torch import nn

from headwise.checks import require_module
from headwise.errors import InputError
from headwise.runs.files import new_folder


def save_model(model: nn.Module, tokenizer: Any, folder: str | Path, *, force: bool = False) -> None:
    """Write a `transformers` model and its tokenizer to a folder: weights as safetensors, and configurations.

    At any moment, also after a crash or on a full disk, the folder is complete or absent.

    Args:
        model: the model, such as one that `hw.prune` returned.
        tokenizer: its tokenizer; None to write none.
        folder: a new or empty folder.
        force: replace the folder of a saved model.

    Raises:
        InputError: the model has no `save_pretrained`, the folder exists and `force` is off or it contains no model, or
            it cannot be written.
        MissingExtra: `filelock` is not installed.

    Example:
        >>> headwise.save_model(pruned, tokenizer, "smaller")  # doctest: +SKIP
    """
    with new_folder(folder, force=force) as part:
        write_model(model, tokenizer, part)


def write_model(model: nn.Module, tokenizer: Any, folder: Path) -> None:
    """Write a model and its tokenizer to an existing folder. An error may leave the folder incomplete."""
    require_module(model)
    parts: tuple[tuple[str, Any], ...] = (("model", model), ("tokenizer", tokenizer))
    for argument, value in parts:
        if value is not None and not hasattr(value, "save_pretrained"):
            expected = f"a {argument} of transformers, which has save_pretrained"
            raise InputError(argument, expected=expected, got=type(value).__name__)
    try:
        for _, value in parts:
            if value is not None:
                value.save_pretrained(folder)
    except Exception as error:
        if "(os error " not in str(error):  # safetensors and tokenizers write in Rust, without an OSError
            raise
        reason = str(error).removeprefix("Error while serializing: ")
        raise InputError("out", expected="a folder that can be written", got=reason) from error
