"""The weights that eager attention computes, recorded while a model runs, without using headwise.

    module calls                          recorded
    attention interface of transformers   the weights that its function returns
    `scaled_dot_product_attention`        its definition in float64, from its arguments
    `F.multi_head_attention_forward`      the weights that it returns on request
    softmax over four axes                its result, in modules that are named attention

A call is assigned to the innermost module that is running.
"""

import inspect
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

SDPA, MULTI_HEAD, SOFTMAX = F.scaled_dot_product_attention, F.multi_head_attention_forward, F.softmax
CALLED_ATTENTION = re.compile(r"att(n|ention)?\d*$")
"""Pattern for the last part of the path of an attention module."""
ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")
"""Arguments that make a module's attention cross-attention."""


NOT_TEXT = ("pixel_values", "input_features", "input_values")
"""Inputs of images and audio, whose positions are not tokens."""


@dataclass
class Weights:
    """Weights and outputs of one recorded attention call.

    Attributes:
        path: path of the innermost running module.
        route: function that computed attention.
        cross: whether that module received another sequence to attend to.
        weights: attention weights, `(batch, heads, queries, keys)`.
        out: the output of every head, `(batch, heads, queries, value_dim)`, if known.
        hidden: True at rows whose mask allows no key, `(batch or 1, heads or 1, queries)`, if there is such a mask.
        tokens: token ids passed to the innermost running module that takes any.
        key_tokens: in cross-attention, token ids `(batch, keys)` of the module whose output the keys are computed from.
        padding: False at padding, from the mask passed to that module or one inside of it.
        projection: weight of the first linear map whose input is the heads' concatenated output, `(heads * value_dim,
            width)`.
    """

    path: str
    route: str
    cross: bool
    weights: Tensor
    out: Tensor | None = None
    hidden: Tensor | None = None
    tokens: Tensor | None = None
    padding: Tensor | None = None
    projection: Tensor | None = None
    key_tokens: Tensor | None = None


