"""Circuits of models of the user, with the layers of headwise and of torch: what they have, and what they lack."""

import math

import pytest
import torch
import transformers
from blocks import Model, close, dense_ov
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("as_user")


def test_a_model_with_our_layer_has_circuits():
    model = Model()
    circuits = hw.circuits(model)
    assert close(circuits.ov(2, 1).matrix(), dense_ov(model, 2, 1))
    assert circuits.has_linear_stream
    assert circuits.scores().statistics[:2] == ("copying", "matching")
    assert len(circuits.composition().rows) == 27


class TorchAttention(nn.Module):
    """Torch's layer in the place of ours."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x):
        return self.layer(x, x, x, need_weights=False)[0]


def test_a_model_with_the_layer_of_torch_has_circuits():
    model = Model(layer=TorchAttention)
    circuits = hw.circuits(model)
    block = model.blocks[1]
    layer, own = block.attention.layer, slice(16, 24)
    norm = torch.diag(block.norm.weight) @ (torch.eye(24, dtype=torch.float64) - 1 / 24)
    query, key, value = (part[own] @ norm for part in layer.in_proj_weight.detach().split(24))
    assert close(circuits.ov(1, 2).matrix(), (layer.out_proj.weight[:, own] @ value).detach())
    assert close(circuits.qk(1, 2).matrix(), (query.T @ key).detach() / 8**0.5)
    assert len(circuits.composition().rows) == 27


def test_images_have_circuits():
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 37}
    model = transformers.ViTModel(transformers.ViTConfig(**sizes, image_size=16, patch_size=8)).eval()
    circuits = hw.circuits(model, {"pixel_values": torch.randn(1, 3, 16, 16)})
    assert len(circuits.composition().rows) == 36
    with pytest.raises(hw.InputError, match="scores of the name 'matching', got"):
        circuits.scores("matching")


def test_rotary_positions_of_our_layer():
    rotary = hw.Rotary(theta=100.0, width=4)
    model = Model(layer=lambda: hw.MultiHeadAttention(24, num_heads=3, mask=hw.causal(), rotary=rotary))
    circuits = hw.circuits(model)
    attention = model.blocks[1].attention
    weight = (
        attention.qkv_proj.weight
        if attention.fused_qkv
        else torch.cat([attention.q_proj.weight, attention.k_proj.weight])
    )
    norm = torch.diag(model.blocks[1].norm.weight) @ (torch.eye(24, dtype=torch.float64) - 1 / 24)
    query, key = weight[8:16] @ norm.detach(), weight[32:40] @ norm.detach()
    x, y = torch.randn(2, 24, dtype=torch.float64)
    q, k = (
        rotary.rotate((matrix @ vector)[None, None, None], torch.tensor([[position]])).flatten()
        for matrix, vector, position in ((query, x, 11), (key, y, 4))
    )
    assert (x @ circuits.qk(1, 1, 7).matrix() @ y).item() == pytest.approx((q @ k).item() / 8**0.5, rel=1e-9)


def test_a_constant_factor_of_what_heads_write_is_found():
    model = Model(written=0.22)
    circuits = hw.circuits(model)
    assert close(circuits.ov(1, 2).matrix(), dense_ov(model, 1, 2, 0.22))


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"written": torch.linspace(0.5, 1.5, 24, dtype=torch.float64)}, id="a factor of each feature"),
        *({"kept": 0.9}, {"post_norm": True}, {"mlp": True}, {"own_norm": True}, {"written": -1.0}, {"written": 0.0}),
    ],
    ids=str,
)
def test_models_without_a_linear_stream_have_no_scores_of_it(options):
    circuits = hw.circuits(Model(**options))
    assert not circuits.has_linear_stream
    for call in (
        lambda: circuits.scores("copying"),
        lambda: circuits.scores("matching"),
        circuits.composition,
    ):
        with pytest.raises(hw.InputError, match=r"^model: expected one that has .*, got .*(blocks|output embedding)"):
            call()
    with pytest.warns(UserWarning, match="the scores copying, matching are left out: the model has"):
        assert circuits.scores().statistics == ("ov_norm", "ov_largest", "qk_norm", "qk_largest")


def test_the_last_layer_must_write_into_the_sum_with_one_factor():
    gains = torch.linspace(0.5, 1.5, 24, dtype=torch.float64)
    assert not hw.circuits(Model(blocks=1, written=gains)).has_linear_stream
    circuits = hw.circuits(Model(blocks=1, written=0.5))
    assert circuits.has_linear_stream
    with pytest.raises(hw.InputError, match=r"^model: expected at least two attention layers, got 1$"):
        circuits.composition()


@pytest.mark.parametrize(
    ("logits", "has_copying"),
    [(lambda z: 3.0 * (z / 3.0).tanh(), True), (lambda z: z / 8, True), (lambda z: -z, False), (torch.sin, False)],
)
def test_logits_must_increase_with_what_the_output_embedding_returns(logits, has_copying):
    plain, circuits = hw.circuits(Model()), hw.circuits(Model(logits=logits))
    if has_copying:
        expected = [row.statistics["copying"].value for row in plain.scores("copying").rows]
        assert [row.statistics["copying"].value for row in circuits.scores("copying").rows] == expected
        return
    with pytest.raises(hw.InputError, match="got logits that are no increasing function of the results"):
        circuits.scores("copying")
    assert circuits.scores("matching").statistics == ("matching",)


def test_models_that_do_not_name_embeddings_need_a_batch():
    model = Model(named=False)
    with pytest.raises(hw.InputError, match=r"^batch: expected one sequence, for a model that does not name its token"):
        hw.circuits(model)
    with pytest.raises(hw.InputError, match=r"^batch: expected at least 4 tokens, by which weights are checked, got 2"):
        hw.circuits(model, torch.tensor([[1, 2]]))
    with pytest.raises(hw.InputError, match=r"^batch: expected one sequence, got 2"):
        hw.circuits(model, torch.arange(14).view(2, 7))
    circuits = hw.circuits(model, torch.arange(7)[None])
    assert close(circuits.ov(0, 0).matrix(), dense_ov(model, 0, 0))
    with pytest.raises(hw.InputError, match="got no output embedding that it names"):
        circuits.scores("copying")


def test_norms_of_queries_and_keys_leave_ov():
    model = Model(layer=lambda: hw.MultiHeadAttention(24, num_heads=3, mask=hw.causal(), qk_norm=hw.QKNorm()))
    circuits = hw.circuits(model)
    assert close(circuits.ov(1, 0).matrix(), dense_ov(model, 1, 0))
    with pytest.raises(hw.InputError, match="expected scores that are a bilinear form of the residual stream, got"):
        circuits.qk(1, 0)
    with pytest.raises(hw.InputError, match="composition scores of the name 'k'"):
        circuits.composition("k")
    assert circuits.composition("v").statistics == ("v",)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [({"position_bias": hw.ALiBi()}, "position_bias"), ({"output_gate": "head"}, r"blocks\.0\.attention")],
)
def test_a_bias_by_position_and_a_gate_of_head_outputs_are_refused(options, sentence):
    model = Model(layer=lambda: hw.MultiHeadAttention(24, num_heads=3, mask=hw.causal(), **options))
    with pytest.raises(hw.InputError, match=sentence):
        hw.circuits(model)


def test_the_bias_by_position_of_t5_leaves_ov():
    config = transformers.T5Config(vocab_size=97, d_model=48, num_layers=2, num_heads=6, d_kv=8, d_ff=37)
    model = transformers.T5EncoderModel(config).double().eval()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    circuits = hw.circuits(model)
    attention = model.encoder.block[1].layer[0]
    own = slice(16, 24)
    value = attention.SelfAttention.v.weight[own] * attention.layer_norm.weight
    assert circuits.has_linear_stream
    assert close(circuits.ov(1, 2).matrix(), (attention.SelfAttention.o.weight[:, own] @ value).detach())
    with pytest.raises(hw.InputError, match="got scores of encoder.block.1.layer.0.SelfAttention that do not follow"):
        circuits.qk(1, 2)


def test_models_that_do_not_run_in_float64_are_refused():
    model = Model(logits=lambda z: z @ torch.zeros(31, 31))
    expected = r"^model: expected one that runs in float64 on the batch, got RuntimeError: expected m1 and m2"
    with pytest.raises(hw.InputError, match=expected):
        hw.circuits(model)
    with pytest.raises(hw.InputError, match="expected one that runs in float64 on the batch, got TypeError"):
        hw.circuits(Model(), {"words": torch.arange(7)[None]})


class Reader(nn.Module):
    """Block whose attention output has a norm, and reaches the stream through this norm or past it too."""

    def __init__(self, attention, past):
        super().__init__()
        self.attention, self.norm, self.after, self.past = attention, nn.LayerNorm(24), nn.LayerNorm(24), past

    def forward(self, x):
        added = self.attention(self.norm(x))
        return x + self.after(added) + added if self.past else x + self.after(added)


@pytest.mark.parametrize("past", [False, True])
def test_a_norm_after_attention_must_be_the_only_way_into_the_stream(past):
    model = changed(Model(), lambda block: Reader(block.attention, past))
    circuits = hw.circuits(model)
    assert circuits.has_linear_stream is not past
    if past:
        with pytest.raises(hw.InputError, match=r"got an input of blocks\.1\.attention that is not the sum of what"):
            circuits.composition()
        return
    after = torch.diag(model.blocks[1].after.weight) @ (torch.eye(24, dtype=torch.float64) - 1 / 24)
    assert close(circuits.ov(1, 2).matrix(), after.detach() @ dense_ov(model, 1, 2))


def changed(model, block_of):
    """Return a model whose blocks are made from its blocks by a function, with other random weights."""
    model.blocks = nn.ModuleList([block_of(block) for block in model.blocks])
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.4)
    return model.double().eval()


class ConditionalNorm(nn.Module):
    """Layer norm with a factor, which may be an argument that the model must pass or one that it may pass."""

    def __init__(self, required):
        super().__init__()
        self.weight, self.required = nn.Parameter(torch.ones(24)), required

    def forward(self, x, factor=None):
        if factor is None and self.required:
            raise TypeError("factor is missing")
        normed = nn.functional.layer_norm(x, (24,)) * self.weight
        return normed if factor is None else normed * factor


class Conditional(nn.Module):
    """Block with such a norm, which is called with a factor of each feature."""

    def __init__(self, attention, required):
        super().__init__()
        self.attention, self.norm = attention, ConditionalNorm(required)

    def forward(self, x):
        return x + self.attention(self.norm(x, torch.linspace(0.5, 1.5, 24, dtype=torch.float64)))


@pytest.mark.parametrize("required", [False, True])
def test_norms_that_depend_on_more_than_their_input_are_refused(required):
    model = changed(Model(), lambda block: Conditional(block.attention, required))
    expected = r"layer norms and RMS norms, got blocks\.0\.norm of the class ConditionalNorm, which computes something"
    with pytest.raises(hw.InputError, match=expected):
        hw.circuits(model)


class PlacedEmbedding(nn.Embedding):
    """Token embedding that adds a vector for the place of each token."""

    def forward(self, tokens):
        places = torch.arange(tokens.shape[-1], dtype=torch.float64)[:, None]
        return super().forward(tokens) + (places * torch.arange(1.0, 25.0, dtype=torch.float64)).sin()


def test_a_token_embedding_that_adds_positions_has_no_scores_of_the_vocabulary():
    model = Model()
    model.embedding = PlacedEmbedding.from_pretrained(model.embedding.weight.detach())
    circuits = hw.circuits(model)
    assert circuits.has_linear_stream
    for score in ("copying", "matching"):
        with pytest.raises(hw.InputError, match="got a token embedding that depends on the places of the tokens"):
            circuits.scores(score)


@pytest.mark.parametrize("part", ["q_proj", "k_proj"])
def test_a_head_whose_qk_matrix_is_0_leaves_the_scores_of_the_others(part):
    model = Model(layer=lambda: hw.MultiHeadAttention(24, num_heads=3, mask=hw.causal(), fused_qkv=False))
    attention = model.blocks[1].attention
    linear = getattr(attention, part)
    for tensor in (linear.weight, linear.bias):
        nn.init.zeros_(tensor.data[8:16])
    circuits = hw.circuits(model)
    norm = torch.diag(model.blocks[1].norm.weight) @ (torch.eye(24, dtype=torch.float64) - 1 / 24)
    query, key = attention.q_proj.weight[16:] @ norm, attention.k_proj.weight[16:] @ norm
    assert close(circuits.qk(1, 2).matrix(), (query.T @ key).detach() / 8**0.5)
    assert not circuits.qk(1, 1).matrix().any()
    composition = circuits.composition()
    assert math.isnan(composition.pair((0, 0), (1, 1)).statistics["k"].value)
    scores = [row.statistics["k"].value for row in composition.rows if (row.layer, row.head) != (1, 1)]
    assert [row.statistics["k"].value for row in composition.largest("k", 99)] == sorted(scores, reverse=True)


def test_heads_that_write_nothing_do_not_change_the_largest_scores_of_others():
    model = Model()
    for head in (slice(0, 8), slice(16, 24)):
        nn.init.zeros_(model.blocks[1].attention.out_proj.weight.data[:, head])
    composition = hw.circuits(model).composition("v")
    values = {(*earlier, *later): composition.pair(earlier, later).statistics["v"].value for earlier, later in PAIRS}
    assert math.isnan(values[1, 2, 2, 0])
    summary = composition.summary()
    for head in range(3):
        seen = [value for (*_, layer, reader), value in values.items() if (layer, reader) == (2, head)]
        expected = max(value for value in seen if not math.isnan(value))
        assert summary.head(2, head).statistics["v_in"].value == expected
    assert summary.head(1, 2).statistics["v_out"].n == 0


PAIRS = [
    ((earlier, one), (later, other))
    for earlier in range(2)
    for later in range(earlier + 1, 3)
    for one in range(3)
    for other in range(3)
]


def test_attention_that_is_too_uniform_is_named():
    tokens = torch.full((1, 7), 3)  # without positions, all keys of a query are equal
    circuits = hw.circuits(Model(), tokens)
    with pytest.raises(hw.InputError, match=r"got attention in blocks\.0\.attention that is too uniform to show the"):
        circuits.qk(0, 0)


def test_logits_may_be_part_of_a_tuple():
    expected = hw.circuits(Model()).scores("copying")
    circuits = hw.circuits(Model(logits=lambda z: (torch.zeros(()), z)))
    assert circuits.scores("copying").rows == expected.rows


def test_layers_called_with_the_length_first_are_named():
    model = Model(layer=LengthFirst)
    with pytest.raises(hw.InputError, match=r"called with \(1, length, width\), got \(7, 1, 24\) in blocks\.0\.atten"):
        hw.circuits(model)


class LengthFirst(nn.Module):
    """Torch's layer with its default layout."""

    def __init__(self):
        super().__init__()
        self.layer = nn.MultiheadAttention(24, 3)

    def forward(self, x):
        x = x.transpose(0, 1)
        return self.layer(x, x, x, need_weights=False)[0].transpose(0, 1)
