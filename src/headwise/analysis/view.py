"""`view`: the attention of every head of a model on one text, in statistics and between words.

No matrix of tokens x tokens is kept for long texts. Each layer's attention is observed in blocks of rows; for each head
its statistics, the strongest keys of each word and token, and pictures of bounded size are stored.
"""

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

import torch
from torch import Tensor, nn

from headwise.analysis.mismatch import mismatches_named, without_options
from headwise.analysis.token_sources import IDS, CallTokens, Place
from headwise.analysis.view_diffusion import diffusion_steps, is_pipeline
from headwise.analysis.view_prompts import difference_of_logits, picture_prompt, viewed_texts, with_generated
from headwise.analysis.view_result import View, ViewedRun, ViewedText, ViewSet, last_row
from headwise.analysis.view_sounds import series_prompt, sound_prompt
from headwise.analysis.viewer import Viewer
from headwise.checks import flag, require_module, whole_number
from headwise.data.batches import call_by_names, device_of, evaluation_mode, is_encoder_decoder
from headwise.data.texts import Texts
from headwise.data.tokenization import (
    EncodedText,
    SpecialTokens,
    decoded_words,
    encode_text,
    max_input_tokens,
    require_text,
    text_model,
)
from headwise.errors import InputError, errors_of
from headwise.intercept.install import intercepted
from headwise.intercept.layer_index import innermost_attention_modules
from headwise.intercept.model_name import model_name
from headwise.progress import progress_bar
from headwise.runs.fingerprint import identity_of
from headwise.shapes import Float, Int

KEPT_TOKENS = 256
"""Number of tokens up to which `view` keeps all weights between tokens by default."""


@overload
def view(
    model: nn.Module,
    processor: Any = ...,
    text: str | None = ...,
    *,
    images: Any = ...,
    audio: Any = ...,
    series: Any = ...,
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
    processor: Any,
    text: Sequence[str],
    *,
    images: Sequence[Any] | None = ...,
    audio: Sequence[Any] | None = ...,
    target: Sequence[str] | None = ...,
    generate: int = ...,
    title: str | None = ...,
    truncate: bool = ...,
    keep_all: int = ...,
    progress: bool = ...,
) -> ViewSet: ...


