"""The weights that eager attention computes, recorded while a model runs, without anything of headwise.

    what a module calls                   what is recorded
    transformers' attention interface     the weights that its function returns
    `scaled_dot_product_attention`        its definition in float64, from its arguments
    `F.multi_head_attention_forward`      the weights that it returns where they are asked for
    softmax over four axes                its result, in modules that are called attention

A call belongs to the innermost module that runs.
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
"""Of the last part of a module's path."""
ELSEWHERE = ("key_value_states", "encoder_hidden_states", "cross_attention_states", "context")


NOT_TEXT = ("pixel_values", "input_features", "input_values")


@dataclass
class Weights:
    """What one call of attention computed.

    Attributes:
        path: the innermost module that ran.
        route: how attention was called.
        cross: whether that module was told to attend to something else than its own input.
        weights: of the keys, `(batch, heads, queries, keys)`.
        out: of every head, `(batch, heads, queries, value_dim)`, where it is known.
        hidden: rows that see no key, `(batch or 1, heads or 1, queries)`, where a mask says so.
        tokens: ids that the innermost module which reads any was called with.
        padding: which of them are real, where that module, or one inside of it, was told.
        projection: what maps the heads' outputs, side by side, to the model's width, `(heads * value_dim, width)`: the
            first linear map whose input they are.
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


class Recorder(TorchFunctionMode):
    """Records every call of attention of a model, in order."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.calls: list[Weights] = []
        self.frames: list[tuple[str, nn.Module, bool]] = []
        self.read: list[dict[str, Any]] = []
        self.inside = 0
        self.softmaxes: list[Tensor] = []
        self.failures: dict[str, str] = {}

    # -- what is met --------------------------------------------------------------------------------------------------

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
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
        """Record a call."""
        path, _, cross = self.frames[-1] if self.frames else ("", None, False)
        optional = [None if each is None else each.detach().clone() for each in (out, hidden, *self.tokens())]
        self.calls.append(Weights(path, route, cross, weights.detach().clone(), *optional))

    def tokens(self) -> tuple[Tensor | None, Tensor | None]:
        """What the modules that run read: tokens, and which of them are real."""
        real = None
        for given in reversed(self.read):
            mask, ids = given.get("attention_mask"), given.get("input_ids")
            if real is None and isinstance(mask, Tensor) and mask.ndim == 2:
                real = mask.bool()
            if isinstance(ids, Tensor):
                return ids, real
            decodes = given.get("inputs_embeds") is not None and given.get("encoder_hidden_states") is not None
            if decodes or any(given.get(name) is not None for name in NOT_TEXT):
                break
        return None, real

    def sdpa(self, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Torch's attention, and its definition where it is not part of a function that says its weights."""
        if not self.inside:
            weights, out = definition(query, key, value, *args, **kwargs)
            self.note("sdpa", weights, out, (weights.sum(-1) == 0))
        return SDPA(query, key, value, *args, **kwargs)

    def multi_head(self, query: Tensor, *args: Any, **kwargs: Any) -> Any:
        """Torch's attention layer, once more with weights."""
        asked = kwargs | {"need_weights": True, "average_attn_weights": False}
        self.inside += 1
        _, weights = MULTI_HEAD(query, *args, **asked)
        assert weights is not None
        result = MULTI_HEAD(query, *args, **kwargs)
        self.inside -= 1
        weights = weights if weights.ndim == 4 else weights[None]
        self.note("multi_head_attention_forward", weights.nan_to_num(0.0), None, weights.isnan().any(-1))
        names = inspect.signature(MULTI_HEAD).parameters
        given = dict(zip(names, (query, *args), strict=False)) | kwargs
        if given["bias_v"] is None and given["value"].ndim == 3:
            apart = given.get("use_separate_proj_weight")
            weight = given["v_proj_weight"] if apart else given["in_proj_weight"].chunk(3)[2]
            weight, bias = weight.double(), given["in_proj_bias"].double().chunk(3)[2]
            values = (given["value"].double() @ weight.T + bias).unflatten(-1, (weights.shape[1], -1))
            self.calls[-1].out = self.calls[-1].weights.double() @ values.permute(1, 2, 0, 3)
            self.calls[-1].projection = given["out_proj_weight"].double().T
        return result

    def softmax(self, result: Tensor) -> None:
        """A softmax, which is attention in modules that are called so."""
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
        # Deformable attention weighs points, and its heads stand on another axis.
        if result.ndim != 4 or (heads is not None and result.shape[1] != heads):
            self.failures[path] = f"softmax of {tuple(result.shape)}"
            return
        self.calls.append(Weights(path, "softmax", cross, result.detach().clone(), None, None, *self.tokens()))

    def product(self, factors: tuple[Any, ...], result: Tensor) -> None:
        """A product, which gives the output of one of the last softmaxes where that is a factor."""
        for call in self.calls[-2:]:  # a module may have two, of which both are computed before either is used
            if self.inside or call.route != "softmax" or call.out is not None:
                continue
            batch, heads, queries, _ = call.weights.shape
            own = any(isinstance(each, Tensor) and _same(each, call.weights) for each in factors)
            if own and result.shape[:-1] in ((batch, heads, queries), (batch * heads, queries)):
                call.out = result.detach().reshape(batch, heads, queries, -1).clone()

    def maps(self, module: nn.Module, given: Any) -> None:
        """A linear map is called, which projects the output of the last calls where that is its input."""
        waiting: list[Any] = []
        for call in reversed(self.calls):
            if call.out is None or call.projection is not None or call.path != self.calls[-1].path:
                break
            waiting.insert(0, call)
        if not waiting or not isinstance(given, Tensor):
            return
        if given.shape[-1] != waiting[-1].out.shape[1] * waiting[-1].out.shape[-1]:
            return
        for calls in (waiting[-1:], waiting):  # one call, or sequences one after the other in one batch
            # (batch, queries, heads, value_dim), or with the queries first
            for order, axis in (((0, 2, 1, 3), 1), ((2, 0, 1, 3), 0)):
                if len({call.out.shape[:2] for call in calls}) > 1:
                    continue
                if _same(given, torch.cat([call.out.permute(*order) for call in calls], axis)):
                    weight = module.get_parameter("weight").detach().double()
                    for call in calls:
                        call.projection = weight if type(module).__name__ == "Conv1D" else weight.T
                    return

    def interface(self, dispatch: Callable[..., Any]) -> Callable[..., Any]:
        """Transformers' choice of a function, wrapped."""

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
                    found, self.softmaxes = self.softmaxes, before
                weights = result[1] if isinstance(result, tuple) and len(result) > 1 else None
                if weights is None and len(found) == 1:
                    weights = found[0]
                if weights is None:
                    self.failures[self.frames[-1][0]] = "no weights"
                    return result
                given = kwargs.get("attention_mask", args[0] if args else None)
                hidden = hidden_rows(given, weights)
                out = result[0].transpose(1, 2) if result[0].ndim == 4 else None
                self.note("interface", weights, out, hidden)
                return result

            return called

        return chosen


def _same(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors hold the same numbers in the same order, but for rounding."""
    if one.numel() != other.numel():
        return False
    return torch.allclose(one.detach().double().reshape(-1), other.double().reshape(-1), rtol=1e-4, atol=1e-5)


def heads_of(module: nn.Module) -> int | None:
    """How many heads a module says it has."""
    named = {name: value for name, value in vars(module).items() if "head" in name and type(value) is int and value > 0}
    for name in sorted(
        named, key=lambda each: ("kv" in each or "key_value" in each, "num" not in each and "n_" not in each)
    ):
        if "dim" not in name and "size" not in name and "group" not in name:
            return named[name]
    return None


def hidden_rows(mask: Any, weights: Tensor) -> Tensor | None:
    """The rows without a key, of which eager attention makes an even row."""
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
    """The weights and the output of `scaled_dot_product_attention`, as torch's documentation defines it, in float64."""
    q, k, v = (each.double() for each in (query, key, value))
    if q.ndim == 3:
        q, k, v = (each[:, None] for each in (q, k, v))
        if attn_mask is not None and attn_mask.ndim == 3:
            attn_mask = attn_mask[:, None]
    if enable_gqa:
        k, v = (each.repeat_interleave(q.shape[-3] // each.shape[-3], -3) for each in (k, v))
    scores = q @ k.mT * (q.shape[-1] ** -0.5 if scale is None else scale)
    seen = torch.ones(scores.shape, dtype=torch.bool)
    if is_causal:
        seen = seen.tril()
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        seen = seen & attn_mask
    elif attn_mask is not None:
        scores, seen = scores + attn_mask, seen & (attn_mask > torch.finfo(attn_mask.dtype).min / 2)
    weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).masked_fill(~seen, 0.0).nan_to_num(0.0)
    out = weights @ v
    return weights.reshape(-1, *weights.shape[-3:]), out.reshape(-1, *out.shape[-3:])


PRODUCTS = (torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm)
SOFTMAXES = (F.softmax, torch.softmax, Tensor.softmax, torch.special.softmax)


@contextmanager
def recorded(model: nn.Module) -> Iterator[Recorder]:
    """Within the context, what a model's attention computes is recorded."""
    from transformers.modeling_utils import AttentionInterface

    recorder, hooks = Recorder(model), []

    def enter(path: str, module: nn.Module) -> Callable[..., None]:
        names = list(inspect.signature(module.forward).parameters)

        def hook(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
            given = dict(zip(names, args, strict=False)) | kwargs
            own = next(iter(given.values()), None)
            cross = any(given.get(name) is not None and given[name] is not own for name in ELSEWHERE)
            recorder.frames.append((path, module, cross))
            recorder.read.append(given)
            if isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D":
                recorder.maps(module, own)

        return hook

    def leave(*_: Any) -> None:
        recorder.frames.pop()
        recorder.read.pop()

    for path, module in model.named_modules():
        hooks.append(module.register_forward_pre_hook(enter(path, module), with_kwargs=True))
        hooks.append(module.register_forward_hook(leave, always_call=True))
    dispatch = AttentionInterface.get_interface
    AttentionInterface.get_interface = recorder.interface(dispatch)
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with recorder:
            yield recorder
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)
        AttentionInterface.get_interface = dispatch
        for hook in hooks:
            hook.remove()
