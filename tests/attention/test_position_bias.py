"""Position biases: ALiBi against its authors' rule, T5's buckets entry by entry, and both against transformers."""

import copy
import math
from fractions import Fraction

import pytest
import torch

import headwise as hw
from headwise.attention.position_bias import ALiBi, PositionBias, RelativeBias

BATCH, HEADS, QUERIES, KEYS = 2, 3, 5, 7
QUERY_POSITIONS = torch.tensor([[2, 3, 4, 5, 6], [-1, 0, 1, 200, 3]])
KEY_POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [-1, -1, 0, 1, 2, 3, 170]])
EXACT = {"rtol": 0, "atol": 1e-12}


# -- ALiBi ---------------------------------------------------------------------------------------------------------


def slopes_by_hand(heads):
    """Return the slopes by the rule of the authors, head by head."""
    if heads & (heads - 1) == 0:
        return [2.0 ** (-8.0 * (i + 1) / heads) for i in range(heads)]
    below = 1
    while 2 * below <= heads:
        below *= 2
    return slopes_by_hand(below) + slopes_by_hand(2 * below)[0::2][: heads - below]


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 8, 12, 16, 25, 64, 71])
def test_slopes_follow_the_rule_of_the_authors(heads):
    slopes = ALiBi().slopes(heads)
    torch.testing.assert_close(slopes, torch.tensor(slopes_by_hand(heads), dtype=torch.float64), **EXACT)


def test_slopes_of_eight_heads_are_halves_of_each_other():
    assert ALiBi().slopes(8).tolist() == [1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32, 1 / 64, 1 / 128, 1 / 256]


@pytest.mark.parametrize("keys", [KEY_POSITIONS, KEY_POSITIONS[:1]], ids=["rows", "one row"])
@pytest.mark.parametrize("queries", [QUERY_POSITIONS, QUERY_POSITIONS[:1]], ids=["rows", "one row"])
def test_linear_biases_are_slopes_times_distances(queries, keys):
    values = ALiBi().values(HEADS, queries, keys, torch.float64)
    batch = max(len(queries), len(keys))
    assert values.shape == (batch, HEADS, QUERIES, KEYS)
    for b in range(batch):
        for head, slope in enumerate(slopes_by_hand(HEADS)):
            for i, query in enumerate(queries[b % len(queries)].tolist()):
                for j, key in enumerate(keys[b % len(keys)].tolist()):
                    assert values[b, head, i, j].item() == pytest.approx(-slope * abs(query - key), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_linear_biases_are_rounded_once(dtype):
    positions = torch.arange(0, 4099, 257)[None]
    with torch.autocast("cpu", torch.bfloat16):
        values = ALiBi().values(HEADS, positions, positions, dtype)
    assert values.dtype == dtype
    exact = ALiBi().values(HEADS, positions, positions, torch.float64)
    torch.testing.assert_close(values.double(), exact, rtol=0.51 * torch.finfo(dtype).eps + 2e-7, atol=0)


@pytest.mark.parametrize("heads", [4, 5, 12])
def test_linear_biases_are_those_of_bloom_but_for_a_constant_in_each_row(heads):
    import transformers.models.bloom.modeling_bloom as bloom

    theirs = bloom.build_alibi_tensor(torch.ones(1, KEYS), heads, torch.float32).view(1, heads, 1, KEYS)
    positions = torch.arange(KEYS)[None]
    difference = ALiBi().values(heads, positions, positions, torch.float32) - theirs
    causal = torch.ones(KEYS, KEYS, dtype=torch.bool).tril()
    spread = difference - difference[..., :1]  # every query sees key 0
    torch.testing.assert_close(spread * causal, torch.zeros_like(spread), rtol=0, atol=4e-6)
    assert spread.abs().max() > 0.1  # keys after the query are far here, and near there


# -- learned -------------------------------------------------------------------------------------------------------


def bucket_by_hand(distance, buckets, far, bidirectional):
    """Return the bucket of one distance, with integer arithmetic at the edges, so that no rounding decides."""
    per_direction = buckets // 2 if bidirectional else buckets
    single = per_direction // 2
    size = abs(distance) if bidirectional else max(-distance, 0)
    if size < single:
        bucket = size
    else:
        # The largest step k with single * (far / single)^(k / wide) <= size, both sides to the power of wide.
        wide = per_direction - single
        steps = [k for k in range(wide) if Fraction(far, single) ** k <= Fraction(size, single) ** wide]
        bucket = single + max(steps)
    return bucket + (per_direction if bidirectional and distance > 0 else 0)


@pytest.mark.parametrize("bidirectional", [True, False], ids=["both", "back"])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (4, 3), (12, 81), (64, 128), (12, 750), (6, 25)])
def test_buckets_equal_integer_arithmetic(buckets, far, bidirectional):
    relative = RelativeBias(HEADS, buckets, far, bidirectional)
    distances = [*range(-2 * far, 2 * far), -(10**6), 10**6]
    expected = [bucket_by_hand(distance, buckets, far, bidirectional) for distance in distances]
    assert relative.buckets(torch.tensor(distances)).tolist() == expected
    assert set(expected) <= set(range(buckets))


