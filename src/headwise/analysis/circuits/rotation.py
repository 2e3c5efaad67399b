"""Rotation of queries and keys by their positions, as the attention modules of a model compute it."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.rotary import Rotary
from headwise.shapes import Float, Int

FAR = 1_000_000
"""Position that decides whether rotations depend on the length of the text."""


class Rotation:
    """Rotation of queries and keys by position. This base class rotates nothing, as in a model whose queries and keys
    do not depend on positions by themselves.
    """

    @property
    def depends_on_length(self) -> bool:
        """True if the rotation of a position depends on the length of the text, not on the position alone."""
        return False

    def rotate(
        self, features: Float[Tensor, "heads columns head_dim"], positions: Int[Tensor, " columns"]
    ) -> Float[Tensor, "heads columns head_dim"]:
        """Return vectors of queries or keys, rotated by the position of each."""
        return features


@dataclass(frozen=True)
class LayerRotation(Rotation):
    """Rotation of headwise's own layer, by its option `rotary`."""

    rotary: Rotary

    @property
    def depends_on_length(self) -> bool:
        return self.rotary.depends_on_length

    def rotate(
        self, features: Float[Tensor, "heads columns head_dim"], positions: Int[Tensor, " columns"]
    ) -> Float[Tensor, "heads columns head_dim"]:
        return self.rotary.rotate(features[None], positions[None])[0]


@dataclass(frozen=True, eq=False)
class ModuleRotation(Rotation):
    """Rotation by the cosines and sines that a module of transformers computes from positions, such as
    `LlamaRotaryEmbedding`. Feature i of the rotated ones forms a pair with feature i plus half of their number.

    Attributes:
        module: the module; its output is a tuple of cosines and sines, `(1, length, rotated features)`.
        arguments: arguments of the module's call in the model, by index or name, without the positions.
        place: index or name of the argument with the positions.
    """

    module: nn.Module
    arguments: Mapping[int | str, Any]
    place: int | str

    @property
    def depends_on_length(self) -> bool:
        near, far = torch.tensor([1, 5]), torch.tensor([1, FAR])
        alone, with_far = (torch.cat(self._cosines_and_sines(each), -1)[0] for each in (near, far))
        return not torch.allclose(alone, with_far, rtol=0.0, atol=1e-6)

    def _cosines_and_sines(self, positions: Int[Tensor, " columns"]) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines of the rotary angles, `(columns, rotated features)` each, in float64."""
        device = next((buffer.device for buffer in self.module.buffers()), positions.device)
        arguments = {**self.arguments, self.place: positions[None].to(device)}
        args = [arguments[index] for index in sorted(key for key in arguments if isinstance(key, int))]
        with torch.no_grad():
            cosines, sines = self.module(
                *args, **{key: each for key, each in arguments.items() if isinstance(key, str)}
            )
        return cosines[0].double(), sines[0].double()

    def rotate(
        self, features: Float[Tensor, "heads columns head_dim"], positions: Int[Tensor, " columns"]
    ) -> Float[Tensor, "heads columns head_dim"]:
        cosines, sines = self._cosines_and_sines(positions)
        width = cosines.shape[-1]
        rotated, unchanged = features[..., :width], features[..., width:]
        first, second = rotated.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return torch.cat([rotated * cosines + turned * sines, unchanged], -1)


def module_rotation(
    module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], length: int
) -> ModuleRotation | None:
    """Return the rotation by the outputs of a module, from the arguments of its call in a model. Return None if the
    positions 0 to `length - 1` are not exactly one of them.
    """
    arguments: dict[int | str, Any] = dict(enumerate(args))
    arguments.update(kwargs.items())
    places = [
        name
        for name, value in arguments.items()
        if isinstance(value, Tensor) and value.shape == (1, length) and value[0].tolist() == list(range(length))
    ]
    if len(places) != 1:
        return None
    # Of hidden states, such modules read the dtype and the device alone.
    others = {
        name: value.detach()[:1, :1].clone() if isinstance(value, Tensor) and value.ndim == 3 else value
        for name, value in arguments.items()
        if name != places[0]
    }
    return ModuleRotation(module, others, places[0])
