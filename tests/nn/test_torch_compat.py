"""`headwise.compat.MultiheadAttention` against torch's layer; where they differ, against an independent oracle."""

import copy
import inspect
import pickle
import re
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import headwise as hw
from headwise.compat import MultiheadAttention
from oracles import plain_attention
from research.tables.torch_differences import DIFFERENCES

BATCH, HEADS, HEAD_DIM, QUERIES, KEYS, KDIM, VDIM = 3, 2, 7, 5, 11, 13, 17
EMBED = HEADS * HEAD_DIM
DOCS = Path(__file__).parent.parent.parent / "docs"
EXACT = {"rtol": 0, "atol": 1e-12}

pytestmark = pytest.mark.filterwarnings(  # warnings of torch about its own code
    "ignore:Support for mismatched",
    "ignore:The PyTorch API of nested tensors",
    "ignore:enable_nested_tensor is True",
    "ignore:There is a performance drop because we have not yet implemented the batching rule",
)


def pair(*, seed=0, **options) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    """Return our layer and torch's layer with these options and the same random weights and biases."""
    options = {"dtype": torch.float64} | options
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in theirs.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.3)
    ours = MultiheadAttention(EMBED, HEADS, **options)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    return ours, theirs


def replacement_of(layer: nn.MultiheadAttention) -> MultiheadAttention:
    """Return our layer with the options and weights of a layer of torch that `nn.Transformer` created."""
    ours = MultiheadAttention(
        layer.embed_dim,
        layer.num_heads,
        layer.dropout,
        bias=layer.in_proj_bias is not None,
        batch_first=layer.batch_first,
        dtype=layer.out_proj.weight.dtype,
    )
    ours.load_state_dict(layer.state_dict(), strict=True)
    return ours.train(layer.training)


def migrated(model: nn.Module) -> nn.Module:
    """Return a copy of a model in which our layers replace all attention layers of torch."""
    model = copy.deepcopy(model)
    for module in list(model.modules()):
        for name, child in module.named_children():
            if type(child) is nn.MultiheadAttention:
                setattr(module, name, replacement_of(child))
    return model


