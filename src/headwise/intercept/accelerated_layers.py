"""Marks the modules of an accelerated model while they run: by hooks, and in torch's own layers by their forward.

Torch's `nn.TransformerEncoderLayer` has a faster path for short inputs, which it leaves if a module inside of it has
hooks. It and `nn.MultiheadAttention` therefore have none. Their `forward`, looked up in an accelerated layer, is one
that leaves the path only where the native kernels are faster. Other layers, also copies, keep torch's.
"""

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from types import MethodType
from typing import Any
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from headwise.intercept.accelerated_modules import CallRecorder, accelerated_modules
from headwise.intercept.accelerated_sdpa import SDPACall, why_not
from headwise.intercept.patches import Patches, Replacement
from headwise.intercept.uncopied_hooks import UncopiedHooks

TORCH_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Layers of torch that have a path without `scaled_dot_product_attention`."""


class AcceleratedHooks(UncopiedHooks):
    """Forward hooks of one module of an accelerated model. They mark the module as running from the start of its
    `forward` to the end.
    """

    def __init__(self, recorder: CallRecorder, path: str) -> None:
        self._recorder, self._path = recorder, path

    @property
    def context(self) -> str:
        """Name, for error messages, of the function that registered the hooks: "hw.accelerate"."""
        return "hw.accelerate"

    @property
    def remedy(self) -> str:
        """Advice, for error messages, on how to remove the hooks."""
        return "leave the context of hw.accelerate first, or call its method restore"

    def register(self, module: nn.Module) -> Iterator[RemovableHandle]:
        """Register a pre-hook before the module's other hooks, and a forward hook after them. Yield the handle that
        removes each of the two.
        """
        yield module.register_forward_pre_hook(self.on_start, prepend=True)
        yield module.register_forward_hook(self.on_end, always_call=True)

    def on_start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook: mark the module as running. While torch compiles the module, do nothing, so that the
        compiled code is not accelerated.
        """
        if not torch.compiler.is_compiling() and not self.is_copy:
            accelerated_modules.start(self._recorder, self._path, module)

    def on_end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: record that the module no longer runs. While torch compiles the module, do nothing."""
        if not torch.compiler.is_compiling() and not self.is_copy:
            accelerated_modules.end(self._recorder, module)


def marked_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of every module of `model` that is to be marked as running during its calls. These are
    the model, every module with submodules, every module whose class name contains "attention", and torch's own
    attention layers. Submodules of a torch layer are left out, except the `self_attn` of an encoder layer.
    """
    inside: set[nn.Module] = set()
    for path, module in model.named_modules():
        if module in inside:
            continue
        if isinstance(module, TORCH_LAYERS):
            inside.update(module.modules())
            yield path, module
            if isinstance(module, nn.TransformerEncoderLayer):
                yield f"{path}.self_attn".lstrip("."), module.self_attn
        elif not path or any(module.children()) or "attention" in type(module).__name__.lower():
            yield path, module


# -- torch's layers ---------------------------------------------------------------------------------------------------

_recorders: WeakKeyDictionary[nn.Module, list[tuple[CallRecorder, str]]] = WeakKeyDictionary()
"""Recorders of the accelerated layers of torch, and the layers' paths."""


def accelerate_layer(layer: nn.Module, recorder: CallRecorder, path: str) -> Callable[[], None]:
    """Mark one of torch's own layers as accelerated: its calls are reported to `recorder` under `path`. Return a
    function that removes the mark.
    """
    _recorders[layer] = [*_recorders.get(layer, []), (recorder, path)]
    reference = ref(layer)

    def restore() -> None:
        accelerated = reference()
        if accelerated is not None:
            others = [each for each in _recorders.pop(accelerated) if each[0] is not recorder]
            if others:
                _recorders[accelerated] = others

    return restore


class _ForwardOfAccelerated:
    """Descriptor that replaces `forward` in one of torch's layer classes. For an accelerated layer it returns the
    accelerated method, for any other layer of the class torch's own method.
    """

    def __init__(self, own: Callable[..., Any]) -> None:
        self._own, self._accelerated = own, _accelerated_forward(own)

    def __get__(self, layer: nn.Module | None, kind: type) -> Any:
        if layer is None:
            return self._own
        if torch.compiler.is_compiling():
            return partial(self._own, layer)  # a compiler does not trace the making of a method
        return MethodType(self._accelerated if layer in _recorders else self._own, layer)


def _accelerated_forward(own: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for `own`, the `forward` of one of torch's layers. The replacement marks the layer as
    running during the call. Torch has a fast path that computes such a layer without SDPA; the replacement disables
    this path if the native kernels are to compute the attention.
    """
    signature = inspect.signature(own)

    @wraps(own)
    def forward(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with ExitStack() as stack:
            for recorder, path in _recorders.get(layer, []):
                accelerated_modules.start(recorder, path, layer)
                stack.callback(accelerated_modules.end, recorder, layer)
            arguments = signature.bind(layer, *args, **kwargs).arguments
            if accelerated_modules.is_accelerated and not layer.training and _is_for_kernels(layer, arguments):
                stack.enter_context(_NoFastPath())
            return own(layer, *args, **kwargs)

    return forward


class _NoFastPath(TorchFunctionMode):
    """Torch function mode that calls every function unchanged. Torch's own attention layers have a fast path, which
    computes a whole layer by one function, without SDPA. They do not use it while a torch function mode is active, so
    this mode disables it.
    """

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Call the function."""
        return func(*args, **(kwargs or {}))


MASKS = ("attn_mask", "key_padding_mask", "src_mask", "src_key_padding_mask")
"""Arguments of torch's layers that are masks."""


def _is_for_kernels(layer: nn.Module, arguments: Mapping[str, Any]) -> bool:
    """Return True if the native kernels support the attention in a call of one of torch's layers, and are expected to
    be faster than torch. The call must be self-attention and must not request the attention weights. It must have no
    mask, since torch's fast path returns NaN for query rows in which a mask hides all keys, and results must not
    change.
    """
    x = arguments.get("src", arguments.get("query"))
    attention: Any = layer if isinstance(layer, nn.MultiheadAttention) else layer.self_attn
    needs_weights = attention is layer and arguments.get("need_weights", True)
    is_self_attention = attention is not layer or arguments.get("key") is x
    if needs_weights or not is_self_attention or any(arguments.get(name) is not None for name in MASKS):
        return False
    if not isinstance(x, Tensor) or x.ndim != 3 or x.is_nested or not attention.batch_first:
        return False
    batch, length, width = x.shape
    like_q = x.detach().new_empty(1).expand(batch, attention.num_heads, length, width // attention.num_heads)
    return why_not(SDPACall(like_q, like_q, like_q)) is None


def _replacements_for_layers() -> Iterator[Replacement]:
    """Yield the replacement of the method `forward` for each of torch's attention layer classes."""
    for layer in TORCH_LAYERS:
        yield Replacement(layer, "forward", _ForwardOfAccelerated(layer.forward))


layer_patches = Patches(_replacements_for_layers)
"""Context in which accelerated layers of torch have a `forward` of their own."""