def view(
    model: nn.Module,
    processor: Any = None,
    text: str | Sequence[str] | None = None,
    *,
    images: Any = None,
    audio: Any = None,
    series: Any = None,
    target: str | Sequence[str] | None = None,
    generate: int = 0,
    title: str | None = None,
    truncate: bool = False,
    keep_all: int = KEPT_TOKENS,
    progress: bool = False,
) -> View | ViewSet:
    """Run a model on one text, on pictures, on a prompt with both, on a sound or on a time series, and return the
    attention of each head: its statistics, its role (a name for what it attends to), and the strongest links (largest
    attention weights) between words. For a list of texts, return a `ViewSet` with one such view per text. For a
    pipeline of `diffusers`, return a `ViewSet` with one view per step.

    Which part of a picture, sound or series each token stands for is derived by gradients: with the outputs of all
    heads set to zero, each token depends only on the pixels of its own patch. A token that stands for no part of a
    picture and for no word, such as a class token, is a special token. A sound is shown as its spectrogram, and a
    series as curves. Their patches are strips of time. The word of a strip is its centre, such as "0.52 s" or "step
    12". The padding after a sound is shown as special tokens.

    Args:
        model: any model that `watch` can intercept, in evaluation mode: a model of `transformers`, or a module that
            takes token ids `(1, tokens)` or pixels `(1, channels, height, width)`. Of an encoder-decoder that reads
            text, the encoder is viewed unless there is a target or generated text. For a pipeline of `diffusers`, its
            transformer, such as `pipeline.transformer`.
        processor: its tokenizer or, with pictures or a sound, its processor. Options of the processor are bound by
            `functools.partial(processor, max_patches=512)`. None if `images` is a tensor, and with a series. With the
            transformer of a pipeline of `diffusers`, the pipeline, which generates a picture
            from the text. Each of its steps has a view: patches attend to patches and to words.
        text: one text, which is not split, or a list of texts. None for a model that reads pictures alone. With
            pictures, a text without the model's token for a picture, such as `<image>`, becomes the message of a user
            by the processor's chat template.
        images: one picture or a list, as `PIL.Image` or paths of files; for a list of texts, one picture or a list of
            pictures per text. Without a processor, pixel values.
        audio: a sound: its samples `(samples,)` at the rate of the processor's feature extractor, or the path of a WAV
            file of this rate; for a list of texts, one sound per text.
        series: values `(time,)` or `(time, channels)` of a time series, without processor. They become the argument
            `past_values` of a model of `transformers`, or the first argument of another module.
        target: text that the decoder of an encoder-decoder reads, one per text.
        generate: number of tokens that the model generates: after the text or, in an encoder-decoder, from the text. It
            generates them without sampling and beams, but with the penalties of its generation config. They are viewed
            together with the text. With a pipeline of `diffusers`, number of steps that are viewed, at equal
            distances from the first to the last one; all steps for 0.
        title: name of the model, for display; by default that of its hub id, folder or class.
        truncate: cut off a text that is longer than the model's limit, instead of refusing it.
        keep_all: number of tokens up to which all attention weights between tokens are kept in memory; of a longer
            text, the 32 largest weights of each token are kept. All weights of cross-attention are also kept if there
            are at most `keep_all` squared.
        progress: show a progress bar on standard error, on a terminal, while the model runs.

    Raises:
        InputError: the text is empty or too long; a picture or sound cannot be read; a sound has another rate; no token
            stands for a part of a picture, sound or series; no self-attention over the tokens was intercepted; the
            output of a head is not the product of its weights and values; the model cannot generate text.
        MissingExtra: Pillow, which reads and draws pictures, is not installed.

    Warns:
        UserWarning: some modules have attention in their names, but no attention of theirs was intercepted; or the view
            leaves out attention over something else than the tokens of the text and pictures.

    Example:
        >>> model, tokenizer = headwise.load("minilm")  # doctest: +SKIP
        >>> headwise.view(model, tokenizer, "Coffee or tea?").head(0, 2).role.name  # doctest: +SKIP
        'previous token'
        >>> headwise.view(model, processor, "What is left of the cup?", images="cups.png")  # doctest: +SKIP
        >>> headwise.view(model, processor, audio="speech.wav", generate=20)  # doctest: +SKIP
        >>> headwise.view(pipeline.transformer, pipeline, "a red circle", generate=4)  # doctest: +SKIP
    """
    _require_usable(model, target, generate, keep_all, progress)
    name = model_name(model) if title is None and isinstance(model, nn.Module) else str(title)
    shown: dict[str, Any] = {"title": name, "keep_all": keep_all, "progress": progress}

    media = {"images": images, "audio": audio, "series": series}
    named = [argument for argument, given in media.items() if given is not None]
    if len(named) > 1:
        raise InputError(named[1], expected=f"None with {named[0]}", got=type(media[named[1]]).__name__)

    def view_one(text: Any, medium: Any, target: Any) -> View:
        """Return the attention of each head on one text, with its pictures or its sound."""
        if medium is not None:
            if truncate:
                what = "pictures" if images is not None else named[0]
                raise InputError("truncate", expected=f"False with {what}", got=True)
            with torch.inference_mode(False):  # patches are derived from gradients
                return _view_media(model, processor, text, named[0], medium, target, generate, shown)
        tokenizer = getattr(processor, "tokenizer", processor)
        reader = text_model(model) if hasattr(model, "config") or not isinstance(model, nn.Module) else model
        encoded = encode_text(reader, tokenizer, text, truncate)
        ids = encoded.inputs["input_ids"]
        inputs = {name: tensor.to(device_of(reader)) for name, tensor in encoded.inputs.items()}
        seen = ViewedText("text", encoded.text, encoded.truncated, encoded.tokens, encoded.words, encoded.word_of, ids)
        texts = [seen]
        logits: Tensor | None = None
        if target is not None or generate:
            reader = model
            if target is None:
                decoded, inputs, logits = _generated_text(model, tokenizer, encoded, inputs, generate)
            else:
                decoded = _target_text(model, tokenizer, target)
                inputs = {**inputs, "decoder_input_ids": _ids_of(decoded)}
            texts = [replace(seen, name="source"), decoded] if is_encoder_decoder(model) else [decoded]
        return view_of(reader, texts, inputs, logits=logits, **shown)

    if is_pipeline(processor):
        others = {**media, "target": target}
        return _view_diffusion(
            model, processor, text, [name for name in others if others[name] is not None], generate, truncate, shown
        )
    if isinstance(text, str) or text is None or not isinstance(text, Sequence):
        return view_one(text, media[named[0]] if named else None, target)
    if not text:
        raise InputError("text", expected="a text, or a list of at least one text", got="an empty list")
    of_texts = {}
    for argument, given in ((named[0] if named else "images", media[named[0]] if named else None), ("target", target)):
        of_texts[argument] = [None] * len(text) if given is None else given
        if isinstance(given, str) or len(of_texts[argument]) != len(text):
            things = {"target": "texts", "audio": "sounds"}.get(argument, argument)
            expected = f"a list of {len(text)} {things}, one per text"
            raise InputError(argument, expected=expected, got=repr(given))
    return ViewSet(tuple(view_one(*each) for each in zip(text, *of_texts.values(), strict=True)))


