"""Programs that compare compiled and exported calls of the native backend with plain ones, and compiled calls of the
blockwise backend where there are no native kernels.

They run in a fresh interpreter, without the checks of shapes in tests, which torch cannot compile.
"""

import io
from collections.abc import Callable

import torch

import headwise as hw

BATCH, HEADS, WIDTH = 2, 4, 8

OPTIONS: dict[str, Callable[[dict], dict]] = {
    "no mask": lambda _: {},
    "window with sinks": lambda _: {"mask": hw.causal() & (hw.window(3) | hw.prefix(2))},
    "dilated": lambda _: {"mask": hw.window(3, dilation=2)},
    "window of each head": lambda _: {"mask": hw.window([3, 5, None, 2])},
    "mask of each head": lambda _: {"mask": hw.per_head([hw.causal(), hw.window(3), hw.prefix(2), hw.chunked(4)])},
    "padding": lambda x: {"mask": hw.padding(x["lengths"]) & hw.causal()},
    "padding first": lambda x: {"mask": hw.padding(x["lengths"], side="left")},
    "prefix of each": lambda x: {"mask": hw.causal() | hw.prefix(x["lengths"])},
    "documents": lambda x: {"mask": hw.causal() & hw.segments(x["ids"])},
    "matrix": lambda x: {"mask": hw.dense(x["matrix"]) & hw.causal()},
    "function": lambda x: {"mask": hw.mask_rule(lambda b, h, q, k: x["ids"][b, q] != (x["ids"][b, k] + h) % 3)},
    "positions": lambda x: {
        "mask": hw.window(4),
        "query_positions": x["positions"],
        "key_positions": x["positions"],
    },
    "numbers": lambda x: {"softcap": 3.0, "sinks": x["sinks"], "scale": x["scale"], "return_lse": True},
    "bias": lambda x: {"bias": x["bias"], "mask": hw.causal()},
}


FROM_A_FIXED_LENGTH = ("window with sinks", "function", "numbers", "bias")
"""Options that are compiled for one length first, and under autocast: each kind of argument of the operators. The
others are compiled for any length at once.
"""


