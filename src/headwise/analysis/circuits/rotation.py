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
    """Rotation of queries and keys by position (rotary position embedding). This base class leaves the vectors
    unchanged, for models without rotary positions.
    """

    @property
    def depends_on_length(self) -> bool:
        """True if the rotation at a position depends on the length of the text in addition to the position."""
        return False

    def rotate(
        self, features: Float[Tensor, "heads columns head_dim"], positions: Int[Tensor, " columns"]
    ) -> Float[Tensor, "heads columns head_dim"]:
        """Return queries or keys (`features`), each rotated by the angles of its position."""
        return features


@dataclass(frozen=True)
class LayerRotation(Rotation):
    """Rotation that headwise's own attention layer applies to queries and keys if it has the option `rotary`."""

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
    """Rotation with the cosines and sines that a transformers module such as `LlamaRotaryEmbedding` computes from
    positions. If the first n features are rotated, feature i is rotated together with feature i + n / 2.

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
        """Return the cosines and the sines of the rotary angles at some positions: two float64 tensors
        `(columns, rotated features)`, with one row per position.
        """
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
    """Return the rotation with the cosines and sines that `module` computes. `args` and `kwargs` are the arguments of
    its call in a recorded run. Return None unless exactly one of these arguments contains the positions 0 to `length -
    1`.
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
