"""`MultiHeadAttention` against an independent implementation, its documented properties, and its error messages."""

import copy

import pytest
import torch

import headwise as hw
from layer_mistakes import MISTAKES_OF_EVERY_LAYER
from oracles import plain_attention, plain_layer

BATCH, QUERIES, KEYS, EMBED, CONTEXT = 2, 5, 7, 12, 10
OPTIONS = {
    "default": {},
    "grouped": {"num_kv_heads": 2},
    "multi-query": {"num_kv_heads": 1},
    "head_dim": {"head_dim": 11},
    "value_dim": {"value_dim": 13},
    "out_dim": {"out_dim": 17},
    "no bias": {"bias": False},
    "no output bias": {"out_bias": False},
    "only an output bias": {"bias": False, "out_bias": True},
    "one projection": {"fused_qkv": True, "num_kv_heads": 2, "value_dim": 5},
    "rotary": {"rotary": hw.Rotary(500.0)},
    "partial rotary": {"rotary": hw.Rotary(width=4, interleaved=True), "head_dim": 7},
    "alibi": {"position_bias": hw.ALiBi()},
    "relative": {"position_bias": hw.RelativeBias(6, 8, 5, dtype=torch.float64)},
    "scale": {"scores": hw.Scores(scale=0.3)},
    "temperature": {"scores": hw.Scores(temperature=True)},
    "sinks": {"scores": hw.Scores(sinks=True)},
    "softcap": {"scores": hw.Scores(softcap=1.5)},
    "blockwise": {"backend": "blockwise", "num_kv_heads": 2, "scores": hw.Scores(sinks=True), "rotary": hw.Rotary()},
    "talking heads": {"scores": hw.Scores(talking_heads=True), "backend": "reference"},
    "rms norm": {"qk_norm": hw.QKNorm("rms", eps=0.01), "num_kv_heads": 3},
    "layer norm over heads": {"qk_norm": hw.QKNorm("layer", "heads", eps=0.01), "num_kv_heads": 3},
    "gate per head": {"output_gate": "head"},
    "gate per element": {"output_gate": "element", "value_dim": 5},
    "all": {
        "num_kv_heads": 2,
        "head_dim": 11,
        "value_dim": 13,
        "out_dim": 17,
        "bias": False,
        "rotary": hw.Rotary(width=6),
        "position_bias": hw.RelativeBias(6, 8, 5, dtype=torch.float64),
        "scores": hw.Scores(0.3, 2.0, sinks=True, temperature=True, talking_heads=True),
        "qk_norm": hw.QKNorm("layer"),
        "output_gate": "element",
        "backend": "reference",
    },
}


def by_hand(layer, x, context, allowed=None, bias=None, gate=None, values=None):
    """Return the output and weights of a layer, computed by `plain_layer` from the layer's parameters and options.

    `allowed` and `bias` are `(batch, heads, queries, keys)`, `gate` is `(batch, heads)`.
    """
    keys, queries = context.shape[1], x.shape[1]
    at_k = torch.arange(keys).expand(x.shape[0], -1)
    at_q = torch.arange(keys - queries, keys).expand(x.shape[0], -1)
    scores, rotary, norm = layer.scores or hw.Scores(), layer.rotary, layer.qk_norm
    return plain_layer(
        dict(layer.named_parameters()),
        x,
        context,
        context if values is None else values,
        at_q,
        at_k,
        heads=layer.num_heads,
        kv_heads=layer.num_kv_heads,
        value_width=layer.num_kv_heads * layer.value_dim,
        allowed=allowed,
        bias=bias,
        gate=None if gate is None else gate[:, :, None, None],
        scale=scores.scale,
        softcap=scores.softcap,
        rotary=rotary and (rotary.theta, rotary.width or layer.head_dim, rotary.interleaved),
        alibi=isinstance(layer.position_bias, hw.ALiBi),
        max_distance=getattr(layer.position_bias, "max_distance", None),
        norm_over=norm and norm.over,
        eps=norm and norm.eps,
    )


