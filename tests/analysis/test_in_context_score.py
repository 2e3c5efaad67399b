"""In-context learning scores, compared with the logits of models whose heads are replaced in the output projection."""

import functools

import pytest
import torch

import headwise as hw
import tiny
from jackknife import jackknife
from token_sequences import padded
from whole_matrices import model_of

pytestmark = pytest.mark.usefixtures("as_user")

OPTIONS = {"early": 5, "late": 17, "window": 3}


@functools.cache
def models(name):
    """Return a tiny causal language model."""
    return model_of(name, top="ForCausalLM")


@torch.no_grad()
def scores(model, rows, early, late, window):
    """Return the early and the late loss of sequences of the same length, from the logarithms of probabilities."""
    ids = torch.stack(list(rows))
    of_tokens = torch.log_softmax(model(input_ids=ids).logits, -1)
    found = []
    for row in range(len(ids)):
        # by the number of the token, from 1
        losses = {t: -float(of_tokens[row, t - 2, ids[row, t - 1]]) for t in range(2, ids.shape[1] + 1)}
        found.append(tuple(sum(losses[t] for t in range(end - window + 1, end + 1)) / window for end in (early, late)))
    return found


def projections(model):
    """Return the output projections of the attention of a tiny model."""
    names = ("self_attn.o_proj", "attn.c_proj")
    return [module for path, module in model.named_modules() if path.endswith(names)]


class Replaced:
    """Context in which the input of an output projection has other numbers at the features of one head."""

    def __init__(self, projection, head, value):
        self.projection, self.head, self.value = projection, head, value

    def __enter__(self):
        def replace(_, args):
            out = args[0].clone().unflatten(-1, (6, -1))
            out[..., self.head, :] = self.value
            return out.flatten(-2)

        self.hook = self.projection.register_forward_pre_hook(replace)

    def __exit__(self, *_):
        self.hook.remove()


@torch.no_grad()
def mean_output(model, projection, rows):
    """Return the mean input of a projection over all tokens of some sequences, `(heads, d)`."""
    inputs = []
    hook = projection.register_forward_pre_hook(lambda _, args: inputs.append(args[0].flatten(0, 1)))
    model(input_ids=torch.stack(list(rows)))
    hook.remove()
    return torch.cat(inputs).mean(0).unflatten(-1, (6, -1))


@pytest.mark.parametrize("name", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_scores_equal_those_of_logits(name):
    model = models(name)
    texts = hw.Texts(tiny.texts(40, 9, 20, 18), tiny.tokenizer("decoder"), context=20, documents="cut", batch=2)
    found = hw.in_context_score(model, texts, **OPTIONS, sequences=20, replacements=("zero", "mean"), repeats=False)
    rows, documents = [], []
    for ids, document in zip((ids for batch in texts for ids in batch["input_ids"]), texts.document_numbers(),
                             strict=True):  # fmt: skip
        if len(ids) >= 17:
            rows.append(ids[:17].long())
            documents.append(document)
    assert len(rows) == 4
    assert found.metadata["measured"].items() >= {"sequences": 4, "tokens": 68, "available": 4, "short": 1}.items()
    of_model = scores(model, rows, **OPTIONS)
    base = [late - early for early, late in of_model]
    assert found.score == pytest.approx(jackknife(base, documents), abs=1e-10)
    assert found.early_loss == pytest.approx(jackknife([early for early, _ in of_model], documents), abs=1e-10)
    assert found.late_loss == pytest.approx(jackknife([late for _, late in of_model], documents), abs=1e-10)
    for row in found.rows:
        projection = projections(model)[row.layer]
        for replacement, value in (("zero", 0.0), ("mean", mean_output(model, projection, rows)[row.head])):
            with Replaced(projection, row.head, value):
                without = scores(model, rows, **OPTIONS)
            changes = [late - early - before for (early, late), before in zip(without, base, strict=True)]
            measured = row.statistics[f"change_{replacement}"]
            assert measured == pytest.approx(jackknife(changes, documents), abs=1e-10), (row.name, replacement)
    tests = found.tests()
    assert list(tests) == ["change_zero_p", "change_zero_q", "change_mean_p", "change_mean_q"]
    for p, q in zip(tests["change_zero_p"], tests["change_zero_q"], strict=True):
        assert 0 <= p <= q <= 1


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_does_not_count(side):
    model = models("llama")
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randint(4, 90, (length,), generator=generator) for length in (17, 24, 19, 8)]
    batch = padded(rows, side)
    del batch["position_ids"]
    found = hw.in_context_score(model, [batch], **OPTIONS, sequences=9, heads=[(1, 4)], repeats=False)
    rows = [tokens[:17] for tokens in rows[:3]]
    base = scores(model, rows, **OPTIONS)
    with Replaced(projections(model)[1], 4, 0.0):
        without = scores(model, rows, **OPTIONS)
    changes = [(b - a) - (d - c) for (a, b), (c, d) in zip(without, base, strict=True)]
    assert [row.name for row in found.rows] == ["1.4"]
    assert found.rows[0].statistics["change_zero"] == pytest.approx(jackknife(changes, range(3)), abs=1e-10)
    assert found.metadata["measured"]["short"] == 1


