"""Profiles of tiny models against the weights that eager attention returns."""

import math
import statistics

import pytest
import torch
from torch import nn

import headwise as hw
import tiny
from oracles import statistics_of
from profile_runs import texts, values

pytestmark = pytest.mark.usefixtures("as_user")  # shapes are checked where `watch` is tested


@torch.no_grad()
def by_definition(kind, sequences, special=None):
    """Return the values of each sequence by head `(layer, head)` and statistic, from the weights of eager attention."""
    model = tiny.model(kind, attn_implementation="eager")
    samples = {}
    for sequence in sequences:
        weights = model(torch.tensor([sequence]), output_attentions=True).attentions
        is_special = None if special is None else [token in special for token in sequence]
        for layer, layer_weights in enumerate(weights):
            for head in range(6):
                for name, value in statistics_of(layer_weights[0, head], sequence, is_special).items():
                    samples.setdefault((layer, head), {}).setdefault(name, []).append(value)
    return samples


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_means_and_errors_are_those_of_the_definition(kind):
    data, special = texts(kind), {0, 2, 3} if kind == "encoder" else {0, 4}
    profile = hw.profile(tiny.model(kind), data)
    expected = by_definition(kind, [sequence.tolist() for sequence in data.sequences], special)
    for head in profile.heads:
        for name, samples in expected[head.layer, head.head].items():
            value, sem, n, _ = head.statistics[name]
            assert n == len(samples), name
            assert value == pytest.approx(statistics.mean(samples), rel=1e-4, abs=1e-5), name
            expected_sem = statistics.stdev(samples) / math.sqrt(n) if n > 1 else math.nan
            assert sem == pytest.approx(expected_sem, rel=1e-3, abs=1e-5, nan_ok=True), name
    assert [head.name for head in profile.heads] == [f"{layer}.{head}" for layer in range(2) for head in range(6)]
    groups = range(6) if kind == "encoder" else [0, 0, 0, 1, 1, 1]
    assert [head.kv_head for head in profile.heads] == [*groups, *groups]


@pytest.mark.parametrize("kind", ["encoder", "decoder"])
def test_random_tokens_have_columns_of_their_own(kind):
    repeats = hw.random_repeats(97, tokens=5, times=3, samples=4)
    profile = hw.profile(tiny.model(kind), texts(kind), repeats=repeats)
    expected = by_definition(kind, repeats.tolist())
    for head in profile.heads:
        for name in ("induction", "duplicate"):
            mean = statistics.mean(expected[head.layer, head.head][name])
            assert head.statistics[f"{name}_random"].value == pytest.approx(mean, rel=1e-4, abs=1e-5)
            assert head.statistics[f"{name}_random"].n == 4
    by_default = hw.profile(tiny.model(kind), texts(kind))
    assert by_default.statistics == profile.statistics
    assert by_default.heads[0].statistics["induction_random"].n == 10
    without = hw.profile(tiny.model(kind), texts(kind), repeats=False)
    assert [name for name in profile.statistics if name not in without.statistics] == [
        "induction_random",
        "duplicate_random",
    ]


def require_close(estimate, expected):
    """Check the numbers of an estimate, which are None for NaN, as in the error of a largest value."""
    assert [number is None for number in estimate] == [number is None for number in expected]
    numbers, others = ([number for number in each if number is not None] for each in (estimate, expected))
    assert numbers == pytest.approx(others, rel=1e-4, abs=1e-6)


def test_the_batch_size_does_not_matter():
    expected = values(hw.profile(tiny.model("decoder"), texts(batch=1)))
    for batch in (3, 100):
        profile = hw.profile(tiny.model("decoder"), texts(batch=batch))
        for estimate, expected_estimate in zip(values(profile), expected, strict=True):
            require_close(estimate, expected_estimate)


def test_batches_and_tensors_are_measured_like_texts():
    model, batches = tiny.model("decoder"), list(texts())
    expected = values(hw.profile(model, texts(), repeats=False, special=()))
    assert values(hw.profile(model, batches)) == expected
    assert values(hw.profile(model, (batch for batch in batches))) == expected
    ids = [sequence[None].long() for sequence in texts(batch=1).sequences]
    profile = hw.profile(model, ids)
    assert profile.metadata["measured"]["sequences"] == 7
    assert profile.metadata["measured"]["tokens"] == sum(sequence.shape[1] for sequence in ids)
    for estimate, expected_estimate in zip(values(profile), expected, strict=True):
        require_close(estimate, expected_estimate)


