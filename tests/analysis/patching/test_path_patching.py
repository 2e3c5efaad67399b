"""Path patching, compared with forward passes written out by hand, and with what must be true of paths."""

import itertools
from functools import partial

import pytest
import torch
import transformers

import headwise as hw
from handwritten_models import path_difference, run
from headwise.analysis.patching.path_patching import PathPatching, path_patching
from prompt_models import (
    ASKED,
    CLEAN,
    CORRUPTED,
    HEADS,
    KINDS,
    KINDS_AND_DIRECTIONS,
    LAYERS,
    difference,
    language_model,
    require_values,
    scale,
)

pytestmark = pytest.mark.usefixtures("as_user")

ALL = list(itertools.product(range(LAYERS), range(HEADS)))
RECEIVERS = [(1, 1), (2, 0), (2, 4)]  # heads of both groups of Llama, whose order matters


@pytest.mark.parametrize("kind", KINDS)
def test_the_handwritten_models_are_the_models(kind):
    model = language_model(kind)
    torch.testing.assert_close(run(model, CLEAN).difference, difference(model, CLEAN), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("kind", "direction"), KINDS_AND_DIRECTIONS)
def test_paths_to_the_logits(kind, direction):
    model = language_model(kind)
    found = path_patching(model, CLEAN, CORRUPTED, **ASKED, direction=direction)
    assert isinstance(found, PathPatching)
    assert [(row.layer, row.head) for row in found.heads] == ALL
    to_recovered = scale(model, direction)[2]
    for row in found.heads:
        require_values(row, path_difference(model, direction, [(row.layer, row.head)]), to_recovered)


INPUTS = {("llama", "denoise", "qkv"), ("llama", "noise", "k"), ("gpt2", "noise", "q"), ("bert", "denoise", "v")}
"""Kinds, directions and inputs of heads whose paths are tested by default: each of them with some of the others."""


@pytest.mark.parametrize(
    ("kind", "direction", "names"),
    [
        pytest.param(*case, marks=() if case in INPUTS else pytest.mark.slow)
        for case in itertools.product(KINDS, ("denoise", "noise"), ("q", "k", "v", "qkv"))
    ],
)
def test_paths_to_inputs_of_heads(kind, direction, names):
    model = language_model(kind)
    options = {"receivers": RECEIVERS, "input": names, "direction": direction}
    found = path_patching(model, CLEAN, CORRUPTED, **ASKED, **options)
    effects, to_recovered = 0, scale(model, direction)[2]
    for row in found.heads:
        expected = path_difference(model, direction, [(row.layer, row.head)], RECEIVERS, names)
        require_values(row, expected, to_recovered)
        effects += row.statistics["recovered"].value != float(direction == "noise")
    assert effects == 2 * HEADS, "heads of the last layer have no path to a receiver"


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_frozen_mlps(kind):
    implementation = "eager" if kind == "gpt2" else "sdpa"
    model = language_model(kind, implementation=implementation)
    to_recovered = scale(model, "denoise")[2]
    for options in ({}, {"receivers": RECEIVERS, "input": "v"}):
        found = path_patching(model, CLEAN, CORRUPTED, **ASKED, **options, mlps="freeze")
        for row in found.heads:
            sender = [(row.layer, row.head)]
            expected = path_difference(model, "denoise", sender, *options.values(), frozen_mlps=True)
            require_values(row, expected, to_recovered)


@pytest.mark.parametrize("direction", ["denoise", "noise"])
def test_only_senders_before_a_receiver_have_an_effect(direction):
    found = path_patching(
        language_model("llama"), CLEAN, CORRUPTED, **ASKED, receivers=[(1, 3)], input="qkv", direction=direction
    )
    unpatched = found.metadata["measured"]["corrupted" if direction == "denoise" else "clean"]
    for row in found.heads:
        if row.layer == 0:
            assert row.statistics["recovered"].value != float(direction == "noise")
        else:
            assert row.statistics["recovered"].value == float(direction == "noise")
            assert row.statistics["difference"].value == unpatched
            assert found.no_effect("difference") == unpatched


@pytest.mark.parametrize(("kind", "direction"), KINDS_AND_DIRECTIONS)
def test_the_last_layer_has_no_other_paths_than_those_to_the_logits(kind, direction):
    model = language_model(kind)
    last = [head for head in ALL if head[0] == LAYERS - 1]
    paths = path_patching(model, CLEAN, CORRUPTED, **ASKED, senders=last, direction=direction)
    patched = hw.activation_patching(model, CLEAN, CORRUPTED, **ASKED, heads=last, direction=direction)
    for row, expected in zip(paths.heads, patched.heads, strict=True):
        assert row.statistics["recovered"] == pytest.approx(expected.statistics["recovered"], abs=1e-10)


