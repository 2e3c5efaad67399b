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
from dataclasses import dataclass
from functools import cache, lru_cache, partial, wraps
from typing import Any

import torch
from torch import Tensor, nn

from headwise.attention.attend import uniform_output
from headwise.attention.masks.base import Mask
from headwise.attention.masks.factories import causal
from headwise.attention.masks.grid import Grid
from headwise.attention.problem import Answer, Problem
from headwise.errors import InputError, require
from headwise.intercept.accelerated_modules import OBSERVED, accelerated_modules
from headwise.intercept.adapters.answer import answered_by_engine
from headwise.intercept.adapters.transformers_engines import reader_of
from headwise.intercept.additive_masks import (
    fill_hidden_rows_as_torch,
    hides_all_keys,
    is_uniform_where_hidden,
    with_infinite,
)
from headwise.intercept.call_handlers import handlers_of_call
from headwise.intercept.foreign_answer import is_attention
from headwise.intercept.foreign_functions import is_sdpa_foreign
from headwise.intercept.patches import Patches, Replacement
from headwise.intercept.received_mask import MaskSource, ReceivedMask
from headwise.intercept.sdpa_calls import widest_dtype_under_autocast
from headwise.intercept.session import current_session
from headwise.intercept.trace.axes import OutputAxes
from headwise.intercept.trace.outputs import follow_reported
from headwise.intercept.trace.scores import scores_behind
from headwise.intercept.undropped import call_without_dropout, random_state

READABLE = ("sdpa", "eager")
"""The implementations whose masks are tensors, so that a call can be stated as a `Problem`."""