def causal_mask(length: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """Return torch's float causal mask `(length, length)`: 0 for visible keys, otherwise -inf."""
    return nn.Transformer.generate_square_subsequent_mask(length, dtype=dtype)


# -- equal results ------------------------------------------------------------------------------------------------


@st.composite
def calls(draw):
    """Draw options of a layer, its three inputs, and keyword arguments of the call.

    Masks never hide key 0, so that every query sees a key.
    """
    other_widths = draw(st.booleans())
    made = {
        "batch_first": draw(st.booleans()),
        "bias": draw(st.booleans()),
        "add_bias_kv": draw(st.booleans()),
        "add_zero_attn": draw(st.booleans()),
        "kdim": KDIM if other_widths else None,
        "vdim": VDIM if other_widths else None,
    }
    batched = draw(st.booleans())
    inputs = "three" if other_widths else draw(st.sampled_from(["one", "two", "three"]))
    keys = QUERIES if inputs == "one" or draw(st.booleans()) else KEYS
    batch = BATCH if batched else 1
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**16)))

    def randn(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    def tensor(length, width):
        if not batched:
            return randn(length, width)
        return randn(batch, length, width) if made["batch_first"] else randn(length, batch, width)

    def mask(kind, *shape):
        if kind == "float":
            return randn(*shape)
        hidden = randn(*shape) > 0
        hidden[..., 0] = False
        return hidden if kind == "bool" else torch.zeros(shape, dtype=torch.float64).masked_fill(hidden, -torch.inf)

    kinds = st.sampled_from([None, "bool", "float", "infinite"])
    padding, attention = draw(kinds), draw(kinds)
    mask_per_head = draw(st.booleans())
    call = {"need_weights": draw(st.booleans()), "average_attn_weights": draw(st.booleans())}
    if padding is not None:
        call["key_padding_mask"] = mask(padding, *((batch, keys) if batched else (keys,)))
    if attention is not None:
        call["attn_mask"] = mask(attention, *((batch * HEADS,) if mask_per_head else ()), QUERIES, keys)
    # When torch uses only the hint, it hides the keys it has appended itself (docs/reports/torch-differences.md).
    appended = made["add_bias_kv"] or made["add_zero_attn"]
    if keys == QUERIES and not (appended and padding is None and not call["need_weights"]) and draw(st.booleans()):
        call |= {"attn_mask": causal_mask(QUERIES), "is_causal": True}
        if draw(st.booleans()):
            call["attn_mask"] = call["attn_mask"] < 0
    query, key = tensor(QUERIES, EMBED), tensor(keys, made["kdim"] or EMBED)
    value = tensor(keys, made["vdim"] or EMBED)
    given_inputs = {"one": (query,) * 3, "two": (query, key, key), "three": (query, key, value)}[inputs]
    return made, given_inputs, call


def leaves(inputs, call):
    """Return copies of the inputs and of float masks that require gradients; equal tensor objects share one copy."""
    copies = {id(x): x.clone().requires_grad_() for x in inputs}
    masks = {
        name: value.clone().requires_grad_() if isinstance(value, torch.Tensor) and value.is_floating_point() else value
        for name, value in call.items()
    }
    if call.get("is_causal"):
        masks["attn_mask"] = call["attn_mask"]  # replaced by the hint, so torch computes no gradient
    return [copies[id(x)] for x in inputs], masks


def results_and_gradients(layer, inputs, call):
    """Return output, weights, and the gradients for the distinct inputs, float masks and parameters."""
    inputs, call = leaves(inputs, call)
    y, weights = layer(*inputs, **call)
    generator = torch.Generator().manual_seed(1)
    loss = (y * torch.randn(y.shape, generator=generator, dtype=y.dtype)).sum()
    if weights is not None:
        loss = loss + (weights * torch.randn(weights.shape, generator=generator, dtype=y.dtype)).sum()
    masks = [mask for mask in call.values() if isinstance(mask, torch.Tensor) and mask.requires_grad]
    differentiated = [*dict.fromkeys(inputs), *masks, *layer.parameters()]
    return y, weights, torch.autograd.grad(loss, differentiated, allow_unused=True)


def check_results_and_gradients(drawn):
    made, inputs, call = drawn
    ours, theirs = pair(**made)
    y, weights, gradients = results_and_gradients(ours, inputs, call)
    expected, expected_weights, expected_gradients = results_and_gradients(theirs, inputs, call)
    torch.testing.assert_close(y, expected, **EXACT)
    assert (weights is None) == (expected_weights is None)
    if weights is not None:
        torch.testing.assert_close(weights, expected_weights, **EXACT)
    for got, wanted in zip(gradients, expected_gradients, strict=True):
        assert (got is None) == (wanted is None)
        if got is not None:
            torch.testing.assert_close(got, wanted, **EXACT)


@settings(deadline=None, max_examples=75)
@given(calls())
def test_output_weights_and_gradients_equal_torchs(drawn):
    check_results_and_gradients(drawn)


@pytest.mark.slow
@settings(deadline=None, max_examples=300)
@given(calls())
def test_output_weights_and_gradients_equal_torchs_in_more_calls(drawn):
    check_results_and_gradients(drawn)


@settings(deadline=None, max_examples=60)
@given(calls())
def test_results_in_evaluation_without_gradients_equal_torchs(drawn):
    made, inputs, call = drawn
    ours, theirs = pair(**made)
    with torch.no_grad():
        for got, wanted in zip(ours.eval()(*inputs, **call), theirs.eval()(*inputs, **call), strict=True):
            assert (got is None) == (wanted is None)
            if got is not None:
                torch.testing.assert_close(got, wanted, **EXACT)


@pytest.mark.parametrize(
    ("options", "called_with"),
    [
        ({"is_causal": True}, [(None, True)]),
        ({}, [("a mask", False)]),
        ({"is_causal": True, "need_weights": True}, []),  # weights are computed without a kernel
        ({"is_causal": True, "key_padding_mask": torch.zeros(BATCH, 17)}, [("a mask", False)]),
    ],
    ids=["hint", "no hint", "weights", "padding"],
)
def test_the_causal_hint_reaches_the_kernel(options, called_with, monkeypatch):
    hints = []
    kernel = torch.nn.functional.scaled_dot_product_attention

    def recorded(*tensors, attn_mask, is_causal, **rest):
        hints.append((attn_mask if attn_mask is None else "a mask", is_causal))
        return kernel(*tensors, attn_mask=attn_mask, is_causal=is_causal, **rest)

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", recorded)
    layer, _ = pair()
    x = torch.randn(17, BATCH, EMBED, dtype=torch.float64)  # the kernel gets a mask for fewer than 16 keys
    layer(x, x, x, attn_mask=causal_mask(17), **({"need_weights": False} | options))
    assert hints == called_with


def test_signatures_equal_torchs():
    for name in ("__init__", "forward"):
        ours, theirs = (
            {
                parameter.name: parameter.default
                for parameter in inspect.signature(getattr(cls, name)).parameters.values()
            }
            for cls in (MultiheadAttention, nn.MultiheadAttention)
        )
        assert ours == theirs


OPTIONS = [{}, {"kdim": KDIM, "vdim": VDIM}, {"kdim": KDIM}, {"bias": False}, {"add_bias_kv": True}]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_parameters_equal_torchs(options):
    torch.manual_seed(3)
    ours = MultiheadAttention(EMBED, HEADS, **options)
    torch.manual_seed(3)
    theirs = nn.MultiheadAttention(EMBED, HEADS, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for got, wanted in zip(ours.state_dict().values(), theirs.state_dict().values(), strict=True):
        assert torch.equal(got, wanted)
    theirs.load_state_dict(ours.state_dict(), strict=True)
    ours.load_state_dict(theirs.state_dict(), strict=True)
    torch.manual_seed(3)
    ours._reset_parameters()
    assert torch.equal(ours.out_proj.weight, theirs.out_proj.weight)


def test_parameters_have_the_given_device_and_dtype():
    layer = MultiheadAttention(EMBED, HEADS, device="meta", dtype=torch.bfloat16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.bfloat16)}
    x = torch.empty(QUERIES, BATCH, EMBED, device="meta", dtype=torch.bfloat16)
    y, weights = layer(x, x, x)
    assert (y.shape, weights.shape) == ((QUERIES, BATCH, EMBED), (BATCH, QUERIES, QUERIES))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_half_precision_stays_near_torch(dtype):
    ours, theirs = pair(dtype=dtype)
    x = torch.randn(QUERIES, BATCH, EMBED).to(dtype)
    hidden = torch.arange(QUERIES) >= torch.tensor([3, 5, 1])[:, None]
    for got, wanted in zip(ours(x, x, x, hidden), theirs(x, x, x, hidden), strict=True):
        assert got.dtype == dtype
        torch.testing.assert_close(got, wanted, rtol=0, atol=8 * torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("options", [{}, {"add_bias_kv": True}, {"kdim": KDIM}], ids=str)
def test_the_input_bias_can_have_another_dtype_than_the_weights(options, dtype):
    layers = pair(batch_first=True, **options)
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    key = torch.randn(BATCH, QUERIES, KDIM, dtype=torch.float64) if "kdim" in options else x
    results = []
    for layer in layers:
        layer.in_proj_bias.data = layer.in_proj_bias.data.to(dtype)
        results.append(layer(x, key, x))
    torch.testing.assert_close(*results, **EXACT)


def test_autocast_equals_torchs():
    ours, theirs = pair(dtype=torch.float32)
    x = torch.randn(QUERIES, BATCH, EMBED)
    for options in ({}, {"attn_mask": causal_mask(QUERIES, torch.float32), "is_causal": True, "need_weights": False}):
        with torch.autocast("cpu", torch.bfloat16):
            (y, _), (expected, _) = ours(x, x, x, **options), theirs(x, x, x, **options)
        assert y.dtype == expected.dtype == torch.bfloat16
        torch.testing.assert_close(y, expected, rtol=0, atol=8 * 2**-7)


@pytest.mark.parametrize(("batch", "queries", "keys"), [(0, 5, 7), (2, 0, 7)], ids=str)
def test_empty_inputs_have_outputs_of_the_right_shape(batch, queries, keys):
    ours, _ = pair(batch_first=True)
    query, key = torch.zeros(batch, queries, EMBED).double(), torch.zeros(batch, keys, EMBED).double()
    hidden = torch.zeros(batch * HEADS, queries, keys, dtype=torch.bool)
    y, weights = ours(query, key, key, torch.zeros(batch, keys, dtype=torch.bool), attn_mask=hidden)
    assert (y.shape, weights.shape) == ((batch, queries, EMBED), (batch, queries, keys))


# -- documented differences ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["bool", "float"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("need_weights", [False, True])
def test_a_row_without_a_key_gives_zeros(need_weights, dropout, kind):
    ours, _ = pair(batch_first=True, dropout=dropout)
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64, requires_grad=True)
    hidden = torch.zeros(QUERIES, QUERIES, dtype=torch.bool)
    hidden[3] = True
    mask = hidden if kind == "bool" else torch.zeros(hidden.shape).double().masked_fill(hidden, -torch.inf)
    y, weights = ours(x, x, x, attn_mask=mask, need_weights=need_weights)
    torch.testing.assert_close(y[:, 3], ours.out_proj.bias.expand(BATCH, EMBED), **EXACT)
    if need_weights:
        assert not weights[:, 3].any()
    loss = y.square().sum() + (weights.square().sum() if need_weights else 0.0)
    for gradient in torch.autograd.grad(loss, [x, *ours.parameters()]):
        assert gradient.isfinite().all()
    if not dropout:
        q, k, v = (
            projected.view(BATCH, QUERIES, HEADS, HEAD_DIM).transpose(1, 2)
            for projected in (x @ ours.in_proj_weight.T + ours.in_proj_bias).chunk(3, -1)
        )
        plain = plain_attention(q, k, v, allowed=~hidden)
        joined = torch.cat(plain.out.unbind(1), -1)
        torch.testing.assert_close(y, joined @ ours.out_proj.weight.T + ours.out_proj.bias, **EXACT)
        if need_weights:
            torch.testing.assert_close(weights, plain.weights.mean(1), **EXACT)


def test_a_sequence_that_is_all_padding_gives_zeros():
    ours, _ = pair(batch_first=True)
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    hidden = torch.tensor([[False] * QUERIES, [True] * QUERIES, [False] * QUERIES])
    for train in (True, False):
        y, weights = ours.train(train)(x, x, x, hidden)
        torch.testing.assert_close(y[1], ours.out_proj.bias.expand(QUERIES, EMBED), **EXACT)
        assert not weights[1].any()


def test_weights_are_those_before_dropout():
    ours, _ = pair(dropout=0.5)
    x = torch.randn(QUERIES, BATCH, EMBED, dtype=torch.float64)
    expected, expected_weights = copy.deepcopy(ours).eval()(x, x, x)
    y, weights = ours(x, x, x)
    torch.testing.assert_close(weights, expected_weights, **EXACT)
    assert not torch.allclose(y, expected)


def test_appended_keys_are_visible_with_the_causal_hint():
    ours, theirs = pair(add_bias_kv=True, add_zero_attn=True)
    x = torch.randn(QUERIES, BATCH, EMBED, dtype=torch.float64)
    hinted, _ = ours(x, x, x, attn_mask=causal_mask(QUERIES), is_causal=True, need_weights=False)
    expected, _ = theirs(x, x, x, attn_mask=causal_mask(QUERIES), need_weights=False)
    torch.testing.assert_close(hinted, expected, **EXACT)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("difference", DIFFERENCES, ids=lambda difference: difference.name)
def test_the_documentation_lists_every_difference(difference):
    assert difference.behaviour(nn.MultiheadAttention) != difference.behaviour(MultiheadAttention)
    assert f"| {difference.name} |" in (DOCS / "reports" / "torch-differences.md").read_text(encoding="utf-8")


def test_the_code_of_the_documentation_runs():
    names = {"nn": nn}
    for block in re.findall(r"```python\n(.*?)```", (DOCS / "torch-layer.md").read_text(encoding="utf-8"), re.DOTALL):
        exec(block, names)
    assert all(type(block.self_attn) is MultiheadAttention for block in names["encoder"].layers)


# -- dropout ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_leaves_the_expected_value_and_is_off_in_evaluation(need_weights):
    layer, theirs = pair(dropout=0.3)
    x = torch.randn(QUERIES, 1, EMBED, dtype=torch.float64)
    expected, _ = theirs.eval()(x, x, x)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x, x, x, need_weights=need_weights)[0], expected, **EXACT)
        many = x.expand(-1, 20_000, -1)
        y, _ = layer.train()(many, many, many, need_weights=need_weights)
    error = (y.mean(1) - expected[:, 0]).abs() / (y.std(1) / 20_000**0.5)
    assert error.max() < 5  # standard errors of the mean
    assert y.std(1).min() > 0.01


