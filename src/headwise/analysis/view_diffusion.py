"""Views of the transformers of diffusion pipelines: the words of a prompt and the patches of the generated picture."""

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import wraps
from typing import Any, NamedTuple

import torch
import torch.utils._pytree as pytree
from torch import Tensor, nn

from headwise.analysis.mismatch import without_options
from headwise.analysis.patches import ElementPlaces
from headwise.analysis.token_sources import IDS
from headwise.analysis.view_prompts import EmbeddedText, Prompt
from headwise.analysis.viewer import DISAGREEMENT
from headwise.data.batches import call_by_names, device_of, floating_tensors, relative_difference
from headwise.data.tokenization import require_text, special_ids
from headwise.errors import InputError, errors_of, require
from headwise.shapes import Float, Int

BASE = 32
"""Number of values of one digit of the number of a latent. Decoders receive digits that are scaled and shifted."""

LARGEST_RESIDUAL = 1e-3
"""Largest difference of two tensors, relative to the largest value, up to which one is a scaled copy of the other."""


class DiffusionStep(NamedTuple):
    """One step of a diffusion pipeline: its number, from 1; True if the end of the text was cut off; and what the
    transformer reads, with the places of the latents in the generated picture.
    """

    number: int
    is_cut_off: bool
    prompt: Prompt


class _ModelCall(NamedTuple):
    """One call of the transformer: the number of its step, from 0, its arguments, and its output."""

    step: int
    inputs: dict[str, Any]
    output: Any

    @property
    def batch(self) -> int:
        """Number of elements of the batch."""
        return len(floating_tensors(self.output)[0])


class _Encoded(NamedTuple):
    """Token ids that a text encoder has read, one of its outputs, and its tokenizer."""

    ids: Int[Tensor, "batch tokens"]
    features: Float[Tensor, "batch tokens width"]
    tokenizer: Any


class _PipelineRun(NamedTuple):
    """Run of a pipeline: the calls of its transformer, the texts that it encoded, the latents before and after each
    step of its scheduler, the latents that its decoder received, and the picture.
    """

    calls: list[_ModelCall]
    encoded: list[_Encoded]
    latents: list[tuple[Tensor, Tensor]]
    drawn: Tensor
    picture: Any


class _Stopped(Exception):
    """Exception that stops a pipeline before it is finished."""


def is_pipeline(processor: Any) -> bool:
    """Return True for a pipeline of `diffusers`, also with options that `functools.partial` binds."""
    pipeline = without_options(processor)
    return hasattr(pipeline, "scheduler") and isinstance(getattr(pipeline, "components", None), Mapping)


