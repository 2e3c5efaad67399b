"""`view`: the attention of every head of a model on one text, in statistics and between words.

No matrix of tokens x tokens is kept for long texts. Each layer's attention is observed in blocks of rows; for each head
its statistics, the strongest keys of each word and token, and pictures of bounded size are stored.
"""

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, overload

import torch
from torch import Tensor, nn

from headwise.analysis.decoder_text import DecoderText, generated_text, target_text
from headwise.analysis.head_view import ViewedText
from headwise.analysis.view_result import View
from headwise.analysis.view_set import ViewSet
from headwise.analysis.viewer import Viewer
from headwise.checks import flag, whole_number
from headwise.data.batches import device_of
from headwise.data.tokenization import EncodedText, encode_text, text_model
from headwise.errors import HeadwiseError, InputError
from headwise.intercept.install import intercepted
from headwise.intercept.layer_index import innermost_attention_modules
from headwise.intercept.model_name import model_name
from headwise.progress import progress_bar
from headwise.runs.fingerprint import identity_of

KEPT_TOKENS = 256
"""Number of tokens up to which `view` keeps all weights between tokens by default."""


@overload
def view(
    model: nn.Module,
    tokenizer: Any,
    text: str,
    *,
    target: str | None = ...,
    generate: int = ...,
    title: str | None = ...,
    truncate: bool = ...,
    keep_all: int = ...,
    progress: bool = ...,
) -> View: ...


@overload
def view(
    model: nn.Module,
    tokenizer: Any,
    text: Sequence[str],
    *,
    target: Sequence[str] | None = ...,
    generate: int = ...,
    title: str | None = ...,
    truncate: bool = ...,
    keep_all: int = ...,
    progress: bool = ...,
) -> ViewSet: ...


def view(
    model: nn.Module,
    tokenizer: Any,
    text: str | Sequence[str],
    *,
    target: str | Sequence[str] | None = None,
    generate: int = 0,
    title: str | None = None,
    truncate: bool = False,
    keep_all: int = KEPT_TOKENS,
    progress: bool = False,
) -> View | ViewSet:
    """Run a model on one text, and return the attention of each head: its statistics, its role (name for what it
    attends to), and the strongest links (largest attention weights) between words. For a list of texts, return a
    `ViewSet` with one view per text.

    Args:
        model: any model that `watch` can intercept and that reads token ids, in evaluation mode: of `transformers`, or
            a module that takes token ids `(1, tokens)`. Of an encoder-decoder, the encoder is viewed unless there is a
            target or generated text.
        tokenizer: its tokenizer, of `transformers`.
        text: one text, which is not split, or a list of texts.
        target: text that the decoder of an encoder-decoder reads, one per text.
        generate: number of tokens that the model continues the text with (of an encoder-decoder: that it generates
            from the text), without sampling and beams, but with penalties that its generation config may have. They are
            viewed together with the text.
        title: name of the model, for display; by default that of its hub id, folder or class.
        truncate: cut off a text that is longer than the model's limit, instead of refusing it.
        keep_all: number of tokens up to which all attention weights between tokens are kept in memory; of a longer
            text, the 32 largest weights of each token are kept.
        progress: show a progress bar on standard error, on a terminal, while the model runs.

    Raises:
        InputError: the text is empty or too long; no self-attention over the tokens of the text was intercepted; the
            output of a head is not the product of its weights and values; the model cannot generate text.

    Warns:
        UserWarning: of modules that ran and are called attention, but whose attention was not intercepted, and of
            attention over something else than the tokens of the text, which the view leaves out.

    Example:
        >>> model, tokenizer = headwise.load("minilm")  # doctest: +SKIP
        >>> headwise.view(model, tokenizer, "Coffee or tea?").head(0, 2).role.name  # doctest: +SKIP
        'previous token'
    """
    if isinstance(model, nn.Module) and model.training:
        raise InputError("model", expected="a model in evaluation mode", got="training", remedy="call model.eval()")
    whole_number("generate", generate, least=0)
    whole_number("keep_all", keep_all, least=0)
    title = model_name(model) if title is None else title
    options: dict[str, Any] = {"generate": generate, "title": title, "truncate": truncate, "keep_all": keep_all}
    options["progress"] = flag("progress", progress)
    if generate and target is not None:
        raise InputError("generate", expected="0 with a target, which the decoder reads instead", got=generate)
    if isinstance(text, str) or not isinstance(text, Sequence):
        return _view(model, tokenizer, text, target, **options)
    if not text:
        raise InputError("text", expected="a text, or a list of at least one text", got="an empty list")
    targets: Sequence[Any] = [None] * len(text) if target is None else target
    if isinstance(targets, str) or len(targets) != len(text):
        raise InputError("target", expected=f"a list of {len(text)} texts, one per text", got=repr(target))
    pairs = zip(text, targets, strict=True)
    return ViewSet(tuple(_view(model, tokenizer, each, own_target, **options) for each, own_target in pairs))