@pytest.mark.parametrize("need_weights", [False, True])
def test_dropout_drops_the_weights_that_torch_drops_with_the_same_seed(need_weights):
    x = torch.randn(QUERIES, BATCH, EMBED, dtype=torch.float64)
    outputs = []
    for layer in pair(dropout=0.5):
        torch.manual_seed(1)
        outputs.append(layer(x, x, x, need_weights=need_weights)[0])
    torch.testing.assert_close(*outputs, **EXACT)


# -- inside torch's transformers ----------------------------------------------------------------------------------


def encoder(**options) -> nn.TransformerEncoder:
    """Return a small encoder of torch with these options."""
    layer = nn.TransformerEncoderLayer(EMBED, HEADS, 31, **({"dropout": 0.0, "batch_first": True} | options))
    return nn.TransformerEncoder(layer, 2)


def forwards_of(monkeypatch) -> list[MultiheadAttention]:
    """Return a list to which each of our layers is added whenever its forward pass runs."""
    ran = []
    forward = MultiheadAttention.forward

    def recorded(self, *inputs, **options):
        ran.append(self)
        return forward(self, *inputs, **options)

    monkeypatch.setattr(MultiheadAttention, "forward", recorded)
    return ran


HIDDEN = torch.arange(QUERIES) >= torch.tensor([3, 5, 1])[:, None]


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "options", [{}, {"src_key_padding_mask": HIDDEN}, {"mask": causal_mask(QUERIES)}], ids=["none", "padding", "causal"]
)
def test_a_converted_encoder_in_evaluation_runs_our_forward(options, norm_first, monkeypatch):
    theirs = encoder(norm_first=norm_first).double().eval()
    ours = migrated(theirs)
    ran = forwards_of(monkeypatch)
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    for context in (torch.no_grad, torch.inference_mode):
        ran.clear()
        with context():
            y, expected = ours(x, **options), theirs(x, **options)
        assert {id(layer) for layer in ran} >= {id(layer.self_attn) for layer in ours.layers}
        torch.testing.assert_close(y, expected, **EXACT)