def layer_with(**options) -> hw.MultiHeadAttention:
    """Return a float64 layer of 6 heads with these options and random parameters."""
    layer = hw.MultiHeadAttention(EMBED, 6, dtype=torch.float64, **options)
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # biases too, which start at zero
    if layer.temperature is not None:
        with torch.no_grad():
            layer.temperature.abs_().add_(0.5)  # scores are divided by it
    return layer


def inputs(width: int = EMBED):
    """Return a random x of `EMBED` features and a random context of `width` features."""
    x = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    return x, torch.randn(BATCH, KEYS, width, dtype=torch.float64)


CALLS = [(options, cross) for options in OPTIONS for cross in (False, True)]
CALLS.remove(("one projection", True))  # projects x alone; its refusal is tested below


@pytest.mark.parametrize(("options", "cross"), CALLS, ids=[f"{o}-{'cross' if c else 'self'}" for o, c in CALLS])
def test_output_weights_and_gradients_equal_the_oracle(options, cross):
    options = copy.deepcopy(OPTIONS[options]) | ({"context_dim": CONTEXT} if cross else {})
    layer = layer_with(**options)
    x, context = inputs(CONTEXT)
    arguments = (x, context) if cross else (x,)
    y, weights = layer(*arguments, return_weights=True)
    expected, expected_weights = by_hand(layer, x, context if cross else x)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    upstream = torch.randn_like(y)
    ours = torch.autograd.grad((layer(*arguments) * upstream).sum(), list(layer.parameters()))
    theirs = torch.autograd.grad((expected * upstream).sum(), list(layer.parameters()))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_keys_and_values_come_from_contexts_of_different_widths():
    layer = layer_with(context_dim=CONTEXT, value_context_dim=17, num_kv_heads=2)
    x, context = inputs(CONTEXT)
    values = torch.randn(BATCH, KEYS, 17, dtype=torch.float64)
    y, weights = layer(x, context, values, return_weights=True)
    expected, expected_weights = by_hand(layer, x, context, values=values)
    torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, expected_weights, rtol=0, atol=1e-12)
    assert torch.equal(layer(x[0], context[0], values[0]), layer(x[:1], context[:1], values[:1])[0])


@pytest.mark.parametrize("options", ["grouped", "rotary", "rms norm", "layer norm over heads", "relative", "sinks"])
def test_a_projected_context_has_the_result_of_the_context(options):
    layer = layer_with(context_dim=CONTEXT, value_context_dim=17, **copy.deepcopy(OPTIONS[options]))
    x, context = inputs(CONTEXT)
    values = torch.randn(BATCH, KEYS, 17, dtype=torch.float64)
    projected = layer.project_context(context, values)
    assert torch.equal(layer(x, projected), layer(x, context, values))
    assert torch.equal(layer(x[:, :1], projected), layer(x[:, :1], context, values))
    one_sequence = layer.project_context(context[0], values[0])
    torch.testing.assert_close(layer(x[0], one_sequence), layer(x, projected)[0], rtol=0, atol=1e-12)
    packed = {"offsets": [0, 2, 5], "context_offsets": [0, 4, 7]}
    assert torch.equal(layer(x[0], one_sequence, **packed), layer(x[0], context[0], values[0], **packed))