def _view(
    model: Any,
    tokenizer: Any,
    text: Any,
    target: Any,
    *,
    generate: int,
    title: str,
    truncate: bool,
    keep_all: int,
    progress: bool,
) -> View:
    """Return the attention of each head on one text."""
    whole_model = model
    has_decoder_text = target is not None or generate > 0
    if hasattr(model, "config") or not isinstance(model, nn.Module):
        model = text_model(model)
    if not callable(tokenizer) or not hasattr(tokenizer, "convert_ids_to_tokens"):
        raise InputError("tokenizer", expected="a transformers tokenizer", got=type(tokenizer).__name__)
    encoded = encode_text(model, tokenizer, text, truncate)
    device = device_of(model)
    inputs = {name: tensor.to(device) for name, tensor in encoded.inputs.items()}
    texts = [_viewed_text("text", encoded)]
    decoder_text: DecoderText | None = None
    if has_decoder_text:
        model = whole_model
        decoder_text = (
            generated_text(model, tokenizer, encoded, inputs, generate)
            if target is None
            else target_text(model, tokenizer, target)
        )
        inputs = decoder_text.model_inputs(inputs)
        texts = decoder_text.texts(texts[0])
    options: dict[str, Any] = {"title": title, "keep_all": keep_all, "progress": progress}
    return view_of(model, texts, inputs, decoder_text=decoder_text, **options)


def view_of(
    model: Any,
    texts: Sequence[ViewedText],
    inputs: Mapping[str, Tensor],
    *,
    title: str,
    keep_all: int = KEPT_TOKENS,
    decoder_text: DecoderText | None = None,
    progress: bool = False,
) -> View:
    """Run a model on tokenized texts and return the attention of each head, for `view`, whose docstring describes the
    arguments and errors.

    Args:
        model: the model.
        texts: what the model reads.
        inputs: arguments of the model.
        title: name of the model.
        keep_all: number of tokens up to which all weights are kept.
        decoder_text: the text that a decoder reads, if the model generated it or it was stated.
        progress: show a progress bar.
    """
    modules = dict(model.named_modules())
    layers = len(innermost_attention_modules(modules, modules))
    keeps_all = max(len(each.tokens) for each in texts) <= keep_all
    try:
        with progress_bar("view", layers or None, "layers", shown=progress, transient=True) as bar:
            viewer = Viewer(model, texts, keeps_all=keeps_all, on_call=bar.advance)
            with torch.no_grad(), intercepted(model, viewer):
                output = _call(model, inputs)
    except HeadwiseError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__} ({' '.join(str(error).split())[:200]})"
        raise InputError("model", expected="a model that takes these tokens", got=reason) from error
    if decoder_text is not None:
        decoder_text.require_same_logits(output)
    viewer.require_attention()
    viewer.require_heads()
    viewer.warn_of_unread(stacklevel=5)
    is_image = texts[0].picture is not None
    if is_image and viewer.leaves_out_stages:
        raise InputError("model", expected="attention over the same patches in all layers", got=viewer.left_out)
    if viewer.left_out:
        kind = "image" if is_image else "text"
        warnings.warn(f"attention over something else than the {kind} was left out: {viewer.left_out}", stacklevel=4)
    heads = tuple(viewer.head_views())
    return View(title, tuple(texts), heads, len(heads), identity_of(model))


def _call(model: Any, inputs: Mapping[str, Tensor]) -> Any:
    """Call a `transformers` model with all outputs of the tokenizer or processor, and another module with those that
    its `forward` names as arguments; return its output. A module whose `forward` does not name the first of them, the
    token ids or pixels, gets this one alone, by position.

    A module whose `forward` has `**kwargs` but does not name the first one gets all outputs.
    """
    parameters, first = inspect.signature(model.forward).parameters, next(iter(inputs))
    accepts_any_name = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    if hasattr(model, "config") or accepts_any_name or first in parameters:
        is_own = not hasattr(model, "config") and first in parameters
        return model(**{name: tensor for name, tensor in inputs.items() if not is_own or name in parameters})
    return model(inputs[first])


def _viewed_text(name: str, encoded: EncodedText) -> ViewedText:
    """Return a tokenized text as the model reads it, called `name`."""
    ids = encoded.inputs["input_ids"]
    return ViewedText(name, encoded.text, encoded.truncated, encoded.tokens, encoded.words, encoded.word_of, ids)
