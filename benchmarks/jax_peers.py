"""Peers that run on JAX, under jit on CPU: Equinox and Flax NNX. Training is a compiled gradient of a sum.

Parameters, input and mask are arguments of the compiled function, so that nothing is folded into it.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.contestants import Contestant, LeftOutError
from benchmarks.oracle import Results
from benchmarks.regime import Data, Regime
from benchmarks.torch_peers import require_room


def to_jax(tensor: Tensor | None) -> Any:
    """The same numbers in the same dtype."""
    import jax.numpy as jnp

    if tensor is None:
        return None
    if tensor.dtype == torch.bool:
        return jnp.asarray(tensor.numpy())
    return jnp.asarray(tensor.float().numpy(), dtype=str(tensor.dtype).removeprefix("torch."))


def to_torch(array: Any) -> Tensor:
    """The same numbers, in float32."""
    import numpy as np

    return torch.from_numpy(np.array(array, dtype=np.float32))


def _contestant(
    call: Callable[[Any, Any, Any], Any], parameters: Any, named: Callable[[Any], Results], regime: Regime, data: Data
) -> Contestant:
    """`call(parameters, x, mask)`, compiled, alone or with its gradient; `named` gives those the oracle's names."""
    import jax
    import jax.numpy as jnp

    x, mask = to_jax(data.x), to_jax(regime.allowed())
    if not regime.training:
        forward = jax.jit(call)
        return Contestant(lambda: forward(parameters, x, mask).block_until_ready(), lambda out: {"out": to_torch(out)})

    def loss(parameters: Any, x: Any, mask: Any, upstream: Any) -> Any:
        out = call(parameters, x, mask)
        return jnp.sum(out.astype("float32") * upstream.astype("float32")), out

    step, upstream = jax.jit(jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)), to_jax(data.upstream)

    def results(found: Any) -> Results:
        (_, out), (gradients, of_x) = found
        return {"out": to_torch(out), "x": to_torch(of_x), **named(gradients)}

    return Contestant(lambda: jax.block_until_ready(step(parameters, x, mask, upstream)), results)


def equinox(regime: Regime, data: Data) -> Contestant:
    """`equinox.nn.MultiheadAttention`, mapped over the batch."""
    require_room(regime)
    if regime.kv_heads is not None:
        raise LeftOutError("has no grouped heads")
    import equinox as eqx
    import jax

    layer = eqx.nn.MultiheadAttention(
        regime.heads,
        regime.embed,
        use_query_bias=True,
        use_key_bias=True,
        use_value_bias=True,
        use_output_bias=True,
        dtype=to_jax(data.x).dtype,
        key=jax.random.key(0),
    )

    def maps(layer: Any) -> list[Any]:
        linears = (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj)
        return [*(each.weight for each in linears), *(each.bias for each in linears)]

    weights = data.weights
    given = [*weights.qkv.chunk(3), weights.out, *weights.qkv_bias.chunk(3), weights.out_bias]
    arrays, fixed = eqx.partition(eqx.tree_at(maps, layer, [to_jax(each) for each in given]), eqx.is_array)

    def call(arrays: Any, x: Any, mask: Any) -> Any:
        layer = eqx.combine(arrays, fixed)
        if mask is None:
            return jax.vmap(lambda one: layer(one, one, one))(x)
        shape = (mask.shape[0], mask.shape[1], regime.length, regime.length)
        mask = jax.numpy.broadcast_to(mask, shape)
        if shape[1] == 1:
            mask = mask[:, 0]
        over = 0 if shape[0] > 1 else None
        return jax.vmap(lambda one, seen: layer(one, one, one, mask=seen), (0, over))(x, mask if over == 0 else mask[0])

    def named(gradients: Any) -> Results:
        found = [to_torch(each) for each in maps(gradients)]
        biases = {"qkv_bias": torch.cat(found[4:7]), "out_bias": found[7]}
        return {"qkv": torch.cat(found[:3]), "out_proj": found[3], **biases}

    return _contestant(call, arrays, named, regime, data)


def flax(regime: Regime, data: Data) -> Contestant:
    """`flax.nnx.MultiHeadAttention`, its state an argument of the compiled function."""
    require_room(regime)
    import jax.numpy as jnp
    from flax import nnx

    dtype = to_jax(data.x).dtype
    layer = nnx.MultiHeadAttention(
        regime.heads,
        regime.embed,
        num_kv_heads=regime.kv_heads,
        dtype=dtype,
        param_dtype=dtype,
        deterministic=True,
        decode=False,
        rngs=nnx.Rngs(0),
    )
    weights, projections = data.weights, (layer.query, layer.key, layer.value)
    for map_, weight, bias in zip(
        projections, weights.qkv.split(regime.widths), weights.qkv_bias.split(regime.widths), strict=True
    ):
        map_.kernel[...] = to_jax(weight.T.unflatten(1, (-1, regime.head_dim)))
        map_.bias[...] = to_jax(bias.unflatten(0, (-1, regime.head_dim)))
    layer.out.kernel[...] = to_jax(weights.out.T.unflatten(0, (-1, regime.head_dim)))
    layer.out.bias[...] = to_jax(weights.out_bias)
    definition, state = nnx.split(layer)

    def call(state: Any, x: Any, mask: Any) -> Any:
        if regime.mask == "causal":
            return nnx.merge(definition, state)(x, is_causal=True)
        if mask is not None:
            mask = jnp.broadcast_to(mask, (*mask.shape[:2], regime.length, regime.length))
        return nnx.merge(definition, state)(x, mask=mask)

    def named(gradients: Any) -> Results:
        maps = [gradients[name] for name in ("query", "key", "value")]
        kernels = [to_torch(each["kernel"][...]).flatten(1).T for each in maps]
        biases = [to_torch(each["bias"][...]).flatten() for each in maps]
        out = gradients["out"]
        return {
            "qkv": torch.cat(kernels),
            "out_proj": to_torch(out["kernel"][...]).flatten(0, 1).T,
            "qkv_bias": torch.cat(biases),
            "out_bias": to_torch(out["bias"][...]),
        }

    return _contestant(call, state, named, regime, data)
