"""Peers that run on JAX, compiled by jit on CPU: Equinox and Flax NNX. For training, the gradient of a sum is compiled.

Parameters, input and mask are arguments of the compiled function, so that the compiler cannot fold them into constants.
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
    """Return a tensor as a JAX array with the same values and dtype; None stays None."""
    import jax.numpy as jnp

    if tensor is None:
        return None
    if tensor.dtype == torch.bool:
        return jnp.asarray(tensor.numpy())
    return jnp.asarray(tensor.float().numpy(), dtype=str(tensor.dtype).removeprefix("torch."))


def to_torch(array: Any) -> Tensor:
    """Return a JAX array as a float32 tensor."""
    import numpy as np

    return torch.from_numpy(np.array(array, dtype=np.float32))


def _contestant(
    call: Callable[[Any, Any, Any], Any], parameters: Any, named: Callable[[Any], Results], regime: Regime, data: Data
) -> Contestant:
    """Return the contestant that runs `call(parameters, x, mask)`, compiled, alone or with its gradient. `named`
    converts the gradients of the parameters to the oracle's names.
    """
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

    def results(returned: Any) -> Results:
        (_, out), (gradients, x_gradient) = returned
        return {"out": to_torch(out), "x": to_torch(x_gradient), **named(gradients)}

    return Contestant(lambda: jax.block_until_ready(step(parameters, x, mask, upstream)), results)


def equinox(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for `equinox.nn.MultiheadAttention`, mapped over the batch."""
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

    def parameters_of(layer: Any) -> list[Any]:
        linears = (layer.query_proj, layer.key_proj, layer.value_proj, layer.output_proj)
        return [*(linear.weight for linear in linears), *(linear.bias for linear in linears)]

    weights = data.weights
    values = [*weights.qkv.chunk(3), weights.out, *weights.qkv_bias.chunk(3), weights.out_bias]
    arrays, fixed = eqx.partition(eqx.tree_at(parameters_of, layer, [to_jax(value) for value in values]), eqx.is_array)

    def call(arrays: Any, x: Any, mask: Any) -> Any:
        layer = eqx.combine(arrays, fixed)
        if mask is None:
            return jax.vmap(lambda one: layer(one, one, one))(x)
        shape = (mask.shape[0], mask.shape[1], regime.length, regime.length)
        mask = jax.numpy.broadcast_to(mask, shape)
        if shape[1] == 1:
            mask = mask[:, 0]
        mask_axis = 0 if shape[0] > 1 else None
        return jax.vmap(lambda one, seen: layer(one, one, one, mask=seen), (0, mask_axis))(
            x, mask if mask_axis == 0 else mask[0]
        )

    def named(gradients: Any) -> Results:
        tensors = [to_torch(gradient) for gradient in parameters_of(gradients)]
        biases = {"qkv_bias": torch.cat(tensors[4:7]), "out_bias": tensors[7]}
        return {"qkv": torch.cat(tensors[:3]), "out_proj": tensors[3], **biases}

    return _contestant(call, arrays, named, regime, data)


def flax(regime: Regime, data: Data) -> Contestant:
    """Return the contestant for `flax.nnx.MultiHeadAttention`; its state is an argument of the compiled function."""
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
    for projection, weight, bias in zip(
        projections, weights.qkv.split(regime.widths), weights.qkv_bias.split(regime.widths), strict=True
    ):
        projection.kernel[...] = to_jax(weight.T.unflatten(1, (-1, regime.head_dim)))
        projection.bias[...] = to_jax(bias.unflatten(0, (-1, regime.head_dim)))
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
        inputs = [gradients[name] for name in ("query", "key", "value")]
        kernels = [to_torch(gradient["kernel"][...]).flatten(1).T for gradient in inputs]
        biases = [to_torch(gradient["bias"][...]).flatten() for gradient in inputs]
        out = gradients["out"]
        return {
            "qkv": torch.cat(kernels),
            "out_proj": to_torch(out["kernel"][...]).flatten(0, 1).T,
            "qkv_bias": torch.cat(biases),
            "out_bias": to_torch(out["bias"][...]),
        }

    return _contestant(call, state, named, regime, data)