def diffusion_steps(
    model: nn.Module, pipeline: Any, text: Any, count: int, *, truncate: bool
) -> tuple[list[DiffusionStep], int]:
    """Let a pipeline generate a picture from a text. Return `count` of its steps at equal distances, from the first to
    the last one (all steps for 0), and the number of all steps.

    Nothing is looked up by the name of a pipeline. Which input of the transformer is the latents, and which of its
    inputs are outputs of text encoders, is read off the numbers of a run. The element of a batch that has the text is
    the one that reads other words in a first step with another text.

    Args:
        model: the transformer of the pipeline.
        pipeline: a pipeline of `diffusers`, in which `functools.partial` may bind options, such as the number of steps.
        text: the prompt.
        count: number of steps.
        truncate: True if the pipeline may cut off a text that is too long.

    Raises:
        InputError: the text is empty or cut off; the pipeline does not run, or does not return one picture; the
            latents, the text or their places cannot be derived.
    """
    require_text(text)
    run = _recorded(model, pipeline, text)
    places, words = _places_of_latents(model, pipeline, text, run), _read_words(model, pipeline, text, run)
    count = min(count, len(run.latents)) or len(run.latents)
    steps = []
    for number in [round(each * (len(run.latents) - 1) / max(count - 1, 1)) for each in range(count)]:
        found = [
            (call, row, texts)
            for call in run.calls
            if call.step == number
            for row, texts in enumerate(_elements(call, run.encoded))
            if _words(texts) == words
        ]
        if len(found) != 1:
            expected = f"a pipeline in which one call of the model in step {number + 1} reads the text, for one element"
            raise InputError("processor", expected=expected, got=f"{len(found)} that read these words")
        call, row, texts = found[0]

        is_cut_off = _is_cut_off(texts, text)
        if is_cut_off and not truncate:
            expected, remedy = "a text that the pipeline reads whole", "truncate=True cuts it off"
            raise InputError("text", expected=expected, got="one whose end it cuts off", remedy=remedy)

        def of_row(leaf: Any, row: int = row, batch: int = call.batch) -> Any:
            is_batch = isinstance(leaf, Tensor) and leaf.ndim > 0 and len(leaf) == batch
            return leaf[row : row + 1] if is_batch else leaf

        inputs = pytree.tree_map(of_row, call.inputs)
        sample = run.latents[number][0]
        named = [name for name, value in inputs.items() if isinstance(value, Tensor) and _is_scaled(sample, value)]
        if not named:
            expected = "a model that reads the latents of the scheduler"
            raise InputError("model", expected=expected, got=f"{type(model).__name__}, which reads other numbers")
        with torch.no_grad(), errors_of("model", expected="a model that reads one element of the pipeline's batch"):
            output = floating_tensors(call_by_names(model, inputs))[0]
        rounding = max(DISAGREEMENT, 8 * torch.finfo(output.dtype).eps)
        if not relative_difference(output, floating_tensors(call.output)[0][row : row + 1]) <= rounding:
            expected = "a model whose output for one element of a batch does not depend on the others"
            raise InputError("model", expected=expected, got="another output for the element alone")
        prompt = Prompt(inputs, {named[0]: places}, (run.picture,), {}, embedded=texts)
        steps.append(DiffusionStep(number + 1, is_cut_off, prompt))
    return steps, len(run.latents)


