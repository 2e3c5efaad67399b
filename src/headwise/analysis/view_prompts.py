"""Prompts with pictures, sound or numbers, and the texts that views show: their tokens are words and patches."""

import inspect
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.mismatch import require_match, without_options
from headwise.analysis.patches import (
    ElementPlaces,
    displayed_pictures,
    element_places,
    patches_of,
    pixel_places,
    require_places,
)
from headwise.analysis.token_sources import IDS, CallTokens, Place, TokenStream, token_sources
from headwise.analysis.view_result import ViewedText
from headwise.analysis.viewer import DISAGREEMENT
from headwise.data.batches import device_of, is_encoder_decoder
from headwise.data.tokenization import Token, Word, decoded_words
from headwise.errors import InputError, errors_of, require
from headwise.page.contents import Patch
from headwise.shapes import Bool, Float, Int


class EmbeddedText(NamedTuple):
    """Text that a model reads as the output of a text encoder.

    Attributes:
        name: the model's input, with one row per token.
        ids: the token ids; -1 where the input has no output of a text encoder.
        tokenizers: the tokenizer of each id.
    """

    name: str
    ids: Int[Tensor, "1 tokens"]
    tokenizers: Sequence[Any]


class Prompt(NamedTuple):
    """Prompt with pictures, sound or numbers, as a model reads it.

    Attributes:
        inputs: arguments of the model.
        places: where the elements of the inputs lie in the pictures, by the input's name.
        pictures: the pictures, `PIL.Image`.
        baselines: for each input with places, what the model reads in place of an occluded part: what it reads for a
            picture of the mean colour, or the mean over time.
        kind: "picture", or "sound" or "series" of which the picture is a drawing.
        length: seconds of the sound, or number of points of time of the series; 0 for pictures.
        embedded: texts that the model reads as outputs of text encoders, by the name of their token ids.
    """

    inputs: dict[str, Tensor]
    places: dict[str, ElementPlaces]
    pictures: tuple[Any, ...]
    baselines: dict[str, Tensor]
    kind: str = "picture"
    length: float = 0.0
    embedded: Mapping[str, EmbeddedText] = MappingProxyType({})


def picture_prompt(model: nn.Module, processor: Any, text: str | None, images: Any) -> Prompt:
    """Return a prompt with pictures, as a processor prepares it for a model. A text without the token of a picture is
    sent as the message of a user, by the chat template of the processor.

    Args:
        model: the model.
        processor: its processor, of `transformers`; None if `images` is a tensor.
        text: the text; None for a model that reads no text.
        images: one picture or a list: `PIL.Image` objects or paths of files. Without a processor, pixel values
            `(1, channels, height, width)`.

    Raises:
        InputError: a picture cannot be read; the processor does not read the text or the pictures; it has no place for
            a picture.
        MissingExtra: Pillow is not installed.
    """
    if processor is None:
        if not isinstance(images, Tensor) or images.ndim != 4 or len(images) != 1 or not images.is_floating_point():
            got = f"{tuple(images.shape)}, {images.dtype}" if isinstance(images, Tensor) else type(images).__name__
            raise InputError("images", expected="pixel values (1, channels, height, width) without processor", got=got)
        parameters = inspect.signature(model.forward).parameters
        takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
        if hasattr(model, "config") and "pixel_values" not in parameters and not takes_all:
            got = f"{type(model).__name__}, which reads {', '.join(parameters)}"
            raise InputError("model", expected="a model that reads pixel_values", got=got)
        of_pixels, picture = pixel_places(images)
        pixels = images.to(device_of(model))
        baseline = pixels.mean((2, 3), keepdim=True).expand_as(pixels)
        return Prompt({"pixel_values": pixels}, {"pixel_values": of_pixels}, (picture,), {"pixel_values": baseline})
    if not callable(processor):
        raise InputError("processor", expected="a processor of transformers", got=type(processor).__name__)
    if hasattr(processor, "convert_ids_to_tokens"):
        got = f"the tokenizer {type(processor).__name__}"
        raise InputError("processor", expected="a processor that reads pictures", got=got)
    several = images if isinstance(images, Sequence) and not isinstance(images, str) else [images]
    pictures = tuple(_opened(each) for each in several)
    if not pictures:
        raise InputError("images", expected="at least one picture", got="an empty list")
    options: dict[str, Any] = {}
    if text is not None:
        options = _with_picture_tokens(without_options(processor), text, len(pictures))

    def process(changed: Sequence[Any]) -> dict[str, Tensor]:
        return model_inputs(model, processor(images=list(changed), return_tensors="pt", **options))

    with errors_of("images", expected="pictures and a text that the processor reads"):
        inputs = process(pictures)
        places = element_places(process, pictures)
        box = require("PIL.Image", purpose="reading a picture", extra="plot").Resampling.BOX
        blank = process([picture.resize((1, 1), box).resize(picture.size) for picture in pictures])
    read = {int(number) for each in places.values() for number in torch.unique(each.picture).tolist()} - {-1}
    if any(len(of_input.picture) != inputs[name].numel() for name, of_input in places.items()):
        expected = "one whose output depends on the size of a picture alone"
        raise InputError("processor", expected=expected, got="an output of another size for other colours")
    if read != set(range(len(pictures))):
        got = f"{len(read)} of them" if read else "none of them"
        raise InputError("processor", expected=f"one that passes {len(pictures)} pictures to the model", got=got)
    with errors_of("images", expected="pictures and a text that the processor reads"):
        require_places(process, pictures, inputs, places)
    require_match(model, processor, inputs)
    device = device_of(model)
    inputs, blank = ({name: value.to(device) for name, value in each.items()} for each in (inputs, blank))
    return Prompt(inputs, places, pictures, {name: blank[name] for name in places})


