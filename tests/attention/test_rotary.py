"""Rotary embedding against multiplication by complex numbers, its invariants, and the models of transformers."""

import cmath
import copy
import math
import pickle

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import headwise as hw
from headwise.attention.rotary import DynamicNTK, LinearScaling, Llama3, Rotary, Scaling, YaRN, _kept_frequencies

BATCH, HEADS, LENGTH, HEAD_DIM = 2, 3, 7, 22
EXACT = {"rtol": 0, "atol": 1e-12}


def by_hand(x, positions, frequencies, interleaved=False, factor=1.0):
    """Return x with each pair of features, as a complex number, times factor * e^(i position frequency).

    Computed one pair at a time; x is `(batch, heads, length, features)`, positions `(batch or 1, length)`.
    """
    rotated = x.clone()
    pairs = len(frequencies)
    for b in range(x.shape[0]):
        for t in range(x.shape[2]):
            position = int(positions[b % len(positions), t])
            for i, frequency in enumerate(frequencies):
                first, second = (2 * i, 2 * i + 1) if interleaved else (i, i + pairs)
                turn = factor * cmath.exp(1j * position * float(frequency))
                number = torch.complex(x[b, :, t, first], x[b, :, t, second]) * turn
                rotated[b, :, t, first], rotated[b, :, t, second] = number.real, number.imag
    return rotated


