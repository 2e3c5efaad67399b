"""Second moments of the keys and values of all heads of attention modules, over the tokens of calibration data."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from headwise.compression.calibration.calibration_survey import heads_of_batches
from headwise.compression.calibration.projection_inputs import projection_inputs
from headwise.data.batches import call_model, copied
from headwise.errors import InputError
from headwise.families.head_module import HeadModule, HeadPart
from headwise.progress import progress_bar
from headwise.shapes import Float


@dataclass
class KVMoments:
    """Sums over tokens, in float64, of projected queries, keys and values, before norms and rotary positions.

    Attributes:
        queries: sum of `|q_h|^2` of each query head h.
        keys: sums of `k_i k_j^T` for key heads i and j.
        values: sums of `v_i v_j^T`.
    """

    queries: Float[Tensor, " heads"]
    keys: Float[Tensor, "kv_heads kv_heads head_dim head_dim"]
    values: Float[Tensor, "kv_heads kv_heads value_dim value_dim"]


def kv_moments(
    model: nn.Module, modules: Mapping[str, HeadModule], batches: Sequence[dict[str, Any]]
) -> dict[str, KVMoments]:
    """Return the moments of each attention module. Padding does not count.

    Args:
        model: the model, in evaluation mode.
        modules: its attention modules, by path.
        batches: arguments of the model.

    Raises:
        InputError: a module projects no keys on these batches, or their padding is not stated.
    """
    heads_of_batches(model, batches)
    places = {(path, part): _place(module, part) for path, module in modules.items() for part in PARTS}
    sums: dict[tuple[str, HeadPart], Tensor] = {}
    with progress_bar("keys and values", len(batches), "batches") as bar:
        for batch in bar.track(batches, step=1):
            with projection_inputs(model, {path: path for path, *_ in places.values()}, batch) as recorded:
                call_model(model, copied(batch))
            for (name, part), (path, start, heads, width) in places.items():
                for _, x in recorded[path]:
                    features = model.get_submodule(path)(x)[:, start : start + heads * width].double()
                    products = _products(features.unflatten(1, (heads, width)), part)
                    sums[name, part] = sums[name, part] + products if (name, part) in sums else products
    for name, part in places:
        if (name, part) not in sums:
            raise InputError("calibration", expected=f"data on which {name} projects queries and keys", got="none")
    return {path: KVMoments(*(sums[path, part] for part in PARTS)) for path in modules}


PARTS: tuple[HeadPart, ...] = ("query", "key", "value")
"""Parts whose moments are summed."""


def _products(features: Float[Tensor, "tokens heads width"], part: HeadPart) -> Tensor:
    """Return the sums over tokens of the squares of each query head, or of the products of all key or value heads."""
    if part == "query":
        return features.square().sum((0, 2))
    _, heads, width = features.shape
    flat = features.flatten(1)
    return (flat.mT @ flat).view(heads, width, heads, width).transpose(1, 2)


def _place(module: HeadModule, part: HeadPart) -> tuple[str, int, int, int]:
    """Return the path of the projection into a part, the first of its output features that belongs to the part, and
    number and width of the heads.
    """
    blocks = next(each for each in module.blocks if each.part == part and each.parameter.endswith(".weight"))
    return blocks.parameter.removesuffix(".weight"), blocks.start, blocks.heads, blocks.width
