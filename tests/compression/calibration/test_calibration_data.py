"""Calibration data: padding that is stated in other ways than by a mask of two axes, and modules that do not always
run.
"""

import dataclasses

import pytest
import torch
import transformers

import headwise as hw
from headwise.compression.calibration.reconstruction import LayerRuns
from headwise.compression.merging.merge_kv import merge_kv
from headwise.compression.pruning.plan_pruning import plan_pruning
from headwise.compression.pruning.prune import prune
from headwise.families.registry import head_module
from removal import families

GENERATOR = torch.Generator().manual_seed(2)
IDS = torch.randint(3, 97, (2, 13), generator=GENERATOR)
SHORTER = torch.arange(13) < torch.tensor([[13], [8]])
CAUSAL = torch.ones(13, 13, dtype=torch.bool).tril().expand(2, 1, 13, 13)
NOT_STATED = (
    "^calibration: expected padding that an attention_mask of shape .* got a mask that hides {} of {} tokens in "
)


def additive(visible):
    """Return a mask to be added to scores."""
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, torch.finfo(torch.float64).min)


def tokens_of(scores):
    """Return the number of tokens that count in each module."""
    return {path: moments.total.tokens for path, moments in scores._moments.items()}


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("form", [lambda visible: visible, additive])
def test_padding_in_a_mask_of_four_axes_is_refused(form, side):
    model = families.model("llama")
    real = SHORTER if side == "right" else SHORTER.flip(1)
    batch = {"input_ids": IDS, "attention_mask": form(CAUSAL & real[:, None, None])}
    plan = plan_pruning(hw.MagnitudeScores(model, {"input_ids": IDS}), keep=0.5)
    for act in (
        lambda: hw.LeastSquaresScores(model, [{"input_ids": IDS}, batch]),
        lambda: prune(model, plan, calibration=[batch]),
        lambda: merge_kv(model, num_kv_heads=1, calibration=[batch], method="weighted_mean", reconstruct=False),
    ):
        with pytest.raises(hw.InputError, match=NOT_STATED.format(5, 26) + "layers.0.self_attn; give such a mask"):
            act()


@pytest.mark.parametrize("window", [None, 4])
@pytest.mark.parametrize("form", [lambda visible: visible, additive])
def test_a_mask_of_four_axes_without_padding_is_accepted(form, window):
    model = families.model("llama")
    visible = CAUSAL if window is None else CAUSAL & ~CAUSAL.tril(-window)
    scores = hw.LeastSquaresScores(model, [{"input_ids": IDS, "attention_mask": form(visible)}])
    assert set(tokens_of(scores).values()) == {26}
    documents = torch.arange(13) // 5
    packed = CAUSAL & (documents[:, None] == documents)
    scores = hw.LeastSquaresScores(model, [{"input_ids": IDS, "attention_mask": form(packed)}])
    assert set(tokens_of(scores).values()) == {26}


def test_a_mask_of_two_axes_counts_as_before():
    for name in ("llama", "bert", "gemma2"):
        batch = {"input_ids": IDS, "attention_mask": SHORTER.long()}
        assert set(tokens_of(hw.LeastSquaresScores(families.model(name), [batch])).values()) == {21}


class TorchModel(torch.nn.Module):
    """Torch's attention layers in a model with an argument of its own for padding."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.MultiheadAttention(24, 4, batch_first=True) for _ in range(2))

    def forward(self, x, hide=None):
        for layer in self.layers:
            x = x + layer(x, x, x, key_padding_mask=hide, need_weights=False)[0]
        return x


def test_padding_in_an_argument_of_any_name_is_refused():
    x = torch.randn(2, 13, 24, generator=GENERATOR)
    assert set(tokens_of(hw.LeastSquaresScores(TorchModel(), [{"x": x, "hide": SHORTER & ~SHORTER}])).values()) == {26}
    with pytest.raises(hw.InputError, match=NOT_STATED.format(5, 26) + "layers.0"):
        hw.LeastSquaresScores(TorchModel(), [{"x": x, "hide": ~SHORTER}])
    layer, much, little = hw.MultiHeadAttention(24, 4), torch.tensor([13, 8]), torch.tensor([13, 12])
    scores = hw.LeastSquaresScores(layer, [{"x": x, "lengths": much}] * 2)
    assert tokens_of(scores) == {"": 42}  # it leaves out padding
    with pytest.raises(hw.InputError, match=NOT_STATED.format(1, 26) + "MultiHeadAttention"):
        hw.LeastSquaresScores(layer, [{"x": x, "lengths": little}])


@pytest.mark.parametrize("name", ["bart", "t5"])
def test_labels_of_minus_100_need_a_mask_of_the_targets(name):
    model = families.model(name, transformers.AutoModelForSeq2SeqLM)
    model.config.decoder_start_token_id = model.config.pad_token_id = 1
    labels = IDS[:, :9].masked_fill(torch.arange(9) >= torch.tensor([[9], [4]]), -100)
    batch = {"input_ids": IDS, "labels": labels}
    with pytest.raises(hw.InputError, match=r"argument decoder_attention_mask of shape \(2, 9\) with labels of -100"):
        hw.LeastSquaresScores(model, [batch])
    counted = tokens_of(hw.LeastSquaresScores(model, [batch | {"decoder_attention_mask": (labels != -100).long()}]))
    assert {path.startswith("decoder") or ".decoder" in path: count for path, count in counted.items()} == {
        False: 26,
        True: 13,
    }
    decoder = families.model("llama", transformers.AutoModelForCausalLM)
    unmasked = {"input_ids": IDS, "labels": IDS.masked_fill(~SHORTER, -100)}
    with pytest.raises(hw.InputError, match=r"the argument attention_mask of shape \(2, 13\) with labels"):
        hw.LeastSquaresScores(decoder, [unmasked])
    assert set(tokens_of(hw.LeastSquaresScores(decoder, [unmasked | {"attention_mask": SHORTER.long()}])).values()) == {
        21
    }


def cross_model():
    """Return a BERT decoder that attends to an encoder's states, and batches with and without these."""
    torch.manual_seed(0)
    config = transformers.BertConfig(**families.SIZES, intermediate_size=37, is_decoder=True, add_cross_attention=True)
    model = transformers.BertLMHeadModel(config).double().eval()
    states = torch.randn(2, 13, 48, dtype=torch.float64, generator=GENERATOR)
    return model, {"input_ids": IDS, "encoder_hidden_states": states}, {"input_ids": IDS}


