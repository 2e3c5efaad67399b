"""Checks of the layer under torch.compile, torch.export and ONNX export; each function raises if its check fails.

tests/test_traced.py runs them in separate processes, because the shape checks of the other tests cannot be traced.
"""

import contextlib
import logging
import tempfile
import warnings
from pathlib import Path

import pytest
import torch
from torch.export import Dim

import headwise as hw
from headwise.attention.backends.blockwise import operator as blockwise_operator
from headwise.attention.backends.native import library
from headwise.attention.caches import keep_addresses
from headwise.nn import linear_engine

BATCH, EMBED, HEADS = 2, 24, 6

OPTIONS = {
    "plain": {},
    "decoder": {"num_kv_heads": 2, "rotary": hw.Rotary(), "mask": hw.causal(), "qk_norm": hw.QKNorm()},
    "window": {"mask": hw.causal() & (hw.window(3) | hw.prefix(1)), "output_gate": "element"},
    "window per head": {"mask": hw.window([1, 2, 3, 4, 5, None]), "position_bias": hw.ALiBi()},
    "chunked": {"mask": hw.causal() & hw.chunked(4), "rotary": hw.Rotary(scaling=hw.YaRN(4.0, 8))},
    "mask rule": {"mask": hw.mask_rule(lambda b, h, q, k: (q >= k) & (h != k % 3))},
    "dynamic angles": {"rotary": hw.Rotary(scaling=hw.DynamicNTK(2.0, 6)), "mask": hw.causal(), "fused_qkv": True},
    "relative": {"position_bias": hw.RelativeBias(HEADS)},
    "scores": {"scores": hw.Scores(softcap=5.0, talking_heads=True, temperature=True), "backend": "reference"},
    "softcap": {"num_kv_heads": 3, "scores": hw.Scores(softcap=5.0), "mask": hw.causal() & hw.window(4)},
    "sinks": {"scores": hw.Scores(sinks=True), "mask": hw.causal()},
}


def layer_with(name: str) -> hw.MultiHeadAttention:
    """Return a layer with random weights and the options of that name."""
    torch.manual_seed(0)
    return hw.MultiHeadAttention(EMBED, HEADS, **OPTIONS[name])


def close(actual, expected):
    """Check that two tensors are equal up to float32 rounding."""
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def forbid_recompiles():
    """Make torch.compile raise an error, with the reason, instead of compiling a function a second time."""
    torch._dynamo.config.error_on_recompile = True


def compiles_for_every_length(name: str, backend: str = "aot_eager", dynamic: bool | None = None):
    """Check that one compiled graph computes outputs and gradients of the layer for any number of texts of any length.

    With `dynamic=True` the compiler lets every size of the input change, which takes twice as long as these two.
    """
    forbid_recompiles()
    layer = layer_with(name)
    compiled = torch.compile(layer, fullgraph=True, dynamic=dynamic, backend=backend)
    for batch, length in ((BATCH, 5), (BATCH, 7), (BATCH + 1, 13)):
        x = torch.randn(batch, length, EMBED)
        if dynamic is None:
            torch._dynamo.mark_dynamic(x, (0, 1))
        y, expected = compiled(x), layer(x)
        close(y, expected)
        upstream = torch.randn_like(y)
        parameters = list(layer.parameters())
        for actual_gradient, expected_gradient in zip(
            torch.autograd.grad((y * upstream).sum(), parameters),
            torch.autograd.grad((expected * upstream).sum(), parameters),
            strict=True,
        ):
            torch.testing.assert_close(actual_gradient, expected_gradient, rtol=1e-4, atol=1e-4)


def compiles_for_every_length_with_inductor():
    """Check the same for the code that the default compiler, inductor, generates for a decoder layer."""
    compiles_for_every_length("decoder", backend="inductor", dynamic=True)


def masks_padding_while_compiling():
    """Check that a compiled layer with `lengths` has the output of the uncompiled one.

    The values of the lengths are unknown while compiling, so padding is masked instead of being removed.
    """
    layer, x = layer_with("decoder"), torch.randn(4, 11, EMBED)
    lengths = torch.tensor([7, 3, 0, 11])
    close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x, lengths=lengths), layer(x, lengths=lengths))