def test_an_encoder_created_with_our_layers_runs_our_forward(monkeypatch):
    layer = encoder().layers[0]
    layer.self_attn = MultiheadAttention(EMBED, HEADS, batch_first=True)
    ours = nn.TransformerEncoder(layer, 2).eval()
    ran = forwards_of(monkeypatch)
    with torch.no_grad():
        ours(torch.randn(BATCH, QUERIES, EMBED), src_key_padding_mask=HIDDEN)
    assert {id(layer) for layer in ran} == {id(layer.self_attn) for layer in ours.layers}


def test_outputs_stay_finite_where_torchs_fast_path_returns_nan():
    theirs = encoder().eval()
    ours = migrated(theirs)
    x = torch.randn(BATCH, QUERIES, EMBED)
    nothing = torch.full((QUERIES, QUERIES), -torch.inf)
    with torch.no_grad():
        assert theirs(x, mask=nothing).isnan().any()
        assert ours(x, mask=nothing).isfinite().all()


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("need_weights", [True, False])
def test_nested_tensors_have_the_results_of_their_sequences(need_weights, average):
    ours = MultiheadAttention(EMBED, HEADS, batch_first=True).eval()
    theirs = nn.MultiheadAttention(EMBED, HEADS, batch_first=True).eval()
    theirs.load_state_dict(ours.state_dict())
    x = torch.nested.nested_tensor([torch.randn(length, EMBED) for length in (3, 5)])
    call = {"need_weights": need_weights, "average_attn_weights": average}
    with torch.no_grad():
        (y, weights), (expected, expected_weights) = ours(x, x, x, **call), theirs(x, x, x, **call)
    torch.testing.assert_close(y.unbind(), expected.unbind())
    torch.testing.assert_close(weights, expected_weights)


