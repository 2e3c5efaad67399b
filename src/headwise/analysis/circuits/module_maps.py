"""Linear maps of one attention module: its heads' weights, checked against what the module computes."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.circuits.norms import norm_map
from headwise.analysis.circuits.rotation import Rotation, layer_rotation, module_rotation
from headwise.analysis.circuits.trace import ModuleCall, RunTrace, is_norm
from headwise.errors import InputError
from headwise.families.registry import head_module, softcap_of
from headwise.nn.multihead import MultiHeadAttention
from headwise.shapes import Bool, Float

TOLERANCE = 1e-5
"""Largest relative difference that counts as rounding: some modules of a model in float64 compute in float32."""

ROUNDING = 1e-6
"""Largest error of the logarithm of an attention weight that was computed in float32."""

SMALLEST_WEIGHT = 1e-30
"""Weights below this number are not compared: in float32 they are rounded to 0."""

LEAST_SIGNAL = 20.0
"""Least differences of the logarithms of the weights, in multiples of rounding, by which scores can be checked."""


def head_weights(model: nn.Module, path: str) -> tuple[dict[str, Tensor], str]:
    """Return the query, key, value and output weights of the attention module at `path`, split by head, and the path of
    its output projection. `model` is a copy made by `double_copy`. Query head h uses key/value head
    `h * kv_heads // heads`.

        query  (heads, head_dim, width)         from the module's input to each head's query
        key    (kv_heads, head_dim, width)
        value  (kv_heads, value_dim, width)
        output (heads, width, value_dim)        each head's slice of the output projection

    Biases are `query_bias`, `key_bias`, `value_bias`, without the last axis, and `output_bias`, `(width,)`; 0 where the
    module has none.
    """
    module = head_module(model, path)
    tensors: dict[str, Tensor] = {}
    for parameter, blocks in module.parameters(model):
        if parameter.ndim <= 2:
            suffix = "_bias" if parameter.ndim == 1 else ""
            tensors |= {f"{each.part}{suffix}": each.view(parameter.detach()) for each in blocks if each.part}
    if missing := {"query", "key", "value", "output"} - tensors.keys():
        got = f"none for the {min(missing)} in {path}"
        raise InputError("model", expected="one matrix for queries, keys and values each", got=got)
    for part in ("query", "key", "value"):
        tensors.setdefault(f"{part}_bias", torch.zeros_like(tensors[part][..., 0]))
    output = tensors["output"].mT
    bias = getattr(model.get_submodule(module.output), "bias", None)
    output_bias = output.new_zeros(output.shape[1]) if bias is None else bias.detach()
    return tensors | {"output": output, "output_bias": output_bias}, module.output


@dataclass(frozen=True, eq=False)
class ModuleMaps:
    """Matrices of the heads of one attention module. They map the residual stream to queries, keys and values, and head
    outputs back to the stream. The norms before and after attention are included with their weight and mean
    subtraction, but without the division by the root mean square.

    Attributes:
        path: path of the module.
        query, key, value: from the residual stream to the query of each head, and to each key and value.
        output: from each head's output to the residual stream.
        scale: factor of each head's scores.
        why_no_qk: what makes the scores of the module no bilinear form; None if they are one.
    """

    path: str
    query: Float[Tensor, "heads head_dim width"]
    key: Float[Tensor, "kv_heads head_dim width"]
    value: Float[Tensor, "kv_heads value_dim width"]
    output: Float[Tensor, "heads width value_dim"]
    scale: Float[Tensor, " heads"]
    rotation: Rotation
    why_no_qk: str | None


class PlacedModule(NamedTuple):
    """Attention module with its linear maps, its input in a recorded run of the model, and two recorded module calls.
    `projection` is the call of its output projection. `written` is the call whose result is added to the residual
    stream: the call of a norm after the projection if there is one, otherwise `projection` itself.

    Attributes:
        maps: its linear maps, with norms folded in.
        unfolded: its linear maps from the module's input to its output, without norms.
        input: its input from the residual stream in the run, before a norm.
        written: the call whose result is added to the stream.
        projection: the call of the output projection, which `written` is too unless a norm follows it.
    """

    maps: ModuleMaps
    unfolded: ModuleMaps
    input: Float[Tensor, "batch length width"]
    written: ModuleCall
    projection: ModuleCall


def placed_modules(trace: RunTrace) -> list[PlacedModule]:
    """Return every attention module with its linear maps, which are read from its weights. The modules are in the order
    in which a recorded run called them. Raise `InputError` unless the maps reproduce the head outputs and the module
    outputs of this run.
    """
    return [_placed_module(trace, path) for path in trace.weights]


def _placed_module(trace: RunTrace, path: str) -> PlacedModule:
    """Return the attention module at `path` with its linear maps, after checking that the maps reproduce the module's
    outputs in the recorded run.
    """
    (weights, output_path), call = head_weights(trace.model, path), trace.call_of(path)
    shape = (1, trace.weights[path].shape[1])
    if call is None or call.input is None or call.input.ndim != 3 or call.input.shape[:2] != shape:
        got = path if call is None or call.input is None else f"{tuple(call.input.shape)} in {path}"
        raise InputError("model", expected="attention modules that are called with (1, length, width)", got=got)
    before = trace.norm_before(call.input)
    projection = trace.call_of(output_path) or call
    _require_values(trace, path, weights, call.input, projection)
    after = trace.norm_after(projection.result, call.result)
    query, key, value, output = (weights[part] for part in ("query", "key", "value", "output"))
    unfolded = ModuleMaps(path, query, key, value, output, *_scores(trace, weights, call))
    if before is not None:
        norm = norm_map(before)
        query, key, value = norm.after(query), norm.after(key), norm.after(value)
    if after is not None:
        output = norm_map(after).before(output)
    stream = call.input if before is None else before.input
    assert stream is not None
    maps = replace(unfolded, query=query, key=key, value=value, output=output)
    return PlacedModule(maps, unfolded, stream, after or projection, projection)


def _require_values(
    trace: RunTrace, path: str, weights: Mapping[str, Tensor], inputs: Tensor, projection: ModuleCall
) -> None:
    """Raise `InputError` unless the weights of an attention module reproduce what a run of the model recorded. The
    recorded attention weights times the values must be the recorded head outputs. The output weights times the head
    outputs must be the recorded result of the call `projection`.
    """
    attention, recorded = trace.weights[path], trace.outputs.get(path)
    group = len(weights["query"]) // len(weights["value"])
    values = torch.einsum("gdw,lw->gld", weights["value"], inputs[0]) + weights["value_bias"][:, None]
    out = attention @ values.repeat_interleave(group, 0) if attention.shape[-1] == values.shape[1] else None
    if out is None or recorded is None or not _is_close(out, recorded):
        got = f"head outputs of {path} that are not its attention weights times W_V x"
        raise InputError("model", expected="values that are a linear map of the module's input", got=got)
    written = torch.einsum("hwd,hld->lw", weights["output"], out) + weights["output_bias"]
    if projection.result is None or not _is_close(written[None], projection.result):
        got = f"an output of {projection.path} that is not the sum of W_O times the head outputs"
        raise InputError("model", expected="an output projection of all heads", got=got)


def _is_close(one: Tensor, other: Tensor) -> bool:
    """Return True if two tensors of vectors are equal up to rounding. The difference between two vectors may have a
    norm of at most `TOLERANCE` times the largest vector norm in `other`, separately for each head (or sequence).
    """
    if one.shape != other.shape:
        return False
    limit = TOLERANCE * other.norm(dim=-1).amax(-1, keepdim=True)
    return bool(((one - other).norm(dim=-1) <= limit).all())


def _scores(
    trace: RunTrace, weights: Mapping[str, Tensor], call: ModuleCall
) -> tuple[Float[Tensor, " heads"], Rotation, str | None]:
    """Determine how an attention module computes its scores. Return the scale of each head, the rotation of queries and
    keys by position, and None. If the scores are not the scale times the products of rotated queries and keys, the
    third result is a reason instead of None.
    """
    assert call.input is not None
    path, ones, rotation = call.path, torch.ones(len(weights["query"])), _rotation(trace, call)
    if rotation is None:
        return ones, Rotation(), f"the rotation of {path}, which is unknown"
    inside = (each for each in trace.calls if each.path.startswith(f"{path}.") and is_norm(each.module))
    if norm := next(inside, None):
        return ones, rotation, f"the norm {norm.path} of queries or keys"
    positions = torch.arange(call.input.shape[1], device=call.input.device)
    query = torch.einsum("hdw,lw->hld", weights["query"], call.input[0]) + weights["query_bias"][:, None]
    key = torch.einsum("gdw,lw->gld", weights["key"], call.input[0]) + weights["key_bias"][:, None]
    group = len(query) // len(key)
    keys = rotation.rotate(key, positions).repeat_interleave(group, 0)
    products = rotation.rotate(query, positions) @ keys.mT
    has_zeros = [(weights[part] == 0).flatten(1).all(1) for part in ("query", "key")]
    is_zero = has_zeros[0] | has_zeros[1].repeat_interleave(group)
    scale, reason = _scale(call, products, trace.weights[path], is_zero)
    if reason is None and rotation.depends_on_length():
        reason = f"the rotation in {path}, which depends on the length of the text"
    return scale, rotation, reason


def _rotation(trace: RunTrace, call: ModuleCall) -> Rotation | None:
    """Return the rotation by position that a call of an attention module applies to its queries and keys. Return None
    if the module receives cosines and sines as an argument, and the recorded run does not show how they follow from the
    positions.
    """
    if isinstance(call.module, MultiHeadAttention):
        return Rotation() if call.module.rotary is None else layer_rotation(call.module.rotary)
    tables = call.kwargs.get("position_embeddings")
    if tables is None:
        return Rotation()
    for each in trace.calls:
        if isinstance(each.output, tuple) and each.output[0] is tables[0]:
            assert call.input is not None
            return module_rotation(each.module, each.args, each.kwargs, call.input.shape[1])
    return None


def _scale(
    call: ModuleCall,
    products: Float[Tensor, "heads length length"],
    weights: Float[Tensor, "heads length length"],
    is_zero: Bool[Tensor, " heads"],
) -> tuple[Float[Tensor, " heads"], str | None]:
    """Determine a scale s for each head: the softmax of s times `products` (dot products of queries and keys) must be
    equal to the recorded attention `weights`. Return the scales and None. If there is no such scale, or attention is
    too uniform to determine it, return ones and the reason.

    The factor is fitted to the weights. A number that the module states or its head_dim implies is used instead if the
    weights follow from it. Scores may be capped, c tanh(score / c), as in Gemma 2. The weights of a head whose QK
    matrix is 0 (`is_zero`) may be uniform, since it is 0 with every factor.
    """
    visible = weights > SMALLEST_WEIGHT
    largest = weights.argmax(-1, keepdim=True)

    def relative(scores: Tensor) -> Tensor:
        """Subtract from the scores of each query the score of the key with the largest attention weight. Return 0 for
        keys that the query does not attend to.
        """
        return torch.where(visible, scores - scores.gather(-1, largest), 0.0).flatten(1)

    seen, plain = relative(weights.log()), relative(products)
    rounding = ROUNDING * float(visible[0].sum()) ** 0.5
    if bool((seen.norm(dim=1) < LEAST_SIGNAL * rounding)[~is_zero].any()):
        reason = f"attention in {call.path} that is too uniform to show the factor of its scores"
        return torch.ones(len(products)), reason
    module, cap = call.module, softcap_of(call.module)
    head_dim, options = getattr(module, "head_dim", None), getattr(module, "scores", None)
    stated = [getattr(module, "scaling", None), getattr(module, "scale", None), getattr(options, "scale", None)]
    stated += [head_dim**-0.5 if isinstance(head_dim, int) else None]
    fitted = ((plain * seen).sum(1) / plain.square().sum(1)).nan_to_num(1.0, 1.0, 1.0)
    for scale in [*(torch.full_like(fitted, each) for each in stated if isinstance(each, float)), fitted]:
        scores = products * scale[:, None, None]
        expected = relative(scores if cap is None else cap * (scores / cap).tanh())
        if bool(((expected - seen).norm(dim=1) <= TOLERANCE * seen.norm(dim=1) + rounding).all()):
            return scale, None
    reason = f"scores of {call.path} that do not follow from W_Q x times W_K x, such as with a bias by position"
    return torch.ones(len(products)), reason