def decodes_without_recompiling(name: str, backend: str = "aot_eager"):
    """Check that decoding with a static cache compiles two graphs, for the prompt and for single tokens, and no third.

    The outputs must be those of a forward pass over the whole text.
    """
    layer = layer_with(name).eval()
    if layer.mask is None:
        layer.mask = hw.causal()
    x = torch.randn(BATCH, 12, EMBED)
    expected = layer(x)
    cache = layer.static_cache(BATCH, 16)
    step = torch.compile(layer, fullgraph=True, backend=backend, dynamic=False)
    with torch.no_grad():
        out = [step(x[:, :4], cache=cache), step(x[:, 4:5], cache=cache)]
        forbid_recompiles()
        out += [step(x[:, t : t + 1], cache=cache) for t in range(5, 12)]
    y = torch.cat(out, dim=1)
    # With angles that depend on the length, only the last step uses those of the whole text.
    comparable = slice(-1, None) if name == "dynamic angles" else slice(None)
    close(y[:, comparable], expected[:, comparable])


def decodes_with_growing_caches(backend: str = "aot_eager"):
    """Check that compiled decoding has the outputs of a forward pass over the whole text, and that a `DynamicCache`
    then writes each token into its buffers instead of copying all of them.
    """
    layer, x = layer_with("decoder").eval(), torch.randn(BATCH, 90, EMBED)
    for make in (hw.DynamicCache, lambda: hw.SlidingCache(90)):
        torch._dynamo.reset()
        cache, step = make(), torch.compile(layer, fullgraph=True, backend=backend)
        with torch.no_grad():
            out, addresses = [layer(x[:, :2], cache=cache)], set()
            for token in range(2, 90):
                out.append(step(x[:, token : token + 1], cache=cache))
                addresses.add(cache.tensors[0].data_ptr())
        close(torch.cat(out, dim=1), layer(x))
        assert len(addresses) == 2 or not isinstance(cache, hw.DynamicCache), addresses


def decodes_the_same_tokens_in_one_graph(**how: str):
    """Check that a greedy decoder with static caches, compiled as `torch.compile` is told by `how`, writes the same
    tokens as without compiling, from one graph for all steps and for two sets of caches, at constant addresses.
    """
    torch.manual_seed(0)
    embedding, head = torch.nn.Embedding(50, EMBED), torch.nn.Linear(EMBED, 50)
    layers = [layer_with(name).eval() for name in ("decoder", "window")]
    compiled_steps = torch._dynamo.utils.counters["stats"]

    def step(token, caches):
        x = embedding(token)
        for layer, cache in zip(layers, caches, strict=True):
            x = x + layer(x, cache=cache)
        return head(x[:, -1]).argmax(-1, keepdim=True)

    def decode(run):
        caches = [layer.static_cache(BATCH, 16) for layer in layers]
        for cache in caches:
            keep_addresses((*cache.slots, cache.lengths))  # as on a GPU
        addresses = [[slots.data_ptr() for slots in (*cache.slots, cache.lengths)] for cache in caches]
        token = step(torch.arange(8).view(BATCH, 4), caches)
        tokens = [token]
        for _ in range(10):
            token = run(token, caches)
            tokens.append(token.clone())
        assert addresses == [[slots.data_ptr() for slots in (*cache.slots, cache.lengths)] for cache in caches]
        return torch.cat(tokens, 1)

    with torch.no_grad():
        expected = decode(step)
        compiled = torch.compile(step, fullgraph=True, dynamic=False, **how)
        compiled_steps.clear()
        assert decode(compiled).tolist() == expected.tolist()
        forbid_recompiles()
        assert decode(compiled).tolist() == expected.tolist()
    assert compiled_steps["unique_graphs"] == 1
    assert len(expected.unique()) > 2


def nan_does_not_survive_a_reset_of_the_cache():
    """Check that after NaN inputs and `reset`, a compiled step with a static cache has the output of a new cache.

    The step after the reset must not compile a new graph.
    """
    layer = layer_with("decoder").eval()
    cache, x = layer.static_cache(BATCH, 8), torch.randn(BATCH, 1, EMBED)
    step = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=False)
    with torch.no_grad():
        step(torch.full_like(x, torch.nan), cache=cache)
        forbid_recompiles()
        step(torch.full_like(x, torch.nan), cache=cache)
        cache.reset()
        close(step(x, cache=cache), layer(x))


