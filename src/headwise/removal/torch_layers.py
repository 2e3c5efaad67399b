"""Torch's attention layers in a model, replaced by headwise's, which can have fewer heads than fill their width."""

from copy import deepcopy

from torch import nn

from headwise.compat import MultiheadAttention
from headwise.errors import InputError


def with_own_layers(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which each `torch.nn.MultiheadAttention` is replaced by headwise's layer,
    `headwise.compat.MultiheadAttention`. The copy has the same outputs, and shares all parameters and buffers with
    `model`. A model without such layers is returned unchanged, not copied.
    """
    if not any(type(module) is nn.MultiheadAttention for module in model.modules()):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    return replace_torch_layers(deepcopy(model, shared))


def replace_torch_layers(model: nn.Module) -> nn.Module:
    """Replace each of torch's attention layers in a model, in place, by a `headwise.compat.MultiheadAttention` with the
    same parameters. Return the model or, if the model is itself such a layer, its replacement.
    """
    if type(model) is nn.MultiheadAttention:
        return _own_layer(model, "model")
    paths: dict[int, str] = {}
    for path, layer in list(model.named_modules(remove_duplicate=False)):
        if type(layer) is nn.MultiheadAttention:
            if first := paths.get(id(layer)):
                expected = "a layer of its own in each place"
                raise InputError("model", expected=expected, got=f"one for {first} and {path}")
            paths[id(layer)] = path
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, _own_layer(layer, path))
    return model


def _own_layer(layer: nn.MultiheadAttention, path: str) -> MultiheadAttention:
    """Return a `headwise.compat.MultiheadAttention` with the options and the parameters of torch's layer, not
    copied.
    """
    if layer._forward_hooks or layer._forward_pre_hooks or layer._backward_hooks:
        raise InputError("model", expected="torch's attention layers without hooks", got=f"a hook of {path}")
    own = MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        layer.in_proj_bias is not None,
        layer.bias_k is not None,
        layer.add_zero_attn,
        layer.kdim,
        layer.vdim,
        layer.batch_first,
        device="meta",
    )
    own.out_proj = layer.out_proj
    for name in own._parameters:  # weights of the projections, and learned keys and values
        setattr(own, name, getattr(layer, name))
    return own.train(layer.training)
