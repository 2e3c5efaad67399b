"""Interception of attention calls of Hugging Face `transformers`, where the library dispatches them.

Every model of `transformers` 5 gets its attention function from `AttentionInterface.get_interface` at each call. While
a model is intercepted that method returns the same function, wrapped. The model keeps its implementation's name, which
some models read. A `ModuleAttention` computes the calls of one module in place of the function, as streaming heads do;
nothing else of the model is followed then.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cached_property, lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.masks.factories import causal
from headwise.attention.problem import Answer, Problem
from headwise.errors import InputError, require
from headwise.intercept.adapters.engine import answered_by_engine
from headwise.intercept.adapters.transformers_engines import reader_of
from headwise.intercept.answer import answered
from headwise.intercept.attention_call import AttentionCall, KnownWeights
from headwise.intercept.patches import Patches, Replacement, is_sdpa_foreign
from headwise.intercept.received_mask import hides_all_keys
from headwise.intercept.session import current_session
from headwise.intercept.trace.scores import scores_behind
from headwise.intercept.undropped import call_without_dropout, random_state

READABLE = ("sdpa", "eager")
"""The implementations whose masks are tensors, so that a call can be stated as a `Problem`."""


class HFCall(AttentionCall):
    """One call of an attention function of `transformers`.

    Args:
        implementation: name of the function, such as "sdpa".
        attention: the function.
        args, kwargs: its arguments, as the model passes them; all other attributes are read from these.

    Attributes:
        implementation: name of the function.
        module: the calling module.
        passed_mask: the mask that the model passes, a tensor in the implementations "sdpa" and "eager"; None without.
        arguments: all further arguments, by name.
        others: results of the function in addition to the output: the weights or None, and possibly more.
    """

    def __init__(
        self, implementation: str, attention: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        self.implementation, self._attention, self._args, self._kwargs = implementation, attention, args, kwargs
        self.module, q, k, v, self.passed_mask, self.arguments = _arguments(*args, **kwargs)
        position_bias = self.arguments.get("position_bias")
        is_causal = self.passed_mask is None and self.is_causal and q.shape[2] > 1
        super().__init__(
            *(q, k, v),
            # SDPA takes causality from the call or the module, over as many keys as queries; eager does not.
            {"mask": causal() if is_causal else None, "bias": position_bias, **self.score_options},
            keys_in_use=q.shape[2] if is_causal else None,
            mask_origin=(implementation, self.passed_mask, position_bias, self.is_causal),
            is_replaceable=True,
        )
        self.others: list[Any] = [None]
        self._is_random = False

    @property
    def is_causal(self) -> bool:
        """True if the attention function hides later keys when it receives no mask. Eager attention never does. SDPA
        does, unless `is_causal` is False: the argument of the call, or if there is none, the attribute of the module.
        """
        option = self.arguments.get("is_causal")
        is_causal = getattr(self.module, "is_causal", True) if option is None else option
        return self.implementation == "sdpa" and bool(is_causal)

    @property
    def score_options(self) -> dict[str, Any]:
        """Scale, softcap, sinks and dropout of the call, as arguments of `headwise.attend`. They apply only to the
        attention implementations "sdpa" and "eager".
        """
        return {
            "scale": self.arguments.get("scaling"),
            "softcap": self.arguments.get("softcap"),
            "sinks": self.arguments.get("s_aux") if self.implementation == "eager" else None,  # SDPA ignores them
            "dropout": self.arguments.get("dropout") or 0.0,
        }

    def require_readable(self) -> None:
        """Raise `InputError` unless the model uses an attention implementation whose masks are tensors: "sdpa" or
        "eager".
        """
        if self.implementation not in READABLE:
            raise InputError(
                "model",
                expected=f"attention implementation {' or '.join(READABLE)}",
                got=self.implementation,
                remedy="call model.set_attn_implementation('sdpa')",
            )

    @cached_property
    def mask(self) -> Tensor | None:
        """The mask as `transformers` adds it to the scores; None if there is none. A boolean mask is returned
        unchanged, unless there is a position bias and the mask hides all keys of some query row: then it becomes an
        additive mask with large negative numbers.
        """
        mask, bias = self.passed_mask, self.arguments.get("position_bias")
        if mask is None or bias is None or mask.is_floating_point() or bool(mask.any(-1).all()):
            return mask
        return torch.zeros_like(mask, dtype=bias.dtype).masked_fill(~mask, torch.finfo(bias.dtype).min)

    @cached_property
    def problem(self) -> Problem:
        """The call as a `Problem` (headwise's form of the tensors and options of a call), for an attention
        implementation whose masks are tensors.
        """
        self.require_readable()
        return super().problem

    @property
    def is_replaced(self) -> bool:
        """True if another library has replaced SDPA, or the function by which `transformers` calls it."""
        library = sys.modules.get("transformers.integrations.sdpa_attention")
        own = getattr(library, "sdpa_attention_forward", None)
        return self.implementation == "sdpa" and (is_sdpa_foreign() or self._attention is not own)

    def run(self, **changes: Any) -> Any:
        """Call the attention function of `transformers` with the model's own arguments; `changes` replace some of them.
        Return the function's result: the output `(batch, queries, heads, value_dim)`, the weights or None, and possibly
        more.
        """
        return self._attention(*self._args, **{**self._kwargs, **changes})

    def compute(self) -> Answer:
        """Call the attention function of `transformers`, and return its output."""
        state = random_state(self.q.device) if self.has_weights else None
        out, *self.others = self.run()
        self._is_random = state is not None and not torch.equal(state, random_state(self.q.device))
        return Answer(out, None, None)

    def compute_without_dropout(self) -> Tensor:
        """Call the attention function of `transformers` without dropout, and return its output."""
        out: Tensor = self.run(dropout=0.0)[0]
        return out

    @property
    def has_weights(self) -> bool:
        """True if the call uses eager attention, which usually returns its weights."""
        return self.implementation == "eager"

    def weights(self, out: Tensor) -> KnownWeights | None:
        """Return the weights before dropout that eager attention has returned; None if it returns none."""
        weights, mask = self.others[0] if self.has_weights else None, self.passed_mask
        if self.has_weights and self._is_random:
            path = current_session().module_calls[-1].path
            out, weights, *_ = call_without_dropout(self._attention, self._args, self._kwargs, out.device, path)
            out = out.transpose(1, 2)
        if weights is None:
            return None
        weights = weights.detach()
        if mask is not None and mask.is_floating_point():  # the function's own softmax is uniform in hidden rows
            weights = weights.masked_fill(hides_all_keys(mask), 0.0)
        return KnownWeights(weights, out, self.v, partial(scores_behind, weights, lambda: self.problem))


def _arguments(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    **options: Any,
) -> tuple[nn.Module, Tensor, Tensor, Tensor, Tensor | None, dict[str, Any]]:
    """Return the arguments of an attention function of `transformers` in their order."""
    return module, query, key, value, attention_mask, options


class ModuleAttention(ABC):
    """Base class of objects that compute the attention of one module of a `transformers` model. Such an object takes
    the place of the library's attention function.

    Args:
        path: path of the module in the model.
    """

    def __init__(self, path: str) -> None:
        self.path, self._calls = path, 0

    @abstractmethod
    def compute(self, call: HFCall) -> Tensor:
        """Return the output `(batch, queries, heads, value_dim)` of one attention call of the module."""

    def on_start(self, module: nn.Module, args: Any) -> None:
        """Forward pre-hook of the module: set the number of attention calls that this object computed to 0."""
        self._calls = 0

    def on_end(self, module: nn.Module, args: Any, output: Any) -> None:
        """Forward hook of the module: raise `InputError` if the module did not call this object to compute its
        attention.
        """
        if not self._calls:
            expected = f"one attention function of transformers in {self.path}, without hw.watch or hw.gate"
            raise InputError("model", expected=expected, got=type(module).__name__)

    def answer(self, call: HFCall) -> tuple[Tensor, None]:
        """Return the output of an attention call, and None in place of the weights, as attention functions of
        `transformers` do.
        """
        if current_session().intercepts:
            expected = "a model without hw.watch or hw.gate while its heads are restricted"
            raise InputError("model", expected=expected, got=f"an intercepted call in {self.path}")
        self._calls += 1
        return self.compute(call), None


module_attentions: dict[nn.Module, ModuleAttention] = {}
"""Modules whose attention a `ModuleAttention` computes."""


@contextmanager
def computing(model: nn.Module, attentions: Iterable[ModuleAttention]) -> Iterator[None]:
    """Return a context in which each of `attentions` computes the attention of its module of `model`, in place of the
    function of `transformers`. Within the context nothing runs as compiled by `torch.compile`, since compiled code
    would not call these objects.

    Raises:
        InputError: the attention of a module is computed so already, or the calling code is being compiled. Inside of
            the context: a module attends in another way than by the attention functions of `transformers`, or is
            watched or gated.
    """
    require("transformers", purpose="streaming heads", extra="hf")
    with ExitStack() as stack:
        stack.enter_context(without_compiled_code())
        stack.enter_context(dispatch_patches)
        for attention in attentions:
            module = model.get_submodule(attention.path)
            if module in module_attentions:
                raise InputError("model", expected="a model whose heads are not restricted yet", got=attention.path)
            module_attentions[module] = attention
            stack.callback(module_attentions.pop, module)
            stack.callback(module.register_forward_pre_hook(attention.on_start).remove)
            stack.callback(module.register_forward_hook(attention.on_end).remove)
        yield


@contextmanager
def without_compiled_code() -> Iterator[None]:
    """Return a context in which code that `torch.compile` has compiled runs uncompiled.

    Raises:
        InputError: the calling code is itself being compiled.
    """
    error = InputError("model", expected="a call outside of code that torch.compile compiles", got="one inside")
    if torch.compiler.is_compiling():
        raise error
    try:
        stance = torch.compiler.set_stance("force_eager")
    except RuntimeError as in_compiled_region:
        raise error from in_compiled_region
    with stance:
        yield


def _replacements() -> Iterator[Replacement]:
    """If `transformers` is loaded, yield a patch of the method by which it looks up attention functions, so that these
    can be intercepted. Attention is computed as before, except in intercepted models and in modules whose attention a
    `ModuleAttention` object of headwise computes.
    """
    library = sys.modules.get("transformers.modeling_utils")
    if library is None:
        return
    dispatch = library.AttentionInterface.get_interface

    @wraps(dispatch)
    def get_interface(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
        return _interceptable(implementation, dispatch(interface, implementation, default))

    yield Replacement(library.AttentionInterface, "get_interface", get_interface)


@lru_cache(maxsize=16)
def _interceptable(implementation: str, attention: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that computes the same as `attention`, an attention function of `transformers`. Calls of the
    new function can be intercepted, or computed by a `ModuleAttention` (object of headwise that computes a module's
    attention).
    """

    @wraps(attention)
    def attention_or_intercepted(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if not module_attentions and not session.intercepts:
            return attention(*args, **kwargs)
        call = HFCall(implementation, attention, args, kwargs)
        if call.module in module_attentions:
            return module_attentions[call.module].answer(call)
        if session.intercepts and not session.reports_unreadable(call.q):
            read = reader_of(attention, implementation)
            if read is not None:
                arguments = call.module, call.q, call.k, call.v, call.passed_mask, call.arguments
                return answered_by_engine(implementation, call.run, lambda: read(*arguments))
            without_dropout = call.compute_without_dropout if call.is_replaced else None
            answer = answered(implementation, call, call.compute, compute_without_dropout=without_dropout)
            return answer.out, *call.others
        return call.run()

    return attention_or_intercepted


dispatch_patches = Patches(_replacements)
"""Context in which the attention functions of `transformers` are intercepted."""
