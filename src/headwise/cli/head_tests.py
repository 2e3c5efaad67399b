"""Preparation of the commands that test single heads."""

from pathlib import Path
from typing import Any

from torch import nn

from headwise.cli.loading import quiet_libraries
from headwise.cli.options import ModelFlags
from headwise.errors import InputError
from headwise.runs.distributed import LocalProcess
from headwise.runs.files import require_writable
from headwise.runs.table import table_path


def require_new_table(out: Path | None, name: str, *, force: bool) -> None:
    """Raise `InputError` if a folder for a table cannot be written, or has one and `force` is off."""
    if out is None:
        return
    require_writable(out)
    if table_path(out, name).exists() and not force:
        remedy = "--force (force=True) replaces it"
        raise InputError("out", expected=f"a folder without {name}.parquet", got=repr(str(out)), remedy=remedy)


def decoder_and_tokenizer(model: ModelFlags) -> tuple[nn.Module, Any, str]:
    """Load a model with its language-model head, and return it with its tokenizer and its title."""
    return _loaded(model, True)


def model_and_tokenizer(model: ModelFlags) -> tuple[nn.Module, Any, str]:
    """Load a model without a language-model head, and return it with its tokenizer and its title."""
    return _loaded(model, False)


def _loaded(model: ModelFlags, has_head: bool) -> tuple[nn.Module, Any, str]:
    """Load a model, with its language-model head or without it."""
    quiet_libraries()
    source = model.find()
    tokenizer = source.tokenizer()
    loaded = source.model(source.lm_head() if has_head else None, model.torch_dtype)
    return loaded.to(LocalProcess(True, 0).device(model.device)), tokenizer, source.title