def losses(model: nn.Module) -> list[float]:
    """Train a model on a small task and return its loss after each step."""
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(BATCH, QUERIES, EMBED, generator=generator)
    target = torch.randn(BATCH, QUERIES, EMBED, generator=generator)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    seen = []
    for _ in range(30):
        y = model(x, mask=causal_mask(QUERIES, torch.float32), src_key_padding_mask=HIDDEN.float() * -1e9)
        loss = (y - target).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


def test_training_losses_equal_torchs():
    theirs = encoder()
    ours = migrated(theirs)
    our_losses, torch_losses = losses(ours), losses(theirs)
    assert torch_losses[-1] < 0.7 * torch_losses[0]
    assert our_losses == pytest.approx(torch_losses, abs=1e-5)


@pytest.mark.parametrize("train", [True, False])
def test_decoder_and_transformer_equal_torchs(train):
    theirs = nn.Transformer(EMBED, HEADS, 2, 2, 31, dropout=0.0, dtype=torch.float64).train(train)
    ours = migrated(theirs)
    assert sum(isinstance(module, MultiheadAttention) for module in ours.modules()) == 6
    source = torch.randn(KEYS, BATCH, EMBED, dtype=torch.float64)
    target = torch.randn(QUERIES, BATCH, EMBED, dtype=torch.float64)
    padding = torch.arange(KEYS) >= torch.tensor([7, KEYS, 2])[:, None]
    masks = {
        "src_key_padding_mask": padding,
        "memory_key_padding_mask": padding,
        "tgt_mask": causal_mask(QUERIES),
        "tgt_is_causal": True,
    }
    with torch.set_grad_enabled(train):
        torch.testing.assert_close(ours(source, target, **masks), theirs(source, target, **masks), **EXACT)
        decoded = ours.decoder(target, source, tgt_mask=causal_mask(QUERIES))
        torch.testing.assert_close(decoded, theirs.decoder(target, source, tgt_mask=causal_mask(QUERIES)), **EXACT)