@pytest.mark.parametrize("bidirectional", [True, False], ids=["both", "back"])
def test_learned_biases_and_their_gradient_equal_the_table_lookup(bidirectional):
    relative = RelativeBias(HEADS, 8, 20, bidirectional, dtype=torch.float64)
    values = relative.values(HEADS, QUERY_POSITIONS, KEY_POSITIONS, torch.float64)
    upstream = torch.randn_like(values)
    expected, gradient = torch.zeros_like(values), torch.zeros_like(relative.weight)
    for b, i, j in torch.cartesian_prod(*map(torch.arange, (BATCH, QUERIES, KEYS))).tolist():
        distance = (KEY_POSITIONS[b, j] - QUERY_POSITIONS[b, i]).item()
        bucket = bucket_by_hand(distance, 8, 20, bidirectional)
        expected[b, :, i, j] = relative.weight[bucket].detach()
        gradient[bucket] += upstream[b, :, i, j]
    assert torch.equal(values, expected)
    (ours,) = torch.autograd.grad(values, relative.weight, upstream)
    torch.testing.assert_close(ours, gradient, **EXACT)


def test_one_row_of_positions_is_broadcast_to_the_batch():
    relative = RelativeBias(HEADS)
    mixed = relative.values(HEADS, QUERY_POSITIONS[:1], KEY_POSITIONS, torch.float32)
    expected = relative.values(HEADS, QUERY_POSITIONS[:1].expand(2, -1), KEY_POSITIONS, torch.float32)
    assert mixed.shape == (BATCH, HEADS, QUERIES, KEYS)
    assert torch.equal(mixed, expected)


def test_the_gradient_of_a_half_precision_bias_is_summed_in_the_precision_of_the_table():
    relative = RelativeBias(1, 4, 2)
    positions = torch.arange(60)[None]
    relative.values(1, positions, positions, torch.bfloat16).sum().backward()
    assert relative.weight.grad.sum().item() == 3600  # bfloat16 would stop at 256


@pytest.mark.parametrize("decoder", [False, True], ids=["encoder", "decoder"])
@pytest.mark.parametrize(("buckets", "far"), [(32, 128), (12, 50)])
def test_learned_biases_equal_those_of_t5(decoder, buckets, far):
    import transformers.models.t5.modeling_t5 as t5

    config = t5.T5Config(
        d_model=12,
        d_kv=4,
        num_heads=HEADS,
        is_decoder=decoder,
        relative_attention_num_buckets=buckets,
        relative_attention_max_distance=far,
    )
    theirs = t5.T5Attention(config, has_relative_attention_bias=True, layer_idx=0)
    ours = RelativeBias(HEADS, buckets, far, bidirectional=not decoder)
    ours.load_state_dict(theirs.relative_attention_bias.state_dict())
    distances = torch.arange(-1009, 1009)
    assert torch.equal(ours.buckets(distances), theirs._relative_position_bucket(distances, not decoder, buckets, far))
    past = 131
    queries, keys = torch.arange(past, past + QUERIES)[None], torch.arange(past + QUERIES)[None]
    expected = theirs.compute_bias(QUERIES, past + QUERIES, past_seen_tokens=past)
    assert torch.equal(ours.values(HEADS, queries, keys, torch.float32), expected)


def test_shape_and_initial_values_of_the_table():
    relative = RelativeBias(5, num_buckets=300, dtype=torch.float64)
    bound = math.sqrt(6 / 305)
    assert 0.98 * bound < relative.weight.max() <= bound
    assert RelativeBias(5, device="meta", dtype=torch.bfloat16).weight.device.type == "meta"
    twin = copy.deepcopy(relative)
    twin.reset_parameters()
    assert not torch.equal(twin.weight, relative.weight)
    assert list(relative.state_dict()) == ["weight"]
    assert repr(RelativeBias(5)) == "RelativeBias(num_heads=5, num_buckets=32, max_distance=128, bidirectional=True)"


def test_layers_may_share_one_relative_bias():
    relative = RelativeBias(HEADS)
    layers = torch.nn.ModuleList([torch.nn.Sequential(relative), torch.nn.Sequential(relative)])
    assert len(list(layers.parameters())) == 1


