"""Prompts of models that read a sound or a time series, shown as a picture whose patches are strips of time: the
spectrogram of a sound, and the curves of a series.
"""

import inspect
import wave
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.mismatch import without_options
from headwise.analysis.patches import ElementPlaces
from headwise.analysis.view_prompts import Prompt, model_inputs
from headwise.data.batches import device_of
from headwise.errors import InputError, errors_of, require
from headwise.shapes import Float

CUTS = 16
"""Number of parts of a sound between which it is changed, to see where each part is in a processor's output."""

LOUDNESS = 0.1
"""Standard deviation of the noise that a processor reads in place of the sound."""

WIDTH, CURVE_HEIGHT, SPECTROGRAM_HEIGHT = 768, 120, 160
"""Size in pixels of a displayed picture; a curve has its height for each channel."""

SERIES = "past_values"
"""Name by which models of `transformers` read a time series."""


class _TimeAxis(NamedTuple):
    """Axes of a processor's output: the axis of time, that of the frequencies (None for samples), and for each index
    along time its place in the sound, as a fraction of the sound's length. The places before the sound are negative,
    and those of the padding after it are larger than 1.
    """

    time: int
    bands: int | None
    places: Float[Tensor, " frames"]


def sound_prompt(model: nn.Module, processor: Any, text: str | None, audio: Any) -> Prompt:
    """Return a prompt with a sound, as a processor prepares it for a model.

    Args:
        model: the model.
        processor: its processor or feature extractor, of `transformers`.
        text: the text; None for a model that reads sound alone, or writes what it hears.
        audio: samples, at the rate of the processor's feature extractor, or the path of a WAV file.

    Raises:
        InputError: the sound cannot be read, or has another rate; the processor does not read it, or drops its end.
        MissingExtra: Pillow, which draws the spectrogram, is not installed.
    """
    reader = without_options(processor)
    extractor = getattr(reader, "feature_extractor", reader)
    rate = getattr(extractor, "sampling_rate", None)
    if not callable(processor) or not isinstance(rate, int):
        expected = "a processor or feature extractor of transformers that reads sound"
        raise InputError("processor", expected=expected, got=type(reader).__name__)
    samples = _samples(audio, rate)
    options: dict[str, Any] = {"sampling_rate": rate, "return_tensors": "pt"} | ({} if text is None else {"text": text})

    def process(changed: Tensor) -> dict[str, Tensor]:
        sound = changed.numpy()
        outputs = processor(sound, **options) if extractor is reader else processor(audio=sound, **options)
        return model_inputs(model, outputs)

    with errors_of("audio", expected="a sound and a text that the processor reads"):
        inputs = process(samples)
        if not inputs:
            expected = f"a model that reads the output of {type(reader).__name__}"
            raise InputError("model", expected=expected, got=type(model).__name__)
        axes = _time_axes(process, len(samples))
    if text is not None and not any(name.endswith("input_ids") for name in inputs):
        expected = "None with a processor that reads sound alone"
        raise InputError("text", expected=expected, got=repr(text), remedy="target= is the text that a decoder reads")
    axes = {name: each for name, each in axes.items() if name in inputs}
    if not axes:
        got = f"a sound of {len(samples):,} samples ({len(samples) / rate:.2f} s)"
        raise InputError("audio", expected="a sound whose parts are in the output of the processor", got=got)
    places, pictures = {}, []
    for name, axis in axes.items():
        if axis.bands is None:
            # The first layers of such models normalise over the whole sound, or add a convolution over seconds of it.
            got = f"{type(model).__name__}, which reads samples ({name})"
            raise InputError("model", expected="a model that reads a spectrogram", got=got)
        places[name] = _element_places(inputs[name].shape, axis.time, axis.bands, axis.places)
        values = inputs[name].float().movedim((axis.bands, axis.time), (-2, -1)).flatten(0, -3)[0]
        pictures.append(_drawn_spectrogram(values, axis.places))
    inputs = {name: value.to(device_of(model)) for name, value in inputs.items()}
    baselines = {name: _of_mean(inputs[name], places[name]) for name in places}
    return Prompt(inputs, places, (pictures[0],), baselines, "sound", len(samples) / rate)