# -- copies, adapters, compilation --------------------------------------------------------------------------------


def test_copied_and_pickled_layers_compute_the_same(monkeypatch):
    layer, _ = pair(batch_first=True)
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    for twin in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        assert torch.equal(twin(x, x, x)[0], layer(x, x, x)[0])
    twin = pickle.loads(pickle.dumps(migrated(encoder()))).eval()
    ran = forwards_of(monkeypatch)
    with torch.no_grad():
        twin(torch.randn(BATCH, QUERIES, EMBED))
    assert len(ran) == 2


class LowRank(nn.Module):
    """Linear map plus a low-rank update, an adapter in place of a linear layer (Hu et al. 2021, equation 3)."""

    def __init__(self, base: nn.Linear):
        super().__init__()
        self.base = base
        self.down = nn.Parameter(torch.randn(2, base.in_features, dtype=base.weight.dtype))
        self.up = nn.Parameter(torch.randn(base.out_features, 2, dtype=base.weight.dtype))

    @property
    def weight(self):
        return self.base.weight

    @property
    def bias(self):
        return self.base.bias

    def forward(self, x):
        return self.base(x) + x @ self.down.T @ self.up.T


def test_an_adapter_in_place_of_the_output_projection_changes_the_output():
    layer, _ = pair(batch_first=True)
    merged = copy.deepcopy(layer)
    layer.out_proj = LowRank(layer.out_proj)
    merged.out_proj.weight.data += layer.out_proj.up.data @ layer.out_proj.down.data
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    y, _ = layer(x, x, x)
    torch.testing.assert_close(y, merged(x, x, x)[0], **EXACT)
    for gradient in torch.autograd.grad(y.sum(), [layer.out_proj.down, layer.out_proj.up]):
        assert gradient.any()