@pytest.mark.usefixtures("as_user")
def test_unusable_projected_contexts_are_refused():
    layer, x = hw.MultiHeadAttention(12, 6, num_kv_heads=2, context_dim=10), torch.zeros(2, 5, 12)
    projected = layer.project_context(torch.zeros(2, 7, 10))
    fused = hw.MultiHeadAttention(12, 6, num_kv_heads=2, fused_qkv=True)
    other = hw.MultiHeadAttention(12, 6)
    for call, message in (
        (lambda: layer.project_context(x), r"context: expected width 10 on the last axis, got \(2, 5, 12\)"),
        (lambda: layer(x[:1], projected), "context: expected the batch of x, 1, got 2"),
        (lambda: layer(x[0], projected), "context: expected the batch of x, 1, got 2"),
        (lambda: layer(x, projected, x), "value_context: expected none with a projected context, got some"),
        (lambda: other(x, projected), r"context: expected heads and widths .*\(6, 2\).*, got .*\(2, 2\)"),
        (lambda: fused(x, projected), "context: expected none, since qkv_proj projects x alone"),
        (lambda: fused.project_context(x), "context: expected none, since qkv_proj projects x alone"),
    ):
        with pytest.raises(hw.InputError, match="^" + message):
            call()


def test_unbatched_input_is_a_batch_of_one_without_the_axis():
    layer = layer_with(context_dim=CONTEXT)
    x, context = inputs(CONTEXT)
    y, weights = layer(x[0], context[0], return_weights=True)
    batched, batched_weights = layer(x[:1], context[:1], return_weights=True)
    assert torch.equal(y, batched[0])
    assert torch.equal(weights, batched_weights[0])