# -- both ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bias", [ALiBi(), RelativeBias(HEADS)], ids=["alibi", "relative"])
def test_only_the_difference_of_positions_counts(bias):
    assert isinstance(bias, PositionBias)
    values = bias.values(HEADS, QUERY_POSITIONS, KEY_POSITIONS, torch.float32)
    assert torch.equal(values, bias.values(HEADS, QUERY_POSITIONS + 1009, KEY_POSITIONS + 1009, torch.float32))
    assert values.isfinite().all()
    assert values.stride(-1) == 1
    empty = bias.values(HEADS, QUERY_POSITIONS[:, :0], KEY_POSITIONS, torch.float32)
    assert empty.shape == (BATCH, HEADS, 0, KEYS)


@pytest.mark.slow
def test_biases_compile_and_export_with_a_free_length(tracing_server):
    code = """
import torch
from headwise.attention.position_bias import *
class Both(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.alibi, self.relative = ALiBi(), RelativeBias(3)
    def forward(self, positions):
        arguments = (3, positions, positions, torch.float32)
        return self.alibi.values(*arguments) + self.relative.values(*arguments)
both, length = Both(), torch.export.Dim("length", min=2, max=4096)
compiled = torch.compile(both, fullgraph=True, dynamic=True, backend="eager")
compiled(torch.arange(7)[None])
exported = torch.export.export(both, (torch.arange(7)[None],), dynamic_shapes={"positions": {1: length}}).module()
with torch._dynamo.config.patch(error_on_recompile=True):
    for length in (11, 13, 501):
        positions = torch.arange(length)[None]
        for traced in (compiled, exported):
            torch.testing.assert_close(traced(positions), both(positions))
"""
    tracing_server.run(code)


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_heads": 0}, "num_heads: expected a whole number of 1 or more, got 0"),
        ({"num_buckets": 31}, "num_buckets: expected an even number, half for each direction, got 31"),
        ({"num_buckets": 2}, "num_buckets: expected a whole number of 4 or more, got 2"),
        ({"num_buckets": 1, "bidirectional": False}, "num_buckets: expected a whole number of 2 or more, got 1"),
        ({"max_distance": 8}, "max_distance: expected a whole number of 9 or more, got 8"),
        (
            {"max_distance": 16, "bidirectional": False},
            "max_distance: expected a whole number of 17 or more, got 16",
        ),
        ({"num_heads": 2**63}, "num_heads: expected a whole number from 1 to 2147483648, got 9223372036854775808"),
        ({"num_buckets": 2**63}, "num_buckets: expected a whole number from 4 to 2147483648, got 9223372036854775808"),
        ({"max_distance": 2**62}, "max_distance: expected a whole number from 9 to 16777216, got 4611686018427387904"),
        ({"dtype": torch.int64}, "dtype: expected a floating-point dtype, such as torch.float16, got torch.int64"),
        ({"bidirectional": 0}, "bidirectional: expected True or False, got 0"),
    ],
)
def test_unusable_options_are_rejected(arguments, message):
    with pytest.raises(hw.InputError, match="^" + message):
        RelativeBias(**({"num_heads": 3} | arguments))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("bias", [ALiBi(), RelativeBias(HEADS)], ids=["alibi", "relative"])
def test_positions_that_do_not_fit_are_rejected(bias):
    positions = torch.zeros(2, 5, dtype=torch.long)
    shape = r"expected a tensor of whole numbers \(batch, length\), got"
    for queries, keys, message in (
        (positions.float(), positions, rf"query_positions: {shape} torch.float32 of shape \(2, 5\)"),
        (positions, positions[0], rf"key_positions: {shape} torch.int64 of shape \(5,\)"),
        (positions, [0, 1], rf"key_positions: {shape} list"),
        (positions, positions.to("meta"), "key_positions: expected a tensor on cpu, got meta"),
        (positions, positions[[0, 0, 0]], "key_positions: expected batch 2 like query_positions, or 1, got batch 3"),
    ):
        with pytest.raises(hw.InputError, match="^" + message):
            bias.values(HEADS, queries, keys, torch.float32)


@pytest.mark.usefixtures("as_user")
def test_another_number_of_heads_is_rejected():
    positions = torch.zeros(1, 5, dtype=torch.long)
    with pytest.raises(hw.InputError, match="^heads: expected the 3 of this RelativeBias, got 5"):
        RelativeBias(3).values(5, positions, positions, torch.float32)
    with pytest.raises(hw.InputError, match="^heads: expected a whole number of 1 or more, got 0"):
        ALiBi().values(0, positions, positions, torch.float32)
