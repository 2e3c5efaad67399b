"""Four published designs of attention, converted to our layer and back, keep output, gradients and weights."""

import pytest
import torch
from torch import nn

import headwise as hw
from oracles import FourLinearMaps, ListOfHeads, NarrowHeads, SingleHead, gradients

pytestmark = pytest.mark.filterwarnings("error")


def assert_same(ours, theirs):
    """Check that two float64 tensors are equal up to rounding."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def assert_same_bits(ours, theirs):
    """Check that linear maps have equal weights and biases, bit for bit, and do not share memory."""
    for one, other in zip(ours, theirs, strict=True):
        assert type(one) is nn.Linear
        assert torch.equal(one.weight, other.weight)
        assert one.weight.data_ptr() != other.weight.data_ptr()
        assert (one.bias is None) == (other.bias is None)
        assert one.bias is None or torch.equal(one.bias, other.bias)


def stacked(theirs: dict, names: tuple[str, str, str], heads: int, kind: str) -> dict:
    """Return the gradients of a list of heads, stacked under the parameter names of our layer."""
    return {
        f"{ours}_proj.{kind}": torch.cat([theirs[f"heads.{head}.{name}.{kind}"] for head in range(heads)])
        for ours, name in zip("qkv", names, strict=True)
    }


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_design_1_list_of_heads_with_a_bare_projection(bias):
    ancestor = ListOfHeads(word_size=7, embed_dim=5, n_head=3, bias=bias).double()
    triples = [(head.query, head.key, head.value) for head in ancestor.heads]
    layer = hw.from_heads(triples, ancestor.projection)
    assert (layer.embed_dim, layer.head_dim, layer.out_dim, layer.num_heads) == (7, 5, 5, 3)
    heads, projection = hw.to_heads(layer)
    for ours, theirs in zip(heads, triples, strict=True):
        assert_same_bits(ours, theirs)
    assert torch.equal(projection.weight.mT, ancestor.projection)
    assert layer.out_proj.bias is projection.bias is None
    x = torch.randn(11, 7, dtype=torch.float64, requires_grad=True)
    expected, y = ancestor(x), layer(x)
    assert_same(y, expected)
    assert y.shape == (11, 5)
    grad_x, theirs = gradients(ancestor, x, expected)
    our_grad_x, ours = gradients(layer, x, y)
    assert_same(our_grad_x, grad_x)
    names = ("query", "key", "value")
    expected_gradients = stacked(theirs, names, 3, "weight") | {"out_proj.weight": theirs["projection"].T}
    expected_gradients |= stacked(theirs, names, 3, "bias") if bias else {}
    assert ours.keys() == expected_gradients.keys()
    for name, grad in expected_gradients.items():
        assert_same(ours[name], grad)


@pytest.mark.parametrize(("embed_dim", "num_heads"), [(35, 5), (8, 2)], ids=["design 2", "design 3"])
def test_designs_2_and_3_four_linear_maps_with_weights_per_head(embed_dim, num_heads):
    ancestor = FourLinearMaps(embed_dim, num_heads).double()
    maps = (ancestor.q_linear, ancestor.k_linear, ancestor.v_linear, ancestor.out_linear)
    layer = hw.from_projections(*maps, num_heads=num_heads)
    assert_same_bits(hw.to_projections(layer), maps)
    assert_same_bits([layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj], maps)
    x = torch.randn(3, 11, embed_dim, dtype=torch.float64, requires_grad=True)
    for mask in (None, torch.rand(3, 1, 11, 11) > 0.3):
        expected, expected_weights = ancestor(x, mask)
        y, weights = layer(x, mask=mask, return_weights=True)
        assert_same(y, expected)
        assert_same(weights, expected_weights)
        assert weights.shape == (3, num_heads, 11, 11)
        grad_x, theirs = gradients(ancestor, x, expected)
        our_grad_x, ours = gradients(layer, x, y)
        assert_same(our_grad_x, grad_x)
        for our_name, grad in ours.items():
            assert_same(grad, theirs[our_name.replace("_proj", "_linear")])


@pytest.mark.parametrize("bias", [False, True], ids=["no bias", "bias"])
def test_design_4_heads_narrower_than_the_model(bias):
    ancestor = NarrowHeads(embedding_dim=13, attention_dim=15, num_heads=3, bias=bias).double()
    heads = [(head.query_map, head.key_map, head.value_map) for head in ancestor.heads]
    layer = hw.from_heads(heads, ancestor.output)
    assert (layer.embed_dim, layer.head_dim, layer.out_dim) == (13, 5, 13)
    back, projection = hw.to_heads(layer)
    for ours, theirs in zip(back, heads, strict=True):
        assert_same_bits(ours, theirs)
    assert_same_bits([projection], [ancestor.output])
    x = torch.randn(2, 11, 13, dtype=torch.float64, requires_grad=True)
    expected, y = ancestor(x), layer(x)
    assert_same(y, expected)
    grad_x, theirs = gradients(ancestor, x, expected)
    our_grad_x, ours = gradients(layer, x, y)
    assert_same(our_grad_x, grad_x)
    names = ("query_map", "key_map", "value_map")
    expected_gradients = stacked(theirs, names, 3, "weight") | {"out_proj.weight": theirs["output.weight"]}
    if bias:
        expected_gradients |= stacked(theirs, names, 3, "bias") | {"out_proj.bias": theirs["output.bias"]}
    assert ours.keys() == expected_gradients.keys()
    for name, grad in expected_gradients.items():
        assert_same(ours[name], grad)


def test_grouped_projections_of_cross_attention_where_only_some_have_a_bias():
    query, output = nn.Linear(10, 12, dtype=torch.float64), nn.Linear(18, 7, bias=False, dtype=torch.float64)
    key = nn.Linear(5, 4, bias=False, dtype=torch.float64)
    value = nn.Linear(5, 6, dtype=torch.float64)
    layer = hw.from_projections(query, key, value, output, num_heads=6, num_kv_heads=2)
    assert (layer.head_dim, layer.value_dim, layer.context_dim, layer.out_dim) == (2, 3, 5, 7)
    x, context = torch.randn(2, 3, 10, dtype=torch.float64), torch.randn(2, 11, 5, dtype=torch.float64)
    q = query(x).view(2, 3, 6, 2).transpose(1, 2)
    k, v = (map_(context).view(2, 11, 2, -1).transpose(1, 2).repeat_interleave(3, 1) for map_ in (key, value))
    heads = torch.softmax(q @ k.mT / 2**0.5, -1) @ v
    assert_same(layer(x, context), output(heads.transpose(1, 2).flatten(2)))


def test_a_bias_of_the_value_alone_is_converted():
    maps = (*triple(6, 6, bias=False), nn.Linear(7, 6), nn.Linear(6, 7, bias=False))
    layer = hw.from_projections(*maps, num_heads=2)
    assert torch.equal(layer.v_proj.bias, maps[2].bias)
    assert not layer.q_proj.bias.any()
    assert layer.out_proj.bias is None
    assert layer.q_proj.weight.dtype == torch.float32


def test_values_can_come_from_another_context():
    query, key, value, output = (nn.Linear(*widths, dtype=torch.float64) for widths in ((7, 6), (5, 6), (3, 6), (6, 7)))
    layer = hw.from_projections(query, key, value, output, num_heads=2)
    assert (layer.context_dim, layer.value_context_dim) == (5, 3)
    x, context, values = (torch.randn(2, *shape, dtype=torch.float64) for shape in ((3, 7), (11, 5), (11, 3)))
    q, k, v = (map_.unflatten(-1, (2, 3)).transpose(1, 2) for map_ in (query(x), key(context), value(values)))
    heads = torch.softmax(q @ k.mT / 3**0.5, -1) @ v
    assert_same(layer(x, context, values), output(heads.transpose(1, 2).flatten(2)))


def test_other_options_are_passed_to_the_layer():
    options = {
        "rotary": hw.Rotary(theta=50.0),
        "position_bias": hw.ALiBi(),
        "scores": hw.Scores(scale=0.3, sinks=True),
        "qk_norm": hw.QKNorm("layer"),
        "mask": hw.causal(),
        "dropout": 0.3,
        "backend": "reference",
    }
    maps = (*triple(8, 4, 4), nn.Linear(8, 7))
    layer = hw.from_projections(*maps, num_heads=4, num_kv_heads=2, **options)
    assert {name: getattr(layer, name) for name in options} == options
    assert_same_bits(hw.to_projections(layer), maps)


def assert_same_layers(one, other):
    """Check that two layers have the same parameters, bit for bit."""
    assert one.state_dict().keys() == other.state_dict().keys()
    for name, value in one.state_dict().items():
        assert torch.equal(value, other.state_dict()[name]), name


LAYERS = {
    "plain": {},
    "grouped": {"num_kv_heads": 2, "head_dim": 3, "value_dim": 7},
    "one key/value head": {"num_kv_heads": 1, "bias": False, "out_bias": True},
    "contexts": {"context_dim": 5, "value_context_dim": 11, "out_dim": 17, "out_bias": False},
    "bfloat16": {"dtype": torch.bfloat16},
}


@pytest.mark.parametrize("options", LAYERS.values(), ids=LAYERS)
def test_layer_round_trip_keeps_the_weights(options):
    layer = hw.MultiHeadAttention(12, 6, **options)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    assert_same_layers(hw.from_heads(*hw.to_heads(layer)), layer)
    maps = hw.to_projections(layer)
    assert_same_layers(hw.from_projections(*maps, num_heads=6, num_kv_heads=layer.num_kv_heads), layer)


def test_a_fused_layer_is_split_into_projections():
    layer = hw.MultiHeadAttention(12, 6, num_kv_heads=2, head_dim=3, value_dim=7, fused_qkv=True)
    nn.init.normal_(layer.qkv_proj.bias)
    query, key, value, output = hw.to_projections(layer)
    assert torch.equal(torch.cat([query.weight, key.weight, value.weight]), layer.qkv_proj.weight)
    assert torch.equal(torch.cat([query.bias, key.bias, value.bias]), layer.qkv_proj.bias)
    assert (query.out_features, key.out_features, value.out_features) == (18, 6, 14)
    assert_same_bits([output], [layer.out_proj])


def test_heads_of_a_group_share_key_and_value_modules():
    layer = hw.MultiHeadAttention(12, 6, num_kv_heads=2)
    heads, _ = hw.to_heads(layer)
    assert [key is heads[0][1] and value is heads[0][2] for _, key, value in heads] == [True] * 3 + [False] * 3
    # Heads that share only their keys, or not with their neighbours, are heads of their own.
    for triples in ([(q, heads[0][1], nn.Linear(12, 2)) for q, _, _ in heads], heads[::3] + heads[1::3]):
        assert hw.from_heads(triples, nn.Linear(2 * len(triples), 12)).num_kv_heads == len(triples)


def triple(*widths, bias=True):
    """Return the query, key and value maps of a head, with these output widths."""
    return tuple(nn.Linear(7, width, bias=bias) for width in widths)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("heads", "projection", "message"),
    [
        ([], torch.ones(2, 2), r"heads: expected at least one .* triple, got \[\]"),
        (
            [triple(5, 5, 5), triple(5, 5, 6)],
            torch.ones(11, 5),
            "heads: expected the same .* shapes in every head, ",
        ),
        (
            *([triple(5, 5, 5), triple(5, 5, 5, bias=False)], torch.ones(10, 5)),
            "heads: expected a bias in every query map or in none, got one in 1 of 2",
        ),
        ([triple(5, 5, 5)] * 2, torch.ones(9, 5), "projection: expected a map from width 10, all heads .*, got 9"),
        (triple(5, 5, 5), torch.ones(5, 5), r"heads: expected a \(query, .* head, got Linear"),
        ([triple(5, 5, 5)], None, "projection: expected an nn.Linear for every map, got None"),
        ([(*triple(5, 5), None)], torch.ones(5, 5), "heads: expected an nn.Linear for every map, got NoneType"),
    ],
)
def test_unusable_heads_are_refused(heads, projection, message):
    with pytest.raises(hw.InputError, match=f"^{message}"):
        hw.from_heads(heads, projection)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("maps", "num_heads", "message"),
    [
        (triple(6, 6, 6), 4, "query: expected an output width that 4 heads divide, got 6"),
        (triple(6, 4, 6), 2, "key: expected 6 wide keys, got 4"),
        ((*triple(6, 6), nn.Identity()), 2, "value: expected an nn.Linear for every map, got Identity"),
        (
            (*triple(6, 6), nn.Linear(7, 6).double()),
            2,
            "value: expected torch.float32 on cpu in .*, got torch.float64",
        ),
        (triple(6, 6, 6), 0, "num_heads: expected a whole number of 1 or more, got 0"),
    ],
)
def test_unusable_projections_are_refused(maps, num_heads, message):
    with pytest.raises(hw.InputError, match=f"^{message}"):
        hw.from_projections(*maps, nn.Linear(6, 7), num_heads=num_heads)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("layer", [hw.DifferentialAttention(12, 2), nn.Linear(6, 2)])
def test_other_layers_are_refused(layer):
    message = f"^layer: expected a MultiHeadAttention, not of a derived class, got {type(layer).__name__}"
    for convert in (hw.to_heads, hw.to_projections, hw.to_torch):
        with pytest.raises(hw.InputError, match=message):
            convert(layer)


def test_swapped_heads_change_the_output():
    """Shows that the comparisons of this file would detect heads in a wrong order."""
    heads = [SingleHead(7, 5, bias=False).double() for _ in range(2)]
    triples = [(head.query, head.key, head.value) for head in heads]
    projection = torch.randn(10, 5, dtype=torch.float64)
    x = torch.randn(3, 7, dtype=torch.float64)
    assert not torch.allclose(hw.from_heads(triples, projection)(x), hw.from_heads(triples[::-1], projection)(x))


class Doubling(nn.Linear):
    """Derived linear map that doubles its output, like an adapter."""

    def forward(self, x):
        return 2 * super().forward(x)


def hooked(linear):
    """Add a forward hook that doubles the output of a linear map, and return the map."""
    linear.register_forward_hook(lambda module, args, output: 2 * output)
    return linear


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("change", [hooked, lambda linear: Doubling(linear.in_features, linear.out_features)])
def test_hooked_and_derived_maps_are_refused_in_both_directions(change):
    """The weight and bias of such a map do not determine its output."""
    message = ": expected a map that is its weight and bias and nothing more, got .*; merge adapters and remove hooks"
    layer = hw.MultiHeadAttention(12, 6)
    layer.v_proj = change(layer.v_proj)
    for convert in (hw.to_heads, hw.to_projections, hw.to_torch):
        with pytest.raises(hw.InputError, match=message):
            convert(layer)
    maps = [nn.Linear(12, 12) for _ in range(4)]
    maps[1] = change(maps[1])
    with pytest.raises(hw.InputError, match="^key" + message):
        hw.from_projections(*maps, num_heads=6)
    theirs = nn.MultiheadAttention(12, 6)
    theirs.out_proj = change(theirs.out_proj)
    with pytest.raises(hw.InputError, match="^layer" + message):
        hw.from_torch(theirs)


def test_the_current_weight_of_a_parametrised_map_is_converted():
    maps = [nn.utils.parametrizations.weight_norm(nn.Linear(12, 12)) for _ in range(4)]
    x = torch.randn(2, 5, 12)
    layer = hw.MultiHeadAttention(12, 6)
    for name, map_ in zip(("q_proj", "k_proj", "v_proj", "out_proj"), maps, strict=True):
        setattr(layer, name, map_)
    torch.testing.assert_close(hw.from_projections(*maps, num_heads=6)(x), layer(x))