def test_the_masks_of_layer_and_call_are_combined():
    layer = layer_with(mask=hw.causal())
    x, _ = inputs()
    causal = torch.ones(QUERIES, QUERIES, dtype=torch.bool).tril()
    padded = torch.arange(QUERIES) < torch.tensor([3, 5])[:, None, None, None]
    bias = torch.randn(1, 6, QUERIES, QUERIES, dtype=torch.float64)
    full = (BATCH, 6, QUERIES, QUERIES)
    for options, allowed, added in (
        ({}, causal, None),
        ({"mask": hw.padding([3, 5])}, causal & padded, None),
        ({"mask": padded}, causal & padded, None),
        ({"mask": bias}, causal, bias),
        ({"mask": padded, "bias": bias}, causal & padded, bias),
    ):
        expected, _ = by_hand(layer, x, x, allowed.expand(full), added)
        torch.testing.assert_close(layer(x, **options), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("shape", [(6,), (BATCH, 6)], ids=str)
def test_gate_multiplies_heads_before_the_output_projection(shape):
    layer = layer_with()
    x, _ = inputs()
    gate = torch.rand(shape, dtype=torch.float64)
    expected, _ = by_hand(layer, x, x, gate=gate.expand(BATCH, 6))
    torch.testing.assert_close(layer(x, gate=gate), expected, rtol=0, atol=1e-12)


def test_gradients_of_gate_and_bias_equal_the_oracle():
    layer = layer_with()
    x, _ = inputs()
    gate = torch.rand(BATCH, 6, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(BATCH, 6, QUERIES, QUERIES, dtype=torch.float64, requires_grad=True)
    upstream = torch.randn(BATCH, QUERIES, EMBED, dtype=torch.float64)
    ours = torch.autograd.grad((layer(x, gate=gate, bias=bias) * upstream).sum(), (gate, bias))
    theirs = torch.autograd.grad((by_hand(layer, x, x, bias=bias, gate=gate)[0] * upstream).sum(), (gate, bias))
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_the_chosen_backend_runs():
    x, _ = inputs()
    bias = torch.zeros(QUERIES, QUERIES, dtype=torch.float64)
    q = torch.zeros(1, 1, QUERIES, 2, dtype=torch.float64)
    assert hw.why_not("fused", q, q, q, bias=bias, softcap=3.0) is not None
    layer_with(backend="reference").forward(x, bias=bias)

    def raise_error(problem):
        raise RuntimeError("fused ran")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headwise.attention.backends.fused.run", raise_error)
        layer_with(backend="reference")(x)
        with pytest.raises(RuntimeError, match="fused ran"):
            layer_with()(x)


def test_initial_weights_are_glorot_and_biases_zero():
    layer = hw.MultiHeadAttention(300, 5, head_dim=20)
    bound = (6 / (300 + 100)) ** 0.5
    assert bound * 0.99 < layer.q_proj.weight.max() <= bound
    assert layer.q_proj.weight.std().item() == pytest.approx(bound / 3**0.5, rel=0.02)
    assert not any(projection.bias.any() for projection in layer.children())


def test_projections_have_the_widths_of_the_options():
    def widths(**options):
        layer = hw.MultiHeadAttention(12, 6, **options)
        return [tuple(projection.weight.shape) for projection in layer.children()]

    assert widths() == [(12, 12), (12, 12), (12, 12), (12, 12)]
    assert widths(head_dim=5) == [(30, 12), (30, 12), (30, 12), (12, 30)]
    assert widths(head_dim=5, value_dim=7, num_kv_heads=3, out_dim=11, context_dim=4) == [
        (30, 12),
        (15, 4),
        (21, 4),
        (11, 42),
    ]


@pytest.mark.parametrize("shape", [(2, 0, 12), (0, 5, 12), (0, 12)], ids=str)
def test_empty_inputs_have_empty_outputs_and_empty_contexts_add_nothing(shape):
    layer = hw.MultiHeadAttention(12, 6)
    assert layer(torch.zeros(shape)).shape == shape
    x = torch.zeros(2, 5, 12)
    torch.testing.assert_close(layer(x, x[:, :0]), layer.out_proj.bias.expand(2, 5, 12))


def test_a_gate_of_zero_removes_the_head_from_the_output_projection():
    layer = layer_with()
    x, _ = inputs()
    gated = layer(x, gate=torch.tensor([1.0, 1, 0, 1, 1, 1], dtype=torch.float64))
    pruned = copy.deepcopy(layer)
    pruned.out_proj.weight.data[:, 4:6] = 0.0  # head 2, two columns a head
    torch.testing.assert_close(gated, pruned(x), rtol=0, atol=1e-12)
    assert not torch.allclose(gated, layer(x))


def test_autocast_keeps_the_scores_in_float32():
    layer = layer_with(scores=hw.Scores(scale=2.0)).float()
    x = 3 * inputs()[0].float()
    with torch.autocast("cpu", torch.bfloat16):
        y, weights = layer(x, return_weights=True)
        q, k = (layer._split_heads(projection(x), 6) for projection in (layer.q_proj, layer.k_proj))
        lse = [hw.attend(q, k, k, scale=2.0, return_lse=True, backend=name)[1] for name in ("fused", "reference")]
    assert y.dtype == weights.dtype == q.dtype == torch.bfloat16
    exact = plain_attention(q.double(), k.double(), k.double(), scale=2.0)
    torch.testing.assert_close(weights.double(), exact.weights, rtol=2**-8, atol=1e-6)  # one rounding to bfloat16
    for backend_lse in lse:
        assert backend_lse.dtype == torch.float32
        torch.testing.assert_close(backend_lse.double(), exact.lse, rtol=1e-5, atol=1e-4)


def test_repr_shows_sizes_and_mask():
    text = repr(hw.MultiHeadAttention(12, 6, num_kv_heads=2, value_dim=5, mask=hw.causal()))
    assert "num_heads=6, num_kv_heads=2, head_dim=2, value_dim=5, mask=causal()" in text


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 5}, "num_heads: expected a number that divides embed_dim 12, got 5; or give head_dim"),
        ({"num_heads": 2.0}, "num_heads: expected a whole number of 1 or more, got 2.0"),
        ({"embed_dim": -12}, "embed_dim: expected a whole number of 1 or more, got -12"),
        ({"num_kv_heads": 4}, "num_kv_heads: expected a number that divides num_heads 6, got 4"),
        ({"dropout": -0.1}, "dropout: expected a probability of 0 or more and less than 1, got -0.1"),
        ({"dropout": "a"}, "dropout: expected a probability of 0 or more and less than 1, got 'a'"),
        (
            {"rotary": hw.Rotary(), "head_dim": 5},
            "head_dim: expected an even number, .*, got 5; or give Rotary a width",
        ),
        ({"position_bias": torch.ones(3)}, r"position_bias: expected ALiBi\(\) or a RelativeBias, got Tensor"),
        ({"position_bias": hw.ALiBi}, r"position_bias: expected ALiBi\(\) or a RelativeBias, got type"),
        ({"qk_norm": "rms"}, r"qk_norm: expected a QKNorm, such as QKNorm\('rms'\), got str"),
        ({"output_gate": "heads"}, "output_gate: expected 'head', 'element' or None, got 'heads'"),
        (
            {"fused_qkv": True, "context_dim": 10},
            r"fused_qkv: expected contexts of width 12 like x, got widths \(10, 10\)",
        ),
        ({"num_heads": True}, "num_heads: expected a whole number of 1 or more, got True"),
        *MISTAKES_OF_EVERY_LAYER,
        ({"fused_qkv": "no"}, "fused_qkv: expected True or False, got 'no'"),
    ],
)
def test_unusable_layer_options_are_refused(arguments, message):
    with pytest.raises(hw.InputError, match="^" + message):
        hw.MultiHeadAttention(**({"embed_dim": 12, "num_heads": 6} | arguments))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: hw.Scores(scale=float("nan")), r"Scores\(scale\): expected a finite number, got nan"),
        (lambda: hw.Scores(softcap=0.0), r"Scores\(softcap\): expected a finite number above 0, got 0.0"),
        (lambda: hw.Scores(sinks=torch.zeros(2)), r"Scores\(sinks\): expected True or False, got tensor\(\[0., 0.\]\)"),
        (lambda: hw.Scores(temperature=2.0), r"Scores\(temperature\): expected True or False, got 2.0"),
        (lambda: hw.QKNorm("batch"), r"QKNorm\(kind\): expected 'rms' or 'layer', got 'batch'"),
        (lambda: hw.QKNorm(over="all"), r"QKNorm\(over\): expected 'head' or 'heads', got 'all'"),
        (lambda: hw.QKNorm(eps=0.0), r"QKNorm\(eps\): expected a finite number above 0, got 0.0"),
    ],
)
def test_unusable_scores_and_norms_are_refused(make, message):
    with pytest.raises(hw.InputError, match="^" + message):
        make()


