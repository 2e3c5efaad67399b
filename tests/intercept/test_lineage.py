"""Tensors are followed through the functions that a model calls, and through no others."""

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

import headwise as hw
import tiny
from headwise.intercept.trace.lineage import Lineage
from headwise.intercept.trace.projection import output_projection


class Functions(TorchFunctionMode):
    """Mode that lists the functions called in it, other than properties such as the shape of a tensor."""

    def __init__(self):
        super().__init__()
        self.called = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.called += [function.__name__] if function.__name__ != "__get__" else []
        return function(*args, **(kwargs or {}))


@torch.no_grad()
def test_only_functions_that_the_model_calls_are_recorded(monkeypatch):
    model, recorded = tiny.model("encoder"), []
    record = Lineage.record

    def counted(self, call, *arguments):
        recorded.append(call.function.__name__)
        record(self, call, *arguments)

    monkeypatch.setattr(Lineage, "record", counted)
    with hw.watch(model):
        model(tiny.TOKENS)
    with Functions() as functions:
        model(tiny.TOKENS)
    own = [name for name in functions.called if name not in ("scaled_dot_product_attention", "size", "dim")]
    assert 0 < len(recorded) <= len(own)
    assert not set(recorded) - set(own)


def test_modules_are_listed_once_for_all_layers(monkeypatch):
    model, calls = tiny.model("encoder"), []
    named_modules = nn.Module.named_modules

    def counted(self, *arguments, **options):
        calls.extend([self] if self is model else [])
        return named_modules(self, *arguments, **options)

    modules = dict(model.named_modules())
    monkeypatch.setattr(nn.Module, "named_modules", counted)
    for layer in range(2):
        found = output_projection(modules, f"encoder.layer.{layer}.attention.self", 48)
        assert found.path == f"encoder.layer.{layer}.attention.output.dense"
    assert not calls
