"""Checks of accelerated models under torch.compile and torch.export; tests run them in separate processes."""

import contextlib
import copy
import threading

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention.bias import causal_lower_right

import headwise as hw
from headwise.intercept import accelerated_sdpa
from headwise.intercept.compiled_sdpa import compiled_modules
from headwise.intercept.patches import SDPA
from headwise.nn import linear_engine


class Attention(nn.Module):
    """Heads of self-attention, with a mask."""

    def __init__(self, mask):
        super().__init__()
        self.qkv, self.mask = nn.Linear(36, 108), mask

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (3, 12)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v, attn_mask=self.mask).transpose(1, 2).flatten(2)


def recorded(model, x, graphs):
    """Return the output of a compiled model, and add the names of the attention functions that it records."""

    def backend(module, _):
        names = ["torch" if node.target is SDPA else str(node.target) for node in module.graph.nodes]
        graphs.append([each for each in names if each == "torch" or each.startswith(("headwise.att", "headwise.sdpa"))])
        return module.forward

    return torch.compile(model, backend=backend, fullgraph=True)(x)


def records_native_operators():
    """Check that a compiled model has the outputs and gradients of before, by native operators in one graph, until it
    is restored; a copy and an exported program have torch's attention.
    """
    accelerated_sdpa._why_slower = lambda problem, hides_nothing: None
    x = torch.randn(2, 7, 36)
    shown = torch.rand(2, 1, 7, 7) > 0.5  # not ranges in each row: the operator leaves it to torch
    hidden = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(2) > 0, -torch.inf)
    rows = torch.tensor([[True]] * 3 + [[False]] * 4)  # repeats along the keys
    masks = (None, "attend_forward"), *((mask, "sdpa_with_mask") for mask in (hidden, shown, rows))
    for mask, operator in masks:
        model, graphs = nn.Sequential(Attention(mask), Attention(mask)), []
        with torch.no_grad():
            expected = model(x)
            with hw.accelerate(model):
                torch.testing.assert_close(recorded(model, x, graphs), expected)
                torch.testing.assert_close(torch.compile(model, backend="aot_eager", dynamic=True)(x[:, :7]), expected)
                recorded(copy.deepcopy(model), x, graphs)
                torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
            recorded(model, x, graphs)
        assert graphs == [[f"headwise.{operator}"] * 2, ["torch"] * 2, ["torch"] * 2], graphs
        torch._dynamo.reset()
        assert not any(compiled_modules.depths.values())
        of_output = torch.randn(2, 7, 36)
        expected = torch.autograd.grad(model(x), list(model.parameters()), of_output)
        with hw.accelerate(model):
            compiled = torch.compile(model, backend="aot_eager")(x)
            actual = torch.autograd.grad(compiled, list(model.parameters()), of_output)
        torch.testing.assert_close(actual, expected)
        torch._dynamo.reset()


def records_linear_maps():
    """Check that compiled code of an accelerated model has the operator `headwise::linear`, with the outputs and
    gradients of before, where oneDNN is the faster library; a copy, an exported program and a subclass have torch's.
    """
    linear_engine.engine_name = lambda _: "onednn"

    class Scaled(nn.Linear):
        def forward(self, x):
            return 2.0 * super().forward(x)

    def linear_maps(model, x, graphs):
        def backend(module, _):
            names = [str(node.target) for node in module.graph.nodes]
            graphs.append(
                (sum("headwise.linear" in each for each in names), sum("_nn.linear" in each for each in names))
            )
            return module.forward

        return torch.compile(model, backend=backend, fullgraph=True)(x)

    model, x, graphs = nn.Sequential(nn.Linear(256, 256), nn.GELU(), Scaled(256, 256)), torch.randn(200, 256), []
    expected, of_output = model(x), torch.randn(200, 256)
    gradients = torch.autograd.grad((expected * of_output).sum(), list(model.parameters()))
    with hw.accelerate(model, linear=True):
        torch.testing.assert_close(linear_maps(model, x, graphs), expected)
        linear_maps(copy.deepcopy(model), x, graphs)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
        compiled = torch.compile(model, backend="aot_eager")(x)
        actual = torch.autograd.grad((compiled * of_output).sum(), list(model.parameters()))
    torch.testing.assert_close(actual, gradients, rtol=1e-4, atol=1e-4)
    torch._dynamo.reset()
    linear_maps(model, x, graphs)
    with hw.accelerate(model, linear=False):
        linear_maps(model, x, graphs)
    assert [ours for ours, _ in graphs] == [1, 0, 0, 0], graphs


def records_native_linear_maps():
    """Check that compiled code of an accelerated model in bfloat16 has the operator of the native kernels where these
    are the faster library and no gradient is needed.
    """
    linear_engine.engine_name = lambda _: "native"
    model = nn.Sequential(nn.Linear(256, 256), nn.GELU(), nn.Linear(256, 255), nn.Linear(255, 256)).bfloat16()
    x, recorded_names = torch.randn(200, 256).bfloat16(), []

    def backend(module, _):
        recorded_names.append([str(node.target) for node in module.graph.nodes if "linear" in str(node.target)])
        return module.forward

    for context in (torch.no_grad, torch.enable_grad):
        with context(), hw.accelerate(model):
            torch.testing.assert_close(torch.compile(model, backend=backend, fullgraph=True)(x), model(x))
        torch._dynamo.reset()
    is_ours = [["headwise" in name for name in names] for names in recorded_names]
    assert is_ours == [[True, True, False], [False] * 3], recorded_names  # a width of 255 has no pairs


