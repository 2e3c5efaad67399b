"""`accelerate`: the attention and the linear maps of any model, computed by the native kernels and by oneDNN.

The attention modules of an accelerated model are marked while they run: by hooks, and in torch's own layers by their
`forward`. Torch's `nn.TransformerEncoderLayer` has a faster path for short inputs, which it leaves if a module inside
of it has hooks. It and `nn.MultiheadAttention` therefore have none. In accelerated layers, another `forward` takes the
place of theirs, and leaves the path only where the native kernels are faster. In an accelerated `nn.Linear`, another
`forward` chooses the engine for each input. Other layers, also copies, keep torch's `forward`.
"""

import inspect
import threading
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial, wraps
from itertools import count
from types import MethodType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, WeakSet, finalize, ref

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from headwise.attention.backends.native import library
from headwise.checks import flag, require_module
from headwise.intercept.accelerated_sdpa import (
    CallRecorder,
    SDPACall,
    accelerated_modules,
    active_recorders,
    why_not,
)
from headwise.intercept.adapters.all_adapters import sdpa_patches
from headwise.intercept.compiled_sdpa import compiled_modules, register_operator
from headwise.intercept.install import require_uncompiled
from headwise.intercept.layer_index import innermost_attention_modules, is_related
from headwise.intercept.patches import Patches, Replacement
from headwise.intercept.uncopied_hooks import UncopiedHooks
from headwise.nn.linear_engine import (
    FORWARDS,
    LINEAR_FORWARD,
    LinearChoice,
    by_operators,
    choice_of,
    computed_by,
    is_compiled_by_operator,
    is_left_to_torch,
)

FAST_PATH = "torch computes the whole layer in one function, which is as fast for short inputs, or has masks"
"""Reason for a layer of torch that ran without SDPA."""

NOT_SDPA = "it does not call torch.nn.functional.scaled_dot_product_attention"
"""Reason for a module that is called attention, ran, and made no call of SDPA."""


_NUMBERS = count()
"""Numbers of accelerations."""

_with_linear: set[int] = set()
"""Numbers of the active accelerations of linear maps."""


class ModuleCalls(NamedTuple):
    """Counts of the attention calls of one module of an accelerated model: how many calls headwise's native CPU kernels
    computed, and how many torch computed.

    Attributes:
        path: path of the module; empty for the model itself.
        accelerated: number of calls that the native kernels computed.
        unchanged: number of calls that torch computed, by the reason. A module that made no call that could be
            intercepted has its reason with the number 0.
    """

    path: str
    accelerated: int
    unchanged: dict[str, int]


