"""Rotation of queries and keys by their positions, as the attention modules of a model compute it."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.attention.rotary import Rotary
from headwise.shapes import Float, Int

FAR = 1_000_000
"""Position that decides whether rotations depend on the length of the text."""


Rotate = Callable[[Float[Tensor, "heads columns head_dim"], Int[Tensor, " columns"]], Tensor]
"""Function that rotates queries or keys, each by the angles of its position."""


class Rotation(NamedTuple):
    """Rotation of queries and keys by position (rotary position embedding). By default vectors are unchanged, as in
    models without rotary positions.

    Attributes:
        rotate: function that rotates features by their positions.
        depends_on_length: function that returns True if the angles at a position depend on the length of the text.
    """

    rotate: Rotate = lambda features, _: features
    depends_on_length: Callable[[], bool] = lambda: False


def layer_rotation(rotary: Rotary) -> Rotation:
    """Return the rotation of queries and keys by position in headwise's own attention layer, for the option `rotary` of
    the layer.
    """
    return Rotation(
        lambda features, positions: rotary.rotate(features[None], positions[None])[0], lambda: rotary.depends_on_length
    )


def module_rotation(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any], length: int) -> Rotation | None:
    """Return the rotation of queries and keys by position, with the cosines and sines that a transformers module such
    as `LlamaRotaryEmbedding` computes. `args` and `kwargs` are the arguments of the module's call in a recorded run.
    Return None unless exactly one of them contains the positions 0 to `length - 1`.

    If the first n features are rotated, feature i is rotated together with feature i + n / 2.
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

    def cosines_and_sines(positions: Int[Tensor, " columns"]) -> list[Float[Tensor, "columns rotated"]]:
        device = next((buffer.device for buffer in module.buffers()), positions.device)
        given = {**others, places[0]: positions[None].to(device)}
        numbered = [given[index] for index in sorted(key for key in given if isinstance(key, int))]
        with torch.no_grad():
            tables = module(*numbered, **{key: each for key, each in given.items() if isinstance(key, str)})
        return [table[0].double() for table in tables]

    def rotate(features: Float[Tensor, "heads columns head_dim"], positions: Int[Tensor, " columns"]) -> Tensor:
        cosines, sines = cosines_and_sines(positions)
        width = cosines.shape[-1]
        rotated, unchanged = features[..., :width], features[..., width:]
        first, second = rotated.chunk(2, -1)
        turned = torch.cat([-second, first], -1)
        return torch.cat([rotated * cosines + turned * sines, unchanged], -1)

    def depends_on_length() -> bool:
        near, far = torch.tensor([1, 5]), torch.tensor([1, FAR])
        alone, with_far = (torch.cat(cosines_and_sines(each), -1)[0] for each in (near, far))
        return not torch.allclose(alone, with_far, rtol=0.0, atol=1e-6)

    return Rotation(rotate, depends_on_length)
