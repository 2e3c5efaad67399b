"""Processors that do not belong to a model: an error that names both instead of a failure inside the model.

Each reason is established from the model and from the processor's output, none from the text of another error.
"""

import inspect
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.token_sources import IDS
from headwise.data.tokenization import input_embeddings
from headwise.errors import InputError, errors_of


def require_match(model: nn.Module, processor: Any, inputs: Mapping[str, Tensor]) -> None:
    """Raise an `InputError` if the outputs of a processor cannot be those that a model expects: token ids of which the
    model reads none, or some outside of its embedding table, or no token at the place of a picture. Models do not
    always fail on these: some ignore the text or the picture, and ids outside of the table end a process on a GPU.

    Args:
        model: the model.
        processor: the processor, or a function that calls it.
        inputs: the outputs of the processor.
    """
    ids = inputs.get(IDS)
    if ids is None:
        return
    config, name, own = getattr(model, "config", None), type(model).__name__, _name_of(processor)
    parameters = inspect.signature(model.forward).parameters
    if any(each in parameters for each in inputs) and not any(each.endswith(IDS) for each in parameters):
        raise InputError("text", expected=f"None for {name}, which reads no token ids", got=f"{ids.numel()} token ids")
    # Models may replace the ids of pictures and sounds before they read the table.
    named = {
        value
        for attribute, value in vars(config).items()
        if attribute.endswith(("_token_id", "_token_index")) and isinstance(value, int)
    } if config is not None else set()  # fmt: skip
    table = input_embeddings(model)
    if isinstance(table, nn.Embedding):
        rows = sum(len(part.weight) for part in table.modules() if isinstance(part, nn.Embedding))
        outside = sorted({int(each) for each in torch.unique(ids)} - named - set(range(rows)))
        if outside:
            expected = f"the processor of {name}, with token ids below {rows}"
            raise InputError("processor", expected=expected, got=f"{own} with the token id {outside[-1]}")
    token = _image_token(model)
    if token is not None and not bool((ids == token).any()):
        written = getattr(without_options(processor), "image_token_id", None)
        if written == token:
            shown = getattr(without_options(processor), "image_token", f"the token {token}")
            expected = f"a text with {shown}, at whose place {name} reads a picture"
            raise InputError("text", expected=expected, got="a text without it")
        expected = f"the processor of {name}, whose token for a picture has the id {token}"
        got = f"{own} without this token" + ("" if written is None else f" but with the id {written}")
        raise InputError("processor", expected=expected, got=got)


@contextmanager
def mismatches_named(model: nn.Module, processor: Any, inputs: Mapping[str, Tensor]) -> Iterator[None]:
    """If a model fails in the context, raise an `InputError` that names its processor as the cause, where that can be
    established. Other errors stay unchanged. The arguments are those of `require_match`.
    """
    try:
        yield
    except InputError as error:
        # Errors of other libraries are the cause of those of `errors_of`; lack of memory is no fault of the processor.
        if error.__cause__ is None or isinstance(error.__cause__, torch.OutOfMemoryError) or processor is None:
            raise
        reason = _mismatch(model, processor, inputs)
        if reason is None:
            raise
        raise reason from error.__cause__


def _mismatch(model: nn.Module, processor: Any, inputs: Mapping[str, Tensor]) -> InputError | None:
    """Return an error that states why a model fails on the outputs of a processor, or None if that is unknown."""
    name, own = type(model).__name__, _name_of(processor)
    parameters = inspect.signature(model.forward).parameters
    main = getattr(model, "main_input_name", None)
    missing = [
        each.name
        for each in parameters.values()
        if each.kind is each.POSITIONAL_OR_KEYWORD
        and each.name not in inputs
        and (each.default is each.empty or each.name == main)
    ]
    if missing:
        if missing == [IDS] and getattr(without_options(processor), "tokenizer", None) is not None:
            return InputError("text", expected=f"a text, which {name} reads with the pictures", got=None)
        expected = f"a processor that returns {' and '.join(missing)}, which {name} reads"
        return InputError("processor", expected=expected, got=f"{own} with {', '.join(inputs) or 'nothing'}")
    token, table = _image_token(model), input_embeddings(model)
    if token is not None and IDS in inputs and isinstance(table, nn.Embedding):
        tokens, features = int((inputs[IDS] == token).sum()), _count_of_features(model, inputs, table.embedding_dim)
        if features not in (None, tokens):
            expected = f"the processor of {name}, which has {features} features for these pictures"
            return InputError("processor", expected=expected, got=f"{own} with {tokens} tokens for them")
    registered = _registered(model)
    if registered is not None and registered not in [
        each.__name__ for each in type(without_options(processor)).__mro__
    ]:
        return InputError("processor", expected=f"{registered}, the processor of {name}", got=own)
    unread = [each for each in inputs if each not in parameters]
    if unread and any(each in parameters for each in inputs):
        expected = f"a processor whose outputs are arguments of {name}"
        return InputError("processor", expected=expected, got=f"{own} with {', '.join(unread)}")
    return None


def without_options(processor: Any) -> Any:
    """Return a processor without the options that `functools.partial` binds to it."""
    return getattr(processor, "func", processor)


def _name_of(processor: Any) -> str:
    """Return the name of the class of a processor, or that of a function."""
    own = without_options(processor)
    return getattr(own, "__name__", type(own).__name__)


def _image_token(model: nn.Module) -> int | None:
    """Return the token id at whose places a model reads pictures, by its config."""
    config = getattr(model, "config", None)
    ids = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    found: int | None = next((each for each in ids if isinstance(each, int)), None)
    return found


def _count_of_features(model: Any, inputs: Mapping[str, Tensor], width: int) -> int | None:
    """Return the number of features of a width that a model puts at the places of the tokens of pictures, or None if
    that is unknown.
    """
    read = getattr(model, "get_image_features", None)
    if read is None:
        return None
    named = inspect.signature(read).parameters
    try:
        with torch.no_grad(), errors_of("model", expected="a model that reads these inputs"):
            output = read(**{name: value for name, value in inputs.items() if name in named and name != IDS})
    except InputError:
        return None
    features = getattr(output, "pooler_output", output)
    several = features if isinstance(features, list | tuple) else [features]
    if not all(isinstance(each, Tensor) and each.shape[-1] == width for each in several):
        return None
    count: int = sum(each.numel() // width for each in several)
    return count


def _registered(model: nn.Module) -> str | None:
    """Return the name of the class of processor that `transformers` loads for a model, or None if it has none."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    try:
        from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES
    except ImportError:
        return None
    name = PROCESSOR_MAPPING_NAMES.get(kind)
    return name if isinstance(name, str) else None