class Acceleration:
    """Result of `accelerate`, which makes one model faster. It counts the attention calls of each module and the calls
    of linear maps, and `print` shows a summary. The acceleration ends with a call of `restore`, or at the end of a
    `with` statement on this object.

    Attributes:
        is_active: True until `restore` is called.
        number: number of the acceleration, unique among all.
        linear_modules: the modules whose linear map is accelerated.
        linear_calls: number of calls of linear maps, by the engine that computed them and the reason. Small ones in
            bfloat16, which torch computes, are not counted. Empty if all are left to torch.
    """

    def __init__(self, model: nn.Module, *, linear: bool) -> None:
        self.linear_modules: WeakSet[nn.Module] = WeakSet()
        self.linear_calls: Counter[LinearChoice] = Counter()
        self._modules = {path: type(module) for path, module in model.named_modules()}
        self._order = {path: index for index, path in enumerate(self._modules)}
        self._named = innermost_attention_modules(dict(model.named_modules()), self._modules)
        self._ran: set[str] = set()
        self._counts: Counter[tuple[str, str | None]] = Counter()
        self._lock = threading.Lock()
        self.is_active, self.number = True, next(_NUMBERS)
        self._remove = finalize(model, _install(model, self, linear=linear).close)

    @property
    def patches(self) -> Patches:
        """Context in which calls of SDPA, of torch's layers and of linear maps are intercepted."""
        return layer_patches

    def __enter__(self) -> "Acceleration":
        return self

    def __exit__(self, *_: object) -> None:
        self.restore()

    def restore(self) -> None:
        """End the acceleration: the model computes its attention as before `accelerate`. Calling this method again does
        nothing.
        """
        self.is_active = False
        self._remove()
        accelerated_modules.discard_ended()
        compiled_modules.depths.pop(self.number, None)

    def on_start(self, path: str) -> None:
        """Record that the module at `path` of the accelerated model ran."""
        self._ran.add(path)

    def record(self, path: str, reason: str | None) -> None:
        """Count one attention call of the module at `path`. If `reason` is None, the native kernels computed the call;
        otherwise torch did, for this reason.
        """
        with self._lock:
            self._counts[path, reason] += 1

    def record_linear(self, choice: LinearChoice) -> None:
        """Count one call of a linear map, which the engine in `choice` computes."""
        with self._lock:
            self.linear_calls[choice] += 1

    @property
    def modules(self) -> list[ModuleCalls]:
        """Counts of attention calls for each module that made such calls, in the order of the model's modules. Also
        included are modules that ran and seem to compute attention, but made no call that could be intercepted: each
        with the reason why not.
        """
        with self._lock:
            counts = dict(self._counts)
        paths = {path for path, _ in counts}
        unseen = {path: NOT_SDPA for path in self._named if path in self._ran}
        unseen |= {path: FAST_PATH for path in self._ran if issubclass(self._modules[path], TORCH_LAYERS)}
        unseen = {path: why for path, why in unseen.items() if not any(is_related(path, other) for other in paths)}
        modules = [ModuleCalls(path, 0, {reason: 0}) for path, reason in unseen.items()]
        for path in paths:
            unchanged = {reason: count for (other, reason), count in counts.items() if other == path and reason}
            modules.append(ModuleCalls(path, counts.get((path, None), 0), unchanged))
        return sorted(modules, key=lambda module: self._order[module.path])

    def summary(self) -> str:
        """Return a text with two kinds of modules: those whose attention the native kernels computed, and those whose
        attention torch computed, with the reasons. For each module, the text states the number of attention calls so
        far.
        """
        state = f"native kernels: {library.why_not_loaded() or library.instruction_set()}"
        lines = [state if self.is_active else f"{state}; restored"]
        if not self._ran:
            return "\n".join([*lines, "no module has run outside of torch.compile so far"])
        accelerated = [(module.path, module.accelerated) for module in self.modules if module.accelerated]
        lines += _listed("computed by the native kernels", accelerated)
        reasons = dict.fromkeys(reason for module in self.modules for reason in module.unchanged)
        for reason in reasons:
            unchanged = [(each.path, each.unchanged[reason]) for each in self.modules if reason in each.unchanged]
            lines += _listed(f"unchanged: {reason}", unchanged)
        if len(lines) == 1:
            lines.append("no attention was intercepted")
        for choice, number in sorted(self.linear_calls.items()):
            lines.append(f"linear maps computed by {ENGINES[choice.engine]}: {choice.because} ({number} calls)")
        return "\n".join(lines)

    def __str__(self) -> str:
        return self.summary()


ENGINES = {"torch": "torch", "onednn": "oneDNN", "native": "the native kernel"}
"""Names, for a summary, of the engines that compute linear maps."""


def accelerate(model: Any, *, linear: bool = True) -> Acceleration:
    """Make a model faster on a CPU. Headwise's native kernels compute attention in place of torch's
    `scaled_dot_product_attention`, and the native kernels or oneDNN compute the model's `nn.Linear` modules. Each call
    is computed so only if this is supported and expected to be faster. Return an `Acceleration`, which counts the
    calls. The acceleration ends with its method `restore`, or at the end of a `with` statement.

    The model computes the same output and gradients, up to rounding, with its own masks and weights. Other calls are
    unchanged: the same function of torch receives the same arguments. Examples are attention calls with dropout, with a
    bias, on a GPU or in float16, and calls in exported programs. In a model that `torch.compile` compiles
    afterwards, the compiled code calls the kernels. Parameters, config and state dict of the model are unchanged, and
    copies of it are not accelerated. No copies of weights are kept.

        acceleration = hw.accelerate(model)
        model(**inputs)
        print(acceleration)             # modules, numbers of calls, and reasons
        acceleration.restore()

        with hw.accelerate(model):      # or within a context
            model.generate(**inputs)

    Args:
        model: any module: of torch, of `transformers` with the attention implementation "sdpa", or your own.
        linear: False to leave linear maps to torch. Modules of subclasses of `nn.Linear`, such as quantised ones, are
            never changed, nor are those whose weights are parametrised.

    Returns:
        the `Acceleration`. It may be used in several threads, and together with `watch` and `gate`, in any order.

    Raises:
        InputError: the model is not a torch module, or it is compiled or scripted, so its calls do not pass through
            Python; or `linear` is not True or False.

    Warns:
        UserWarning: the native kernels are not available, so that attention is not accelerated.

    Example:
        >>> print(hw.accelerate(model))
        native kernels: avx512
        no module has run outside of torch.compile so far
    """
    require_module(model)
    require_uncompiled(model)
    reason = library.why_not_loaded()
    if reason is not None:
        warnings.warn(f"attention is not accelerated: {reason}", stacklevel=2)
    return Acceleration(model, linear=flag("linear", linear))


