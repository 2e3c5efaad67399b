"""Comparison of a model with the one that is loaded from its saved files."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from headwise.data.batches import call_model, copied, device_of, evaluation_mode, to_device, with_cache_disabled
from headwise.data.models import find_model
from headwise.errors import InputError

ROUNDING = 16.0
"""Difference of outputs that counts as rounding, in units of the dtype's epsilon times the largest number."""


def require_equal_after_loading(model: nn.Module, folder: Path, lm_head: str | None, batch: Mapping[str, Any]) -> None:
    """Load a saved model, and raise `InputError` if its weights differ from those of the model in memory, or its
    outputs on a batch differ by more than rounding. It is loaded by plain `transformers` unless its configuration lists
    the remaining heads, which `headwise.load` reads.

    Args:
        model: the model in memory.
        folder: where it was saved.
        lm_head: kind of its language-model head: "causal", "masked" or None.
        batch: arguments of the model.

    Raises:
        InputError: the model cannot be loaded, or is another one.
    """
    loaded = find_model(str(folder)).model(lm_head).to(device_of(model))
    expected, weights = model.state_dict(), loaded.state_dict()
    different = sorted(
        name
        for name in {*expected, *weights}
        if name not in expected or name not in weights or not torch.equal(expected[name], weights[name])
    )
    if different:
        raise _other_model(f"other weights {different[0]}")
    inputs = with_cache_disabled(model, to_device(batch, device_of(model)))
    with evaluation_mode(model), torch.no_grad():
        outputs, others = (_tensors(call_model(each, copied(inputs))) for each in (model, loaded))
    if len(outputs) != len(others) or not all(map(_is_close, others, outputs)):
        raise _other_model("other outputs of the same weights")


def _tensors(output: Any) -> list[Tensor]:
    """Return the tensors of floating-point numbers in an output."""
    leaves = pytree.tree_leaves(output)
    return [leaf for leaf in leaves if isinstance(leaf, Tensor) and leaf.is_floating_point()]


def _is_close(output: Tensor, expected: Tensor) -> bool:
    """Return True if two outputs differ by rounding alone."""
    if output.shape != expected.shape:
        return False
    tolerance = ROUNDING * torch.finfo(expected.dtype).eps * float(expected.abs().max())
    return bool(((output - expected).abs() <= tolerance).all())


def _other_model(got: str) -> InputError:
    """Return the error for a saved model that differs from the one in memory."""
    return InputError("model", expected="a saved model that is unchanged when it is loaded", got=got)