def a_full_static_cache_raises():
    """Check that a compiled step raises an error when its static cache is full, instead of a wrong result.

    Compiled code does not read the length on the host, so that the error is that of the index.
    """
    layer = layer_with("decoder").eval()
    cache = layer.static_cache(1, 4)
    step = torch.compile(layer, fullgraph=True, dynamic=False)
    with torch.no_grad():
        for token in torch.randn(4, 1, 1, EMBED):
            step(token, cache=cache)
        with pytest.raises((IndexError, RuntimeError), match="out of bounds"):
            step(torch.randn(1, 1, EMBED), cache=cache)


def masks_made_inside_compile():
    """Check that masks that depend on the input can be created inside a compiled function, also by the first use of
    their public names, which imports them.
    """
    forbid_recompiles()
    for name in ("segments", "causal", "padding"):
        vars(hw).pop(name, None)
    layer = layer_with("plain")

    def masked(x, ids):
        return layer(x, mask=hw.segments(ids) & hw.causal() | hw.padding(ids[:, 0] + 1))

    compiled = torch.compile(masked, fullgraph=True, dynamic=True, backend="aot_eager")
    for length in (5, 7, 13):
        x, ids = torch.randn(BATCH, length, EMBED), torch.arange(length).expand(BATCH, -1) // 3
        close(compiled(x, ids), masked(x, ids))


def decodes_without_recompiling_with_inductor():
    """Check decoding with the code that the default compiler, inductor, generates for a decoder layer."""
    decodes_without_recompiling("decoder", backend="inductor")


def packs_sequences_while_compiling():
    """Check that packed sequences compile to one graph if their offsets are a tensor."""
    layer = layer_with("decoder")
    compiled = torch.compile(layer, fullgraph=True, dynamic=False, backend="aot_eager")
    x = torch.randn(11, EMBED)
    for offsets in ([0, 4, 11], [0, 0, 11]):
        close(compiled(x, offsets=torch.tensor(offsets)), layer(x, offsets=offsets))
        forbid_recompiles()


def exports(name: str):
    """Check that one program of torch.export computes the layer for any batch size and length."""
    layer = layer_with(name).eval()
    x = torch.randn(BATCH, 5, EMBED)
    program = torch.export.export(layer, (x,), dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},))
    for shape in ((BATCH, 5), (3, 11)):
        x = torch.randn(*shape, EMBED)
        close(program.module()(x), layer(x))