def _require_usable(model: Any, target: Any, generate: int, keep_all: int, progress: bool) -> None:
    """Raise an `InputError` if one of these arguments of `view` cannot be used."""
    if is_pipeline(model):
        remedy = "hw.view(pipeline.transformer, pipeline, text) views the pipeline"
        raise InputError("model", expected="the transformer of a pipeline", got=type(model).__name__, remedy=remedy)
    if isinstance(model, nn.Module) and model.training:
        raise InputError("model", expected="a model in evaluation mode", got="training", remedy="call model.eval()")
    whole_number("generate", generate, least=0)
    whole_number("keep_all", keep_all, least=0)
    flag("progress", progress)
    if generate and target is not None:
        raise InputError("generate", expected="0 with a target, which the decoder reads instead", got=generate)


def _view_media(
    model: nn.Module,
    processor: Any,
    text: str | None,
    argument: str,
    medium: Any,
    target: Any,
    generate: int,
    shown: dict[str, Any],
) -> View:
    """Return the attention of each head on a prompt with pictures, a sound or a series, by the name of the argument of
    `view`; `shown` are the last arguments of `view_of`.
    """
    require_module(model)
    tokenizer = getattr(without_options(processor), "tokenizer", None)
    read = {"images": picture_prompt, "audio": sound_prompt, "series": series_prompt}[argument]
    prompt = read(model, processor, text, medium)
    inputs, logits = prompt.inputs, None
    if generate:
        with mismatches_named(model, processor, inputs):
            inputs, logits = with_generated(model, inputs, generate, tokenizer)
    elif target is not None:
        inputs = {**inputs, "decoder_input_ids": _ids_of(_target_text(model, tokenizer, target))}
    elif is_encoder_decoder(model) and "decoder_input_ids" not in inputs:
        start = getattr(model.config, "decoder_start_token_id", None)
        if start is not None:
            inputs = {**inputs, "decoder_input_ids": torch.tensor([[start]], device=device_of(model))}
    if tokenizer is None and any(name.endswith(IDS) for name in inputs):
        got = type(without_options(processor)).__name__
        raise InputError("processor", expected="one with a tokenizer, for the words that the model writes", got=got)
    with mismatches_named(model, processor, prompt.inputs):
        generated = 0 if logits is None else len(logits)
        texts, tokens_of, calls = viewed_texts(model, prompt, inputs, tokenizer, generated)
    seen = view_of(
        model, texts, inputs, logits=logits, tokens_of=tokens_of, baselines=prompt.baselines, calls=calls, **shown
    )
    # Whisper numbers the layers of its decoder, each of which has one module with attention on the sound.
    cross = [
        head for head in seen.heads if head.kind == "cross" and seen.texts[head.attention.keys].seconds is not None
    ]
    layers = list(dict.fromkeys(head.layer for head in cross))
    named = getattr(getattr(model, "generation_config", None), "alignment_heads", None) or ()
    followed = tuple((layers[layer], head) for layer, head in named if layer < len(layers))
    return replace(seen, alignment_heads=followed)


def _view_diffusion(
    model: nn.Module,
    pipeline: Any,
    text: Any,
    others: Sequence[str],
    generate: int,
    truncate: bool,
    shown: dict[str, Any],
) -> ViewSet:
    """Return the attention of each head in some steps of a diffusion pipeline. `others` are the names of further
    arguments of `view` that were passed; `generate` is the number of steps, and `shown` are the last arguments of
    `view_of`.
    """
    if others or not isinstance(text, str):
        got = f"one with {others[0]}" if others else type(text).__name__
        raise InputError("text", expected="one text alone for a diffusion pipeline", got=got)
    require_module(model)
    views = []
    with torch.inference_mode(False):  # patches are derived from gradients
        steps, count = diffusion_steps(model, pipeline, text, generate, truncate=truncate)
        for number, is_cut_off, prompt in steps:
            texts, tokens_of, calls = viewed_texts(model, prompt, prompt.inputs, None, 0)
            texts[0] = replace(texts[0], text=f"step {number} of {count}: {text}", truncated=is_cut_off)
            views.append(view_of(model, texts, prompt.inputs, tokens_of=tokens_of, calls=calls, **shown))
    return ViewSet(tuple(views))