def model_inputs(model: nn.Module, outputs: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return the outputs of a processor that a model takes as arguments."""
    parameters = inspect.signature(model.forward).parameters
    takes_all = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {
        name: value
        for name, value in outputs.items()
        if isinstance(value, Tensor) and (takes_all or name in parameters) and name != "labels"
    }


def _opened(picture: Any) -> Any:
    """Return a picture as `PIL.Image` in RGB. `picture` is one already, or the path of a file.

    As in `transformers`, a file is turned as its EXIF data state, and its transparency is ignored. A `PIL.Image` is not
    turned, and transparent parts become white.
    """
    image = require("PIL.Image", purpose="reading a picture", extra="plot")
    if isinstance(picture, str | Path):
        turned = require("PIL.ImageOps", purpose="reading a picture", extra="plot").exif_transpose
        try:
            with image.open(picture) as opened:
                return turned(opened).convert("RGB")
        except OSError as error:  # also for a file that is no picture
            got = f"{str(picture)!r} ({error.strerror or 'no picture that Pillow reads'})"
            raise InputError("images", expected="a picture file", got=got) from None
    if not isinstance(picture, image.Image):
        raise InputError("images", expected="PIL.Image objects or paths of files", got=type(picture).__name__)
    if "A" in picture.getbands() or picture.info.get("transparency") is not None:
        white = image.new("RGBA", picture.size, "white")
        return image.alpha_composite(white, picture.convert("RGBA")).convert("RGB")
    return picture.convert("RGB")


def _with_picture_tokens(processor: Any, text: str, count: int) -> dict[str, Any]:
    """Return the arguments of a processor for the text of a prompt with a token for each picture. A text that has none
    becomes the message of a user if the processor has a chat template.
    """
    token = getattr(processor, "image_token", None)
    if not isinstance(token, str) or token in text or not getattr(processor, "chat_template", None):
        return {"text": text}
    content = [*({"type": "image"} for _ in range(count)), {"type": "text", "text": text}]
    message = [{"role": "user", "content": content}]
    with errors_of("text", expected=f"a text with {token}, or one that the chat template of the processor takes"):
        prompt: str = processor.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
    # Many templates write the token that begins a text, which the tokenizer would add once more.
    begin = getattr(getattr(processor, "tokenizer", None), "bos_token", None)
    return {"text": prompt} | ({"add_special_tokens": False} if begin and prompt.startswith(begin) else {})


def with_generated(
    model: Any, inputs: Mapping[str, Tensor], count: int, tokenizer: Any
) -> tuple[dict[str, Tensor], Float[Tensor, "generated vocabulary"]]:
    """Let a model generate up to `count` tokens after a prompt, without sampling or beams. Return the arguments with
    which the model reads the prompt and the generated tokens, and the logits from which each of them was chosen.
    """
    if not (hasattr(model, "can_generate") and model.can_generate()):
        remedy = 'load it with its language-model head, as hw.load(name, "causal") or hw.load(name, "saved") does'
        raise InputError("model", expected="a model that generates text", got=type(model).__name__, remedy=remedy)
    options: dict[str, Any] = {
        "do_sample": False,
        "num_beams": 1,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    if getattr(model.generation_config, "pad_token_id", None) is None:  # `generate` would warn
        ids = [getattr(tokenizer, name, None) for name in ("pad_token_id", "eos_token_id")]
        options["pad_token_id"] = next((each for each in ids if each is not None), None)
    mask, is_continued = inputs.get("attention_mask"), IDS in inputs and not is_encoder_decoder(model)
    if is_continued and mask is not None and mask.shape == inputs[IDS].shape and not bool(mask[0, -1]):
        remedy = 'set processor.tokenizer.padding_side = "left"'
        got = "padding after it"
        raise InputError("generate", expected="a prompt that ends with its last word", got=got, remedy=remedy)
    with errors_of("generate", expected="a model that generates these tokens"), torch.no_grad():
        result = model.generate(**inputs, max_new_tokens=count, **options)
    if len(result.sequences) != 1:
        got = f"{len(result.sequences)} of them"
        raise InputError("generate", expected="a generation config that returns one sequence", got=got)
    sequence, logits = result.sequences, torch.cat(result.logits).float()
    if is_encoder_decoder(model) or IDS not in inputs:
        return {**inputs, f"decoder_{IDS}" if is_encoder_decoder(model) else IDS: sequence}, logits
    prompt = inputs[IDS]
    added = sequence[:, sequence.shape[1] - len(logits) :]
    types = [name for name in inputs if name.endswith("type_ids")]

    def continued(kind: int) -> dict[str, Tensor]:
        """Return the arguments with new tokens of a type."""
        extended = dict(inputs)
        for name, value in inputs.items():
            if value.shape[:2] != prompt.shape or name.startswith("pixel"):
                continue
            if name == IDS:
                new = added
            elif name.endswith("mask"):
                new = value[:, -1:].expand(-1, added.shape[1], *value.shape[2:])
            else:
                new = value.new_full((1, added.shape[1], *value.shape[2:]), kind if name in types else 0)
            extended[name] = torch.cat([value, new], 1)
        return extended

    # New tokens are of type 0 in Gemma 3, and of type 1 in PaliGemma, which reads tokens of type 0 in both directions.
    with torch.no_grad():
        kind = int(bool(types) and bool(difference_of_logits(logits, model(**continued(0)).logits)))
    return continued(kind), logits


def difference_of_logits(
    logits: Float[Tensor, "generated vocabulary"], computed: Float[Tensor, "1 tokens vocabulary"]
) -> float:
    """Return the largest difference between the logits from which tokens were generated and those of a run with all
    tokens, relative to the largest logit. Return 0 for a difference that may be rounding.
    """
    difference = float((computed[0, -1 - len(logits) : -1].float() - logits).abs().max() / logits.abs().max())
    return 0.0 if difference <= max(DISAGREEMENT, 8 * torch.finfo(computed.dtype).eps) else difference


def viewed_texts(
    model: nn.Module, prompt: Prompt, inputs: Mapping[str, Tensor], tokenizer: Any, generated: int
) -> tuple[list[ViewedText], list[Mapping[str, Tensor]], dict[Place, tuple[CallTokens, CallTokens]]]:
    """Return the sequences of tokens to which a model attends on a prompt with pictures, as texts, with the elements of
    the inputs on which the tokens of each text depend, and the tokens of the queries and keys of each attention call.

    Args:
        model: the model.
        prompt: the prompt.
        inputs: the arguments with which the model is viewed: those of the prompt, with generated tokens.
        tokenizer: tokenizer by which token ids are displayed; None for a model that reads no text.
        generated: number of generated tokens, which are the last ones of a sequence of token ids.

    Raises:
        InputError: no token stands for a part of a picture.
    """
    parts = {name: places.picture >= 0 for name, places in prompt.places.items()}
    sources = token_sources(model, inputs, parts, {ids_name: each.name for ids_name, each in prompt.embedded.items()})
    used = {side.stream for sides in sources.calls.values() for side in sides}
    # The last ids are those that the model has generated.
    last = [name for name in inputs if name.endswith(IDS) and not name.startswith("qformer")][-1:]
    texts = {
        number: _text_of(stream, prompt, inputs, tokenizer, generated if stream.ids_names == last else 0)
        for number, stream in enumerate(sources.streams)
        if number in used
    }
    if not any(patch for text in texts.values() for patch in text.patches):
        sizes = " and ".join(f"{picture.width} x {picture.height}" for picture in prompt.pictures)
        unknown = ", ".join(dict.fromkeys(sources.unknown.values())) or f"none for {sizes} pixels"
        raise InputError("model", expected=f"tokens that each depend on a part of a {prompt.kind}", got=unknown)
    # First the prompt with words and patches, then what other tokens attend to.
    is_source = {keys.stream for queries, keys in sources.calls.values() if keys.stream != queries.stream}
    is_prompt = {number for number, text in texts.items() if text.patches and text.ids is not None}
    order = sorted(texts, key=lambda number: (number not in is_prompt, number not in is_source, number))
    calls = {
        place: (
            queries._replace(stream=order.index(queries.stream)),
            keys._replace(stream=order.index(keys.stream)),
        )
        for place, (queries, keys) in sources.calls.items()
    }
    return [texts[index] for index in order], [sources.streams[index].tokens_of for index in order], calls


def _text_of(
    stream: TokenStream,
    prompt: Prompt,
    inputs: Mapping[str, Tensor],
    tokenizer: Any,
    generated: int,
) -> ViewedText:
    """Return a sequence of tokens as a text: token ids as words of the text, and patches as words named by row and
    column, such as "(1, 2)", or by time. Tokens that are neither are special tokens. `generated` is the number of
    tokens at the end that the model has generated.
    """
    shown, patches = patches_of(stream, prompt.places)
    position_of = torch.full((stream.size,), -1)
    ids, tokenizers, is_masked = _read_ids(stream.ids_names, prompt, inputs, tokenizer)
    first = 0
    for name in stream.ids_names:
        for tokens in stream.tokens_of[name]:
            is_read = (tokens >= 0) & (ids[first : first + len(tokens)] >= 0)
            position_of[tokens[is_read]] = first + is_read.nonzero()[:, 0]
        first += stream.tokens_of[name].shape[1]
    positions: list[int] = position_of.tolist()
    labels = _labels(patches, prompt)
    padding = _padding(stream, prompt)
    tokens_shown: list[Token] = []
    words: list[Word] = []
    word_of: list[int] = []
    start = 0
    while start < stream.size:
        stop = start + 1
        if positions[start] >= 0 and patches[start] is None:
            first, own = positions[start], tokenizers[positions[start]]
            while (
                stop < stream.size
                and patches[stop] is None
                and positions[stop] == positions[stop - 1] + 1
                and tokenizers[positions[stop]] is own
            ):
                stop += 1
            before = [token for token, other in zip(ids[:first].tolist(), tokenizers, strict=False) if other is own]
            decoded = decoded_words(own, ids[first : positions[stop - 1] + 1].tolist(), before)
            word_of += (decoded.word_of + len(words)).tolist()
            words += decoded.words
            tokens_shown += decoded.tokens
        else:
            is_patch = patches[start] is not None
            label = labels.get(start, "padding" if start in padding else f"token {start}")
            if not is_patch and len(ids) == stream.size and tokenizer is not None:
                label = tokenizer.convert_ids_to_tokens(int(ids[start]))
            word_of.append(len(words))
            words.append(Word(label, not is_patch, is_patch))
            tokens_shown.append(Token(label, not is_patch, True, False))
        start = stop
    is_patch_word = {word for word, patch in zip(word_of, patches, strict=True) if patch is not None}
    kept = [word.text for index, word in enumerate(words) if not word.special and index not in is_patch_word]
    viewed_ids = None
    if len(ids):  # patches are different tokens, although the model's ids of them are the same
        viewed_ids = torch.where(position_of >= 0, ids[position_of.clamp(min=0)], -1 - torch.arange(stream.size))[None]
    is_padding = None
    if bool(is_masked.any()):
        is_padding = (position_of >= 0) & is_masked[position_of.clamp(min=0)]
    if not stream.ids_names:
        name = prompt.kind if shown else "tokens"
    else:
        name = "prompt" if shown else stream.ids_names[0].removesuffix(IDS).removesuffix("_") or "text"
    return ViewedText(
        name,
        " ".join(kept),
        False,
        tuple(tokens_shown),
        tuple(words),
        torch.tensor(word_of),
        viewed_ids,
        stream.size - generated if generated else None,
        displayed_pictures(prompt.pictures, shown, prompt.kind),
        tuple(patches) if shown else (),
        prompt.length if shown and prompt.kind == "sound" else None,
        is_padding,
    )


def _read_ids(
    names: Sequence[str], prompt: Prompt, inputs: Mapping[str, Tensor], tokenizer: Any
) -> tuple[Int[Tensor, " tokens"], list[Any], Bool[Tensor, " tokens"]]:
    """Return the token ids of some names that the model reads, the tokenizer of each, and True at padding."""
    ids, tokenizers, is_padding = [torch.zeros(0, dtype=torch.long)], list[Any](), [torch.zeros(0, dtype=torch.bool)]
    for name in names:
        if name in prompt.embedded:
            of_name = prompt.embedded[name].ids
            tokenizers += prompt.embedded[name].tokenizers
            masks = [inputs[each] for each in inputs if each.endswith("attention_mask")]
        else:
            of_name = inputs[name].cpu()
            tokenizers += [tokenizer] * of_name.shape[1]
            masks = [inputs["attention_mask"]] if name == IDS and "attention_mask" in inputs else []
        ids.append(of_name[0])
        fitting = (each[0].cpu() == 0 for each in masks if each.shape == of_name.shape)
        is_padding.append(next(fitting, torch.zeros(len(of_name[0]), dtype=torch.bool)))
    return torch.cat(ids), tokenizers, torch.cat(is_padding)


def _labels(patches: Sequence[Patch | None], prompt: Prompt) -> dict[int, str]:
    """Return the row and the column of each patch in its picture, by the index of the token, such as "(1, 2)". Of a
    sound or series, return the time of the patch's centre, such as "0.52 s" or "step 12", after the channel or the band
    of frequencies if there are several.
    """
    labels: dict[int, str] = {}
    for picture in {patch.picture for patch in patches if patch is not None}:
        chosen = {index: patch for index, patch in enumerate(patches) if patch is not None and patch.picture == picture}
        # Patches that reach over the border are cut off, so their order is that of their centres.
        rows = _ranks([patch.top + patch.height / 2 for patch in chosen.values()])
        if prompt.kind != "picture":
            for (index, patch), row in zip(chosen.items(), rows, strict=True):
                time = prompt.length * (patch.left + patch.width / 2)
                # The points of time of a series are counted from 0, and each of them is the middle of a unit.
                label = f"{time:.2f} s" if prompt.kind == "sound" else f"step {time - 0.5:.4g}"
                part = f"band {max(rows) - row + 1}, " if prompt.kind == "sound" else f"channel {row}, "
                labels[index] = part + label if max(rows) else label
            continue
        columns = _ranks([patch.left + patch.width / 2 for patch in chosen.values()])
        labels |= {
            index: f"({row + 1}, {column + 1})" for index, row, column in zip(chosen, rows, columns, strict=True)
        }
    return labels


def _padding(stream: TokenStream, prompt: Prompt) -> set[int]:
    """Return the tokens that depend on padding of a sound, and may also depend on its end."""
    if prompt.kind != "sound":
        return set()
    found = [
        tokens[(tokens >= 0) & (of_elements.picture < 0)]
        for name, of_elements in prompt.places.items()
        for tokens in stream.tokens_of.get(name, ())
    ]
    return set(torch.cat(found).tolist()) if found else set()


def _ranks(centres: Sequence[float]) -> list[int]:
    """Return the number of the row or column of each patch, from the centres along one axis."""
    order = sorted(range(len(centres)), key=centres.__getitem__)
    steps = [centres[after] - centres[before] for before, after in pairwise(order)]
    ranks, rank = [0] * len(centres), 0
    for index, step in zip(order[1:], steps, strict=True):
        rank += step > max(max(steps) / 3, 1e-6)  # smaller steps are rounding
        ranks[index] = rank
    return ranks