X = torch.zeros(2, 5, 12)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("options", "arguments", "message"),
    [
        (
            {"fused_qkv": True},
            {"context": X},
            "context: expected none, since qkv_proj projects x alone, .* separate_proj",
        ),
        ({}, {"value_context": X}, "context: expected a tensor with value_context, got none"),
        (
            {},
            {"context": X, "value_context": X[:, :4]},
            r"value_context: expected batch and length \(2, 5\) like context, got \(2, 4\)",
        ),
        ({"value_context_dim": 3}, {}, "value_context: expected a tensor of width 3, the layer's, got none"),
        ({}, {"return_weights": "False"}, "return_weights: expected True or False, got 'False'"),
        ({}, {"context": X, "cache": hw.DynamicCache()}, "cache: expected self-attention, .*, got a context"),
        ({}, {"cache": {}}, r"cache: expected a headwise Cache, such as DynamicCache\(\), got dict"),
        ({}, {"lengths": [5]}, r"lengths: expected one for each of 2 sequences, got 1"),
        ({}, {"lengths": [6, 5]}, r"lengths: expected numbers from 0 to 5, the tokens, got \[6, 5\]"),
        ({}, {"lengths": [5, 5], "context": X}, r"lengths: expected a StaticCache with them, got none; mask=padding"),
        ({}, {"positions": torch.arange(4)}, r"positions: expected shape \(5,\) or \(2, 5\), got \(1, 4\)"),
        ({}, {"context": X, "positions": torch.arange(5)}, "positions: expected none with a context"),
        ({}, {"offsets": [0, 5]}, r"offsets: expected x of shape \(tokens, 12\), .*, got x of shape \(2, 5, 12\)"),
        (
            {},
            {"context_offsets": [0, 5]},
            "context_offsets: expected offsets of x and of a context, .*, got one without",
        ),
        (
            {"position_bias": hw.ALiBi()},
            {"cache": hw.DynamicCache(), "positions": torch.arange(5)},
            "positions: expected none with a cache, where cached keys get new positions in every call, got some",
        ),
        (
            {"position_bias": hw.ALiBi()},
            {"bias": torch.ones(4, 5)},
            r"bias: expected a shape that broadcasts to .* = \(2, 6, 5, 5\), got \(1, 1, 4, 5\)",
        ),
    ],
)
def test_contradictory_arguments_are_refused(options, arguments, message):
    with pytest.raises(hw.InputError, match="^" + message):
        hw.MultiHeadAttention(12, 6, **options)(X, **arguments)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"offsets": [0, 4]}, r"offsets: expected numbers that rise from 0 to 5, the tokens, got \[0, 4\]"),
        ({"offsets": [0, 4, 3, 5]}, r"offsets: expected numbers that rise from 0 to 5, the tokens, got \[0, 4, 3, 5\]"),
        (
            {"offsets": [0, 5], "return_weights": True},
            "return_weights: expected False with packed sequences, got True",
        ),
        ({"offsets": [0, 5], "bias": torch.ones(5, 5)}, "bias: expected none with packed sequences, got shape"),
        ({"offsets": [0, 2, 5], "gate": torch.ones(5, 6)}, r"gate: expected shape \(6,\) or \(2, 6\) with packed"),
        ({"offsets": [0, 5], "gate": [1.0] * 6}, "gate: expected a float tensor, got list"),
        (
            {"offsets": [0, 2, 5], "mask": hw.padding([1, 2, 3])},
            "mask: expected one for all sequences or for each of 2",
        ),
        ({"offsets": [0, 5], "cache": hw.DynamicCache()}, "cache: expected self-attention, .*, got packed sequences"),
        (
            {"offsets": [0, 5], "context": X[0], "context_offsets": [0, 2, 5]},
            "context_offsets: expected 2 numbers like offsets, got 3",
        ),
    ],
)
def test_unusable_arguments_with_packed_sequences_are_refused(arguments, message):
    with pytest.raises(hw.InputError, match="^" + message):
        hw.MultiHeadAttention(12, 6)(X[0], **arguments)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((X[0, 0],), r"x: expected \(batch, length, 12\) or \(length, 12\), got \(12,\)"),
        ((X[..., :11],), r"x: expected width 12 on the last axis, got \(2, 5, 11\)"),
        ((X.double(),), "x: expected torch.float32 like the layer, got torch.float64; cast one to the other"),
        ((X.to("meta"),), "x: expected a tensor on cpu like the layer, got meta"),
        ((X.to("meta").double(),), "x: expected a tensor on cpu like the layer, got meta"),
        ((X.int(),), "x: expected torch.float32 like the layer, got torch.int32; cast one to the other"),
        (("text",), "x: expected a tensor, got str"),
        ((X, X[:1]), r"context: expected the batch of x, \(2,\), got \(1,\)"),
        ((X, X[0]), r"context: expected the batch of x, \(2,\), got \(\)"),
        ((X, X[..., :3]), r"context: expected width 12 on the last axis, got \(2, 5, 3\)"),
    ],
)
def test_unusable_inputs_are_refused(arguments, message):
    with pytest.raises(hw.InputError, match="^" + message):
        hw.MultiHeadAttention(12, 6)(*arguments)