def _install(model: nn.Module, acceleration: Acceleration, *, linear: bool) -> ExitStack:
    """Install the hooks and patches by which `acceleration` intercepts attention in `model`, and its linear maps if
    `linear` is True. Return a context that removes them when it is closed. The context does not keep the model in
    memory.
    """
    with ExitStack() as stack:
        stack.enter_context(layer_patches)
        active_recorders.append(acceleration)
        stack.callback(active_recorders.remove, acceleration)
        register_operator()
        for path, module in marked_modules(model):
            if isinstance(module, TORCH_LAYERS):
                stack.callback(accelerate_layer(module, acceleration, path))
            else:
                for handle in AcceleratedHooks(acceleration, path).register(module):
                    stack.callback(handle.remove)
        if linear:
            _with_linear.add(acceleration.number)
            stack.callback(_with_linear.discard, acceleration.number)
            for path, module in model.named_modules():
                if type(module) in PLAIN_LINEAR:
                    acceleration.linear_modules.add(module)
                    stack.callback(accelerate_layer(module, acceleration, path))
        return stack.pop_all()


def _listed(title: str, calls: list[tuple[str, int]]) -> Iterator[str]:
    """Yield the lines of one section of a summary: first `title` with the total numbers of calls and modules, then each
    module's path with its number of calls. Yield nothing if `calls` is empty.
    """
    if calls:
        total = sum(count for _, count in calls)
        yield f"{title} ({total} calls of {len(calls)} modules)"
        yield from (f"    {path or 'the model'}" + (f" ({count})" if count else "") for path, count in calls)


# -- modules that are marked while they run ----------------------------------------------------------------------------

TORCH_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer)
"""Layers of torch that have a path without `scaled_dot_product_attention`."""


