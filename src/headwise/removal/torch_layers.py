"""Torch's attention layers in a model, replaced by headwise's, which can have fewer heads than fill their width."""

from copy import deepcopy

from torch import nn

from headwise.nn.torch_compat import MultiheadAttention


def has_torch_layers(model: nn.Module) -> bool:
    """Return True if a model contains torch's `nn.MultiheadAttention`."""
    return any(type(module) is nn.MultiheadAttention for module in model.modules())


def with_own_layers(model: nn.Module) -> nn.Module:
    """Return a model that computes the same with `headwise.compat.MultiheadAttention` in place of torch's layer, and
    shares all parameters and buffers with `model`; `model` itself if it has none of torch's layers.
    """
    if not has_torch_layers(model):
        return model
    shared = {id(tensor): tensor for tensor in (*model.parameters(), *model.buffers())}
    copy = deepcopy(model, shared)
    replace_torch_layers(copy)
    return copy


def replace_torch_layers(model: nn.Module) -> None:
    """Replace torch's attention layers in a model, in place, by `headwise.compat.MultiheadAttention` with the same
    parameters. A model that is itself such a layer is not changed.
    """
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.MultiheadAttention:
                setattr(parent, name, _own_layer(child))


def _own_layer(layer: nn.MultiheadAttention) -> MultiheadAttention:
    """Return a layer of headwise with the parameters of torch's layer."""
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
