"""Rotation of queries and keys by their positions, as the attention modules of a model compute it."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.attention.rotary import Rotary
from headwise.shapes import Float, Int

FAR = 1_000_000
"""Position that decides whether rotations depend on the length of the text."""


@runtime_checkable
class Rotation(Protocol):
    """Interface of rotations of queries and keys by position."""

    @property
    def depends_on_length(self) -> bool:
        """True if the rotation of a position depends on the length of the text, not on the position alone."""

    def rotate(
        self, features: Float[Tensor, "heads columns head_dim"], positions: Int[Tensor, " columns"]
    ) -> Float[Tensor, "heads columns head_dim"]:
        """Return vectors of queries or keys, rotated by the position of each."""


class NoRotation:
    """Rotation of a model whose queries and keys do not depend on positions by themselves."""

    depends_on_length = False

    def rotate(
        self, features: Float[Tensor, "heads columns head_dim"], positions: Int[Tensor, " columns"]
    ) -> Float[Tensor, "heads columns head_dim"]:
        """Return the vectors unchanged."""
        return features


class LayerRotation(NamedTuple):
    """Rotation of headwise's own layer.

    Attributes:
        rotary: the option of the layer.
    """

    rotary: Rotary

    @property
    def depends_on_length(self) -> bool:
        """True if the rotation of a position depends on the length of the text."""
        return self.rotary.depends_on_length

    def rotate(
        self, features: Float[Tensor, "heads columns head_dim"], positions: Int[Tensor, " columns"]
    ) -> Float[Tensor, "heads columns head_dim"]:
        """Return vectors of queries or keys, rotated by the position of each."""
        return self.rotary.rotate(features[None], positions[None])[0]


class ModuleRotation(NamedTuple):
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
        """True if the rotation of a position depends on the largest position of the text."""
        near, far = torch.tensor([1, 5]), torch.tensor([1, FAR])
        alone, with_far = (torch.cat(self.cosines_and_sines(each), -1)[0] for each in (near, far))
        return not torch.allclose(alone, with_far, rtol=0.0, atol=1e-6)

    def cosines_and_sines(self, positions: Int[Tensor, " columns"]) -> tuple[Tensor, Tensor]:
        """Return the cosines and the sines of the rotary angles at these positions, `(columns, rotated features)`
        each, in float64, as the model's module computes them.
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
        """Return vectors of queries or keys, rotated by the position of each."""
        cosines, sines = self.cosines_and_sines(positions)
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