def view_of(
    model: Any,
    texts: Sequence[ViewedText],
    inputs: Mapping[str, Tensor],
    *,
    title: str,
    keep_all: int = KEPT_TOKENS,
    logits: Float[Tensor, "generated vocabulary"] | None = None,
    tokens_of: Sequence[Mapping[str, Tensor]] | None = None,
    baselines: Mapping[str, Tensor] | None = None,
    calls: Mapping[Place, tuple[CallTokens, CallTokens]] | None = None,
    progress: bool = False,
) -> View:
    """Run a model with the arguments `inputs`, and return the attention of each of its heads. `texts` are the tokens
    and words that the model reads. If the model generated the last tokens, `logits` are the logits from which these
    tokens were chosen; the run must reproduce them. `tokens_of`, `baselines` and `calls` are those of `ViewedRun`; by
    default, the tokens of the texts are the token ids among the inputs. The other arguments are those of `view`.
    """
    if tokens_of is None:
        named = {name: value for name, value in inputs.items() if name.endswith(IDS)}
        tokens_of = [
            {
                name: torch.arange(value.shape[1])[None]
                for name, value in named.items()
                if text.ids is not None and torch.equal(value.cpu(), text.ids.cpu())
            }
            for text in texts
        ]
    modules = dict(model.named_modules())
    layers = len(innermost_attention_modules(modules, modules))
    with (
        errors_of("model", expected="a model that takes these tokens"),
        progress_bar("view", layers or None, "layers", shown=progress, transient=True) as bar,
        torch.no_grad(),
    ):
        viewer = Viewer(model, texts, keep_all=keep_all, on_call=bar.advance, calls=calls)
        with intercepted(model, viewer):
            output = call_by_names(model, inputs)
    if logits is not None and len(logits):
        # Attention while the tokens were generated must not have been different from what the view shows.
        difference = difference_of_logits(logits, output.logits)
        if difference:
            raise InputError(
                "generate",
                expected="a model whose logits in one call for all tokens equal those during generation",
                got=f"logits that differ by {difference:.1%}",
                remedy="view the text alone, without generate",
            )
    viewer.require_attention()
    heads = tuple(viewer.head_views())
    if not heads:
        expected = f"self-attention over the {' and '.join(str(len(each.tokens)) for each in texts)} tokens of the text"
        raise InputError("model", expected=expected, got=viewer.left_out)
    viewer.warn_of_unread(stacklevel=5)
    if viewer.left_out:
        kind = "pictures" if any(text.pictures for text in texts) else "text"
        warnings.warn(f"attention over something else than the {kind} was left out: {viewer.left_out}", stacklevel=4)
    run = ViewedRun(dict(inputs), tuple(tokens_of), baselines or {}, viewer.calls, last_row(output))
    return View(title, tuple(texts), heads, len(heads), identity_of(model), run)


def _generated_text(
    model: Any, tokenizer: Any, encoded: EncodedText, inputs: Mapping[str, Tensor], count: int
) -> tuple[ViewedText, dict[str, Tensor], Float[Tensor, "generated vocabulary"]]:
    """Let a model continue a text by up to `count` tokens, without sampling or beams. Return the text with the
    generated tokens, the arguments with which the model reads both, and the logits from which each generated token was
    chosen. For an encoder-decoder, the returned text is only what the decoder generated.
    """
    has_encoder, prompt = is_encoder_decoder(model), int(encoded.inputs["input_ids"].shape[1])
    limit = max_input_tokens(model, tokenizer)
    if not has_encoder and limit is not None and prompt + count > limit:
        got = f"{prompt} tokens of the text and {count} generated ones"
        raise InputError("generate", expected=f"at most {limit} tokens, the model's limit", got=got)
    if not has_encoder and int(encoded.inputs["input_ids"][0, -1]) == tokenizer.eos_token_id:
        end = tokenizer.eos_token
        warnings.warn(f"the tokenizer ends the text with {end}; the model continues after it", stacklevel=4)
    inputs, logits = with_generated(model, inputs, count, tokenizer)
    if has_encoder:
        ids = inputs["decoder_input_ids"]
        first = int(ids.shape[1]) - len(logits)
        return _decoded_text("output", tokenizer, ids, first_generated=first), inputs, logits
    ids = inputs["input_ids"]
    added = decoded_words(tokenizer, ids[0, prompt:].tolist(), ids[0, :prompt].tolist())
    text = ViewedText(
        "text",
        encoded.text + "".join(added.pieces),
        encoded.truncated,
        (*encoded.tokens, *added.tokens),
        (*encoded.words, *added.words),
        torch.cat([encoded.word_of, added.word_of + len(encoded.words)]),
        ids,
        first_generated=prompt,
    )
    return text, inputs, logits