def differentiates_within_compiled_code():
    """Check that gradients by `torch.func` are those of the plain model where compiled code contains the transform, or
    is inside of it: tensors of a gradient do not require one there.
    """
    accelerated_sdpa._why_slower = lambda problem, hides_nothing: None
    linear_engine.engine_name = lambda _: "native"
    hidden = torch.ones(7, 7).tril() > 0
    for dtype in (torch.float32, torch.bfloat16):
        for layer in (Attention(None), Attention(hidden), nn.Linear(36, 256), hw.MultiHeadAttention(36, 3)):
            model, x = nn.Sequential(layer).to(dtype).requires_grad_(False), torch.randn(2, 7, 36).to(dtype)

            def loss(x, model=model):
                return model(x).float().square().sum()

            expected = torch.func.grad(loss)(x)
            ways = (
                torch.compile(torch.func.grad(loss), backend="aot_eager"),
                torch.func.grad(torch.compile(loss, backend="aot_eager")),
            )
            with hw.accelerate(model):
                for way in ways:
                    torch.testing.assert_close(way(x), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
                    torch._dynamo.reset()


def follows_the_rule():
    """Check that the rule for few queries is read without breaking the graph, on whatever processor this is."""
    model = Attention(None)
    for length in (5, 40, 600):
        x, graphs = torch.randn(2, length, 36), []
        with torch.no_grad(), hw.accelerate(model) as acceleration:
            torch.testing.assert_close(recorded(model, x, graphs), model(x))
            (module,) = acceleration.modules
        assert graphs == [["headwise.attend_forward" if module.accelerated else "torch"]], (length, graphs)
        assert module.accelerated or length < 600
        torch._dynamo.reset()


def runs_as_without():
    """Check that compiled and exported models have the same output as before, and are accelerated elsewhere."""
    accelerated_sdpa._why_slower = lambda problem, hides_nothing: None
    x = torch.randn(2, 7, 36)
    for model in (
        nn.Sequential(Attention(None), Attention(torch.ones(7, 7).bool())),
        nn.Sequential(nn.TransformerEncoderLayer(36, 3, 7, 0.0, batch_first=True)),
        Attention(causal_lower_right(7, 7)),
    ):
        expected = model(x)
        acceleration = hw.accelerate(model)
        torch.testing.assert_close(torch.compile(model, backend="aot_eager", fullgraph=True)(x), expected)
        torch.testing.assert_close(torch.export.export(model, (x,)).module()(x), expected)
        assert "no module has run outside of torch.compile" in str(acceleration), str(acceleration)
        torch.testing.assert_close(model(x), expected)
        assert "computed by the native kernels" in str(acceleration), str(acceleration)
        acceleration.restore()
        torch._dynamo.reset()


class Interrupted(Attention):
    """Attention after a break of the compiled graph, at which it raises an exception or calls `inside`."""

    error, inside = None, None

    def forward(self, x):
        torch._dynamo.graph_break()
        if self.inside is not None:
            self.inside()
        if self.error is not None:
            raise self.error
        return super().forward(x)


def marks_no_other_models():
    """Check that a model which is not accelerated has torch's attention in compiled code: in another thread while an
    accelerated one runs, and after an exception in the accelerated one.
    """
    accelerated_sdpa._why_slower = lambda problem, hides_nothing: None
    x = torch.randn(2, 7, 36)

    def kinds(model):
        torch._dynamo.reset()
        functions = []

        def backend(module, _):
            functions.extend("torch" if node.target is SDPA else str(node.target) for node in module.graph.nodes)
            return module.forward

        torch.compile(model, backend=backend)(x)
        return {"native" for each in functions if "headwise" in each} | {each for each in functions if each == "torch"}

    def elsewhere():
        thread = threading.Thread(target=lambda: found.append(kinds(nn.Sequential(Attention(None)))))
        thread.start()
        thread.join()

    with torch.no_grad():
        model, found = nn.Sequential(*(Interrupted(None) for _ in range(12))), []
        with hw.accelerate(model):
            assert kinds(model) == {"native"}
            model[1].inside = torch._dynamo.disable(elsewhere)
            kinds(model)
            assert found == [{"torch"}], found
            model[1].inside = None
            for error in (ValueError("stop"), KeyboardInterrupt("stop")):
                model[1].error = error
                with contextlib.suppress(ValueError, KeyboardInterrupt):
                    kinds(model)
                model[1].error = None
                elsewhere()
                assert kinds(model) == {"native"}
                assert kinds(nn.Sequential(Attention(None))) == {"torch"}
            model[1].error = error
            with contextlib.suppress(KeyboardInterrupt):
                kinds(model)
        with hw.accelerate(nn.Sequential(Attention(None))):
            model[1].error = None
            assert kinds(model) == {"torch"}
        assert found == [{"torch"}] * 3, found