def test_paths_to_all_heads_of_the_next_layer_and_to_the_logits_are_all_paths():
    """A head of the last layer but one reaches the logits directly or through heads of the last layer alone. Without
    MLPs in between and at the last position, both parts change the same sum before the final norm.
    """
    model = language_model("gpt2")
    for layer in model.transformer.h:
        layer.mlp = torch.nn.Identity()
        layer.mlp.forward = torch.zeros_like
    model.transformer.ln_f = torch.nn.Identity()
    every = [(LAYERS - 1, head) for head in range(HEADS)]
    senders = [(LAYERS - 2, head) for head in range(HEADS)]
    direct = path_patching(model, CLEAN, CORRUPTED, **ASKED, senders=senders)
    through = path_patching(model, CLEAN, CORRUPTED, **ASKED, senders=senders, receivers=every, input="qkv")
    patched = hw.activation_patching(model, CLEAN, CORRUPTED, **ASKED, heads=senders)
    for rows in zip(direct.heads, through.heads, patched.heads, strict=True):
        parts = [row.statistics["recovered"].value for row in rows]
        assert parts[0] + parts[1] == pytest.approx(parts[2], abs=1e-10)


def test_paths_to_one_query_head_leave_its_group_unchanged():
    """Two receivers with the same keys and values have effects of their own."""
    model = language_model("llama", num_hidden_layers=2)
    tables = [
        path_patching(model, CLEAN, CORRUPTED, **ASKED, senders=[(0, 1)], receivers=heads, input="kv")
        for heads in ([(1, 0)], [(1, 1)], [(1, 2)], [(1, 0), (1, 1), (1, 2)])
    ]
    effects = [table.heads[0].statistics["recovered"].value for table in tables]
    assert len({round(effect, 9) for effect in effects}) == 4


def test_names_of_receivers_and_senders():
    model = language_model("llama")
    found = path_patching(
        model, CLEAN, CORRUPTED, **ASKED, senders=[(0, 4)], receivers=[("model.layers.2.self_attn", 1)], input="k"
    )
    settings = found.metadata["settings"]
    assert settings["receivers"] == [["model.layers.2.self_attn", 1]]
    assert (settings["input"], settings["mlps"], settings["heads"]) == ("k", "recompute", 1)
    expected = path_difference(model, "denoise", [(0, 4)], [(2, 1)], "k")
    require_values(found.heads[0], expected, scale(model, "denoise")[2])


PATHS = {"senders": [(0, 1), (1, 5)], "receivers": [(1, 0), (2, 3)], "input": "qkv"}


@pytest.mark.parametrize(
    ("side", "implementation", "measure"),
    [
        ("left", "sdpa", partial(path_patching, **PATHS)),
        ("right", "eager", partial(path_patching, **PATHS)),
        ("right", "sdpa", partial(hw.attribution_patching, heads=[(1, 2), (2, 5)])),
        pytest.param("left", "eager", partial(path_patching, **PATHS), marks=pytest.mark.slow),
        pytest.param("right", "sdpa", partial(path_patching, **PATHS), marks=pytest.mark.slow),
    ],
)
def test_padding(side, implementation, measure):
    """Prompts of other lengths in one batch have the results that each has alone."""
    lengths = (11, 7, 5)
    shift = torch.arange(11) - (11 - torch.tensor(lengths)[:, None]) * (side == "left")
    mask = ((shift >= 0) & (shift < torch.tensor(lengths)[:, None])).long()
    padded = [{"input_ids": ids.gather(1, shift.clamp(0, 10)), "attention_mask": mask} for ids in (CLEAN, CORRUPTED)]
    if side == "left":
        padded = [batch | {"position_ids": shift.clamp(min=0)} for batch in padded]
    model = language_model("gpt2", implementation=implementation)
    found = measure(model, *padded, **ASKED)
    tables = [
        measure(
            model,
            *(ids[pair : pair + 1, :length] for ids in (CLEAN, CORRUPTED)),
            **{name: ids[pair : pair + 1] for name, ids in ASKED.items()},
        )
        for pair, length in enumerate(lengths)
    ]
    assert len(found.heads) == 2
    for row in found.heads:
        alone = [table.head(row.layer, row.head).statistics["recovered"].value for table in tables]
        assert row.statistics["recovered"].value == pytest.approx(sum(alone) / 3, abs=1e-9)