def test_a_mask_of_the_keys_of_cross_attention_hides_no_queries():
    model, batch, _ = cross_model()
    counted = tokens_of(hw.LeastSquaresScores(model, [batch | {"encoder_attention_mask": SHORTER.long()}]))
    assert len(counted) == 4
    assert set(counted.values()) == {26}


def test_modules_that_run_on_some_batches_are_scored_and_fitted_on_these():
    model, crossed, alone = cross_model()
    scores = hw.LeastSquaresScores(model, [alone, crossed, alone])
    assert sorted(set(tokens_of(scores).values())) == [26, 78]
    units = [((row.layer, row.head),) for row in scores.rows]
    assert len(units) == 24
    plan = plan_pruning(scores, keep=0.5)
    both = prune(model, plan, calibration=[crossed, alone])
    turned = prune(model, plan, calibration=[alone, crossed])
    for one, other in zip(both.parameters(), turned.parameters(), strict=True):
        assert torch.allclose(one, other, atol=1e-9)
    path = "bert.encoder.layer.0.crossattention.output.dense"
    assert not torch.equal(both.get_submodule(path).weight, prune(model, plan).get_submodule(path).weight)
    with pytest.raises(hw.InputError, match="^calibration: expected data on which .*crossattention.self runs"):
        prune(model, plan, calibration=[alone])


def test_measured_scores_name_modules_that_run_on_some_batches_alone():
    model, crossed, alone = cross_model()
    batches = [crossed | {"labels": IDS}, alone | {"labels": IDS}]
    with pytest.raises(hw.InputError, match="on which the same modules attend, got some without .*cros"):
        hw.AblationScores(model, batches, hw.next_token_loss)


def test_a_module_without_head_outputs_loses_nothing():
    model = families.model("llama")
    for layer, bias in zip(model.layers, (0.0, 0.7), strict=True):
        torch.nn.init.zeros_(layer.self_attn.v_proj.weight)
        torch.nn.init.constant_(layer.self_attn.v_proj.bias, bias)
    batches = [{"input_ids": IDS}]
    scores = hw.LeastSquaresScores(model, batches)
    units = [((layer, head),) for layer in range(2) for head in range(6)]
    assert scores.of(units, frozenset()) == [0.0] * 12
    plan = plan_pruning(scores, keep=0.5, constraint="groups")
    fitted, unfitted = prune(model, plan, calibration=batches), prune(model, plan)
    assert torch.equal(fitted.layers[0].self_attn.o_proj.weight, unfitted.layers[0].self_attn.o_proj.weight)
    with torch.no_grad():
        assert torch.allclose(fitted(**batches[0])[0], model(**batches[0])[0])


class Masked(torch.nn.Module):
    """Torch's layer with tokens first or sequences first, in a model that takes an attention mask."""

    def __init__(self, batch_first):
        super().__init__()
        torch.manual_seed(0)
        self.layer, self.batch_first = torch.nn.MultiheadAttention(24, 4, batch_first=batch_first).double(), batch_first

    def forward(self, x, attention_mask):
        x = x if self.batch_first else x.transpose(0, 1)
        y = self.layer(x, x, x, key_padding_mask=attention_mask == 0, need_weights=False)[0]
        return y if self.batch_first else y.transpose(0, 1)


class Encoder(torch.nn.Module):
    """Torch's encoder with or without nested tensors."""

    def __init__(self, nested):
        super().__init__()
        layer = torch.nn.TransformerEncoderLayer(24, 4, 32, batch_first=True, dropout=0.0)
        self.encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=nested).double()

    def forward(self, x, attention_mask):
        return self.encoder(x, src_key_padding_mask=attention_mask == 0)