class Doubled(nn.Module):
    """Parametrization that doubles a weight."""

    def forward(self, weight):
        return 2 * weight


@pytest.mark.parametrize("name", ["in_proj_weight", "in_proj_bias"])
def test_a_parametrization_changes_the_output(name):
    layer, doubled = pair()[0], pair()[0]
    getattr(doubled, name).data.mul_(2)
    nn.utils.parametrize.register_parametrization(layer, name, Doubled())
    nn.utils.parametrize.register_parametrization(layer.out_proj, "weight", Doubled())
    doubled.out_proj.weight.data.mul_(2)
    x = torch.randn(QUERIES, BATCH, EMBED, dtype=torch.float64)
    for inputs in ((x, x, x), (x, x.clone(), x)):
        torch.testing.assert_close(layer(*inputs)[0], doubled(*inputs)[0], **EXACT)


def test_vmap_and_grad_equal_separate_calls():
    layer, _ = pair()
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    hidden = HIDDEN

    def one(x, hidden):
        return layer(x, x, x, hidden)

    for got, wanted in zip(torch.func.vmap(one)(x, hidden), zip(*map(one, x, hidden), strict=True), strict=True):
        torch.testing.assert_close(got, torch.stack(wanted), **EXACT)

    def loss(x, hidden):
        return one(x, hidden)[0].sin().sum()

    leaf = x.clone().requires_grad_()
    (expected,) = torch.autograd.grad(sum(map(loss, leaf, hidden)), leaf)
    torch.testing.assert_close(torch.func.vmap(torch.func.grad(loss))(x, hidden), expected, **EXACT)


def test_the_layer_compiles_to_one_graph(tracing_server):
    tracing_server.run("""
import torch
from torch import nn
from headwise.compat import MultiheadAttention
x, hidden, mask = torch.randn(2, 5, 12), torch.rand(2, 5) > 0.7, nn.Transformer.generate_square_subsequent_mask(5)
layer = MultiheadAttention(12, 6, batch_first=True, add_bias_kv=True)
calls = {}, {"key_padding_mask": hidden}, {"attn_mask": mask, "is_causal": True, "need_weights": False}
for call in calls:
    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, x, x, **call), layer(x, x, x, **call))
block = nn.TransformerEncoderLayer(12, 6, 17, dropout=0.0, batch_first=True)
block.self_attn = MultiheadAttention(12, 6, batch_first=True)
for train in (True, False):
    with torch.set_grad_enabled(train):
        compiled = torch.compile(block.train(train), fullgraph=True, backend="eager")
        torch.testing.assert_close(compiled(x, src_key_padding_mask=hidden), block(x, src_key_padding_mask=hidden))
""")


@pytest.mark.slow
def test_the_layer_exports_with_free_lengths(tracing_server):
    tracing_server.run("""
import torch
from torch import nn
from headwise.compat import MultiheadAttention
batch, length = torch.export.Dim("batch", min=2, max=64), torch.export.Dim("length", min=2, max=64)
layer = MultiheadAttention(12, 6, batch_first=True, add_bias_kv=True).eval()
encoder = nn.TransformerEncoder(nn.TransformerEncoderLayer(12, 6, 17, batch_first=True), 2, enable_nested_tensor=False)
for block in encoder.layers:
    block.self_attn = MultiheadAttention(12, 6, batch_first=True)
encoder.eval()

class With(nn.Module):
    def __init__(self, call):
        super().__init__()
        self.layer, self.encoder, self.call = layer, encoder, call
    def forward(self, x, mask):
        return self.call(x, mask)

def inputs(b, n):
    return torch.randn(b, n, 12), nn.Transformer.generate_square_subsequent_mask(n)

for call in (
    lambda x, mask: layer(x, x, x),
    lambda x, mask: layer(x, x, x, attn_mask=mask, need_weights=False),
    lambda x, mask: layer(x, x, x, attn_mask=mask, is_causal=True),
    lambda x, mask: encoder(x),
    lambda x, mask: encoder(x, mask=mask, is_causal=True),
    lambda x, mask: encoder(x, src_key_padding_mask=x[..., 0] > 1),
):
    for context in (torch.no_grad, torch.enable_grad):
        with context():
            shapes = ({0: batch, 1: length}, {0: length, 1: length})
            exported = torch.export.export(With(call), inputs(3, 5), dynamic_shapes=shapes).module()
            x, mask = inputs(4, 7)
            torch.testing.assert_close(exported(x, mask), call(x, mask))
""")