class AcceleratedHooks(UncopiedHooks):
    """Forward hooks of one module of an accelerated model (headwise's kernels compute its attention). They mark the
    module as running when its `forward` starts, and as no longer running when its `forward` ends.
    """

    def __init__(self, recorder: CallRecorder, path: str) -> None:
        self._recorder, self._path = recorder, path
        self._is_model = not path  # a compiler that reads the path compiles the hook again for each module

    @property
    def context(self) -> str:
        """Name, for error messages, of the function that registered the hooks: "hw.accelerate"."""
        return "hw.accelerate"

    @property
    def remedy(self) -> str:
        """Advice, for error messages, on how to remove these hooks."""
        return "leave the context of hw.accelerate first, or call its method restore"

    def register(self, module: nn.Module) -> Iterator[RemovableHandle]:
        """Register a pre-hook before the module's other hooks, and a forward hook after them. Yield the handle that
        removes each of the two.
        """
        yield module.register_forward_pre_hook(self.on_start, prepend=True)
        yield module.register_forward_hook(self.on_end, always_call=True)

    def on_start(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Forward pre-hook: mark the module as running. While torch compiles it, count it for compiled attention
        calls.
        """
        if torch.compiler.is_dynamo_compiling():
            if not self.is_copy:
                compiled_modules.start(self._recorder.number, self._is_model)
        elif not torch.compiler.is_compiling() and not self.is_copy:
            accelerated_modules.start(self._recorder, self._path, module)

    def on_end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Forward hook: record that the module no longer runs."""
        if torch.compiler.is_dynamo_compiling():
            if not self.is_copy:
                compiled_modules.end(self._recorder.number)
        elif not torch.compiler.is_compiling() and not self.is_copy:
            accelerated_modules.end(self._recorder, module)


def marked_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield the path and module of every module of `model` that is to be marked as running during its calls. These are
    the model, the innermost modules whose class name contains "attention", and torch's own attention layers. If there
    is none, they are all modules with submodules. Submodules of a torch layer are left out, except the `self_attn` of
    an encoder layer.
    """
    modules = dict(model.named_modules())
    attention = {modules[path] for path in innermost_attention_modules(modules, modules)}
    are_named = bool(attention) or any(isinstance(each, TORCH_LAYERS) for each in modules.values())
    inside: set[nn.Module] = set()
    for path, module in modules.items():
        if module in inside:
            continue
        if isinstance(module, TORCH_LAYERS):
            inside.update(module.modules())
            yield path, module
            if isinstance(module, nn.TransformerEncoderLayer):
                yield f"{path}.self_attn".lstrip("."), module.self_attn
        elif not path or module in attention or (not are_named and any(module.children())):
            yield path, module


# -- torch's layers --------------------------------------------------------------------------------------------------

_recorders: WeakKeyDictionary[nn.Module, list[tuple[CallRecorder, str]]] = WeakKeyDictionary()
"""Recorders of the accelerated layers of torch, and the layers' paths."""


def accelerate_layer(layer: nn.Module, recorder: CallRecorder, path: str) -> Callable[[], None]:
    """Let headwise compute one of torch's own layers, such as `nn.MultiheadAttention` or `nn.Linear`, and report its
    calls to `recorder` under `path`. Return a function that ends this.
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
    computes a whole layer by one function, without `scaled_dot_product_attention`. They do not use the fast path while
    a torch function mode is active, so this mode disables it.
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
    """Yield the replacements of the method `forward` of torch's attention layers and of `nn.Linear`."""
    for layer in TORCH_LAYERS:
        yield Replacement(layer, "forward", _ForwardOfAccelerated(layer.forward))
    if nn.Linear.forward is LINEAR_FORWARD:  # not that of another library
        yield Replacement(nn.Linear, "forward", _forward_of_linear)


layer_patches = Patches(_replacements_for_layers, sdpa_patches)
"""Context in which calls of SDPA are intercepted, and accelerated layers of torch have a `forward` of their own."""


# -- linear maps -------------------------------------------------------------------------------------------------------

PLAIN_LINEAR = (nn.Linear, NonDynamicallyQuantizableLinear)
"""Classes of the modules whose linear map may be computed by another engine. Subclasses may compute something else."""


@wraps(LINEAR_FORWARD)  # so that torch.jit.script reads torch's own code
def _forward_of_linear(self: nn.Linear, input: Tensor) -> Tensor:  # noqa: A002
    """Replacement of the method `forward` of `nn.Linear`. In modules of accelerated models, the fastest engine for the
    input computes the linear map. Other modules, also those of subclasses, have torch's method.
    """
    if torch.compiler.is_compiling():
        running = (number for number, depth in compiled_modules.depths.items() if depth)
        is_accelerated = type(self) in PLAIN_LINEAR and any(number in _with_linear for number in running)
        if is_accelerated and is_compiled_by_operator(input, self.weight, self.bias):
            return by_operators(input, self.weight, self.bias)
    elif type(self) in PLAIN_LINEAR and not is_left_to_torch(self, input) and (recorders := _recorders_of(self)):
        attributes = vars(self)
        parameters = attributes["_parameters"]  # reading from here takes less time than reading an attribute
        if "weight" in parameters and "bias" in parameters and attributes.keys().isdisjoint(("weight", "bias")):
            weight, bias = parameters["weight"], parameters["bias"]
        else:
            weight, bias = self.weight, self.bias
        choice = choice_of(input, weight, bias)
        if not accelerated_modules.is_repeating:
            for recorder in recorders:
                recorder.record_linear(choice)
        return computed_by(choice.engine, input, weight, bias)
    return F.linear(input, self.weight, self.bias)


def _recorders_of(linear: nn.Linear) -> list[CallRecorder]:
    """Return the recorders of the active accelerations that contain the module `linear`. In a backward pass there are
    none, except while activation checkpointing repeats a part of a forward pass: then the recorders of that forward
    pass are returned.
    """
    if torch._C._current_graph_task_id() == -1:
        return [recorder for recorder, _ in _recorders.get(linear, ())] if _recorders else []
    return [recorder for recorder in accelerated_modules.repeated if linear in recorder.linear_modules]


FORWARDS.add(_forward_of_linear)