def _recorded(model: nn.Module, pipeline: Any, text: str, *, first_step: bool = False) -> _PipelineRun:
    """Run a pipeline on a text, or only its first step, and return what its parts have read and returned."""
    parts = without_options(pipeline)
    if not any(part is model for part in parts.components.values()):
        name = next((name for name in ("transformer", "unet") if name in parts.components), "transformer")
        expected = f"a part of the pipeline, such as pipeline.{name}"
        raise InputError("model", expected=expected, got=type(model).__name__)
    calls: list[_ModelCall] = []
    encoded: list[_Encoded] = []
    latents: list[tuple[Tensor, Tensor]] = []
    drawn: list[tuple[Tensor, torch.Size]] = []  # what the decoder received, and the size of its output
    signature = inspect.signature(model.forward)

    def on_call(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
        bound = signature.bind(*arguments, **named).arguments
        inputs = {name: value for name, value in bound.items() if value is not None and name != "return_dict"}
        copied = pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, inputs)
        calls.append(_ModelCall(len(latents), copied, output))

    def on_text(tokenizer: Any) -> Callable[..., None]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], named: dict[str, Any], output: Any) -> None:
            given = [each for each in (*arguments, *named.values()) if isinstance(each, Tensor) and each.ndim == 2]
            ids = next((each.cpu() for each in given if not each.is_floating_point()), None)
            for features in floating_tensors(output):
                if ids is not None and features.ndim == 3 and features.shape[:2] == ids.shape:
                    encoded.append(_Encoded(ids, features, tokenizer))

        return hook

    def on_step(step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        if first_step:
            raise _Stopped
        sample = inspect.signature(step).bind(*arguments, **named).arguments["sample"].clone()
        result = step(*arguments, **named)
        latents.append((sample, (result[0] if isinstance(result, tuple) else result.prev_sample).clone()))
        return result

    def on_decode(decode: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
        result = decode(*arguments, **named)
        drawn.append((arguments[0].clone(), floating_tensors(result)[0].shape))
        return result

    with ExitStack() as stack:
        for name, part in parts.components.items():
            tokenizer = parts.components.get(name.replace("text_encoder", "tokenizer"))
            if isinstance(part, nn.Module) and hasattr(tokenizer, "convert_ids_to_tokens"):
                stack.callback(part.register_forward_hook(on_text(tokenizer), with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(on_call, with_kwargs=True).remove)
        stack.enter_context(_wrapped(parts.scheduler, "step", on_step))
        if getattr(parts, "vae", None) is not None:
            stack.enter_context(_wrapped(parts.vae, "decode", on_decode))
        stack.enter_context(errors_of("processor", expected="a pipeline that generates a picture from this text"))
        if first_step:
            with _same_random_numbers(model, pipeline), suppress(_Stopped):
                pipeline(prompt=text)
            return _PipelineRun(calls, encoded, [], torch.empty(0), None)
        pictures = getattr(pipeline(prompt=text), "images", None)
    if not (latents and calls and encoded):
        lacking = "text encoder" if latents and calls else f"{type(model).__name__} and scheduler"
        raise InputError("processor", expected=f"a pipeline that calls its {lacking}", got="one that does not")
    shown, shape = drawn[-1] if drawn else (latents[-1][1], latents[-1][1].shape)
    return _PipelineRun(calls, encoded, latents, shown, _only_picture(pictures, shape[-2:]))


def _only_picture(pictures: Any, size: Sequence[int]) -> Any:
    """Return the only picture that a pipeline has returned, whose decoder has returned one of a height and width."""
    image = require("PIL.Image", purpose="showing a picture", extra="plot").Image
    if not isinstance(pictures, list) or len(pictures) != 1 or not isinstance(pictures[0], image):
        got = f"{len(pictures)} of them" if isinstance(pictures, list) else type(pictures).__name__
        raise InputError("processor", expected="a pipeline that returns a list of one PIL.Image", got=got)
    if tuple(size) != (pictures[0].height, pictures[0].width):
        got = f"{pictures[0].width} x {pictures[0].height} of {size[1]} x {size[0]} pixels"
        remedy = "bind use_resolution_binning=False, or another size"
        expected = "a pipeline that returns the whole decoded picture"
        raise InputError("processor", expected=expected, got=got, remedy=remedy)
    return pictures[0]


@contextmanager
def _wrapped(owner: Any, name: str, replacement: Callable[..., Any]) -> Iterator[None]:
    """Replace a method of an object by a function that receives the method and its arguments."""
    method, was_own = getattr(owner, name), name in vars(owner)

    @wraps(method)  # pipelines read its signature
    def replaced(*arguments: Any, **named: Any) -> Any:
        return replacement(method, *arguments, **named)

    setattr(owner, name, replaced)
    try:
        yield
    finally:
        if was_own:
            setattr(owner, name, method)
        else:
            delattr(owner, name)


def _is_scaled(one: Tensor, other: Tensor) -> bool:
    """Return True if a tensor is another one of the same shape, multiplied by a number and shifted by another one."""
    if one.shape != other.shape or one.numel() < 3 or not other.is_floating_point():
        return False
    x, y = (each.detach().double().flatten() for each in (one, other))
    x, y = x - x.mean(), y - y.mean()
    slope = (x * y).sum() / x.square().sum().clamp(min=torch.finfo(torch.float64).tiny)
    rounding = max(LARGEST_RESIDUAL, *(8 * torch.finfo(each.dtype).eps for each in (one, other)))
    return bool(slope > 0) and bool((y - slope * x).abs().max() <= rounding * y.abs().max())


@contextmanager
def _same_random_numbers(model: nn.Module, pipeline: Any) -> Iterator[None]:
    """Return a context after which the generators of a pipeline are in the same state as before."""
    device = device_of(model)
    generators = [each for each in getattr(pipeline, "keywords", {}).values() if isinstance(each, torch.Generator)]
    states = [each.get_state() for each in generators]
    with torch.random.fork_rng([device] if device.type == "cuda" else []):
        yield
    for generator, state in zip(generators, states, strict=True):
        generator.set_state(state)


def _read_words(model: nn.Module, pipeline: Any, text: str, run: _PipelineRun) -> list[list[int]]:
    """Return the token ids, for each tokenizer, that the model reads for a text, in an element of its batch. It is the
    element with other ids for another text; the others have no text, or a negative one.
    """
    other = _recorded(model, pipeline, f"one more {text}", first_step=True)
    elements, others = (
        [_words(element) for call in each.calls if call.step == 0 for element in _elements(call, each.encoded)]
        for each in (run, other)
    )
    changed = [ids for ids, after in zip(elements, others, strict=False) if ids != after]
    if len(elements) != len(others) or len(changed) != 1 or not changed[0]:
        got = f"{len(changed)} elements that read it" if len(changed) > 1 else "none that reads it by a text encoder"
        expected = "a pipeline in which one element of the model's batch reads the text"
        raise InputError("processor", expected=expected, got=got)
    return changed[0]


def _elements(call: _ModelCall, encoded: Sequence[_Encoded]) -> list[dict[str, EmbeddedText]]:
    """Return for each element of a batch the texts that the model reads, by the name of their token ids."""
    elements: list[dict[str, EmbeddedText]] = [{} for _ in range(call.batch)]
    for name, value in call.inputs.items():
        if isinstance(value, Tensor) and value.ndim == 3 and len(value) == call.batch:
            for texts, rows in zip(elements, value, strict=True):
                embedded = _embedded_text(name, rows, encoded)
                if any(each is not None for each in embedded.tokenizers):
                    texts[f"{name}_{IDS}" if texts else IDS] = embedded
    return elements


def _words(texts: Mapping[str, EmbeddedText]) -> list[list[int]]:
    """Return the token ids of texts for each of their tokenizers, without special tokens."""
    words = []
    for embedded in texts.values():
        for tokenizer in dict.fromkeys(each for each in embedded.tokenizers if each is not None):
            special = special_ids(tokenizer)
            tokens = zip(embedded.ids[0].tolist(), embedded.tokenizers, strict=True)
            words.append([token for token, each in tokens if each is tokenizer and token not in special])
    return [ids for ids in words if ids]


def _is_cut_off(texts: Mapping[str, EmbeddedText], text: str) -> bool:
    """Return True if the model reads fewer tokens of a text than it has, by all of its tokenizers."""
    tokenizers = [each for embedded in texts.values() for each in embedded.tokenizers if each is not None]
    longest = max(map(len, _words(texts)))
    counts = []
    for tokenizer in dict.fromkeys(tokenizers):
        special = special_ids(tokenizer)
        counts += [
            sum(token not in special for token in tokenizer(written, verbose=False)[IDS])
            for written in (text, text.lower())
        ]
    return longest < min(counts)


def _embedded_text(name: str, rows: Float[Tensor, "tokens width"], encoded: Sequence[_Encoded]) -> EmbeddedText:
    """Return the token ids of an input of the model. A row of the input has the id for which a text encoder has
    returned the same numbers, or -1. Outputs of a second encoder may follow in the same row, for the same token.
    """
    compared = min(8, *(each.features.shape[-1] for each in encoded), rows.shape[-1])
    outputs: dict[bytes, list[tuple[Tensor, int, Any]]] = {}

    def key_of(row: Tensor) -> bytes:
        key: bytes = row[:compared].double().numpy().tobytes()
        return key

    for each in encoded:
        for row, token in zip(
            each.features.to(rows.dtype).cpu().flatten(0, 1), each.ids.flatten().tolist(), strict=True
        ):
            outputs.setdefault(key_of(row), []).append((row, token, each.tokenizer))
    ids, tokenizers = torch.full((1, len(rows)), -1), [None] * len(rows)
    for position, whole in enumerate(rows.cpu()):
        rest, names = whole, set[str]()
        while bool(rest.any()):
            equal = (each for each in outputs.get(key_of(rest), ()) if torch.equal(each[0], rest[: len(each[0])]))
            features, token, tokenizer = next(equal, (rest, -1, None))
            if tokenizer is not None and not names:
                ids[0, position], tokenizers[position] = token, tokenizer
            names |= set() if tokenizer is None else {tokenizer.convert_ids_to_tokens(token)}
            rest = rest[len(features) :]
        if len(names) > 1:
            got = f"{' and '.join(sorted(names))} at the same place"
            raise InputError("processor", expected="a pipeline that passes one text to all text encoders", got=got)
    return EmbeddedText(name, ids, tokenizers)


def _places_of_latents(model: nn.Module, pipeline: Any, text: str, run: _PipelineRun) -> ElementPlaces:
    """Return where the latents of a pipeline lie in the picture that is decoded from them. The other arguments are
    those of `_recorded`.

    If the decoder does not receive a scaled copy of the latents, the pipeline runs once more without its model. It
    carries the digits of the numbers of the latents to the decoder, and so shows where it puts each of them.
    """
    last, shown = run.latents[-1][1], run.drawn
    if shown.ndim != 4 or len(last) != 1 or shown.numel() != last.numel():
        got = f"{tuple(shown.shape)} from latents {tuple(last.shape)}"
        raise InputError("processor", expected="a pipeline that draws one picture from its latents", got=got)
    numbers = torch.arange(last.numel())
    if not _is_scaled(last, shown):
        powers = [BASE**power for power in range(10) if BASE**power < last.numel()]
        digits = [0 * numbers, 0 * numbers + BASE, *(numbers // each % BASE for each in powers)]
        carried: list[Tensor] = []
        done: list[None] = []

        def on_step(step: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            result = step(*arguments, **named)
            done.append(None)
            if len(done) < len(run.latents):
                return result
            probes = torch.stack(digits).view(len(digits), *last.shape[1:]).to(last)
            return (probes,) if isinstance(result, tuple) else type(result)(prev_sample=probes)

        def on_decode(decode: Callable[..., Any], *arguments: Any, **named: Any) -> Any:
            carried.append(arguments[0].clone())
            raise _Stopped

        parts = without_options(pipeline)
        with (
            _same_random_numbers(model, pipeline),
            errors_of("processor", expected="a pipeline that carries numbers in place of its latents"),
            _wrapped(model, "forward", lambda *_, **__: run.calls[0].output),
            _wrapped(parts.scheduler, "step", on_step),
            _wrapped(parts.vae, "decode", on_decode),
            suppress(_Stopped),
        ):
            pipeline(prompt=text)
        if len(carried) != 1 or carried[0].numel() != len(digits) * last.numel():
            expected = "a pipeline that decodes a batch of latents"
            raise InputError("processor", expected=expected, got="one that does not")
        nothing, unit, *read = carried[0].double().cpu().flatten(1)
        decoded = (((each - nothing) / (unit - nothing) * BASE).round().long() for each in read)
        placed = sum(digit * power for digit, power in zip(decoded, powers, strict=True))
        if not torch.equal(placed.sort().values, numbers):
            expected = "a pipeline that decodes each of its latents"
            raise InputError("processor", expected=expected, got="one that mixes them")
        numbers[placed] = torch.arange(last.numel())
    height, width = shown.shape[-2:]
    y, x = (numbers // width % height + 0.5).double() / height, (numbers % width + 0.5).double() / width
    nothing = torch.zeros(last.numel(), dtype=torch.long)
    return ElementPlaces(nothing, x, y, nothing)