def _ids_of(text: ViewedText) -> Int[Tensor, "1 tokens"]:
    """Return the token ids of a decoded text."""
    assert text.ids is not None
    return text.ids


def _target_text(model: Any, tokenizer: Any, target: Any) -> ViewedText:
    """Return the text that the decoder of an encoder-decoder reads when it is to output `target`: the tokens of the
    target, shifted by one position, after the start token of the decoder.
    """
    require_text(target)
    if not is_encoder_decoder(model):
        got = type(model).__name__
        raise InputError("target", expected="None for a model that is not an encoder-decoder", got=got)
    labels: Int[Tensor, "1 tokens"] = tokenizer(text_target=target, return_tensors="pt", verbose=False)["input_ids"]
    if hasattr(model, "prepare_decoder_input_ids_from_labels"):
        ids = model.prepare_decoder_input_ids_from_labels(labels=labels.to(model.device))
    else:
        start = getattr(model.config, "decoder_start_token_id", None)
        if start is None:
            raise InputError("model", expected="a decoder_start_token_id in its config", got="none")
        ids = torch.cat([torch.full_like(labels[:, :1], start), labels[:, :-1]], 1).to(model.device)
    return _decoded_text("target", tokenizer, ids)


def _decoded_text(
    name: str,
    tokenizer: Any,
    ids: Int[Tensor, "1 tokens"],
    *,
    truncated: bool = False,
    first_generated: int | None = None,
) -> ViewedText:
    """Decode token ids, and return the text with its tokens and words as a model reads it. `name` is the name of the
    text, such as "target".
    """
    decoded = decoded_words(tokenizer, ids[0].tolist())
    shown = "".join(decoded.pieces).strip()
    return ViewedText(name, shown, truncated, decoded.tokens, decoded.words, decoded.word_of, ids, first_generated)


def view_examples(
    model: nn.Module, texts: Texts, *, count: int = 8, tokens: int = 96, seed: int = 0, title: str | None = None
) -> ViewSet:
    """Return the attention of each head on some sequences of a data set, drawn at random without replacement, as a
    `ViewSet` with one view per sequence.

    Args:
        model: a `transformers` model; of an encoder-decoder, the encoder is viewed.
        texts: the data set.
        count: number of sequences; all if there are fewer.
        tokens: number of tokens of a sequence, from its start, that the model reads; special tokens stay at both ends.
        seed: of the random choice.
        title: name of the model, for display; by default that of its hub id, folder or class.

    Raises:
        InputError: an argument cannot be used; no self-attention over the sequences was intercepted.

    Example:
        >>> texts = headwise.Texts("corpus.jsonl", tokenizer)  # doctest: +SKIP
        >>> seen = headwise.view_examples(model, texts)  # doctest: +SKIP
        >>> headwise.write_page("page.html", headwise.profile(model, texts), seen)  # doctest: +SKIP
    """
    require_module(model)
    if not isinstance(texts, Texts):
        raise InputError("texts", expected="headwise.Texts", got=type(texts).__name__)
    whole_number("count", count, least=1)
    whole_number("tokens", tokens, least=1)
    title = model_name(model) if title is None else title
    model, sequences = text_model(model), texts.within(text_model(model)).sequences
    order = torch.randperm(len(sequences), generator=torch.Generator().manual_seed(seed))[:count]
    special_tokens = SpecialTokens.of(texts.tokenizer)
    views = []
    with evaluation_mode(model), progress_bar("examples", len(order), "texts", transient=True) as bar:
        for index in bar.track(sorted(order.tolist())):
            ids = sequences[index].tolist()
            is_cut = len(ids) > tokens
            if is_cut:
                before, after = special_tokens
                inner = ids[len(before) :] if ids[: len(before)] == before else ids
                if after and inner[-len(after) :] == after:
                    inner = inner[: -len(after)]
                ids = special_tokens.around(inner[: max(tokens - special_tokens.size, 1)])
            text = _decoded_text("text", texts.tokenizer, torch.tensor([ids]), truncated=is_cut)
            inputs = {"input_ids": torch.tensor([ids], device=device_of(model))}
            inputs["attention_mask"] = torch.ones_like(inputs["input_ids"])
            views.append(view_of(model, [text], inputs, title=title))
    return ViewSet(tuple(views))
