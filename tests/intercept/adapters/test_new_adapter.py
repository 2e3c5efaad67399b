"""The steps of an adapter for a new engine, in one file: here for an attention function that this test makes up."""

import sys
from types import ModuleType

import torch
from engine_model import HEADS, WIDTH, model_of, require_rows
from torch import nn

import headwise as hw
from headwise.attention.masks.factories import causal
from headwise.intercept.adapters import all_adapters
from headwise.intercept.adapters.engine import Arguments, Engine
from headwise.intercept.attention_call import AttentionCall


def swift_attention(queries, keys, values, *, looks_ahead=True, temperature=1.0, blocks=128):
    """Attention of a library, over tensors `(batch, tokens, heads, features)`."""
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / temperature
    if not looks_ahead:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:]).tril().bool(), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)


def read(name: str, arguments: Arguments) -> AttentionCall:
    """Read a call of `swift_attention`. Other arguments are refused, unless they have their default."""
    arguments.ignore("blocks")
    q, k, v = (arguments.take(each).transpose(1, 2) for each in ("queries", "keys", "values"))
    mask = None if arguments.take("looks_ahead") else causal()
    return AttentionCall(q, k, v, {"mask": mask, "scale": 1 / arguments.take("temperature")})


SWIFT = Engine(modules=("swift.attention",), functions=("swift_attention",), read=read)


def test_a_new_engine_is_observed(monkeypatch):
    library = ModuleType("swift.attention")
    library.swift_attention = swift_attention
    monkeypatch.setitem(sys.modules, "swift.attention", library)
    monkeypatch.setattr(all_adapters.engine_patches, "engines", (*all_adapters.ENGINES, SWIFT))
    model, x = model_of(swift_attention, kv_heads=HEADS), torch.randn(2, 7, WIDTH).double()
    with torch.no_grad(), hw.watch(nn.Sequential(model)) as heads:
        model[0](x, looks_ahead=False, temperature=2.0)
    q, k, v = (tensor.detach().transpose(1, 2) for tensor in model[0].split(x))
    hidden = ~torch.ones(7, 7).tril().bool()
    scores = (q @ k.mT / 2.0).masked_fill(hidden, -torch.inf)
    weights, projection = scores.softmax(-1), model[0].out_proj.weight.detach()
    outs = (weights @ v).transpose(1, 2)
    require_rows(heads, list(weights), list(outs), scores=list(scores), projection=projection)