def series_prompt(model: nn.Module, processor: Any, text: str | None, series: Any) -> Prompt:
    """Return the inputs of a model that reads a time series: its argument `past_values` or, of a module that is not of
    `transformers`, the first argument of its `forward`.

    Args:
        model: the model.
        processor: None.
        text: None.
        series: values `(time,)` or `(time, channels)`.

    Raises:
        InputError: `series` has another form; the model has no such argument, or needs further ones.
        MissingExtra: Pillow, which draws the curves, is not installed.
    """
    for argument, value in (("processor", processor), ("text", text)):
        if value is not None:
            raise InputError(argument, expected="None with a time series", got=type(value).__name__)
    with errors_of("series", expected="numbers (time,) or (time, channels)"):
        values = torch.as_tensor(series).detach().float()
    if values.ndim not in (1, 2) or not values.numel() or not bool(values.isfinite().all()):
        got = "values that are not finite" if values.ndim in (1, 2) and values.numel() else tuple(values.shape)
        raise InputError("series", expected="numbers (time,) or (time, channels)", got=got)
    parameters = dict(inspect.signature(model.forward).parameters)
    name = SERIES if hasattr(model, "config") else next(iter(parameters), "")
    if name not in parameters:
        got = f"{type(model).__name__}, which reads {getattr(model, 'main_input_name', 'other inputs')}"
        raise InputError("model", expected=f"a model whose forward has the argument {SERIES}", got=got)
    variadic = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    needed = [
        other
        for other, parameter in parameters.items()
        if other != name and parameter.default is parameter.empty and parameter.kind not in variadic
    ]
    if needed:
        got = f"{type(model).__name__}, which also needs {', '.join(needed)}"
        raise InputError("model", expected=f"a model that reads {name} alone", got=got)
    if values.ndim == 1 and hasattr(getattr(model, "config", None), "num_input_channels"):
        values = values[:, None]
    if bool((values == values[0]).all()):
        raise InputError("series", expected="values that change over time", got="a constant series")
    columns = values.view(len(values), -1)
    time, channels = columns.shape
    x, y = ((torch.arange(size, dtype=torch.float64) + 0.5) / size for size in (time, channels))
    nothing = torch.zeros(values.numel(), dtype=torch.long)
    places = ElementPlaces(nothing, x.repeat_interleave(channels), y.repeat(time), nothing)
    inputs = {name: values[None].to(device_of(model))}
    baselines = {name: inputs[name].mean(1, keepdim=True).expand_as(inputs[name])}
    return Prompt(inputs, {name: places}, (_drawn_curves(columns),), baselines, "series", float(time))


def _of_mean(values: Tensor, places: ElementPlaces) -> Tensor:
    """Return values of which those of the sound are replaced by the mean over time of their band."""
    is_sound = (places.picture >= 0).to(values.device)
    changed = values.flatten().clone()
    for height in torch.unique(places.y[places.picture >= 0]):
        of_band = is_sound & (places.y == height).to(values.device)
        changed[of_band] = changed[of_band].mean()
    return changed.view(values.shape)


def _samples(audio: Any, rate: int) -> Float[Tensor, " samples"]:
    """Return the samples of a sound: those of a WAV file if `audio` is its path."""
    if isinstance(audio, str | Path):
        samples = _samples_of_file(audio, rate)
    else:
        with errors_of("audio", expected="samples (samples,) or the path of a WAV file"):
            samples = torch.as_tensor(audio).detach().cpu()
        if samples.ndim != 1 or not (samples.is_floating_point() or not samples.numel()):
            got = f"{tuple(samples.shape)}, {samples.dtype}"
            raise InputError("audio", expected="floating-point samples (samples,)", got=got)
    if not samples.numel():
        raise InputError("audio", expected="at least one sample", got="an empty sound")
    if not bool(samples.isfinite().all()):
        raise InputError("audio", expected="finite samples", got="values that are not finite")
    return samples.float()