def inputs(length: int) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return q, k and v of some length, and tensors for masks and options."""
    tensors = [torch.randn(BATCH, heads, length, WIDTH, requires_grad=True) for heads in (HEADS, 2, 2)]
    others = {
        "lengths": torch.tensor([length, length // 2]),
        "ids": (torch.arange(length) // 5 % 3).expand(BATCH, -1).contiguous(),
        "matrix": torch.rand(BATCH, 1, length, length) < 0.5,
        "positions": (torch.arange(length) - torch.tensor([[0], [3]])).clamp(min=-1),
        "sinks": torch.randn(HEADS),
        "scale": torch.rand(HEADS),
        "bias": torch.randn(1, HEADS, length, length),
    }
    return tensors, others


class Attention(torch.nn.Module):
    """Attention on a backend with some of the options."""

    def __init__(self, name: str, backend: str = "native") -> None:
        super().__init__()
        self.options, self.backend = OPTIONS[name], backend

    def forward(self, q, k, v, others):
        """Return the results of attention as a tuple."""
        result = hw.attend(q, k, v, backend=self.backend, **self.options(others))
        return result if isinstance(result, tuple) else (result,)


def with_gradients(function: Callable, tensors: list[torch.Tensor], others: dict) -> list[torch.Tensor]:
    """Return the results of a function, and their gradients."""
    results = function(*tensors, others)
    loss = sum(each.masked_fill(each == -torch.inf, 0.0).square().sum() for each in results)
    return [*results, *torch.autograd.grad(loss, tensors)]


def compiles(name: str, compiler: str = "aot_eager", backend: str = "native") -> None:
    """Check that a compiled call has the same bits as a plain one, for several lengths; with some of the options first
    from a graph of one length, and under autocast. While compiling, positions are read as a matrix, otherwise as
    ranges, and blockwise attention has other blocks: results differ by rounding.
    """
    torch._dynamo.reset()
    plain, differs = Attention(name, backend), name == "positions" or backend != "native"
    is_fixed_first = name in FROM_A_FIXED_LENGTH
    compiled = torch.compile(plain, fullgraph=True, backend=compiler)
    for length in (17, 19, 23) if is_fixed_first else (17, 23):
        tensors, others = arguments = inputs(length)
        for each in () if is_fixed_first else (*tensors, *others.values()):
            torch._dynamo.mark_dynamic(each, [axis for axis, size in enumerate(each.shape) if size == length])
        expected, results = (with_gradients(each, *arguments) for each in (plain, compiled))
        if differs:
            torch.testing.assert_close(results, expected, rtol=1e-5, atol=2e-6)
        else:
            assert all(map(torch.equal, results, expected)), name
    if not is_fixed_first:
        return
    with torch.autocast("cpu", dtype=torch.bfloat16):
        tensors, others = inputs(13)
        results, expected = compiled(*tensors, others), plain(*tensors, others)
        assert differs or all(map(torch.equal, results, expected)), name


def exports(name: str) -> None:
    """Check that an exported, saved and loaded program has the results of a plain call, for other lengths too."""
    tensors, others = inputs(17)
    length = torch.export.Dim("length", min=4, max=1000)
    of_others = {key: {axis: length for axis, n in enumerate(x.shape) if n == 17} for key, x in others.items()}
    shapes = ({2: length}, {2: length}, {2: length}, of_others)
    exported = torch.export.export(Attention(name), (*(x.detach() for x in tensors), others), dynamic_shapes=shapes)
    file = io.BytesIO()
    torch.export.save(exported.run_decompositions(), file)
    file.seek(0)
    program = torch.export.load(file).module()
    tensors, others = inputs(23)
    torch.testing.assert_close(program(*tensors, others), Attention(name)(*tensors, others), rtol=1e-5, atol=2e-6)


def compiles_in_parts() -> None:
    """Check a compiled call whose mask is computed in parts."""
    import torch._dynamo.testing

    from headwise.attention.masks import key_ranges

    key_ranges.MATRIX_ELEMENTS = 2**13
    calls = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")

    def function(q, k, v):
        mask = hw.causal() & hw.mask_rule(lambda b, h, q, k: (q + 2 * k + h) % 3 > 0)
        return (hw.attend(q, k, v, mask=mask, backend="native"),)

    compiled = torch.compile(function, fullgraph=True, backend=calls)
    tensors = [torch.randn(1, 2, 150, WIDTH, requires_grad=True) for _ in range(3)]
    results = []
    for each in (function, compiled):
        out = each(*tensors)[0]
        results.append([out, *torch.autograd.grad(out.square().sum(), tensors)])
    graph = calls.graphs[0].code
    assert graph.count("headwise.attend_forward(") == 3, graph
    for plain, other in zip(*results, strict=True):
        torch.testing.assert_close(other, plain, rtol=0, atol=2e-6)


def traces_without_values() -> None:
    """Check that operators can be recorded, and that no tensor without values is cached."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def function(q, k, v):
        return hw.attend(q, k, v, mask=hw.window(6, dilation=2), backend="native")

    def tensors(length: int) -> list[torch.Tensor]:
        return [torch.randn(1, 2, length, WIDTH) for _ in range(3)]

    for mode in ("real", "fake", "symbolic"):
        traced, arguments = make_fx(function, tracing_mode=mode)(*tensors(9)), tensors(9)
        assert torch.equal(traced(*arguments), function(*arguments)), mode
    with torch._subclasses.FakeTensorMode() as fakes:
        fake = [fakes.from_tensor(x) for x in tensors(11)]
        assert function(*fake).stride() == (176, 8, 16, 1)
    assert function(*tensors(11)).isfinite().all()
