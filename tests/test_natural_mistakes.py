"""Natural mistakes in Python are one sentence that says what to write instead."""

import re

import pytest
import torch

import headwise as hw
import tiny

pytestmark = pytest.mark.usefixtures("as_user")

MODEL = tiny.model("decoder", top="ForCausalLM")
TEXTS = hw.Texts(tiny.texts(5, 7), tiny.tokenizer("decoder"))
LOSS = "loss: expected a function of model and batch, such as hw.next_token_loss or hw.EmbeddingDistance(), got "
REPLACEMENT = (
    "replacement: expected a number, or one of hw.replacements: zero(), uniform(), mean(dataset), resample(batch), got "
)
NAMES = "; tokenizer.all_special_ids has the ids of special tokens"


def ablate(*arguments, **options):
    return hw.ablate(MODEL, TEXTS, *arguments, **options)


def watch(**options):
    with hw.watch(MODEL, **options):
        MODEL(torch.tensor([[5, 7, 11]]))


MISTAKES = {
    "names of folders to compare": (
        lambda: hw.compare("a", "b"),
        "a: expected a profile, got str; hw.load_profile(folder) reads one",
    ),
    "a loss by name": (lambda: ablate(loss="next-token"), f"{LOSS}'next-token'"),
    "a loss by name, for importance": (lambda: hw.importance(MODEL, TEXTS, "next-token"), f"{LOSS}'next-token'"),
    "the class of a loss": (
        lambda: ablate(hw.EmbeddingDistance),
        f"{LOSS}the class EmbeddingDistance; create an object of it: EmbeddingDistance(...)",
    ),
    "the class of a loss, for importance": (
        lambda: hw.importance(MODEL, TEXTS, hw.MaskedTokenLoss),
        f"{LOSS}the class MaskedTokenLoss; create an object of it: MaskedTokenLoss(...)",
    ),
    "a replacement by name": (
        lambda: ablate(hw.next_token_loss, replacement="zero"),
        f"{REPLACEMENT}'zero'",
    ),
    "a replacement without parentheses": (
        lambda: ablate(hw.next_token_loss, replacement=hw.replacements.zero),
        f"{REPLACEMENT}the function zero, not called",
    ),
    "sequences of one token": (
        lambda: hw.ablate(MODEL, hw.Texts(["w5", "w6"], TEXTS.tokenizer), hw.next_token_loss),
        "loss: expected a number for at least one example, got NaN for all of them",
    ),
    "sequences of one token, for importance": (
        lambda: hw.importance(MODEL, hw.Texts(["w5", "w6"], TEXTS.tokenizer), hw.next_token_loss),
        "loss: expected a number for at least one example, got NaN for all of them",
    ),
    "no sets of heads": (
        lambda: ablate(hw.next_token_loss, units={}),
        "units: expected at least one set of heads, got none",
    ),
    "several methods": (
        lambda: hw.importance(MODEL, TEXTS, hw.next_token_loss, method=["gradient"]),
        "method: expected one of gradient, square, integrated, hard_concrete, ablation, got ['gradient']",
    ),
    "special tokens": (
        lambda: watch(special=["[CLS]", "[SEP]"]),
        f"special: expected token ids, got ['[CLS]', '[SEP]']{NAMES}",
    ),
    "one special token": (lambda: watch(special="[CLS]"), f"special: expected token ids, got '[CLS]'{NAMES}"),
    "a special id": (lambda: watch(special=3), "special: expected token ids, got 3"),
    "a negative vocabulary": (
        lambda: hw.random_repeats(-1),
        "vocabulary: expected a whole number of 1 or more, got -1",
    ),
    "a seed by name": (
        lambda: hw.random_repeats(97, seed="a"),
        "seed: expected a whole number of 0 or more, got 'a'",
    ),
    "force in words": (
        lambda: hw.profile(MODEL, TEXTS, repeats=False, force="no"),
        "force: expected True or False, got 'no'",
    ),
    "an empty output folder": (
        lambda: hw.profile(MODEL, TEXTS, out=""),
        "out: expected the path of a folder, got ''",
    ),
    "an empty source": (
        lambda: hw.Texts("", TEXTS.tokenizer),
        "source: expected a file, a folder, or documents: strings or mappings, got an empty path",
    ),
    "texts in memory for a study": (
        lambda: hw.study_texts(["a"], "out", budget=hw.StudyBudget(5)),
        "data: expected the path of a file or folder, got ['a']",
    ),
    "heads as the space of a study": (
        lambda: hw.study_texts("text.txt", "out", budget=hw.StudyBudget(5), space=(1, 2)),
        "space: expected an hw.Space, got (1, 2)",
    ),
    "a URL as options of Optuna": (
        lambda: hw.study_texts("text.txt", "out", budget=hw.StudyBudget(5), optuna="sqlite:///x"),
        "optuna: expected an hw.OptunaOptions, got 'sqlite:///x'",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_sentence(mistake):
    call, sentence = MISTAKES[mistake]
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        call()


def test_a_long_value_is_shortened():
    value = "first\n" + "x" * 999 + "last"
    sentence = str(hw.InputError("a", expected="b", got=value, remedy="c"))
    assert sentence == f"a: expected b, got first {'x' * 394} … {'x' * 96}last; c"


def test_one_statistic_to_compare_is_refused():
    profile = hw.profile(MODEL, TEXTS, repeats=False)
    with pytest.raises(hw.InputError, match="^statistics: expected a collection of names of statistics, got 'entropy'"):
        hw.compare(profile, profile).largest("entropy")
