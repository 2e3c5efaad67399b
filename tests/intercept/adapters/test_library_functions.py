"""Functions of engines are intercepted whatever their parameters are, and in which way they are defined."""

import functools
import inspect
import sys
from types import ModuleType

import pytest
import torch
from engine_model import HEADS, WIDTH, model_of
from torch import nn

import headwise as hw
from headwise.intercept.adapters import all_adapters
from headwise.intercept.adapters.engine import Arguments, Engine
from headwise.intercept.attention_call import AttentionCall


def attention(q, k, v):
    """Softmax attention over `(batch, tokens, heads, features)`."""
    return torch.einsum("bhqk,bkhd->bqhd", torch.einsum("bqhd,bkhd->bhqk", q, k).mul(0.4).softmax(-1), v)


def defined_in_a_closure():
    scale = 1.0

    def attend(q, k, v, *, times=1.0):
        return attention(q, k, v) * scale * times

    return attend


def decorated(function):
    @functools.wraps(function)
    def wrapper(*args, **kwargs):
        return function(*args, **kwargs)

    return wrapper


def with_all_kinds(q, /, k, *others, times, **named):
    return attention(q, k, *others) * times


FUNCTIONS = {
    "plain": (attention, {}),
    "closure": (defined_in_a_closure(), {"times": 2.0}),
    "decorated": (decorated(attention), {}),
    "lambda": (attention, {}),
    "all kinds of parameters": (with_all_kinds, {"times": 1.0, "speed": 3}),
}


def read(name, arguments):
    """Read a call of any of the functions, whose tensors come first."""
    arguments.ignore("times", "speed")
    q, k, v, others = (arguments.take(each) for each in ("q", "k", "v", "others"))
    return AttentionCall(*(tensor.transpose(1, 2) for tensor in (q, k, *(others or (v,)))), {"scale": 0.4})


@pytest.mark.parametrize("name", FUNCTIONS)
@torch.no_grad()
def test_functions_of_every_kind_are_intercepted_and_restored(monkeypatch, name):
    function, options = FUNCTIONS[name]
    library = ModuleType("swift.attention")
    library.attend = function
    monkeypatch.setitem(sys.modules, "swift.attention", library)
    engine = Engine(modules=("swift.attention",), functions=("attend",), read=read)
    monkeypatch.setattr(all_adapters.engine_patches, "engines", (engine,))
    model, x = model_of(function, kv_heads=HEADS), torch.randn(2, 5, WIDTH).double()
    plain, signature, code = model[0](x, **options), inspect.signature(function), function.__code__
    with hw.watch(model) as heads:
        assert torch.equal(model[0](x, **options), plain)
        assert inspect.signature(function) == signature
    assert function.__code__ is code
    assert len(heads.rows()) == HEADS


@torch.no_grad()
def test_an_attention_function_without_an_adapter_is_named_if_it_is_an_operator():
    operator = torch.library.custom_op("headwise_adapters::swift_attention", mutates_args=())(_operator)

    class WithGradients(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *tensors):
            return operator(*tensors)

    model = nn.Sequential(*model_of(attention, kv_heads=HEADS), *model_of(WithGradients.apply, kv_heads=HEADS))
    with pytest.warns(UserWarning, match=r"by swift_attention cannot be read; .*: 1$"), hw.watch(model) as heads:
        model(torch.randn(2, 5, WIDTH).double())
    assert {row["module"] for row in heads.rows()} == {"0"}


def _operator(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    return attention(q, k, v)


def test_arguments_that_are_not_read_are_refused_unless_they_have_their_default():
    def function(q, *, turbo=None, factor=1.0, is_reversed=True, **named):
        return q

    for options, word in (
        ({"turbo": 3}, "turbo"),
        ({"factor": 2.0}, "factor"),
        ({"is_reversed": False}, "is_reversed"),
        ({"other": 1}, "other"),
        ({"turbo": torch.ones(2)}, "turbo"),
    ):
        arguments = Arguments.of(function, (1,), options)
        arguments.take("q")
        with pytest.raises(Exception, match=f"with {word}"):
            arguments.require_read()
    arguments = Arguments.of(function, (1,), {"turbo": False, "factor": 1, "other": None})
    arguments.take("q")
    arguments.require_read()