def runs_in_onnxruntime(name: str):
    """Check that the layer, exported to ONNX, has the same output in onnxruntime for any batch size and length."""
    import onnxruntime

    logging.disable(logging.WARNING)
    layer = layer_with(name).eval()
    x = torch.randn(BATCH, 5, EMBED)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), contextlib.redirect_stdout(None):
        path = Path(folder) / "layer.onnx"
        warnings.simplefilter("ignore")
        program = torch.onnx.export(
            layer, (x,), dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},), dynamo=True, verbose=False
        )
        program.save(path)
        session = onnxruntime.InferenceSession(path)
        for shape in ((BATCH, 5), (3, 11)):
            x = torch.randn(*shape, EMBED)
            (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
            close(torch.from_numpy(y), layer(x))


class Positions(torch.nn.Module):
    """Values of position biases, and rotations of a fixed tensor, by positions."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((32, 128, True), (32, 128, False), (12, 81, True))
        self.relative = torch.nn.ModuleList(hw.RelativeBias(HEADS, *options) for options in sizes)
        scalings = (None, hw.LinearScaling(3.3), hw.DynamicNTK(1.7, 64), hw.YaRN(4.3, 64), hw.Llama3(8.1, 64))
        self.rotaries = [hw.Rotary(theta=12_345.6, scaling=scaling) for scaling in scalings]

    def forward(self, queries: torch.Tensor, keys: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the biases between queries and keys, and the rotations by the positions of the keys."""
        biases = [bias.values(HEADS, queries, keys, torch.float32) for bias in (hw.ALiBi(), *self.relative)]
        x = torch.ones(1, 1, keys.shape[1], 16)
        return (*biases, *(rotary.rotate(x, keys) for rotary in self.rotaries))


def positions_in_onnxruntime():
    """Check position biases and rotations in onnxruntime for many lengths, and rotations far from the first position:
    the exporter rounds Python numbers to float32, and some of them decide about buckets and whole turns.
    """
    import onnxruntime

    logging.disable(logging.WARNING)
    module, queries, keys = Positions(), Dim("queries"), Dim("keys")
    with tempfile.TemporaryDirectory() as folder, torch.no_grad(), contextlib.redirect_stdout(None):
        path = Path(folder) / "positions.onnx"
        warnings.simplefilter("ignore")
        example = (torch.arange(3, 14)[None], torch.arange(13)[None])
        shapes = ({1: queries}, {1: keys})
        torch.onnx.export(module, example, dynamic_shapes=shapes, dynamo=True, verbose=False).save(path)
        session = onnxruntime.InferenceSession(path)
        names = [each.name for each in session.get_inputs()]
        for length, first in ((17, 0), (33, 0), (65, 0), (200, 0), (50, 3000), (23, 10**6)):
            positions = first + torch.arange(length)[None]
            arguments = (positions[:, -7:], positions)
            results = session.run(None, dict(zip(names, (each.numpy() for each in arguments), strict=True)))
            for result, expected in zip(results, module(*arguments), strict=True):
                torch.testing.assert_close(torch.from_numpy(result), expected, rtol=1e-6, atol=2e-6)


def forget_the_kernels():
    """Forget that the native kernels were loaded, as in a new process."""
    for function in (library.load, linear_engine.native_rule, linear_engine.engine_of, blockwise_operator._register):
        function.cache_clear()


def first_calls_export_without_headwise():
    """Check that a program contains no operator of headwise, whichever layer is exported by the first call of a
    process, and that a default call can be exported with every option of scores.
    """
    options = {"scores": hw.Scores(softcap=5.0, sinks=True), "mask": hw.causal()}
    layers = (
        hw.MultiHeadAttention(EMBED, HEADS, mask=hw.causal()),
        hw.MultiHeadAttention(EMBED, HEADS, num_kv_heads=2, rotary=hw.Rotary(), **options),
        hw.MultiHeadAttention(EMBED, HEADS, num_kv_heads=3, position_bias=hw.ALiBi(), scores=hw.Scores(softcap=2.0)),
        hw.DifferentialAttention(EMBED, 3, **options),
        hw.LatentAttention(EMBED, 3, kv_rank=7, head_dim=4, rotary_dim=2, **options),
    )
    for layer in layers:
        layer.eval()
        for records in (exported_nodes, traced_nodes):
            forget_the_kernels()
            with torch.no_grad():
                nodes, results = records(layer)
            assert "headwise::" not in nodes, nodes
            assert "headwise." not in nodes, nodes
            for x, y in results:
                close(y, layer(x))


def exported_nodes(layer):
    """Return the nodes of an exported program as text, and its results for another size."""
    program = torch.export.export(
        layer, (torch.randn(BATCH, 5, EMBED),), dynamic_shapes=({0: Dim("batch"), 1: Dim("length")},)
    )
    x = torch.randn(3, 11, EMBED)
    return str(program.graph), [(x, program.module()(x))]


def traced_nodes(layer):
    """Return the nodes of a program of torch.jit.trace as text, and its results for another size."""
    traced = torch.jit.trace(layer, torch.randn(BATCH, 5, EMBED), check_trace=False)
    x = torch.randn(3, 11, EMBED)
    return " ".join(node.kind() for node in traced.inlined_graph.nodes()), [(x, traced(x))]


def the_first_call_in_a_mode_is_not_recorded():
    """Check that a program recorded by make_fx contains the operators of attention alone."""
    from torch.fx.experimental.proxy_tensor import make_fx

    q = torch.randn(1, 2, 150, 8)
    forget_the_kernels()
    graph = str(make_fx(lambda q: hw.attend(q, q, q, mask=hw.window(7)))(q).graph)
    assert "sources_checksum" not in graph
    assert "instruction_set" not in graph