# -- mistakes -----------------------------------------------------------------------------------------------------

X = torch.zeros(2, 5, 12)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("inputs", "options", "message"),
    [
        ((X[0, 0], X, X), {}, r"query: expected \(batch, length, 12\) or \(length, 12\), got \(12,\)"),
        (([1], X, X), {}, "query: expected a tensor, got list"),
        ((X, X[0], X), {}, r"key: expected \(batch, length, 12\), as many axes as query, got \(5, 12\)"),
        ((X, X[..., :11], X), {}, r"key: expected width 12 on the last axis, got \(2, 5, 11\)"),
        ((X, X[:1], X[:1]), {}, "key: expected batch 2 like query, got batch 1"),
        ((X, X, X[:, :3]), {}, r"value: expected \(2, 5\) before the width, like key, got \(2, 3\)"),
        ((X.double(), X, X), {}, "query: expected torch.float32 like the layer, got torch.float64; cast one"),
        ((X, X.to("meta"), X), {}, "key: expected a tensor on cpu like the layer, got meta"),
        ((X,) * 3, {"key_padding_mask": torch.ones(5, 2)}, r"key_padding_mask: .* shape of \(2, 5\), got \(5, 2\)"),
        ((X[0],) * 3, {"key_padding_mask": torch.ones(2, 5)}, r"key_padding_mask: .* of \(5,\), got \(2, 5\)"),
        ((X,) * 3, {"attn_mask": torch.ones(5, 7)}, r"attn_mask: .* \(5, 5\) or \(12, 5, 5\), got \(5, 7\)"),
        ((X,) * 3, {"attn_mask": torch.ones(2, 5, 5)}, r"attn_mask: .* or \(12, 5, 5\), got \(2, 5, 5\)"),
        ((X,) * 3, {"attn_mask": torch.ones(5, 5).int()}, "attn_mask: expected a boolean tensor, .* got torch.int32"),
        ((X,) * 3, {"key_padding_mask": [1]}, "key_padding_mask: expected a boolean tensor, .* got list"),
        ((X,) * 3, {"attn_mask": torch.ones(5, 5, device="meta")}, "attn_mask: .* on cpu like query, got meta"),
        ((X,) * 3, {"is_causal": True}, r"attn_mask: expected the causal mask \(5, 5\) that is_causal=True .* none"),
    ],
)
def test_unusable_inputs_are_refused(inputs, options, message):
    with pytest.raises(hw.InputError, match="^" + message):
        MultiheadAttention(12, 6, batch_first=True)(*inputs, **options)


@pytest.mark.usefixtures("as_user")
def test_unusable_nested_tensors_are_refused():
    layer = MultiheadAttention(12, 6, batch_first=True)
    x = torch.nested.nested_tensor([X[0], X[0, :3]])
    with pytest.raises(hw.InputError, match=r"^key: expected query itself, and value too, when query is nested"):
        layer(x, X, X)
    with pytest.raises(hw.InputError, match=r"^key: expected a tensor, got a nested tensor"):
        layer(X, x, x)
    with pytest.raises(hw.InputError, match=r"^query: expected a tensor with a mask, got a nested tensor; its"):
        layer(x, x, x, key_padding_mask=torch.zeros(2, 5))
    with pytest.raises(hw.InputError, match=r"^query: expected a strided .*batch_first=True, got .*batch_first=False"):
        MultiheadAttention(12, 6)(x, x, x)


@pytest.mark.usefixtures("as_user")
def test_errors_name_the_axes_in_the_order_of_batch_first():
    with pytest.raises(hw.InputError, match=r"^query: expected \(length, batch, 12\) or \(length, 12\), got \(12,\)"):
        MultiheadAttention(12, 6)(X[0, 0], X, X)