def jagged(*lengths, width=12):
    """Return a jagged nested tensor of random sequences of these lengths."""
    values = torch.randn(sum(lengths), width)
    return torch.nested.nested_tensor_from_jagged(values, torch.tensor([0, *lengths]).cumsum(0))


@pytest.mark.usefixtures("as_user")  # the shape checks name the lengths of two jagged tensors differently
def test_nested_cross_attention_equals_a_call_for_each_sequence():
    layer = hw.MultiHeadAttention(12, 6, context_dim=5, value_context_dim=7, mask=hw.causal())
    x, context, values = jagged(2, 3), jagged(4, 1, width=5), jagged(4, 1, width=7)
    for y, *sequence in zip(
        layer(x, context, values).unbind(), x.unbind(), context.unbind(), values.unbind(), strict=True
    ):
        torch.testing.assert_close(y, layer(*sequence))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"cache": hw.DynamicCache()}, "cache: expected self-attention, one sequence a row, got packed sequences"),
        ({"lengths": [1, 2]}, "lengths: expected a StaticCache with them, got none"),
        ({"offsets": [0, 1, 5]}, "offsets: expected none with a nested x, which has its own, got some"),
        ({"context": X}, r"context: expected a jagged nested tensor, like x, got shape \(2, 5, 12\)"),
        ({"context": "text"}, "context: expected a jagged nested tensor, like x, got str"),
        ({"value_context": jagged(2, 3)}, "context: expected a tensor with value_context, got none"),
        (
            {"context": jagged(2, 3), "value_context": jagged(3, 2)},
            r"value_context: expected sequences of lengths \[2, 3\] like context, got \[3, 2\]",
        ),
        (
            {"x": torch.nested.narrow(X, 1, torch.tensor([0, 0]), torch.tensor([2, 3]), layout=torch.jagged)},
            r"x: expected a jagged nested tensor without gaps between its sequences, got one with gaps; call contig",
        ),
        (
            {"x": torch.nested.nested_tensor([torch.randn(length, 12) for length in (2, 3)])},
            "x: expected a jagged nested tensor, like x, got a nested tensor of torch.strided",
        ),
    ],
)
def test_unusable_arguments_with_nested_tensors_are_refused(call, message):
    with pytest.raises(hw.InputError, match="^" + message):
        hw.MultiHeadAttention(12, 6)(**({"x": jagged(2, 3)} | call))


