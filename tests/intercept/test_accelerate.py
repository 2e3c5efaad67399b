"""Accelerated calls: outputs and gradients against the model's own, what stays unchanged, and the reasons."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right, causal_upper_left

import headwise as hw
from headwise.attention.backends.native import library
from headwise.intercept import accelerated_sdpa
from oracles import distance, plain_attention, plain_errors

pytestmark = [
    pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded())),
    pytest.mark.usefixtures("kernels_count_as_faster"),
]

WIDTH, HEADS, LENGTH, BATCH = 33, 3, 7, 2
SDPA = F.scaled_dot_product_attention
MIN = torch.finfo(torch.float32).min


class Attention(nn.Module):
    """Self-attention by SDPA with any options."""

    def __init__(self, kv_heads: int = HEADS, **options) -> None:
        super().__init__()
        self.kv_heads, self.options = kv_heads, options
        self.q, self.k, self.v = (nn.Linear(WIDTH, heads * 11) for heads in (HEADS, kv_heads, kv_heads))
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, **options):
        q = self.q(x).unflatten(-1, (HEADS, 11)).transpose(-3, -2)
        k, v = (each(x).unflatten(-1, (self.kv_heads, 11)).transpose(-3, -2) for each in (self.k, self.v))
        out = F.scaled_dot_product_attention(q, k, v, **self.options, **options)
        return self.out_proj(out.transpose(-3, -2).flatten(-2))


def attention(*shape: int, **options) -> tuple[nn.Module, torch.Tensor]:
    """Return a model with one attention layer, and an input of this shape."""
    torch.manual_seed(0)
    return Attention(**options), torch.randn(*shape or (BATCH, LENGTH), WIDTH)


def outcome(model: nn.Module, x: torch.Tensor, upstream: torch.Tensor, **options) -> list[torch.Tensor]:
    """Return the output of a model, the gradient of its input, and those of all its parameters as one vector."""
    x = x.detach().clone().requires_grad_()
    out = model(x, **options)
    out = out[0] if isinstance(out, tuple) else out
    parameters = [each for each in model.parameters() if each.requires_grad]
    of_input, *others = torch.autograd.grad((out * upstream.to(out.dtype)).sum(), [x, *parameters])
    return [out.detach(), of_input, torch.cat([each.flatten() for each in others])]


def require_same(model, x, options=None, *, accelerated: int = 1, dtype=torch.float32) -> hw.Acceleration:
    """Check output and gradients of an accelerated model: their error against float64 is at most twice that of the
    model itself, over all values. Return the acceleration.
    """
    options = options or {}
    casts = [
        {name: each.to(kind) if each.is_floating_point() else each for name, each in options.items()}
        for kind in (torch.float64, dtype)
    ]
    upstream = torch.randn_like(x)
    exact = outcome(model.double(), x.double(), upstream, **casts[0])
    model, x = model.to(dtype), x.to(dtype)
    plain = outcome(model, x, upstream, **casts[1])
    with hw.accelerate(model) as acceleration:
        ours = outcome(model, x, upstream, **casts[1])
    assert sum(module.accelerated for module in acceleration.modules) == accelerated, str(acceleration)
    for right, theirs, each in zip(exact, plain, ours, strict=True):
        rounding = torch.finfo(dtype).eps / 2 * right.norm()
        assert (each.double() - right).norm() <= 2 * max((theirs.double() - right).norm(), rounding)
    return acceleration


# -- calls that are accelerated ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    ("shape", "layer"),
    [
        ((BATCH, LENGTH), {}),
        ((BATCH, LENGTH), {"is_causal": True}),
        ((BATCH, 131), {"is_causal": True, "kv_heads": 1, "enable_gqa": True, "scale": 0.37}),
    ],
)
def test_plain_calls(shape, layer, dtype):
    require_same(*attention(*shape, **layer), dtype=dtype)


def masks() -> dict[str, torch.Tensor]:
    """Return masks that are ranges of keys, by name."""
    causal = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()
    padding = torch.ones(BATCH, 1, 1, LENGTH, dtype=torch.bool)
    padding[0, ..., :3] = False
    windows = causal.triu(-2) | (torch.arange(LENGTH) == 0) & causal
    hidden_rows = causal & padding  # in the first sequence, three queries attend to nothing
    return {
        "two axes": causal,
        "padding": padding,
        "expanded": padding.expand(BATCH, HEADS, LENGTH, LENGTH),
        "window and first key": windows[None, None],
        "hidden rows": hidden_rows,
        "additive": torch.zeros(padding.shape).masked_fill(~padding, -torch.inf),
        "additive, finite": torch.zeros(padding.shape).masked_fill(~padding, MIN),
        "additive, hidden rows": torch.zeros(hidden_rows.shape).masked_fill(~hidden_rows, -torch.inf),
        "per head": torch.stack([causal, causal.triu(-1), torch.ones_like(causal)])[None],
    }


@pytest.mark.parametrize("name", masks())
def test_masks_are_the_models_own(name):
    require_same(*attention(), {"attn_mask": masks()[name]})


@pytest.mark.parametrize("kind", [causal_lower_right, causal_upper_left])
def test_causal_masks_of_a_class_of_torch(kind):
    q, k, v = (torch.randn(BATCH, HEADS, length, 11) for length in (5, 7, 7))
    bias = kind(5, 7)
    expected = SDPA(q, k, v, bias._materialize())
    model = Calls(q, k, v, attn_mask=bias)
    with hw.accelerate(model) as acceleration:
        torch.testing.assert_close(F.scaled_dot_product_attention(q, k, v, bias), expected)  # in no model
        torch.testing.assert_close(model(), expected)
    assert acceleration.modules[0].accelerated == 1


def test_the_causal_flag_aligns_the_first_query_with_the_first_key():
    q, k, v = (torch.randn(BATCH, HEADS, length, 11) for length in (5, 9, 9))
    for queries, keys, values in ((q, k, v), (k, q, q)):
        model = Calls(queries, keys, values, is_causal=True)
        with torch.no_grad(), hw.accelerate(model) as acceleration:
            out = model()
        assert acceleration.modules[0].accelerated == 1
        shape = (BATCH, HEADS, queries.shape[2], keys.shape[2])
        allowed = torch.ones(shape, dtype=torch.bool).tril()
        exact = plain_attention(queries.double(), keys.double(), values.double(), allowed)
        assert distance(out, exact.out) <= 2 * plain_errors(queries, keys, values, exact, allowed)["out"]


class Calls(nn.Module):
    """Module whose forward is one call of SDPA."""

    def __init__(self, *args, **options) -> None:
        super().__init__()
        self.args, self.options = args, options

    def forward(self):
        return F.scaled_dot_product_attention(*self.args, **self.options)


@pytest.mark.parametrize("mask", [None, torch.ones(5, 7, dtype=torch.bool).tril(), torch.rand(2, 5, 7) > 2])
def test_calls_without_an_axis_of_sequences(mask):
    q, k, v = torch.randn(2, 5, 11), torch.randn(2, 7, 11), torch.randn(2, 7, 13)
    model = Calls(q, k, v, mask)
    with hw.accelerate(model) as acceleration:
        torch.testing.assert_close(model(), SDPA(q, k, v, mask))
    assert acceleration.modules[0].accelerated == 1


@pytest.mark.parametrize("mask", [torch.rand(2, 1, 9, 1) > 0.5, torch.zeros(9, 1), torch.ones(1, 1, dtype=torch.bool)])
def test_masks_that_repeat_along_the_keys(mask):
    q, k, v = torch.randn(2, 3, 9, 11), torch.randn(2, 3, 7, 11), torch.randn(2, 3, 7, 13)
    model = Calls(q, k, v, mask)
    with hw.accelerate(model) as acceleration:
        torch.testing.assert_close(model(), SDPA(q, k, v, mask))
    assert acceleration.modules[0].accelerated == 1


def test_a_mask_that_layers_share_is_read_once(monkeypatch):
    reads = []
    own = accelerated_sdpa.mask_ranges
    monkeypatch.setattr(accelerated_sdpa, "mask_ranges", lambda *args: reads.append(args) or own(*args))

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList([attention()[0], attention()[0], attention()[0]])

        def forward(self, x, mask, change):
            for layer in self.layers:
                x = layer(x, attn_mask=mask[:, :, :LENGTH])  # another view of the same memory
            if change:
                mask[..., 1:] = False
                x = self.layers[0](x, attn_mask=mask)
            return x

    model, x = Twice(), attention()[1]
    for context in (torch.no_grad, torch.inference_mode):
        with context():
            expected, again = (model(x, masks()["two axes"][None, None].clone(), change) for change in (False, True))
            reads.clear()
            with hw.accelerate(model):
                torch.testing.assert_close(model(x, masks()["two axes"][None, None].clone(), False), expected)
                assert len(reads) == 1
                torch.testing.assert_close(model(x, masks()["two axes"][None, None].clone(), True), again)
                assert len(reads) == 3


# -- calls that are unchanged ------------------------------------------------------------------------------------------


def reason_of(model: nn.Module, *args, **kwargs) -> str:
    """Return the only reason for which a call in a model was not accelerated, and check that its output is the same, to
    the bit.
    """
    torch.manual_seed(5)
    expected = model(*args, **kwargs)
    with hw.accelerate(model) as acceleration:
        torch.manual_seed(5)
        assert torch.equal(model(*args, **kwargs), expected)
    (module,) = acceleration.modules
    assert module.accelerated == 0
    (reason,) = module.unchanged
    assert reason in str(acceleration)
    return reason


SQUARE = torch.randn(LENGTH, LENGTH)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"dropout_p": 0.5}, accelerated_sdpa.DROPOUT),
        ({"attn_mask": SQUARE}, "adds other numbers"),
        ({"attn_mask": SQUARE.relu() * -1e4}, "adds other numbers"),
        ({"attn_mask": torch.full((LENGTH, LENGTH), MIN)}, "by finite numbers"),
        ({"attn_mask": torch.zeros(LENGTH, LENGTH).requires_grad_()}, accelerated_sdpa.MASK_GRADIENT),
        ({"attn_mask": torch.arange(2 * LENGTH * 7).reshape(2, 1, LENGTH, 7) % 2 == 0}, None),
        ({"scale": -1.0}, accelerated_sdpa.SCALE),
        ({"scale": 0.0}, accelerated_sdpa.SCALE),
        ({"scale": torch.tensor(0.5)}, accelerated_sdpa.SCALE),
    ],
)
def test_unsupported_options(options, reason):
    model, x = attention()
    if reason is None:  # four runs of keys
        require_same(model, x, options)
        return
    assert reason in reason_of(model, x, **options)


def test_masks_of_many_ranges():
    model, x = attention(BATCH, 19)
    assert "more than 4 ranges" in reason_of(model, x, attn_mask=(torch.arange(19) % 2 == 0)[None])


@pytest.mark.parametrize(
    ("dtype", "reason"), [(torch.float64, "q is in torch.float64"), (torch.float16, "q is in torch.float16")]
)
def test_unsupported_dtypes(dtype, reason):
    model, x = attention()
    assert reason in reason_of(model.to(dtype), x.to(dtype))


def test_a_mask_and_the_causal_flag():
    model, x = attention()
    assert reason_of(model, x, attn_mask=masks()["padding"], is_causal=True) == accelerated_sdpa.TWO_MASKS


def test_kernels_that_the_user_chooses():
    model, x = attention()
    with sdpa_kernel(SDPBackend.MATH):
        assert reason_of(model, x) == accelerated_sdpa.KERNEL_CHOSEN


def test_second_derivatives_where_torch_has_them():
    q, k, v = (torch.randn(2, 3, 5, width).requires_grad_() for width in (11, 11, 13))
    model = Calls(q, k, v)
    assert reason_of(model) == accelerated_sdpa.SECOND_DERIVATIVE
    with hw.accelerate(model), torch.no_grad():
        torch.testing.assert_close(model(), SDPA(q, k, v))


def test_second_derivatives_do_not_depend_on_earlier_calls():
    q, k, v = torch.randn(2, 3, 5, 11), torch.randn(2, 3, 5, 11), torch.randn(2, 3, 5, 11)
    model, other = Calls(q.mT.contiguous().mT.requires_grad_(), k, v), Calls(q.clone().requires_grad_(), k, v)
    with hw.accelerate(model), hw.accelerate(other):
        other()  # which the kernels compute
        (gradient,) = torch.autograd.grad(model().square().sum(), model.args[0], create_graph=True)
        (second,) = torch.autograd.grad(gradient.square().sum(), model.args[0])
    assert bool(second.abs().max() > 0)


@pytest.mark.parametrize("layout", ["heads first", "positions first", "one sequence"])
def test_the_output_has_the_layout_of_torch(layout):
    q, k, v = torch.randn(2, 3, 5, 11), torch.randn(2, 3, 7, 11), torch.randn(2, 3, 7, 11)
    if layout == "positions first":
        q = q.transpose(1, 2).contiguous().transpose(1, 2)
    if layout == "one sequence":
        q, k, v = q[0], k[0], v[0]
    model = Calls(q, k, v)
    with torch.no_grad(), hw.accelerate(model) as acceleration:
        assert model().stride() == SDPA(q, k, v).stride()
    assert acceleration.modules[0].accelerated == 1


@pytest.mark.parametrize(("dtype", "smallest"), accelerated_sdpa.SMALLEST_QUERIES.items())
def test_few_queries_stay_with_torch(dtype, smallest, monkeypatch):
    monkeypatch.undo()  # the rule itself, on a processor where MKL uses AVX-512
    monkeypatch.setattr(accelerated_sdpa, "_may_be_slow_for_few_queries", lambda: True)
    monkeypatch.setattr(accelerated_sdpa, "_reasons", {})  # those of this processor are kept apart
    for queries in (1, smallest - 1, smallest):
        q, k = torch.randn(1, 1, queries, 4, dtype=dtype), torch.randn(1, 1, 2000, 4, dtype=dtype)
        model = Calls(q, k, k)
        if queries < smallest:
            assert reason_of(model) == f"torch is as fast for fewer than {smallest:,} queries in {dtype}"
        with hw.accelerate(model) as acceleration:
            model()
        assert acceleration.modules[0].accelerated == int(queries == smallest)


def test_wide_heads_in_float32_stay_with_torch(monkeypatch):
    monkeypatch.undo()  # the rule itself
    q = torch.randn(1, 1, 512, 192)
    assert reason_of(Calls(q, q, q)).startswith("for more than 128 features in float32")


def test_an_error_of_torch_is_its_own():
    q, k, v = torch.randn(2, 3, 5, 11), torch.randn(2, 3, 5, 12), torch.randn(2, 3, 5, 12)
    for arguments in (
        *((q, k, v), (q, q), (q, q, q, torch.ones(4, 4, dtype=torch.bool)), (q, q, q, q.double())),
        *((q, q, q, None, -0.5), (q, q, q, None, float("nan")), (q, q, q, None, 0.0, 1)),
    ):
        with pytest.raises((RuntimeError, TypeError)) as plain:
            SDPA(*arguments)
        model = Calls(*arguments)
        with hw.accelerate(model), pytest.raises(type(plain.value)) as ours:
            model()
        assert str(ours.value) == str(plain.value)


def test_other_functions_of_sdpa_stay_in_use(monkeypatch):
    model, x = attention()
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda *args, **kwargs: 2 * SDPA(*args, **kwargs))
    assert reason_of(model, x) == accelerated_sdpa.FOREIGN


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_of_functions():
    model, x = attention()
    out, tangent = torch.func.jvp(model, (x,), (x,)) if _has_jvp(model, x) else (None, None)
    batched = torch.func.vmap(model)(torch.stack([x, 2 * x]))
    with hw.accelerate(model) as acceleration:
        torch.testing.assert_close(torch.func.vmap(model)(torch.stack([x, 2 * x])), batched)
        if out is not None:
            torch.testing.assert_close(torch.func.jvp(model, (x,), (x,)), (out, tangent))
    assert acceleration.modules[0].unchanged.keys() == {accelerated_sdpa.UNUSUAL}


def _has_jvp(model, x) -> bool:
    with contextlib.suppress(NotImplementedError, RuntimeError):
        torch.func.jvp(model, (x,), (x,))
        return True
    return False


def test_the_meta_device():
    model, x = attention()
    with hw.accelerate(model.to("meta")) as acceleration:
        assert model(x.to("meta")).shape == x.shape
    assert acceleration.modules[0].unchanged == {accelerated_sdpa.UNUSUAL: 1}


# -- autocast ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mask", [None, torch.full((LENGTH, LENGTH), MIN)])
def test_autocast(mask):
    # In bfloat16, the smallest number of float32 is -inf, so that all rows are empty.
    model, x = attention()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(x, attn_mask=mask)
        with hw.accelerate(model) as acceleration:
            out = model(x, attn_mask=mask)
    assert acceleration.modules[0].accelerated == 1
    assert out.dtype == expected.dtype
    exact = model.double()(x.double(), attn_mask=None if mask is None else torch.full_like(mask, -torch.inf).double())
    assert distance(out, exact) <= 2 * distance(expected, exact)
