"""Copy of a model in float64, in which weights are read and compared with what the modules compute."""

from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.nn.utils import parametrize

from headwise.errors import InputError
from headwise.intercept.install import require_uncompiled
from headwise.intercept.uncopied_hooks import uncopied_hooks_of
from headwise.intercept.unreadable_tensors import has_usual_values

HOOKS = ("_forward_hooks", "_forward_pre_hooks")

PASSIVE_HOOKS = "transformers.utils.output_capturing"
"""Module of hooks that transformers leaves in a model once it returned hidden states; they change nothing."""


def double_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64 and in evaluation mode, without gradients. Tied weights stay tied.

    Raises:
        InputError: the model is compiled, has hooks, parametrizations or replaced methods, which could change what its
            weights compute; or it has quantised weights, or weights without values; or it cannot be copied.
    """
    require_uncompiled(model)
    for path, module in model.named_modules():
        if (hooks_of_context := uncopied_hooks_of(module)) is not None:
            got = f"one that is within {hooks_of_context.context}"
            raise _refusal("a model outside of all contexts of headwise", got, hooks_of_context.remedy)
        name = path or type(model).__name__
        hooks = [hook for kind in HOOKS for hook in getattr(module, kind).values()]
        if any(getattr(hook, "__module__", None) != PASSIVE_HOOKS for hook in hooks):
            raise _refusal("modules without hooks", f"a hook of {name}", "remove the hook")
        if "forward" in vars(module):
            raise _refusal("modules with the forward method of their class", f"another one of {name}")
        if parametrize.is_parametrized(module):
            remedy = "torch.nn.utils.parametrize.remove_parametrizations"
            raise _refusal("plain weights", f"a parametrization of {name}", remedy)
    memo: dict[int, Any] = {}
    for path, parameter in model.named_parameters():
        if not has_usual_values(parameter):
            got = f"{path} of {str(parameter.dtype).removeprefix('torch.')} on {parameter.device.type}"
            raise _refusal("weights whose values can be read", got, "load the weights, without quantisation")
        memo[id(parameter)] = nn.Parameter(_on_exact_device(parameter.detach()).double(), requires_grad=False)
    for buffer in model.buffers():
        moved = _on_exact_device(buffer.detach())
        memo[id(buffer)] = moved.double() if moved.is_floating_point() else moved.clone()
    try:
        return deepcopy(model, memo).eval()
    except Exception as error:  # whatever a module of unknown class raises
        raise _refusal("one that can be copied", f"{type(error).__name__}: {error}") from error


def _on_exact_device(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on a device that computes in float64: its own, or the CPU instead of Apple's GPU."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _refusal(expected: str, got: str, remedy: str | None = None) -> InputError:
    """Return the error for a model whose weights do not determine its circuits."""
    return InputError("model", expected=expected, got=got, remedy=remedy)