@pytest.mark.usefixtures("as_user")
def test_a_missing_context_is_refused():
    with pytest.raises(hw.InputError, match=r"^context: expected a tensor of width 10, .*, got none"):
        hw.MultiHeadAttention(12, 6, context_dim=10)(X)


def test_packed_sequences_without_tokens_have_an_empty_output():
    layer = layer_with(mask=hw.causal())
    assert layer(torch.zeros(0, EMBED, dtype=torch.float64), offsets=[0]).shape == (0, EMBED)
    assert layer(torch.zeros(0, EMBED, dtype=torch.float64), offsets=[0, 0, 0]).shape == (0, EMBED)


def test_the_projections_decide_the_dtype_of_a_mixed_precision_layer():
    """Inputs are compared with the dtype of their projection, not with that of the first parameter."""
    layer = hw.MultiHeadAttention(EMBED, 6, position_bias=hw.RelativeBias(6), scores=hw.Scores(sinks=True))
    layer.bfloat16()
    layer.position_bias.float()
    layer.sinks.data = layer.sinks.data.float()
    assert layer(torch.randn(2, 3, EMBED, dtype=torch.bfloat16)).dtype == torch.bfloat16
    assert layer.static_cache(1, 2).slots[0].dtype == torch.bfloat16


@pytest.mark.parametrize("offsets", [[0], [0, 0, 0]], ids=["no sequence", "two empty sequences"])
@pytest.mark.parametrize("scaling", [None, hw.DynamicNTK(2.0, 8)], ids=["unscaled", "scaled by length"])
def test_rotated_packed_sequences_without_tokens(offsets, scaling):
    layer = hw.MultiHeadAttention(12, 3, rotary=hw.Rotary(scaling=scaling), mask=hw.causal())
    x = torch.zeros(0, 12)
    assert layer(x, offsets=offsets).shape == (0, 12)
    assert layer(x, x, offsets=offsets, context_offsets=offsets).shape == (0, 12)