class Recorder(TorchFunctionMode):
    """Records every attention call of a model, in order.

    Attributes:
        model: the model.
        calls: the recorded calls.
        frames: path, module and whether it is cross-attention, for each running module.
        read: arguments of each running module, by name.
        inside: number of running functions whose inner softmax and product are not recorded.
        softmaxes: results of softmax inside such a function.
        states: output of each module that received token ids, with these ids.
        failures: by module path, the reason why a call could not be recorded.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[Weights] = []
        self.frames: list[tuple[str, nn.Module, bool]] = []
        self.read: list[dict[str, Any]] = []
        self.inside = 0
        self.softmaxes: list[Tensor] = []
        self.states: list[tuple[Tensor, Tensor]] = []
        self.failures: dict[str, str] = {}

    # -- intercepted functions ----------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call a torch function, and record it if it computes attention, a softmax over the last axis, or a matrix
        product.
        """
        kwargs = kwargs or {}
        if func is SDPA:
            return self.sdpa(*args, **kwargs)
        if func is MULTI_HEAD:
            return self.multi_head(*args, **kwargs)
        result = func(*args, **kwargs)
        if func in SOFTMAXES and isinstance(result, Tensor):
            dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
            if dim in (-1, result.ndim - 1):
                self.softmax(result)
        elif func in PRODUCTS and isinstance(result, Tensor):
            self.product(args, result)
        return result

    def note(self, route: str, weights: Tensor, out: Tensor | None = None, hidden: Tensor | None = None) -> None:
        """Record a call of the innermost running module, with copies of its weights and output."""
        path, _, cross = self.frames[-1] if self.frames else ("", None, False)
        copies = [None if tensor is None else tensor.detach().clone() for tensor in (out, hidden, *self.tokens())]
        self.calls.append(Weights(path, route, cross, weights.detach().clone(), *copies))
        self.calls[-1].key_tokens = self.key_tokens() if cross else None

    def key_tokens(self) -> Tensor | None:
        """Return the token ids of the module whose output is passed as keys to the innermost running module that
        receives keys; None if they are unknown.
        """
        for arguments in reversed(self.read):
            for keys in (arguments[name] for name in ELSEWHERE if isinstance(arguments.get(name), Tensor)):
                return next((ids for output, ids in reversed(self.states) if _same(output, keys)), None)
        return None

    def store_states(self, arguments: dict[str, Any], output: Any) -> None:
        """Store the output of a module that received token ids, if it is a vector for each token."""
        ids = arguments.get("input_ids")
        states = output if isinstance(output, Tensor) else getattr(output, "last_hidden_state", None)
        if isinstance(ids, Tensor) and isinstance(states, Tensor) and states.shape[:-1] == ids.shape:
            self.states.append((states.detach().clone(), ids))

    def tokens(self) -> tuple[Tensor | None, Tensor | None]:
        """Return the token ids and the padding mask that the innermost running modules received; None for what they did
        not receive.
        """
        real = None
        for arguments in reversed(self.read):
            mask, ids = arguments.get("attention_mask"), arguments.get("input_ids")
            if real is None and isinstance(mask, Tensor) and mask.ndim == 2:
                real = mask.bool()
            if isinstance(ids, Tensor):
                return ids, real
            is_decoder = (
                arguments.get("inputs_embeds") is not None and arguments.get("encoder_hidden_states") is not None
            )
            if is_decoder or any(arguments.get(name) is not None for name in NOT_TEXT):
                break
        return None, real

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Return the output of torch's SDPA. Record the weights and output of its definition, except inside a function
        that returns its weights.
        """
        if not self.inside:
            weights, out = definition(query, key, value, *args, **kwargs)
            self.note("sdpa", weights, out, (weights.sum(-1) == 0))
        return SDPA(query, key, value, *args, **kwargs)

    def multi_head(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return the output of torch's multi-head function, and record the weights of a second run that returns
        them.
        """
        options = kwargs | {"need_weights": True, "average_attn_weights": False}
        self.inside += 1
        _, weights = MULTI_HEAD(query, *args, **options)
        assert weights is not None
        result = MULTI_HEAD(query, *args, **kwargs)
        self.inside -= 1
        weights = weights if weights.ndim == 4 else weights[None]
        self.note("multi_head_attention_forward", weights.nan_to_num(0.0), None, weights.isnan().any(-1))
        names = inspect.signature(MULTI_HEAD).parameters
        arguments = dict(zip(names, (query, *args), strict=False)) | kwargs
        if arguments["bias_v"] is None and arguments["value"].ndim == 3:
            has_separate_weights = arguments.get("use_separate_proj_weight")
            weight = arguments["v_proj_weight"] if has_separate_weights else arguments["in_proj_weight"].chunk(3)[2]
            weight, bias = weight.double(), arguments["in_proj_bias"].double().chunk(3)[2]
            values = (arguments["value"].double() @ weight.T + bias).unflatten(-1, (weights.shape[1], -1))
            self.calls[-1].out = self.calls[-1].weights.double() @ values.permute(1, 2, 0, 3)
            self.calls[-1].projection = arguments["out_proj_weight"].double().T
        return result

    def softmax(self, result: Tensor) -> None:
        """Record the result of a softmax as attention weights if the running module is named attention. Inside a
        recorded function, store it for that function.
        """
        if self.inside:
            self.softmaxes.append(result)
            return
        path, module, cross = self.frames[-1]
        if isinstance(module, nn.Softmax) and len(self.frames) > 1:
            path, module, cross = self.frames[-2]
        last = path.rsplit(".", 1)[-1].lower()
        if not CALLED_ATTENTION.search(last) and "att" not in type(module).__name__.lower():
            return
        heads = heads_of(module)
        if result.ndim == 3:
            if heads is None or result.shape[0] % heads:
                self.failures[path] = f"softmax of {tuple(result.shape)}"
                return
            result = result.unflatten(0, (-1, heads))
        # Deformable attention computes weights of points, and has its heads on another axis.
        if result.ndim != 4 or (heads is not None and result.shape[1] != heads):
            self.failures[path] = f"softmax of {tuple(result.shape)}"
            return
        key_tokens = self.key_tokens() if cross else None
        copy = result.detach().clone()
        self.calls.append(Weights(path, "softmax", cross, copy, None, None, *self.tokens(), key_tokens=key_tokens))

    def product(self, factors: tuple[Any, ...], result: Tensor) -> None:
        """Store the result of a matrix product as head output of one of the last two calls if that call's weights are a
        factor.
        """
        for call in self.calls[-2:]:  # a module may compute two softmaxes before it uses either
            if self.inside or call.route != "softmax" or call.out is not None:
                continue
            batch, heads, queries, _ = call.weights.shape
            has_weights = any(isinstance(factor, Tensor) and _same(factor, call.weights) for factor in factors)
            if has_weights and result.shape[:-1] in ((batch, heads, queries), (batch * heads, queries)):
                call.out = result.detach().reshape(batch, heads, queries, -1).clone()

    def maps(self, module: nn.Module, inputs: Any) -> None:
        """Store the weight of a linear map as output projection of the last calls if its input is their concatenated
        head output.
        """
        waiting: list[Any] = []
        for call in reversed(self.calls):
            if call.out is None or call.projection is not None or call.path != self.calls[-1].path:
                break
            waiting.insert(0, call)
        if not waiting or not isinstance(inputs, Tensor):
            return
        if inputs.shape[-1] != waiting[-1].out.shape[1] * waiting[-1].out.shape[-1]:
            return
        # The input belongs to the last call, or to several calls with one sequence each, concatenated to a batch.
        for calls in (waiting[-1:], waiting):
            # (batch, queries, heads, value_dim), or with the queries first
            for order, axis in (((0, 2, 1, 3), 1), ((2, 0, 1, 3), 0)):
                if len({call.out.shape[:2] for call in calls}) > 1:
                    continue
                if _same(inputs, torch.cat([call.out.permute(*order) for call in calls], axis)):
                    weight = module.get_parameter("weight").detach().double()
                    for call in calls:
                        call.projection = weight if type(module).__name__ == "Conv1D" else weight.T
                    return

    def interface(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap the function with which transformers selects an attention implementation, so that calls of the eager
        implementation are recorded.
        """

        def chosen(interface: Any, implementation: str, default: Callable[..., Any]) -> Callable[..., Any]:
            attention = dispatch(interface, implementation, default)

            def called(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Any:
                if implementation != "eager":
                    return attention(module, query, key, value, *args, **kwargs)
                self.inside, before = self.inside + 1, self.softmaxes
                self.softmaxes = []
                try:
                    result = attention(module, query, key, value, *args, **kwargs)
                finally:
                    self.inside -= 1
                    softmaxes, self.softmaxes = self.softmaxes, before
                weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
                if weights is None and len(softmaxes) == 1:
                    weights = softmaxes[0]
                if weights is None:
                    self.failures[self.frames[-1][0]] = "no weights"
                    return result
                mask = kwargs.get("attention_mask", args[0] if args else None)
                hidden = hidden_rows(mask, weights)
                out = result[0].transpose(1, 2) if result[0].ndim == 4 else None
                self.note("interface", weights, out, hidden)
                return result

            return called

        return chosen


def _same(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors have the same values in the same order, up to rounding; shapes may differ."""
    if one.numel() != other.numel():
        return False
    return torch.allclose(one.detach().double().reshape(-1), other.double().reshape(-1), rtol=1e-4, atol=1e-5)


def _is_other_sequence(keys: Any, queries: Any) -> bool:
    """Return whether two arguments of a module are tensors of features of two sequences of different lengths."""
    if not (isinstance(keys, Tensor) and isinstance(queries, Tensor) and keys.ndim == queries.ndim == 3):
        return False
    return keys.shape != queries.shape


def heads_of(module: nn.Module) -> int | None:
    """Return the number of heads according to an attribute of a module; None if it has none."""
    named = {name: value for name, value in vars(module).items() if "head" in name and type(value) is int and value > 0}
    for name in sorted(
        named, key=lambda key: ("kv" in key or "key_value" in key, "num" not in key and "n_" not in key)
    ):
        if "dim" not in name and "size" not in name and "group" not in name:
            return named[name]
    return None


def hidden_rows(mask: Any, weights: Tensor) -> Tensor | None:
    """Return True at the rows whose mask allows no key, `(batch or 1, heads or 1, queries)`; None if the mask is not a
    mask over queries and keys. Eager attention computes uniform weights there.
    """
    if not isinstance(mask, Tensor) or mask.ndim != 4:
        return None
    if mask.shape[-1] < weights.shape[-1]:
        return None
    allowed = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return ~allowed[..., : weights.shape[-1]].any(-1)


def definition(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> tuple[Tensor, Tensor]:
    """Return the weights and the output of `scaled_dot_product_attention` in float64, as torch's documentation defines
    them. Hidden keys, and rows without a visible key, have weight 0.
    """
    q, k, v = (tensor.double() for tensor in (query, key, value))
    if q.ndim == 3:
        q, k, v = (tensor[:, None] for tensor in (q, k, v))
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask[:, None]
    if enable_gqa:
        k, v = (tensor.repeat_interleave(q.shape[-3] // tensor.shape[-3], -3) for tensor in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    visible = torch.ones(scores.shape, dtype=torch.bool)
    if is_causal:
        visible = visible.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        visible = visible & attn_mask
    elif attn_mask is not None:
        scores, visible = scores + attn_mask, visible & (attn_mask > torch.finfo(attn_mask.dtype).min / 2)
    weights = scores.masked_fill(~visible, -torch.inf).softmax(-1).masked_fill(~visible, 0.0).nan_to_num(0.0)
    out = weights @ v
    return weights.reshape(-1, *weights.shape[-3:]), out.reshape(-1, *out.shape[-3:])


PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


@contextmanager
def recorded(model: nn.Module) -> Iterator[Recorder]:
    """Within the context, a `Recorder` records every attention call of a model. Torch's fused fast path is disabled."""
    from transformers.modeling_utils import AttentionInterface

    recorder, hooks = Recorder(model), []

    def enter(path: str, module: nn.Module) -> Callable[..., None]:
        names = list(inspect.signature(module.forward).parameters)

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            arguments = dict(zip(names, args, strict=False)) | kwargs
            first_argument = next(iter(arguments.values()), None)
            cross = any(arguments.get(name) is not None and arguments[name] is not first_argument for name in ELSEWHERE)
            cross = cross or _is_other_sequence(arguments.get("key"), first_argument)
            recorder.frames.append((path, module, cross))
            recorder.read.append(arguments)
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                recorder.maps(module, first_argument)

        return hook

    def leave(_: nn.Module, __: Any, output: Any) -> None:
        recorder.frames.pop()
        recorder.store_states(recorder.read.pop(), output)

    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path, module), with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    dispatch = AttentionInterface.get_interface
    AttentionInterface.get_interface = recorder.interface(dispatch)
    fast_path_enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with recorder:
            yield recorder
    finally:
        torch.backends.mha.set_fastpath_enabled(fast_path_enabled)
        AttentionInterface.get_interface = dispatch
        for hook in hooks:
            hook.remove()