def test_sequences_are_from_as_many_documents_as_possible():
    texts = hw.Texts(tiny.texts(100, 20, 40, 25), tiny.tokenizer("decoder"), context=20, documents="cut")
    options = {**OPTIONS, "heads": (), "repeats": False}
    of_four = hw.in_context_score(models("llama"), texts, **options, sequences=4)
    assert (of_four.metadata["measured"]["sequences"], of_four.score.n) == (4, 4)
    of_six = hw.in_context_score(models("llama"), texts, **options, sequences=6)
    assert (of_six.metadata["measured"]["sequences"], of_six.score.n) == (6, 4)


def test_a_table_is_joined_and_drawn(tmp_path):
    model, tokenizer = models("llama"), tiny.tokenizer("decoder")
    texts = hw.Texts(tiny.texts(20, 19, 30), tokenizer, context=30)
    found = hw.in_context_score(model, texts, **OPTIONS, out=tmp_path)
    with pytest.raises(hw.InputError, match=r"another run \(settings.loss differs\)"):
        hw.in_context_score(model, texts, **OPTIONS | {"window": 2}, out=tmp_path)
    profile = hw.profile(model, texts)
    joined = found.table().merge(profile.table(), on=["layer", "head"])
    assert joined["induction_random_x"].tolist() == joined["induction_random_y"].tolist()
    found.plot("change_zero")
    axes = found.plot("change_zero", kind="scatter", against="induction_random")
    assert axes.get_xlabel().startswith("induction random")


def test_models_that_see_later_tokens_are_refused():
    model = tiny.model("encoder", top="ForMaskedLM").double()
    data = [torch.randint(5, 90, (2, 30))]
    with pytest.raises(hw.InputError, match="^model: expected a causal language model, got BertForMaskedLM, whose"):
        hw.in_context_score(model, data, **OPTIONS)


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("^window: expected fewer tokens than early, .* got 5 for early=5", {"window": 5}),
        ("^window: expected windows that do not overlap, got 4 for early=5 and late=8", {"window": 4, "late": 8}),
        ("^early: expected a whole number", {"early": 1, "window": 1}),
        ("^dataset: expected sequences of at least 31 tokens, got 30 in the longest one", {"late": 31}),
        ("^replacements: expected one or both of zero, mean, got \\('uniform',\\)", {"replacements": "uniform"}),
        ("^replacements: expected one or both of zero, mean, got \\(\\)", {"replacements": ()}),
        ("^heads: expected each head .* once at most, got \\(2, 0\\)", {"heads": [(2, 0)]}),
        ("^heads: expected each head .* once at most, got \\(1, 0\\)", {"heads": [(1, 0), (1, 0)]}),
        ("^sequences: expected ", {"sequences": 0}),
        ("^repeats: expected True or False, got 'x'", {"repeats": "x"}),
    ],
)
def test_arguments_that_are_refused(message, options):
    with pytest.raises(hw.InputError, match=message):
        hw.in_context_score(models("llama"), [torch.randint(5, 90, (2, 30))], **OPTIONS | options)


@pytest.mark.parametrize(
    ("message", "batch"),
    [
        ("^dataset: expected padding before or after the tokens", {"attention_mask": torch.tensor([[1, 0, 1] * 10])}),
        ("^dataset: expected batches with input_ids .* alone", {"position_ids": torch.arange(30)[None]}),
        ("^dataset: expected an attention_mask of the shape", {"attention_mask": torch.ones(1, 29)}),
    ],
)
def test_batches_that_are_refused(message, batch):
    with pytest.raises(hw.InputError, match=message):
        hw.in_context_score(models("llama"), [{"input_ids": torch.randint(5, 90, (1, 30)), **batch}], **OPTIONS)
