"""The steps of an adapter for a new engine, in one file: here for an attention function that this test makes up."""

import sys
from types import ModuleType

import torch
from engine_model import HEADS, WIDTH, model_of, require_rows
from torch import nn

import headwise as hw
from headwise.attention.masks.factories import causal
from headwise.intercept.adapters import all_engines
from headwise.intercept.adapters.engine import TOKENS_FIRST, Arguments, Engine, EngineCall


def swift_attention(queries, keys, values, *, looks_ahead=True, temperature=1.0, blocks=128):
    """Attention of a library, over tensors `(batch, tokens, heads, features)`."""
    scores = torch.einsum("bqhd,bkhd->bhqk", queries, keys) / temperature
    if not looks_ahead:
        scores = scores.masked_fill(~torch.ones(scores.shape[2:]).tril().bool(), -torch.inf)
    return torch.einsum("bhqk,bkhd->bqhd", scores.softmax(-1), values)


def read(name: str, arguments: Arguments) -> EngineCall:
    """Read a call of `swift_attention`. Other arguments are refused, unless they have their default."""
    arguments.ignore("blocks")
    q, k, v = (arguments.take(each).transpose(1, 2) for each in ("queries", "keys", "values"))
    options = {
        "mask": None if arguments.take("looks_ahead") else causal(),
        "scale": 1 / arguments.take("temperature"),
    }
    return EngineCall(q, k, v, options, TOKENS_FIRST)


SWIFT = Engine(modules=("swift.attention",), functions=("swift_attention",), read=read)


def test_a_new_engine_is_observed(monkeypatch):
    library = ModuleType("swift.attention")
    library.swift_attention = swift_attention
    monkeypatch.setitem(sys.modules, "swift.attention", library)
    monkeypatch.setattr(all_engines.engine_patches, "engines", (*all_engines.ENGINES, SWIFT))
    model, x = model_of(swift_attention, kv_heads=HEADS), torch.randn(2, 7, WIDTH).double()
    options = {"looks_ahead": False, "temperature": 2.0}
    with torch.no_grad(), hw.watch(nn.Sequential(model)) as heads:
        model[0](x, **options)
    q, k, v = (tensor.transpose(1, 2) for tensor in model[0].split(x))
    hidden = ~torch.ones(7, 7).tril().bool()
    weights = (q @ k.mT / 2.0).masked_fill(hidden, -torch.inf).softmax(-1).detach()
    require_rows(heads, list(weights), list((weights @ v.detach()).transpose(1, 2)))