class PlainLayer(torch.nn.Module):
    """Causal attention of 4 heads, with a residual connection."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out_proj = torch.nn.Linear(24, 72), torch.nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        out = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out_proj(out.transpose(1, 2).flatten(2))


def test_plain_modules_and_shared_layers():
    """In a model that runs the same two layers twice, a frozen head has its own output in each of its calls."""

    class Looped(torch.nn.Module):
        def __init__(self, times):
            super().__init__()
            self.embed, self.layers = torch.nn.Embedding(97, 24), torch.nn.ModuleList([PlainLayer(), PlainLayer()])
            self.head, self.times = torch.nn.Linear(24, 97), times

        def forward(self, ids):
            x = self.embed(ids)
            for _ in range(self.times):
                for layer in self.layers:
                    x = layer(x)
            return self.head(x)

    torch.manual_seed(0)
    model = Looped(2).double()
    found = path_patching(model, CLEAN, CORRUPTED, **ASKED)
    # All of this model but attention is linear, so the direct effects of all heads add up to what remains of the
    # difference without the embeddings.
    with torch.no_grad():
        logits = [model.head(model.embed(ids))[:, -1] for ids in (CLEAN, CORRUPTED)]
    by_embedding = [
        each.gather(1, ASKED["answer"][:, None]) - each.gather(1, ASKED["wrong"][:, None]) for each in logits
    ]
    gap = found.metadata["measured"]["clean"] - found.metadata["measured"]["corrupted"]
    effects = [row.statistics["difference"].value - found.metadata["measured"]["corrupted"] for row in found.heads]
    assert sum(effects) == pytest.approx(gap - (by_embedding[0] - by_embedding[1]).mean().item(), abs=1e-10)
    received = path_patching(model, CLEAN, CORRUPTED, **ASKED, receivers=[(0, 1)], input="v")
    assert received.head(1, 0).statistics["recovered"].value != 0.0, "the second call of layer 0 is after layer 1"


REFUSED = {
    "receivers": ({"receivers": "q"}, "receivers: expected 'logits' or heads (layer, head), got 'q'"),
    "no receivers": ({"receivers": [], "input": "q"}, "receivers: expected 'logits', or at least one head, got none"),
    "no such receiver": (
        {"receivers": [(9, 9)], "input": "q"},
        "receivers: expected each a (layer, head) of this model, got (9, 9)",
    ),
    "no such sender": ({"senders": [(0, 6)]}, "senders: expected each a (layer, head) of this model, got (0, 6)"),
    "senders": ({"senders": 3}, "senders: expected a collection of heads (layer, head), got 3"),
    "no input": (
        {"receivers": [(1, 1)]},
        "input: expected the inputs of the receivers to patch: 'q', 'k' or 'v', or several letters, got None",
    ),
    "another input": (
        {"receivers": [(1, 1)], "input": "qq"},
        "input: expected the inputs of the receivers to patch: 'q', 'k' or 'v', or several letters, got 'qq'",
    ),
    "input of logits": ({"input": "q"}, "input: expected None for receivers=\"logits\", got 'q'"),
    "mlps": ({"mlps": "skip"}, "mlps: expected 'recompute' or 'freeze', got 'skip'"),
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_is_refused(why):
    options, sentence = REFUSED[why]
    with pytest.raises(hw.InputError) as refused:
        path_patching(language_model("llama"), CLEAN, CORRUPTED, **ASKED | options)
    assert str(refused.value).startswith(sentence)


def test_mlps_that_cannot_be_frozen_are_refused():
    with pytest.raises(hw.InputError, match="^mlps: expected 'recompute' for a model whose MLPs are not modules with"):
        path_patching(language_model("bert"), CLEAN, CORRUPTED, **ASKED, mlps="freeze")
    model = language_model("llama")
    del model.model.layers[1].mlp
    model.model.layers[1].mlp = torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()).double()
    with pytest.raises(hw.InputError, match="^model: expected one whose output embedding reads, through a final norm"):
        path_patching(model, CLEAN, CORRUPTED, **ASKED, mlps="freeze")


class OwnSoftmax(torch.nn.Module):
    """Language model that computes attention weights itself, or something else in their place."""

    def __init__(self, attend):
        super().__init__()
        self.embed, self.qkv = torch.nn.Embedding(97, 24), torch.nn.Linear(24, 72)
        self.out_proj, self.head, self.attend = torch.nn.Linear(24, 24), torch.nn.Linear(24, 97), attend

    def forward(self, ids):
        x = self.embed(ids)
        for _ in range(2):
            q, k, v = (part.unflatten(-1, (4, 6)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
            x = x + self.out_proj(self.attend(q, k, v).transpose(1, 2).flatten(2))
        return self.head(x)


def test_receivers_whose_queries_are_unknown_are_refused():
    model = OwnSoftmax(lambda q, k, v: torch.softmax(q @ k.mT / 6**0.5, -1) @ v).double()
    direct = path_patching(model, CLEAN, CORRUPTED, **ASKED)
    assert len(direct.heads) == 4
    sentence = (
        "^receivers: expected heads whose queries, keys and values are known, got attention that .* computes itself;"
    )
    with pytest.raises(hw.InputError, match=sentence):
        path_patching(model, CLEAN, CORRUPTED, **ASKED, receivers=[(0, 1)], input="q")


def test_softmax_in_float32_is_rounding():
    """The eager attention of Llama computes weights in float32 at most."""
    model = language_model("llama", implementation="eager")
    found = path_patching(model, CLEAN, CORRUPTED, **ASKED, senders=[(0, 1)], receivers=[(2, 1)], input="qkv")
    expected = path_difference(model, "denoise", [(0, 1)], [(2, 1)], "qkv").mean().item()
    assert found.heads[0].statistics["difference"].value == pytest.approx(expected, abs=1e-5)


class Averages(torch.nn.Module):
    """Mean over the tokens so far."""

    def forward(self, x):
        return x.cumsum(1) / torch.arange(1, x.shape[1] + 1)[:, None]


class AverageAttention(Averages):
    """The same under the name of attention."""


@pytest.mark.parametrize(
    ("mixer", "sentence"),
    [
        (
            Averages,
            "^model: expected one in which intercepted attention heads, and nothing else, mix tokens, got logit",
        ),
        (
            AverageAttention,
            "^model: expected attention whose heads can all be frozen, got .* was not intercepted in 2$",
        ),
    ],
)
def test_other_layers_that_mix_tokens_are_refused(mixer, sentence):
    torch.manual_seed(0)
    layers = [torch.nn.Embedding(97, 24), PlainLayer(), mixer(), torch.nn.Linear(24, 97)]
    with pytest.raises(hw.InputError, match=sentence):
        path_patching(torch.nn.Sequential(*layers).double(), CLEAN, CORRUPTED, **ASKED)


def test_attention_without_a_tensor_of_the_mask_is_refused():
    """An attention function under a name of its own may read its mask in any way."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS

    functions = transformers.modeling_utils.ALL_ATTENTION_FUNCTIONS
    functions["ours"] = functions["sdpa"]
    ALL_MASK_ATTENTION_FUNCTIONS["ours"] = ALL_MASK_ATTENTION_FUNCTIONS["sdpa"]
    try:
        model = language_model("llama")
        expected = path_patching(model, CLEAN, CORRUPTED, **ASKED, senders=[(0, 1)]).heads
        model.set_attn_implementation("ours")
        assert path_patching(model, CLEAN, CORRUPTED, **ASKED, senders=[(0, 1)]).heads == expected
        sentence = (
            "^model: expected attention implementation sdpa or eager, got ours; call model.set_attn_implementation"
        )
        with pytest.raises(hw.InputError, match=sentence):
            path_patching(model, CLEAN, CORRUPTED, **ASKED, receivers=[(1, 1)], input="q")
    finally:
        del functions["ours"], ALL_MASK_ATTENTION_FUNCTIONS["ours"]


def test_outputs_that_do_not_follow_from_queries_keys_and_values_are_refused(monkeypatch):
    """A model's own attention function may compute something else than its arguments state."""
    module = transformers.models.llama.modeling_llama
    plain = module.eager_attention_forward

    def scaled(*args, **options):
        out, weights = plain(*args, **options)
        return out * 1.001, weights

    monkeypatch.setattr(module, "eager_attention_forward", scaled)
    model = language_model("llama", implementation="eager")
    assert len(path_patching(model, CLEAN, CORRUPTED, **ASKED, senders=[(0, 1)]).heads) == 1
    sentence = (
        "^receivers: expected heads whose outputs follow from their queries, keys and values, got other outputs in "
    )
    with pytest.raises(hw.InputError, match=sentence):
        path_patching(model, CLEAN, CORRUPTED, **ASKED, receivers=[(1, 1)], input="q")
