"""The operators of the native backend in plain torch, where the native kernels are switched off."""

import pytest
import torch
from test_native import NATIVE, run_python

from headwise.attention.backends.blockwise import operator
from headwise.attention.backends.native import library

OFF = {library.VARIABLE: "off"}

CHECKED_BY_TORCH = """
import torch, headwise as hw
from headwise.attention.backends.blockwise import operator
assert operator.why_not_registered() is None
for dtype in (torch.float32, torch.bfloat16):
    q, k, v = (torch.randn(2, 9, heads, 8, dtype=dtype).transpose(1, 2) for heads in (4, 2, 2))
    ranges = torch.stack([torch.arange(9) - 3, torch.arange(9) + 1], -1).int()[None, None, :, None]
    numbers = (0.5, torch.rand(4), 5.0, torch.randn(4), ranges, torch.rand(1, 1, 9, 9) < 0.8, torch.randn(1, 4, 9, 9))
    shared = (q, k, v, *numbers)
    torch.library.opcheck(torch.ops.headwise.attend, shared)
    torch.library.opcheck(torch.ops.headwise.attend_forward, [x.requires_grad_() for x in (q, k, v)] + list(numbers))
    with torch.no_grad():
        out, lse, normalizers = torch.ops.headwise.attend_forward(*shared)
    upstream = (torch.randn_like(out), torch.randn_like(lse), out, normalizers)
    shared = [x.detach() if isinstance(x, torch.Tensor) else x for x in (*upstream, *shared)]
    torch.library.opcheck(torch.ops.headwise.attend_backward, shared)
    torch.library.opcheck(torch.ops.headwise.attend_bias_gradient, shared)
"""

LINEAR = """
import torch
from headwise.attention.backends.blockwise import operator
operator.why_not_registered()
largest = 0
class Largest(torch.utils._python_dispatch.TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        global largest
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor):
            largest = max(largest, result.untyped_storage().nbytes() // result.element_size())
        return result
q, k, v = (torch.randn(1, 2, 4096, 8) for _ in range(3))
ranges = torch.stack([torch.arange(4096) - 50, torch.arange(4096) + 1], -1).int()[None, None, :, None]
with Largest():
    torch.ops.headwise.attend(q, k, v, 1.0, None, 9.0, None, ranges, None, None)
print(largest)
"""

RESULTS = """
import torch, headwise as hw
from native_traced import inputs
torch.manual_seed(0)
(q, k, v), others = inputs(150)
dropped = torch.compile(lambda: hw.attend(q, k, torch.ones_like(v), dropout=0.25, backend="blockwise"), backend="eager")
torch.testing.assert_close(dropped().mean(), torch.tensor(1.0), rtol=0, atol=0.05)
assert dropped().std() > 0.02

def permuted(q, k, v, table):
    return hw.attend(q, k, v, bias=table.t()[None, None], backend="blockwise").square().sum()

table = torch.randn(150, 150, requires_grad=True)
functions = permuted, torch.compile(permuted, fullgraph=True)
gradients = [torch.autograd.grad(function(q, k, v, table), table)[0] for function in functions]
torch.testing.assert_close(gradients[1], gradients[0], rtol=1e-4, atol=1e-4)

from headwise.attention.masks import key_ranges
key_ranges.MATRIX_ELEMENTS = 2**13
rule = hw.mask_rule(lambda b, h, i, j: (i + 2 * j + h) % 3 > 0)
eye = torch.eye(512)[None, None]

def in_parts(x):
    return hw.attend(x, x, eye, mask=rule, dropout=0.5, backend="blockwise")

kept = (torch.compile(in_parts, dynamic=False, backend="eager")(torch.zeros(1, 1, 512, 8)) > 0)[0, 0].float()
for distance in (63, 66, 126, 192):  # the rule has the period 3
    shown = (torch.arange(512)[:, None] + 2 * torch.arange(512)) % 3 > 0
    both = shown[distance:] & shown[:-distance]
    pair = torch.stack([kept[distance:][both], kept[:-distance][both]])
    assert pair.corrcoef()[0, 1].abs() < 0.03, distance

for shape in ((0, 2, 5, 8), (1, 2, 0, 8), (1, 2, 5, 0)):
    q = torch.randn(*shape[:3], 8)
    k = torch.randn(*shape[:2], 0 if shape[3] == 0 else 7, 8)
    function = torch.compile(lambda q, k: hw.attend(q, k, k, return_lse=True, backend="blockwise"), backend="eager")
    for got, wanted in zip(function(q, k), hw.attend(q, k, k, return_lse=True, backend="reference")):
        assert torch.equal(got, wanted), shape
"""


@NATIVE
@pytest.mark.parametrize("name", operator.SCHEMAS)
def test_the_operators_have_the_arguments_of_the_native_ones(name):
    library.load()
    native = getattr(torch.ops.headwise, name).default._schema
    assert torch._C.parse_schema(f"headwise::{name}{operator.SCHEMAS[name]}") == native


@NATIVE
def test_native_kernels_stand_for_blockwise_attention_while_compiling(monkeypatch):
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    assert operator.why_not_registered() == "while compiling, its operator is that of the native kernels"


@pytest.mark.slow
def test_torch_accepts_the_operators():
    run_python(CHECKED_BY_TORCH, **OFF)


KINDS = ("no mask", "window with sinks", "window of each head", "padding", "matrix", "positions", "numbers", "bias")
"""Options with every kind of argument of the operators. The compiler traces the same code as for the native backend,
for which all options are compiled.
"""


@pytest.mark.slow
def test_compiled_calls_have_the_results_of_plain_ones():
    run_python(f"import native_traced\nfor name in {KINDS}: native_traced.compiles(name, backend='blockwise')", **OFF)


@pytest.mark.slow
def test_the_operator_keeps_no_matrix():
    assert int(run_python(LINEAR, **OFF)) < 4096 * 512


@pytest.mark.slow
def test_dropout_and_empty_inputs_while_compiling():
    run_python(RESULTS, **OFF)
