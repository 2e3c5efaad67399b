"""Inputs for the forward pass of a tiny model, derived from its signature: tokens, images, audio and other arguments.

One sequence of the batch is padded, on the left or on the right, if the model takes a padding mask. `attempts` returns
several sets of inputs where the signature is ambiguous, for example about the time axis of audio.
"""

import inspect
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from research.tiny_models.special_inputs import INPUTS

BATCH, LENGTH, PADDING, DECODER_LENGTH = 2, 13, 4, 11
OPTIONAL = ("pixel_values", "input_features", "input_values", "inputs_embeds", "decoder_input_ids")
"""Arguments that a model may need although its signature declares them optional."""


def attempts(model_type: str, model: nn.Module, side: str | None) -> Iterator[dict[str, Any]]:
    """Yield sets of arguments for a forward pass, one of which the model may accept.

    Args:
        model_type: name of the model type in `transformers`.
        model: a tiny model of that type.
        side: side on which the last sequence is padded; None for no padding.
    """
    special_inputs = INPUTS.get(model_type)
    parameters = inspect.signature(model.forward).parameters
    names_in_signature = [
        name
        for name, parameter in parameters.items()
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    required = [name for name in names_in_signature if parameters[name].default is inspect.Parameter.empty]
    main = getattr(model, "main_input_name", "input_ids")
    for extra in ((), *((name,) for name in OPTIONAL if name in names_in_signature), OPTIONAL):
        for layout in range(3):
            make = Maker(model.config, torch.Generator().manual_seed(1), side, layout)
            make.signature = tuple(names_in_signature)
            if special_inputs is not None:
                yield special_inputs(make)
                continue
            names = dict.fromkeys([*required, main, *extra, "decoder_input_ids", "bbox"])
            if "input_ids" in names_in_signature and not (main != "input_ids" and "input_ids" not in required):
                names = dict.fromkeys(["input_ids", *names])
            arguments = {name: make(name) for name in names if name in names_in_signature}
            if "input_ids" in arguments and "attention_mask" in names_in_signature and side is not None:
                arguments["attention_mask"] = make.padding()
            if not arguments:
                arguments = {name: make(name) for name in OPTIONAL if name in names_in_signature}
            if "input_ids" in arguments:
                arguments.pop("inputs_embeds", None)
            yield arguments
            if not any(name in LAYOUTS for name in arguments):
                break
        if special_inputs is not None:
            break


LAYOUTS = ("pixel_values", "input_features", "input_values", "hidden_states")
"""Arguments whose order of axes differs between models."""


def takes_padding(model: nn.Module) -> bool:
    """Return whether the model takes token ids and a padding mask."""
    parameters = inspect.signature(model.forward).parameters
    return (
        "attention_mask" in parameters
        and "input_ids" in parameters
        and model.main_input_name in ("input_ids", *OPTIONAL)
    )


class Maker:
    """Creates the arguments of a model's forward by name; each argument has a method of that name.

    Attributes:
        config: config of the model.
        generator: random number generator.
        side: side on which the last sequence is padded; None for no padding.
        layout: index of the order of axes to try.
        signature: names of the forward's parameters.
    """

    def __init__(self, config: Any, generator: torch.Generator, side: str | None, layout: int = 0) -> None:
        self.config, self.generator, self.side, self.layout = config, generator, side, layout

    def __call__(self, name: str) -> Any:
        """Return the argument with this name.

        Raises:
            LookupError: the class has no method for this argument.
        """
        maker = getattr(self, name, None)
        if maker is None:
            raise LookupError(f"no input is known for {name}")
        return maker()

    def size(self, *names: str, default: Any = None) -> Any:
        """Return the first config entry with one of these names, also from nested configs; otherwise the default."""
        return find(self.config, names, default)

    def noise(self, *shape: int) -> Tensor:
        """Return normally distributed random numbers of this shape."""
        return torch.randn(shape, generator=self.generator)

    def tokens(self, length: int = LENGTH, batch: int = BATCH) -> Tensor:
        """Return random token ids `(batch, length)` that are not special and contain repetitions."""
        most = min(self.size("vocab_size", "text_vocab_size", "src_vocab_size", default=97), 50)
        low = 8 if most > 20 else 1
        return torch.randint(low, most, (batch, length), generator=self.generator) // 2 + low // 2

    def padding(self, length: int = LENGTH) -> Tensor:
        """Return a padding mask: 1 at tokens, 0 at padding."""
        positions, count = torch.arange(length), torch.tensor([[0]] * (BATCH - 1) + [[PADDING]])
        return (positions >= count if self.side == "left" else positions < length - count).long()

    # -- text ---------------------------------------------------------------------------------------------------------

    def input_ids(self) -> Tensor:
        return self.tokens()

    def decoder_input_ids(self) -> Tensor:
        return self.tokens(DECODER_LENGTH)

    def attention_mask(self) -> Tensor:
        return self.padding() if self.side else torch.ones(BATCH, LENGTH, dtype=torch.long)

    def bbox(self) -> Tensor:
        corner = torch.randint(0, 20, (BATCH, LENGTH, 2), generator=self.generator)
        return torch.cat([corner, corner + 5], -1)

    def hidden_states(self) -> Tensor:
        if "grid_thw" in self.signature:
            return self.patches()
        return self.noise(BATCH, LENGTH, self.size("hidden_size", "d_model", default=96))

    signature: tuple[str, ...] = ()

    def inputs_embeds(self) -> Tensor:
        return self.noise(BATCH, LENGTH, self.size("hidden_size", "d_model", default=96))

    def encoder_hidden_states(self) -> Tensor:
        return self.noise(BATCH, 17, self.size("encoder_hidden_size", "cross_hidden_size", "hidden_size", "d_model"))

    # -- images -------------------------------------------------------------------------------------------------------

    def pixel_values(self) -> Tensor:
        if "grid_thw" in self.signature or "image_grid_thw" in self.signature:
            return self.patches()
        side = self.size("image_size", "img_size", "spec_size", default=32)
        height, width = side if isinstance(side, (list, tuple)) else (side, side)
        channels = self.size("num_channels", "in_channels", "in_chans", default=3)
        channels = channels if isinstance(channels, int) else 3
        frames = self.size("num_frames", "frames_per_clip", "num_frame", default=2)
        frames = frames if isinstance(frames, int) else 2
        shapes = [
            (BATCH, channels, height, width),
            (BATCH, frames, channels, height, width),
            (BATCH, channels, frames, height, width),
        ]
        if isinstance(self.size("num_frames", "frames_per_clip"), int):
            shapes = shapes[1:] + shapes[:1]
        return self.noise(*shapes[self.layout])

    def image(self) -> Tensor:
        return self.pixel_values()

    def pixel_values_videos(self) -> Tensor:
        frames = self.size("frames_per_clip", "num_frames", default=4)
        side = self.size("image_size", "crop_size", default=32)
        return self.noise(BATCH, frames, self.size("num_channels", "in_chans", default=3), side, side)

    GRID = ((1, 4, 6), (1, 4, 4))

    def patches(self) -> Tensor:
        count = sum(t * h * w for t, h, w in self.GRID)
        patch = self.size("patch_size", default=8)
        channels, frames = (
            self.size("in_channels", "in_chans", "num_channels", default=3),
            self.size("temporal_patch_size", "patch_temporal"),
        )
        area = channels * patch * patch
        return [
            self.noise(count, area * (frames or 1)),
            self.noise(count, channels, patch, patch),
            self.noise(1, count, channels, patch, patch),
        ][self.layout]

    def grid_thw(self) -> Tensor:
        return torch.tensor(self.GRID)

    def image_grid_thw(self) -> Tensor:
        return torch.tensor(self.GRID)

    # -- sound --------------------------------------------------------------------------------------------------------

    def input_features(self) -> Tensor:
        bins = self.size(
            "num_mel_bins",
            "feature_size",
            "n_mels",
            "input_dim",
            "n_mel_bins",
            "input_feat_per_channel",
            "feature_projection_input_dim",
            default=80,
        )
        length = 2 * min(self.size("max_source_positions", default=32), 64)
        return self.noise(
            *[(BATCH, bins, length), (BATCH, length, bins), (BATCH, length, self.size("input_dim", default=bins))][
                self.layout
            ]
        )

    def input_features_mask(self) -> Tensor:
        return torch.ones(BATCH, self.input_features().shape[-1 - (self.layout > 0)], dtype=torch.long)

    def input_values(self) -> Tensor:
        bins = self.size("num_mel_bins", default=80)
        return self.noise(
            *[(BATCH, 1600), (BATCH, 1, 1920), (BATCH, self.size("max_length", default=64), bins)][self.layout]
        )

    # -- series -------------------------------------------------------------------------------------------------------

    def past_values(self) -> Tensor:
        length = self.size("context_length", default=11)
        lags = self.size("lags_sequence", default=None)
        if lags:
            return self.noise(BATCH, length + max(lags))
        return self.noise(BATCH, length, self.size("num_input_channels", default=1))

    def past_time_features(self) -> Tensor:
        return self.noise(BATCH, self.past_values().shape[1], self.size("num_time_features", default=0))

    def past_observed_mask(self) -> Tensor:
        return torch.ones_like(self.past_values())

    def future_values(self) -> Tensor:
        return self.noise(BATCH, self.size("prediction_length", default=5))

    def future_time_features(self) -> Tensor:
        return self.noise(BATCH, self.size("prediction_length", default=5), self.size("num_time_features", default=0))


def find(config: Any, names: tuple[str, ...], default: Any = None) -> Any:
    """Return the first entry of a config with one of these names; if it has none, that of a nested config."""
    for name in names:
        value = getattr(config, name, None)
        if value is not None:
            return value
    for nested in vars(config).values():
        if hasattr(nested, "to_dict"):
            value = find(nested, names)
            if value is not None:
                return value
    return default