@pytest.mark.parametrize(
    ("fitted", "end"),
    [
        pytest.param(True, 7, id="fitted, all rows end earlier"),
        pytest.param(True, 9, id="fitted, one row is full", marks=pytest.mark.slow),
        pytest.param(False, 7, id="all rows end earlier", marks=pytest.mark.slow),
        pytest.param(False, 9, id="one row is full"),
    ],
)
def test_encoders_with_nested_tensors_have_the_same_scores(fitted, end):
    mask = torch.ones(3, 9, dtype=torch.long)
    mask[:, end:], mask[1, 4:] = 0, 0
    batches = [{"x": torch.randn(3, 9, 24, generator=GENERATOR).double(), "attention_mask": mask} for _ in range(2)]
    units, found = [((layer, head),) for layer in range(2) for head in range(4)], []
    for nested in (True, False):
        torch.manual_seed(0)
        model = Encoder(nested).eval()
        found.append(torch.tensor(hw.LeastSquaresScores(model, batches, fitted=fitted).of(units, frozenset())))
        pruned = hw.prune(model, hw.plan_pruning(hw.MagnitudeScores(model, batches[0]), keep=0.5), calibration=batches)
        found[-1] = torch.cat([found[-1], pruned(**batches[0])[mask.bool()].flatten()])
        same = hw.prune(model, hw.plan_pruning(hw.MagnitudeScores(model, batches[0]), keep=1.0))
        with torch.no_grad():  # nested tensors give outputs of 0 at padding
            torch.testing.assert_close(same(**batches[0]), model(**batches[0]), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(*found, rtol=1e-9, atol=1e-9)


def test_sequences_are_those_of_the_data_in_any_order_of_the_arguments():
    model = families.model("llama")
    embeddings = torch.randn(6, 7, model.config.hidden_size, generator=GENERATOR)
    positions = {"position_ids": torch.arange(7)[None], "cache_position": torch.arange(7)}
    scores = [
        hw.LeastSquaresScores(model, [batch]).of([((0, 0),)], frozenset())
        for batch in ({"inputs_embeds": embeddings}, positions | {"inputs_embeds": embeddings})
    ]
    assert scores[0] == scores[1]


@pytest.mark.parametrize("tokens", [2, 5])
@pytest.mark.parametrize("batch_first", [True, False])
def test_padding_is_refused_where_tokens_come_first(batch_first, tokens):
    x, model = torch.randn(2, tokens, 24, generator=GENERATOR, dtype=torch.float64), Masked(batch_first)
    mask = (torch.arange(tokens) < torch.tensor([[tokens], [tokens - 1]])).long()
    whole, padded = ([{"x": x, "attention_mask": each}] * 2 for each in (torch.ones_like(mask), mask))
    plan = plan_pruning(hw.LeastSquaresScores(model, whole), keep=0.5)
    for act in (lambda: hw.LeastSquaresScores(model, padded), lambda: prune(model, plan, calibration=padded)):
        if batch_first:
            act()
        else:
            with pytest.raises(hw.InputError, match="^calibration: expected batches without padding, or "):
                act()


class Repeated(torch.nn.Module):
    """Attention layers of which the first runs twice."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = torch.nn.ModuleList(hw.MultiHeadAttention(24, 4).double() for _ in range(2))

    def forward(self, x):
        for index in (0, 0, 1):
            x = x + self.layers[index](x)
        return x


def test_all_calls_of_a_layer_count():
    model = Repeated().eval()
    batches = [{"x": torch.randn(3, 9, 24, generator=GENERATOR, dtype=torch.float64)} for _ in range(2)]
    plan = plan_pruning(hw.MagnitudeScores(model, batches[0]), keep=0.5)
    pruned = prune(model, plan, calibration=batches)
    runs = LayerRuns(model, batches, ["layers.0", "layers.1"])
    assert not runs._reuses
    inputs = []
    hook = model.layers[0].out_proj.register_forward_pre_hook(lambda module, arguments: inputs.append(arguments[0]))
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    hook.remove()
    scores = hw.LeastSquaresScores(model, batches)
    assert tokens_of(scores)["layers.0"] == sum(each.shape[:2].numel() for each in inputs) == 4 * 27
    prune_without_first = pruned.layers[0].out_proj.weight
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(LayerRuns, "_is_chain_on", lambda self, index: True)
        alone = prune(model, plan, calibration=batches).layers[0].out_proj.weight
    assert not torch.allclose(prune_without_first, alone, atol=1e-6)


@pytest.mark.parametrize("name", ["bert", "llama", "t5", "gpt2", "vit"])
def test_a_plan_of_one_module_is_fitted(name):
    """The output projection may be outside of the module that computes attention."""
    model, batch = families.model(name), families.inputs(name, torch.float64)
    whole = plan_pruning(hw.MagnitudeScores(model, batch), keep=0.5)
    for planned in (whole.modules[0], whole.modules[-1]):
        plan = dataclasses.replace(whole, modules=(planned,))
        fitted = prune(model, plan, calibration=[batch, batch])
        output = head_module(model, planned.module).output
        assert not torch.equal(fitted.get_submodule(output).weight, prune(model, plan).get_submodule(output).weight)
