"""Preparation of the commands that test single heads."""

from typing import TYPE_CHECKING, Any

from headwise.cli.loading import find_causal, quiet_libraries
from headwise.cli.options import ModelFlags

if TYPE_CHECKING:
    from torch import nn


def decoder_and_tokenizer(model: ModelFlags) -> "tuple[nn.Module, Any, str]":
    """Load a model with its language-model head, and return it with its tokenizer and its title."""
    return _loaded(model, True)


def model_and_tokenizer(model: ModelFlags) -> "tuple[nn.Module, Any, str]":
    """Load a model without a language-model head, and return it with its tokenizer and its title."""
    return _loaded(model, False)


def _loaded(model: ModelFlags, has_head: bool) -> "tuple[nn.Module, Any, str]":
    """Load a model, with its language-model head or without it."""
    quiet_libraries()
    source = find_causal(model) if has_head else model.find()
    tokenizer = source.tokenizer()
    loaded = source.model(source.lm_head() if has_head else None, model.torch_dtype)
    return loaded.to(model.torch_device), tokenizer, source.title