def plain_frequencies(theta, width):
    """Return the angle per position of each pair of features, without scaling."""
    return [theta ** (-2 * i / width) for i in range(width // 2)]


def tokens(batch=BATCH, length=LENGTH, head_dim=HEAD_DIM, dtype=torch.float64):
    """Return random queries or keys, `(batch, heads, length, head_dim)`."""
    return torch.randn(batch, HEADS, length, head_dim, dtype=dtype)


POSITIONS = torch.tensor([[0, 1, 2, 3, 4, 5, 6], [-1, -1, 0, 31, 2, 1000, 1]])


@pytest.mark.parametrize("positions", [POSITIONS, POSITIONS[1:], POSITIONS.int()], ids=["rows", "one row", "int32"])
@pytest.mark.parametrize("interleaved", [False, True], ids=["halves", "interleaved"])
@pytest.mark.parametrize("width", [None, 2, 10])
def test_values_and_gradients(width, interleaved, positions):
    rotary = Rotary(theta=500.0, width=width, interleaved=interleaved)
    x = tokens().requires_grad_()
    rotated = rotary.rotate(x, positions)
    frequencies = plain_frequencies(500.0, width or HEAD_DIM)
    torch.testing.assert_close(rotated, by_hand(x.detach(), positions, frequencies, interleaved), **EXACT)
    upstream = torch.randn_like(rotated)
    (gradient,) = torch.autograd.grad(rotated, x, upstream)
    # A rotation is undone by its transpose: the gradient is the upstream one rotated back.
    torch.testing.assert_close(gradient, by_hand(upstream, -positions, frequencies, interleaved), **EXACT)


def test_second_derivatives_exist():
    x = torch.randn(1, 1, 3, 4, dtype=torch.float64, requires_grad=True)
    torch.autograd.gradcheck(lambda x: Rotary().rotate(x, POSITIONS[:1, :3]), (x,))
    torch.autograd.gradgradcheck(lambda x: Rotary(interleaved=True).rotate(x, POSITIONS[:1, :3]), (x,))


@pytest.mark.parametrize("interleaved", [False, True])
def test_scores_depend_on_the_difference_of_positions_alone(interleaved):
    rotary = Rotary(interleaved=interleaved, scaling=Llama3(8.0, 64))
    q, k = tokens(), tokens()
    at_q, at_k = torch.randint(0, 50, (2, BATCH, LENGTH)).unbind()

    def scores(shift):
        return rotary.rotate(q, at_q + shift) @ rotary.rotate(k, at_k + shift).transpose(-1, -2)

    torch.testing.assert_close(scores(0), scores(101), **EXACT)
    assert not torch.allclose(scores(0), q @ k.transpose(-1, -2))


def test_scores_depend_on_the_difference_in_float32_at_the_end_of_a_long_text():
    q, k = tokens(dtype=torch.float32), tokens(dtype=torch.float32)
    positions = torch.arange(LENGTH)[None]

    def scores(shift):
        rotated = (Rotary(theta=5e5).rotate(x, positions + shift) for x in (q, k))
        return next(rotated) @ next(rotated).transpose(-1, -2)

    torch.testing.assert_close(scores(0), scores(1_000_000), rtol=0, atol=2e-5)


def test_norms_and_position_0_stay_unchanged():
    x = tokens()
    rotated = Rotary().rotate(x, POSITIONS)
    torch.testing.assert_close(rotated.norm(dim=-1), x.norm(dim=-1), **EXACT)
    assert torch.equal(Rotary().rotate(x, torch.zeros(1, LENGTH, dtype=torch.long)), x)


def test_interleaved_is_halves_after_a_permutation_of_features():
    x = tokens()
    halves = torch.arange(HEAD_DIM).view(2, -1).t().flatten()  # features 0, 11, 1, 12, ...: pairs side by side
    rotated = Rotary(interleaved=True).rotate(x[..., halves], POSITIONS)
    assert torch.equal(rotated, Rotary().rotate(x, POSITIONS)[..., halves])


def test_partial_rotary_leaves_other_features_unchanged():
    x = tokens()
    rotated = Rotary(width=6).rotate(x, POSITIONS)
    assert torch.equal(rotated[..., 6:], x[..., 6:])
    assert torch.equal(rotated[..., :6], Rotary().rotate(x[..., :6], POSITIONS))


def test_layers_with_different_thetas_share_no_table():
    x = tokens()
    one, other = Rotary(theta=100.0), Rotary(theta=101.0)
    for rotary, theta in ((one, 100.0), (other, 101.0), (one, 100.0)):
        torch.testing.assert_close(
            rotary.rotate(x, POSITIONS), by_hand(x, POSITIONS, plain_frequencies(theta, 22)), **EXACT
        )


def in_inference_mode(x, positions):
    """Rotate in inference mode, whose tensors autograd refuses."""
    with torch.inference_mode():
        Rotary().rotate(x, positions)


def on_fake_tensors(x, positions):
    """Rotate tensors without values."""
    with FakeTensorMode(allow_non_fake_inputs=True):
        Rotary().rotate(x, positions)


def under_a_transform(x, positions):
    """Rotate in a gradient of `torch.func`, which wraps every tensor."""
    torch.func.grad(lambda x: Rotary().rotate(x, positions).sum())(x)


@pytest.mark.parametrize("rotate_first", [in_inference_mode, on_fake_tensors, under_a_transform])
def test_an_earlier_call_of_another_kind_changes_nothing(rotate_first):
    x, positions = torch.randn(BATCH, HEADS, LENGTH, HEAD_DIM, dtype=torch.float64), torch.arange(LENGTH)[None]
    _kept_frequencies.cache_clear()
    rotate_first(x, positions)
    x.requires_grad_()
    rotated = Rotary().rotate(x, positions)
    assert type(rotated) is torch.Tensor
    torch.testing.assert_close(rotated, by_hand(x, positions, plain_frequencies(1e4, HEAD_DIM)), **EXACT)
    (gradient,) = torch.autograd.grad(rotated.square().sum() / 2, x)
    torch.testing.assert_close(gradient, x, **EXACT)  # a rotation keeps norms


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("autocast", [False, True])
def test_angles_are_never_in_half_precision(dtype, autocast):
    x, positions = tokens(dtype=dtype), POSITIONS + 4099  # no whole number above 256 is safe in bfloat16
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        rotated = Rotary().rotate(x, positions)
    assert rotated.dtype == dtype
    exact = by_hand(x.double(), positions, plain_frequencies(1e4, HEAD_DIM))
    half_a_unit = torch.finfo(dtype).eps / 2
    assert ((rotated.double() - exact).abs() <= half_a_unit * exact.abs() + 4e-7 * x.abs().max()).all()


def test_float64_stays_float64_under_autocast():
    with torch.autocast("cpu", torch.bfloat16):
        rotated = Rotary().rotate(x := tokens(), POSITIONS)
    assert torch.equal(rotated, Rotary().rotate(x, POSITIONS))


def test_unusual_strides_do_not_change_the_result():
    x = tokens()
    views = {
        "transposed": x.transpose(1, 2).contiguous().transpose(1, 2),
        "every other": torch.stack((x, torch.zeros_like(x)), -1).flatten(-2)[..., ::2],
        "features first": x.permute(3, 2, 1, 0).contiguous().permute(3, 2, 1, 0),
    }
    for view in views.values():
        assert torch.equal(Rotary(width=10).rotate(view, POSITIONS), Rotary(width=10).rotate(x, POSITIONS))
    one = x[:1, :1].expand(BATCH, HEADS, LENGTH, HEAD_DIM)
    assert torch.equal(Rotary().rotate(one, POSITIONS), Rotary().rotate(one.contiguous(), POSITIONS))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("scaling", [None, DynamicNTK(2.0, 5)], ids=str)
@pytest.mark.parametrize("shape", [(2, 3, 0, 4), (0, 3, 5, 4), (2, 0, 5, 4)], ids=str)
def test_empty_tensors_stay_empty(shape, scaling):
    assert Rotary(scaling=scaling).rotate(torch.zeros(shape), torch.zeros(1, shape[2], dtype=torch.long)).shape == shape


def test_equal_options_make_equal_rotaries():
    rotary = Rotary(theta=1e5, scaling=YaRN(4.0, 64))
    assert rotary == copy.deepcopy(rotary) == pickle.loads(pickle.dumps(rotary)) != Rotary(theta=1e5)
    assert hash(rotary) == hash(Rotary(theta=1e5, scaling=YaRN(4.0, 64)))


# -- scalings ----------------------------------------------------------------------------------------------------

SCALINGS = {
    "linear": (LinearScaling(3.0), {}),
    "dynamic": (DynamicNTK(3.0, 64), {}),
    "yarn": (YaRN(4.0, 64, fast=8.0), {"beta_fast": 8.0}),
    "yarn, whole": (YaRN(32.0, 64, truncate=False), {"truncate": False}),
    "yarn, all slow": (YaRN(4.0, 7, slow=0.5), {"beta_slow": 0.5}),
    "yarn, factor": (YaRN(4.0, 64, attention_factor=1.5), {"attention_factor": 1.5}),
    "yarn, mscale": (
        YaRN(40.0, 64, attention_factor=(0.1 * 0.7 * math.log(40) + 1) / (0.1 * 0.3 * math.log(40) + 1)),
        {"mscale": 0.7, "mscale_all_dim": 0.3},
    ),
    "yarn, factor 1": (YaRN(1.0, 64), {}),
    "llama3": (Llama3(8.0, 64), {"low_freq_factor": 1.0, "high_freq_factor": 4.0}),
    "llama3, narrow": (Llama3(2.0, 300, low=0.7, high=1.1), {"low_freq_factor": 0.7, "high_freq_factor": 1.1}),
}


def config_of(name, theta=1e4, head_dim=HEAD_DIM):
    """Return the same scaling as a configuration of transformers."""
    import transformers

    scaling, more = SCALINGS[name]
    kind = name.split(",")[0]
    parameters = {"rope_type": kind, "rope_theta": theta, "factor": scaling.factor, **more}
    if kind in ("yarn", "llama3"):
        parameters["original_max_position_embeddings"] = scaling.trained_length
    return transformers.LlamaConfig(
        hidden_size=3 * head_dim,
        num_attention_heads=3,
        head_dim=head_dim,
        max_position_embeddings=64 if kind == "dynamic" else 4096,
        rope_parameters=parameters,
    )


@pytest.mark.parametrize("length", [5, 64, 65, 1009])
@pytest.mark.parametrize("theta", [1e4, 50.0])
@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_frequencies_equal_those_of_transformers(name, theta, length):
    import transformers.modeling_rope_utils as rope_utils

    scaling, _ = SCALINGS[name]
    init = rope_utils.ROPE_INIT_FUNCTIONS[name.split(",")[0]]
    theirs, factor = init(config_of(name, theta), torch.device("cpu"), seq_len=length)
    assert isinstance(scaling, Scaling)
    for length_or_tensor in (length, torch.tensor(length)):
        ours, our_factor = scaling.frequencies(theta, HEAD_DIM, length_or_tensor)
        torch.testing.assert_close(ours.float(), theirs, rtol=1e-5 if "dynamic" in name else 1e-6, atol=0)
        assert our_factor == pytest.approx(factor, rel=1e-12)


@pytest.mark.parametrize("name", SCALINGS)
def test_scaled_rotation_equals_llama_of_transformers(name):
    import transformers.models.llama.modeling_llama as llama

    scaling, _ = SCALINGS[name]
    q, k = tokens(dtype=torch.float32), tokens(dtype=torch.float32)
    positions = torch.arange(60, 60 + LENGTH)[None].expand(BATCH, -1)
    cos, sin = llama.LlamaRotaryEmbedding(config_of(name))(q, positions)
    for ours, theirs in zip((q, k), llama.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        rotated = Rotary(scaling=scaling).rotate(ours, positions)
        torch.testing.assert_close(rotated, theirs, rtol=0, atol=1e-4)  # their angles are rounded at position 66


def llama3_by_hand(theta, width, factor, trained, low, high):
    """Yield the frequencies of Llama 3: slow ones divided by the factor, fast ones unchanged, a ramp between them."""
    for plain in plain_frequencies(theta, width):
        wavelength = 2 * math.pi / plain
        if wavelength < trained / high:
            yield plain
        elif wavelength > trained / low:
            yield plain / factor
        else:
            smooth = (trained / wavelength - low) / (high - low)
            yield (1 - smooth) * plain / factor + smooth * plain


def yarn_by_hand(theta, width, factor, trained, fast, slow):
    """Yield the frequencies of YaRN: a linear ramp over pairs from unchanged to divided by the factor."""

    def pair(turns):  # solves trained * theta^(-2i / width) / 2 pi = turns for i
        return width / 2 * math.log(trained / (2 * math.pi * turns), theta)

    first, last = math.floor(pair(fast)), math.ceil(pair(slow))
    assert 0 <= first < last < width / 2
    for i, plain in enumerate(plain_frequencies(theta, width)):
        interpolated = min(max((i - first) / (last - first), 0), 1)
        yield plain * (1 - interpolated) + plain / factor * interpolated


def dynamic_by_hand(theta, width, factor, trained, length):
    """Return the frequencies of dynamic NTK scaling for a text of this length."""
    stretch = max(factor * length / trained - (factor - 1), 1)
    return plain_frequencies(theta * stretch ** (width / (width - 2)), width)


@pytest.mark.parametrize(
    ("scaling", "frequencies", "factor"),
    [
        (LinearScaling(3.0), [f / 3 for f in plain_frequencies(1e4, 22)], 1.0),
        (DynamicNTK(3.0, 500), dynamic_by_hand(1e4, 22, 3.0, 500, 1001), 1.0),
        (DynamicNTK(3.0, 2000), plain_frequencies(1e4, 22), 1.0),
        (YaRN(4.0, 1024), list(yarn_by_hand(1e4, 22, 4.0, 1024, 32, 1)), 0.1 * math.log(4) + 1),
        (Llama3(8.0, 64), list(llama3_by_hand(1e4, 22, 8.0, 64, 1.0, 4.0)), 1.0),
    ],
    ids=str,
)
def test_scaled_rotation_in_float64(scaling, frequencies, factor):
    x = tokens()
    expected = by_hand(x, POSITIONS, frequencies, factor=factor)
    torch.testing.assert_close(Rotary(scaling=scaling).rotate(x, POSITIONS), expected, **EXACT)


def test_dynamic_angles_depend_on_the_length():
    grown, still = Rotary(scaling=DynamicNTK(2.0, 5)), Rotary(scaling=YaRN(2.0, 5))
    assert (grown.depends_on_length, still.depends_on_length, Rotary().depends_on_length) == (True, False, False)
    x, positions = tokens(), torch.arange(LENGTH)[None]
    of_text = grown.rotate(x, positions)
    assert not torch.allclose(of_text, Rotary().rotate(x, positions))
    # A part of a text is rotated as in the complete text if the length of the complete text is passed.
    for length in (LENGTH, torch.tensor(LENGTH)):
        part = grown.rotate(x[:, :, 1:3], positions[:, 1:3], length=length)
        torch.testing.assert_close(part, of_text[:, :, 1:3], **EXACT)
    assert torch.equal(grown.rotate(x[:, :, :5], positions[:, :5]), Rotary().rotate(x[:, :, :5], positions[:, :5]))
    assert torch.equal(still.rotate(x, positions, length=1000), still.rotate(x, positions))
    assert grown.rotate(x, torch.full((1, LENGTH), -1)).isfinite().all()
    assert Rotary(width=2, scaling=DynamicNTK(2.0, 5)).rotate(x, positions).isfinite().all()


# -- models of transformers ----------------------------------------------------------------------------------------


def test_partial_rotation_equals_gpt_neox():
    import transformers.models.gpt_neox.modeling_gpt_neox as neox

    config = neox.GPTNeoXConfig(
        hidden_size=3 * 24,
        num_attention_heads=3,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25},
    )
    q, k = tokens(head_dim=24, dtype=torch.float32), tokens(head_dim=24, dtype=torch.float32)
    positions = torch.arange(LENGTH)[None]
    cos, sin = neox.GPTNeoXRotaryEmbedding(config)(q, positions)
    assert cos.shape[-1] == 6
    for ours, theirs in zip((q, k), neox.apply_rotary_pos_emb(q, k, cos, sin), strict=True):
        torch.testing.assert_close(Rotary(width=6).rotate(ours, positions), theirs, rtol=0, atol=5e-6)


def test_interleaved_rotation_equals_gpt_j_and_deepseek():
    import transformers.models.deepseek_v3.modeling_deepseek_v3 as deepseek
    import transformers.models.gptj.modeling_gptj as gptj

    q, k = tokens(dtype=torch.float32), tokens(dtype=torch.float32)
    angles = torch.arange(LENGTH)[:, None] * torch.tensor(plain_frequencies(1e4, HEAD_DIM))
    rotated = [Rotary(interleaved=True).rotate(x, torch.arange(LENGTH)[None]) for x in (q, k)]

    sin, cos = angles.sin()[None], angles.cos()[None]
    of_gptj = gptj.apply_rotary_pos_emb(q.transpose(1, 2), sin, cos).transpose(1, 2)
    torch.testing.assert_close(rotated[0], of_gptj, rtol=0, atol=5e-6)

    # DeepSeek takes pairs side by side and returns them as halves, queries and keys alike.
    halved = deepseek.apply_rotary_pos_emb_interleave(q, k, torch.cat((cos, cos), -1), torch.cat((sin, sin), -1))
    for ours, theirs in zip(rotated, halved, strict=True):
        torch.testing.assert_close(torch.cat((ours[..., 0::2], ours[..., 1::2]), -1), theirs, rtol=0, atol=5e-6)


# -- compiled ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_rotation_compiles_to_one_graph_for_all_lengths(tracing_server):
    tracing_server.run("""
import torch
from headwise.attention.rotary import Rotary
from headwise.attention.rotary import DynamicNTK, LinearScaling, Llama3, YaRN
def inputs(length):
    return torch.randn(2, 3, length, 12), torch.arange(length)[None]
for scaling in (None, LinearScaling(2.0), DynamicNTK(2.0, 8), YaRN(4.0, 64), Llama3(8.0, 32)):
    for rotary in (Rotary(scaling=scaling), Rotary(theta=5e4, width=8, interleaved=True, scaling=scaling)):
        torch._dynamo.reset()
        compiled = torch.compile(rotary.rotate, fullgraph=True, dynamic=True, backend="eager")
        compiled(*inputs(7))
        with torch._dynamo.config.patch(error_on_recompile=True):
            for length in (11, 13, 501):
                x, positions = inputs(length)
                torch.testing.assert_close(compiled(x, positions), rotary.rotate(x, positions))
""")


@pytest.mark.slow
def test_rotation_exports_with_a_free_length(tracing_server):
    tracing_server.run("""
import torch
from headwise.attention.rotary import Rotary
from headwise.attention.rotary import DynamicNTK, LinearScaling, Llama3, YaRN
class Turn(torch.nn.Module):
    def __init__(self, rotary):
        super().__init__()
        self.rotary = rotary
    def forward(self, x, positions):
        return self.rotary.rotate(x, positions)
length = torch.export.Dim("length", min=2, max=4096)
for scaling in (None, DynamicNTK(2.0, 8), YaRN(4.0, 64)):
    module = Turn(Rotary(scaling=scaling))
    free = {"x": {2: length}, "positions": {1: length}}
    example = torch.randn(2, 3, 7, 12), torch.arange(7)[None]
    exported = torch.export.export(module, example, dynamic_shapes=free).module()
    longer = torch.randn(2, 3, 11, 12), torch.arange(11)[None]
    torch.testing.assert_close(exported(*longer), module(*longer))
""")


# -- mistakes ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Rotary(theta=1.0), r"Rotary\(theta\): expected a finite number above 1, got 1.0"),
        (lambda: Rotary(theta=float("nan")), r"Rotary\(theta\): expected a finite number above 1, got nan"),
        (lambda: Rotary(width=7), r"Rotary\(width\): expected an even number, since pairs are rotated, got 7"),
        (lambda: Rotary(width=0), r"Rotary\(width\): expected a whole number of 2 or more, got 0"),
        (lambda: Rotary(interleaved=1), r"Rotary\(interleaved\): expected True or False, got 1"),
        (lambda: Rotary(scaling=2.0), r"Rotary\(scaling\): expected a Scaling, such as YaRN\(...\), got 2.0"),
        (lambda: Rotary(scaling=YaRN), r"Rotary\(scaling\): expected a Scaling, such as YaRN\(...\), got <class"),
        (lambda: LinearScaling(0.5), r"LinearScaling\(factor\): expected a factor of 1 or more, got 0.5"),
        (lambda: LinearScaling("a"), r"LinearScaling\(factor\): expected a finite number, got 'a'"),
        (lambda: DynamicNTK(0.0, 8), r"DynamicNTK\(factor\): expected a factor of 1 or more, got 0.0"),
        (lambda: DynamicNTK(2.0, 0), r"DynamicNTK\(trained_length\): expected a whole number of 1 or more, got 0"),
        (lambda: YaRN(0.9, 8), r"YaRN\(factor\): expected a factor of 1 or more, got 0.9"),
        (lambda: YaRN(2.0, 8.5), r"YaRN\(trained_length\): expected a whole number of 1 or more, got 8.5"),
        (lambda: YaRN(2.0, 8, slow=0.0), r"YaRN\(slow\): expected a finite number above 0, got 0.0"),
        (lambda: YaRN(2.0, 8, fast=3.0, slow=3.0), r"YaRN\(fast\): expected a finite number above 3, got 3.0"),
        (lambda: YaRN(2.0, 8, attention_factor=-1.0), r"YaRN\(attention_factor\): expected .* above 0, got -1.0"),
        (lambda: YaRN(2.0, 8, truncate="no"), r"YaRN\(truncate\): expected True or False, got 'no'"),
        (lambda: Rotary(width=2**63), r"Rotary\(width\): expected a whole number from 2 to 2147483648, got 922"),
        (lambda: DynamicNTK(2.0, 2**64), r"DynamicNTK\(trained_length\): expected a whole number from 1 to 92233"),
        (lambda: YaRN(2.0, 2**64), r"YaRN\(trained_length\): expected a whole number from 1 to 92233"),
        (lambda: Llama3(2.0, 2**64), r"Llama3\(trained_length\): expected a whole number from 1 to 92233"),
        (lambda: Llama3(0.1, 8), r"Llama3\(factor\): expected a factor of 1 or more, got 0.1"),
        (lambda: Llama3(2.0, -3), r"Llama3\(trained_length\): expected a whole number of 1 or more, got -3"),
        (lambda: Llama3(2.0, 8, low=0.0), r"Llama3\(low\): expected a finite number above 0, got 0.0"),
        (lambda: Llama3(2.0, 8, low=5.0), r"Llama3\(high\): expected a finite number above 5, got 4.0"),
    ],
)
@pytest.mark.usefixtures("as_user")
def test_unusable_options_are_rejected(make, message):
    with pytest.raises(hw.InputError, match="^" + message):
        make()


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("scaling", [None, DynamicNTK(2.0, 2**63 - 1), Llama3(2.0, 2**63 - 1), YaRN(2.0, 2**63 - 1)])
def test_large_whole_numbers_are_computed_as_floats(scaling):
    x, positions = torch.randn(2, 3, 5, 8), torch.arange(5)[None]
    rotated = Rotary(theta=2**64, scaling=scaling).rotate(x, positions)
    assert torch.equal(rotated, Rotary(theta=2.0**64, scaling=scaling).rotate(x, positions))
    assert rotated.isfinite().all()