def _samples_of_file(path: str | Path, rate: int) -> Float[Tensor, " samples"]:
    """Return the samples of a WAV file, from -1 to 1; of several channels, their mean."""
    try:
        with wave.open(str(path), "rb") as file:
            own_rate, channels, width = file.getframerate(), file.getnchannels(), file.getsampwidth()
            data = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        reason = error.strerror if isinstance(error, OSError) else str(error)
        got = f"{str(path)!r} ({reason or 'no WAV file'})"
        raise InputError("audio", expected="a WAV file with integer samples", got=got) from None
    if own_rate != rate:
        expected = f"a file with {rate:,} samples per second, the rate of the processor"
        remedy = "resample it, or pass samples"
        raise InputError("audio", expected=expected, got=f"{own_rate:,} in {str(path)!r}", remedy=remedy)
    # The lowest byte is the first one. Samples of one byte have no sign, and their middle is 128.
    parts = torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.zeros(0, dtype=torch.uint8)
    parts = parts[: len(parts) // (width * channels) * width * channels].view(-1, channels, width).double()
    numbers = (parts * 256.0 ** torch.arange(width)).sum(-1) / 256.0**width * 2
    numbers = numbers - 1 if width == 1 else torch.where(numbers >= 1, numbers - 2, numbers)
    return numbers.mean(-1)


def _time_axes(process: Callable[[Tensor], Mapping[str, Tensor]], length: int) -> dict[str, _TimeAxis]:
    """Return where the output of a processor lies in a sound of `length` samples, by the output's name.

    The processor reads one noise up to a sample, and another noise from there on. A frame of its output is before this
    sample if it is equal to that of the first noise, and after it if it is equal to that of the second one. The numbers
    of frames before several samples lie on a line, since frames have a constant distance.

    Raises:
        InputError: the processor drops the end of the sound.
    """
    noises = LOUDNESS * torch.randn(2, length, generator=torch.Generator().manual_seed(0))

    def values_of(cut: int) -> dict[str, Tensor]:
        outputs = process(torch.cat([noises[0, :cut], noises[1, cut:]]))
        return {name: value.double() for name, value in outputs.items() if value.is_floating_point()}

    cuts = torch.arange(1, CUTS) * length // CUTS
    first, second, mixed = values_of(length), values_of(0), [values_of(int(cut)) for cut in cuts]
    end = values_of(length - min(length // 4, 800))  # the last samples alone are changed
    axes = {}
    for name, value in first.items():
        if any(outputs[name].shape != value.shape for outputs in (second, end, *mixed)):
            continue

        def profiles(outputs: Mapping[str, Tensor], axis: int, name: str = name) -> tuple[Tensor, Tensor]:
            """Return the distances of the outputs from those of the first and of the second noise, along one axis."""
            others = [other for other in range(outputs[name].ndim) if other != axis]
            distances = [(outputs[name] - each[name]).abs() for each in (first, second)]
            return distances[0].sum(others), distances[1].sum(others)

        contrasts: dict[int, float] = {}
        for axis in range(1, value.ndim):
            from_first, from_second = profiles(mixed[CUTS // 2 - 1], axis)
            ratios = (from_first - from_second) / (from_first + from_second).clamp(min=1e-300)
            contrasts[axis] = float(ratios.max() - ratios.min())  # 2 along time
        time = max(contrasts, key=contrasts.__getitem__, default=0)
        if contrasts.get(time, 0.0) < 1.5 or value.shape[time] < 4:
            continue
        changed = profiles(second, time)[0]
        # Frames of noise differ from their neighbours. The frames of padding are equal, although their values may
        # depend on the loudest frame of the sound.
        frame_rows = value.movedim(time, 0).flatten(1)
        is_step = (frame_rows.diff(dim=0).abs().amax(1) > 1e-6 * frame_rows.abs().max()).tolist()
        is_sound = torch.tensor([True, *is_step]) & torch.tensor([*is_step, True])
        if float(profiles(end, time)[0].max()) < 1e-3 * float(changed.max()):
            raise InputError("audio", expected="a sound that the processor reads whole", got="one whose end it drops")
        if not bool(is_sound.any()):
            continue
        start = int(is_sound.nonzero()[0])
        before = [profiles(outputs, time) for outputs in mixed]
        # A frame over the sample belongs to both sides, by the distances.
        shares = [(other / (one + other).clamp(min=1e-300))[is_sound].sum() for one, other in before]
        frames = start + torch.stack(shares)
        steps = frames - frames.mean()
        if not bool((steps != 0).any()):
            continue
        slope = float((steps * cuts).sum() / (steps**2).sum())
        fitted = cuts.double().mean() + slope * steps
        if float((fitted - cuts).abs().max()) > max(2 * slope, 0.02 * length):
            continue
        # A sample is between two frames if as many frames are before it.
        indices = torch.arange(value.shape[time], dtype=torch.float64) + 0.5
        places = (cuts.double().mean() + slope * (indices - frames.mean())) / length
        bands = next((axis for axis in reversed(range(1, value.ndim)) if axis != time and value.shape[axis] > 1), None)
        axes[name] = _TimeAxis(time, bands, _on_sound(places, slope / length))
    return axes


def _on_sound(places: Float[Tensor, " frames"], distance: float) -> Float[Tensor, " frames"]:
    """Return the places of frames, in which those within half a frame of an end of the sound are placed on this end."""
    is_near = ((places < 0) & (places > -distance / 2)) | ((places > 1) & (places < 1 + distance / 2))
    return torch.where(is_near, places.clamp(0, 1), places)


def _element_places(shape: torch.Size, time: int, bands: int, frames: Float[Tensor, " frames"]) -> ElementPlaces:
    """Return the places in the spectrogram of the elements of a processor's output: time from left to right, and
    frequencies from the bottom to the top. `time` and `bands` are its axes, and `frames` the places along time.
    """
    y = 1 - (torch.arange(shape[bands], dtype=torch.float64) + 0.5) / shape[bands]

    def spread(values: Tensor, along: int) -> Tensor:
        return values.view([-1 if other == along else 1 for other in range(len(shape))]).expand(shape).flatten()

    x = spread(frames, time)
    picture = torch.where((x >= 0) & (x <= 1), 0, -1)
    return ElementPlaces(picture, x, spread(y, bands), torch.zeros_like(picture))


def _drawn_spectrogram(values: Float[Tensor, "bands frames"], places: Float[Tensor, " frames"]) -> Any:
    """Return the part of a spectrogram in a sound as `PIL.Image`: loud parts are dark, high frequencies are above."""
    image = require("PIL.Image", purpose="showing a sound", extra="plot")
    columns = (torch.arange(WIDTH, dtype=torch.float64) + 0.5) / WIDTH
    frames = torch.searchsorted((places[1:] + places[:-1]) / 2, columns)
    rows = torch.arange(SPECTROGRAM_HEIGHT - 1, -1, -1) * len(values) // SPECTROGRAM_HEIGHT
    shown = values.cpu()[rows][:, frames]
    low, high = shown.min(), shown.max()
    grey = 255 - ((shown - low) / (high - low).clamp(min=1e-12) * 255).round().to(torch.uint8)
    return image.fromarray(grey.contiguous().numpy()).convert("RGB")


def _drawn_curves(values: Float[Tensor, "time channels"]) -> Any:
    """Return the curves of the channels of a series as `PIL.Image`, one below the other, each from its smallest to its
    largest value. A point of time is as wide as all others, so that the curve begins and ends in the middle of one.
    """
    image = require("PIL.Image", purpose="showing a time series", extra="plot")
    draw_on = require("PIL.ImageDraw", purpose="showing a time series", extra="plot").Draw
    time, channels = values.shape
    picture = image.new("RGB", (WIDTH, CURVE_HEIGHT * channels), "white")
    draw = draw_on(picture)
    for channel, curve in enumerate(values.detach().double().cpu().unbind(1)):
        top = CURVE_HEIGHT * channel
        if channel:
            draw.line([(0, top), (WIDTH, top)], fill=(210, 210, 210))
        heights = (curve - curve.min()) / (curve.max() - curve.min()).clamp(min=1e-12)
        y = top + CURVE_HEIGHT * (0.95 - 0.9 * heights)
        x = (torch.arange(time) + 0.5) * WIDTH / time
        draw.line(list(zip(x.tolist(), y.tolist(), strict=True)), fill=(40, 40, 40), width=2)
    return picture