def test_any_model_that_can_be_watched():
    layer = nn.TransformerEncoderLayer(24, 3, 37, batch_first=True)
    profile = hw.profile(nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), [torch.randn(2, 13, 24)] * 3)
    assert len(profile.heads) == 6
    assert profile.heads[0].statistics["entropy"].n == 6
    assert "induction" not in profile.statistics


def test_a_statistic_that_a_head_does_not_have_is_nan():
    """Self-attention has the tokens of its keys, cross-attention does not; one table contains both."""
    import transformers

    sizes = {"d_model": 24, "encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 8, "decoder_ffn_dim": 8}
    heads = {"encoder_attention_heads": 3, "decoder_attention_heads": 3}
    model = transformers.BartModel(transformers.BartConfig(vocab_size=97, **sizes, **heads))
    batch = {"input_ids": torch.randint(5, 97, (2, 11)), "decoder_input_ids": torch.randint(5, 97, (2, 7))}
    profile = hw.profile(model, [batch])
    assert {head.kind for head in profile.heads} == {"self", "cross"}
    for head in profile.heads:
        assert tuple(head.statistics) == profile.statistics
        if head.kind == "cross":
            assert math.isnan(head.statistics["induction"].value)
            assert head.statistics["induction"].n == 0


def test_the_model_is_left_unchanged():
    model = tiny.model("decoder").train()
    model.layers[1].eval()
    before = [module.training for module in model.modules()]
    modes = []
    model.register_forward_hook(lambda module, *_: modes.append((module.training, torch.is_grad_enabled())))
    hw.profile(model, texts())
    assert [module.training for module in model.modules()] == before
    assert set(modes) == {(False, False)}
    assert torch.is_grad_enabled()


def test_every_head_has_one_role():
    profile = hw.profile(tiny.model("decoder"), texts())
    heads = [head for members in profile.roles().values() for head in members]
    assert sorted(heads) == [(head.layer, head.head) for head in profile.heads]


def test_what_cannot_be_profiled(tmp_path):
    model = tiny.model("decoder")
    (tmp_path / "file").write_text("")
    cases = [
        ((None, []), {}, "model: expected a torch module, got NoneType"),
        ((model, None), {}, "dataset: expected Texts, or batches, got NoneType"),
        ((model, texts()), {"special": "ab"}, "special: expected token ids, got 'ab'"),
        (
            (model, texts()),
            {"repeats": [[5, 6]]},
            "repeats: expected True, False, or token ids of shape (samples, length), got [[5, 6]]",
        ),
        (
            (model, texts()),
            {"repeats": torch.rand(7)},
            "repeats: expected True, False, or token ids of shape (samples, length), got shape (7,), torch.float32",
        ),
        (
            (model, ["w5"]),
            {},
            "dataset: expected batches: tensors, or mappings of them, as the model takes them, got str; "
            "hw.Texts(source, tokenizer) makes batches of texts and files",
        ),
        (
            (model, texts()),
            {"out": tmp_path / "file"},
            f"out: expected a folder that can be created and written, got {str(tmp_path / 'file')!r}",
        ),
        ((model, texts()), {"out": 5}, "out: expected the path of a folder, got 5"),
        (
            (nn.Linear(2, 2), [torch.ones(2, 2)]),
            {"repeats": True},
            "model: expected a model with input embeddings, got Linear; "
            "repeats=hw.random_repeats(vocabulary), or repeats=False",
        ),
        (
            (tiny.model("decoder", vocab_size=20), texts()),
            {},
            "tokenizer: expected ids below 20, the model's vocabulary, got 27",
        ),
        ((nn.Linear(2, 2), texts()), {}, "model: expected a transformers model, got Linear"),
        ((nn.Linear(2, 2), [torch.ones(2, 2)]), {}, "model: expected attention in a way that can be seen, got none in"),
    ]
    for arguments, options, sentence in cases:
        with pytest.raises(hw.InputError) as refused:
            hw.profile(*arguments, **options)
        assert str(refused.value).startswith(sentence)