@dataclass(frozen=True, eq=False)
class HFCall:
    """One call of an attention function of `transformers`, with the arguments that the model passes.

    Attributes:
        implementation: name of the function, such as "sdpa".
        attention: the function.
        args, kwargs: its arguments, as the model passes them; the other attributes are read from these.
        module: the calling module.
        q, k, v: queries `(batch, heads, queries, head_dim)`, keys and values `(batch, kv_heads, keys, ...)`.
        mask: the mask that the model passes, a tensor in the implementations "sdpa" and "eager"; None without.
        options: all further arguments, by name.
    """

    implementation: str
    attention: Callable[..., Any]
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    module: nn.Module
    q: Tensor
    k: Tensor
    v: Tensor
    mask: Tensor | None
    options: dict[str, Any]

    @staticmethod
    def of(
        implementation: str, attention: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> "HFCall":
        """Return a call of the function `attention`. `args` and `kwargs` are the arguments, by position and by name."""

        def read(
            module: nn.Module,
            query: Tensor,
            key: Tensor,
            value: Tensor,
            attention_mask: Tensor | None = None,
            **options: Any,
        ) -> HFCall:
            return HFCall(implementation, attention, args, kwargs, module, query, key, value, attention_mask, options)

        return read(*args, **kwargs)

    def run(self, **changes: Any) -> Any:
        """Call the attention function of `transformers` with the model's own arguments; `changes` replace some of them.
        Return the function's result: the output `(batch, queries, heads, value_dim)`, the weights or None, and possibly
        more.
        """
        return self.attention(*self.args, **{**self.kwargs, **changes})

    @property
    def is_causal(self) -> bool:
        """True if the attention function hides later keys when it receives no mask. SDPA does, unless the argument
        `is_causal` of the call, or else the attribute `is_causal` of the module, is False. Eager attention does not.
        """
        option = self.options.get("is_causal")
        is_causal = getattr(self.module, "is_causal", True) if option is None else option
        return self.implementation == "sdpa" and bool(is_causal)

    @property
    def score_options(self) -> dict[str, Any]:
        """Scale, softcap, sinks and dropout of the call, as arguments of `headwise.attend`. They apply only to the
        attention implementations "sdpa" and "eager".
        """
        return {
            "scale": self.options.get("scaling"),
            "softcap": self.options.get("softcap"),
            "sinks": self.options.get("s_aux") if self.implementation == "eager" else None,  # SDPA ignores them
            "dropout": self.options.get("dropout") or 0.0,
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


class ModuleAttention(ABC):
    """Base class of objects that compute the attention of one module of a `transformers` model, in place of the
    library's own attention function.

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
    """Return a context in which each of `attentions` computes the attention of its module of `model`. Within the
    context nothing runs as compiled by `torch.compile`, since compiled code would not call these objects.

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
    """Yield a replacement of the method by which `transformers` looks up an attention function, if the library is
    loaded. The replacement returns attention functions that can be intercepted. They compute the same as before outside
    of intercepted models and of modules with a `ModuleAttention`.
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
    """Return a function that computes the same as `attention`, an attention function of `transformers`. Its calls can
    be intercepted, or computed by a `ModuleAttention`.
    """

    @wraps(attention)
    def attention_or_intercepted(*args: Any, **kwargs: Any) -> Any:
        session = current_session()
        if not module_attentions and not session.intercepts:
            return attention(*args, **kwargs)
        call = HFCall.of(implementation, attention, args, kwargs)
        if call.module in module_attentions:
            return module_attentions[call.module].answer(call)
        if session.intercepts and not session.reports_unreadable(call.q):
            read = reader_of(attention, implementation)
            if read is not None:
                arguments = call.module, call.q, call.k, call.v, call.mask, call.options
                return answered_by_engine(implementation, call.run, lambda: read(*arguments))
            with session.paused():
                return _intercepted_call(call)
        return call.run()

    return attention_or_intercepted


dispatch_patches = Patches(_replacements)
"""Context in which the attention functions of `transformers` are intercepted."""


def _intercepted_call(call: HFCall) -> Any:
    """Compute an attention call of `transformers` inside an intercepted model. The interceptors observe the attention
    weights and may change the head outputs. Return the output `(batch, queries, heads, value_dim)`, the weights or
    None, and possibly more.
    """
    implementation, q, k, v, mask, options = call.implementation, call.q, call.k, call.v, call.mask, call.options
    session = current_session()
    step = session.step(implementation, q, k, v)
    if step is None:
        return call.run()
    others: list[Any] = [None]  # what the function returns in addition to the output

    @cache
    def read_problem() -> Problem:
        return _problem_of(call)

    added = _as_added(mask, options.get("position_bias"))
    mask_origin = (implementation, mask, options.get("position_bias"), call.is_causal)
    mask_source = MaskSource(lambda: ReceivedMask.of_problem(read_problem()), mask_origin)
    grid = Grid(q.shape[0], q.shape[1], q.shape[2], k.shape[2], q.device)
    origins = session.origins_of(q, k, v)

    @cache
    def compute() -> Answer:
        out, *others[:] = call.run()
        return Answer(out.transpose(1, 2), None, None)

    def compute_without_dropout() -> Answer:
        return Answer(call.run(dropout=0.0)[0].transpose(1, 2), None, None)

    as_torch = partial(fill_hidden_rows_as_torch, v=v, mask=added)
    is_replaced = implementation == "sdpa" and (is_sdpa_foreign() or not _is_own_sdpa(call.attention))
    if is_replaced and not is_attention(read_problem, compute, compute_without_dropout):
        return compute().out.transpose(1, 2), *others
    sizes = grid, k.shape[1], v.shape[3]
    handlers = handlers_of_call(*sizes, mask_source=mask_source, origins=origins, keys=k, step=step)
    if handlers.observations and implementation == "eager":
        with session.paused():
            state = random_state(q.device)
            out = undropped_out = compute().out
            weights = others[0]
            if not torch.equal(state, random_state(q.device)):
                undropped_out, weights = _without_dropout(call)
        if weights is not None:
            weights = _zeros_in_hidden_rows(weights.detach(), mask)
            behind = partial(scores_behind, weights, read_problem)
            handlers.observe_weights(weights, mask_source.read(), undropped_out, v, True, behind)
        else:
            handlers.answer(read_problem, lambda: Answer(undropped_out, None, None))
    else:
        is_uniform = is_uniform_where_hidden(added)
        keeps_output = is_replaced or handlers.keeps_output or (bool(handlers.observations) and not is_uniform)
        out = handlers.answer(read_problem, compute, keeps_output).out
        if not compute.cache_info().currsize and accelerated_modules.is_accelerated:
            accelerated_modules.record(OBSERVED)
        if handlers.observations and not keeps_output and not options.get("dropout"):
            out = as_torch(out)
    out = handlers.changed(out, lambda: as_torch(uniform_output(read_problem())), read_problem)
    with session.paused():
        out = out.transpose(1, 2).contiguous()
    if origins is not None:
        follow_reported(out, OutputAxes(3, (1,)), origins, step.number)
    return out, *others


def _as_added(mask: Tensor | None, position_bias: Tensor | None) -> Tensor | None:
    """Return the mask of a call in the form in which `transformers` adds it to the scores. A boolean mask becomes an
    additive one with large negative numbers if there is a position bias and the mask hides all keys of some query row.
    In all other cases, return the mask unchanged.
    """
    if mask is None or position_bias is None or mask.is_floating_point() or bool(mask.any(-1).all()):
        return mask
    return torch.zeros_like(mask, dtype=position_bias.dtype).masked_fill(~mask, torch.finfo(position_bias.dtype).min)


def _is_own_sdpa(attention: Callable[..., Any]) -> bool:
    """Return True if `attention` is the original function by which `transformers` calls torch's SDPA."""
    library = sys.modules.get("transformers.integrations.sdpa_attention")
    return attention is getattr(library, "sdpa_attention_forward", None)


def _without_dropout(call: HFCall) -> tuple[Tensor, Tensor | None]:
    """Repeat an attention call without dropout. Return the head outputs `(batch, heads, queries, value_dim)` and the
    weights; the weights are None if the function returns none.
    """
    path = current_session().module_calls[-1].path
    out, weights, *_ = call_without_dropout(call.attention, call.args, call.kwargs, call.q.device, path)
    return out.transpose(1, 2), weights


def _problem_of(call: HFCall) -> Problem:
    """Return a call as a `Problem`, headwise's form of the tensors and options of one attention call. Causality and
    masks are those that the implementation ("sdpa" or "eager") applies in such a call.

    Raises:
        InputError: it is another implementation, whose masks cannot be read.
    """
    call.require_readable()
    query, key, value = widest_dtype_under_autocast(call.q, call.k, call.v)
    queries = query.shape[2]
    mask: Mask | Tensor | None = call.mask
    bias = call.options.get("position_bias")
    if call.mask is None:
        # SDPA then takes causality from the call or the module, over as many keys as queries; eager does not.
        if call.is_causal and queries > 1:
            mask, key, value = causal(), key[:, :, :queries], value[:, :, :queries]
            bias = None if bias is None else bias[..., :queries]
    elif call.mask.is_floating_point():
        added = with_infinite(call.mask)
        mask, bias = None, added if bias is None else bias + added
    return Problem.checked(query, key, value, mask=mask, bias=bias, **call.score_options)


def _zeros_in_hidden_rows(weights: Tensor, mask: Tensor | None) -> Tensor:
    """Return attention weights of an eager attention function, with 0 in every row where an additive mask hides all
    keys. The function's own softmax attends uniformly in such rows. Without an additive mask, return the weights
    unchanged.
    """
    if mask is None or not mask.is_floating_point():
        return weights
    return weights.masked_fill(hides_all_keys(mask), 0.0)
