"""Copy of a model in float64, and one run of it on a short text: what its attention modules and all others compute."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.data.batches import call_model
from headwise.errors import HeadwiseError, InputError
from headwise.intercept.install import intercepted, require_uncompiled
from headwise.intercept.interceptor import Call, Change, HeadOutput, Observation
from headwise.intercept.session import current_session
from headwise.intercept.sites import SiteRegistry
from headwise.intercept.uncopied_hooks import uncopied_hooks_of
from headwise.intercept.unreadable_tensors import has_usual_values
from headwise.shapes import Float

HOOKS = ("_forward_hooks", "_forward_pre_hooks")

PASSIVE_HOOKS = "transformers.utils.output_capturing"
"""Module of hooks that transformers leaves in a model once it returned hidden states; they change nothing."""


def double_copy(model: nn.Module) -> nn.Module:
    """Return a copy of a model in float64 and in evaluation mode, without gradients. Tied weights stay tied."""
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


def _on_exact_device(tensor: Tensor) -> Tensor:
    """Return a tensor on a device that supports float64: the CPU for tensors on Apple's GPU ("mps"), otherwise the
    device of the tensor.
    """
    return tensor.cpu() if tensor.device.type == "mps" else tensor


def _refusal(expected: str, got: str, remedy: str | None = None) -> InputError:
    """Return the `InputError` that states why the OV and QK matrices of a model cannot be read from its weights."""
    return InputError("model", expected=expected, got=got, remedy=remedy)


def is_norm(module: nn.Module) -> bool:
    """Return True for a module without submodules that has "norm" in the name of its class."""
    return "norm" in type(module).__name__.lower() and next(module.children(), None) is None


class ModuleCall(NamedTuple):
    """One finished call of a PyTorch module: the module, its arguments and its output.

    Attributes:
        path: path of the module in the model.
        of_norm: copies of the input and of the result of a norm, which the model may change in place later; None for
            other modules.
    """

    path: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    of_norm: tuple[Tensor, Tensor] | None = None

    @property
    def input(self) -> Tensor | None:
        """First floating-point tensor among the arguments of the call; None if there is none."""
        arguments = (*self.args, *self.kwargs.values())
        return next((each for each in arguments if isinstance(each, Tensor) and each.is_floating_point()), None)

    @property
    def result(self) -> Tensor | None:
        """Output of the call, or the first element of an output that is a tuple; None if that is not a tensor."""
        first = self.output[0] if isinstance(self.output, tuple) and self.output else self.output
        return first if isinstance(first, Tensor) else None


class RunTrace(SiteRegistry):
    """Recorded run of a model on one sequence. For each attention module, identified by its path, it has the attention
    weights and the head outputs before the output projection. It also has the calls of all PyTorch modules, in the
    order in which the calls ended.

    Args:
        model: copy of a model, in float64.
        batch: arguments of the model, with one sequence.
        is_replay: True if norms return the outputs of an earlier run. Such an output has no known source in this run,
            so self-attention may look like cross-attention. The earlier run has checked that.
    """

    def __init__(self, model: nn.Module, batch: Any, *, is_replay: bool = False) -> None:
        super().__init__(model)
        self.model, self.calls, self.is_replay = model, list[ModuleCall](), is_replay
        self.weights: dict[str, Float[Tensor, "heads queries keys"]] = {}
        self.outputs: dict[str, Float[Tensor, "heads queries value_dim"]] = {}
        paths = {module: path for path, module in model.named_modules()}

        def note(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            call = ModuleCall(paths[module], module, args, kwargs, output)
            if is_norm(module) and call.input is not None and call.result is not None:
                with current_session().paused():  # copies have no source among the tensors of the model
                    call = call._replace(of_norm=(call.input.clone(), call.result.clone()))
            self.calls.append(call)

        hooks = [module.register_forward_hook(note, with_kwargs=True) for module in paths]
        try:
            with torch.no_grad(), intercepted(model, self):
                self.output = call_model(model, batch)
        except HeadwiseError:
            raise
        except Exception as error:  # whatever a model raises for a batch, or for float64
            got = f"{type(error).__name__}: {error}"
            raise InputError("model", expected="one that runs in float64 on the batch", got=got) from error
        finally:
            for hook in hooks:
                hook.remove()
        self.require_attention()
        if unread := self.unread:
            got = f"none in {', '.join(unread)}"
            raise InputError("model", expected="attention in a way that can be seen", got=got)

    def observe(self, call: Call) -> Observation:
        """Return an `Observation` (receiver of attention weights) that stores the attention weights of a call in
        float64.
        """
        self.register(call)
        path, grid = call.site.path, call.grid
        if call.site.cross and not self.is_replay:
            raise InputError("model", expected="self-attention", got=f"cross-attention in {path}")
        if path in self.weights:
            raise InputError("model", expected="modules that attend once in a run", got=f"several calls of {path}")
        if grid.batch != 1:
            raise InputError("batch", expected="one sequence", got=grid.batch)
        weights = torch.zeros(grid.heads, grid.queries, grid.keys, dtype=torch.float64, device=grid.device)
        self.weights[path] = weights

        def record(block: RowBlock) -> None:
            rows = slice(block.rows.start, block.rows.stop)
            weights[block.tile.heads, rows, block.visibility.key_indices] = block.weights[0].double()

        return Observation(record, CallContext(), lambda: None)

    def change(self, call: Call) -> Change:
        """Return a function that records the head outputs of an attention call, and returns them unchanged."""

        def record(attended: HeadOutput) -> Tensor:
            self.outputs[call.site.path] = attended.out[0].detach().double()
            return attended.out

        return record

    def call_of(self, path: str) -> ModuleCall | None:
        """Return the only call of the module at `path`; None if it was not called, or several times."""
        calls = [call for call in self.calls if call.path == path]
        return calls[0] if len(calls) == 1 else None

    def norm_before(self, tensor: Tensor) -> ModuleCall | None:
        """Return the recorded call of a norm whose output is the tensor `tensor`; None if no norm returned it."""
        calls = (call for call in self.calls if is_norm(call.module) and is_same(call.output, tensor))
        return next(calls, None)

    def norm_after(self, *tensors: Tensor | None) -> ModuleCall | None:
        """Return the recorded call of a norm whose input is one of `tensors`; None if no norm received one of them."""
        norms = (call for call in self.calls if is_norm(call.module))
        return next((call for call in norms if any(is_same(call.input, tensor) for tensor in tensors)), None)


def is_same(one: Any, other: Tensor | None) -> bool:
    """Return True if both arguments are tensors with the same shape, strides and memory address. A recorded run keeps
    all its tensors in memory, so that equal addresses mean the same tensor.
    """
    if not isinstance(one, Tensor) or other is None:
        return False
    return one.shape == other.shape and one.data_ptr() == other.data_ptr() and one.stride() == other.stride()