@pytest.mark.parametrize(
    ("rotary", "x", "positions", "message"),
    [
        (Rotary(), (2, 3, 5, 11), (1, 5), "head_dim: expected an even number, .*, got 11; or give Rotary a width"),
        (Rotary(width=14), (2, 3, 5, 11), (1, 5), r"Rotary\(width\): expected at most the head_dim, 11, got 14"),
        (Rotary(), (3, 5, 11), (1, 5), r"x: expected a float tensor \(batch, .*, got torch.float32 of shape \(3, 5"),
        (Rotary(), (2, 3, 5, 4), (1, 7), r"positions: expected shape \(2, 5\) or \(1, 5\), got \(1, 7\)"),
        (Rotary(), (2, 3, 5, 4), (3, 5), r"positions: expected shape \(2, 5\) or \(1, 5\), got \(3, 5\)"),
        (Rotary(), (2, 3, 5, 4), (5,), r"positions: .* whole numbers \(batch, length\), got torch.int64 of shape \(5,"),
    ],
)
@pytest.mark.usefixtures("as_user")
def test_inputs_that_do_not_fit_are_rejected(rotary, x, positions, message):
    with pytest.raises(hw.InputError, match="^" + message):
        rotary.rotate(torch.zeros(x), torch.zeros(positions, dtype=torch.long))


@pytest.mark.usefixtures("as_user")
def test_inputs_of_another_kind_are_rejected():
    x, positions = torch.zeros(2, 3, 5, 4), torch.zeros(1, 5, dtype=torch.long)
    position_message = r"positions: expected a tensor of whole numbers \(batch, length\), got "
    for bad_x, bad_positions, message in (
        (x.int(), positions, "x: expected a float tensor .*, got torch.int32 of shape"),
        ([1.0], positions, "x: expected a float tensor .*, got list"),
        (x, positions.float(), position_message + r"torch.float32 of shape \(1, 5\)"),
        (x, positions.bool(), position_message + r"torch.bool of shape \(1, 5\)"),
        (x, [0, 1, 2, 3, 4], position_message + "list"),
        (x, positions.to("meta"), "positions: expected a tensor on cpu, got meta"),
    ):
        with pytest.raises(hw.InputError, match="^" + message):
            Rotary().rotate(bad_x, bad_positions)
