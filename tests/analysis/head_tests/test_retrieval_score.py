"""The retrieval score against arg maxima of whole attention matrices."""

from types import SimpleNamespace

import pytest
import torch

import headwise as hw
import tiny
from full_attention import weights_of
from headwise.analysis.head_tests.haystacks import draw_needles, haystacks, read_haystack
from jackknife import jackknife
from prompt_models import HEADS, LAYERS, language_model

pytestmark = pytest.mark.usefixtures("as_user")

HAY = " ".join(tiny.WORDS[:40])
NEEDLES = [
    hw.Needle("w60 w61 ", "w62 w63 w64 w62", " w65", "w66 w60 w61"),
    hw.Needle("w70 w71 ", "w72 w73", " w75", "w76 w70 w71"),
    hw.Needle("w80 w81 ", " ".join(tiny.WORDS[5:45:2]), " w85", "w86 w80"),
]


@pytest.fixture
def haystack(tmp_path):
    (tmp_path / "hay.txt").write_text("\n\n".join([HAY] * 5))
    return tmp_path / "hay.txt"


def scores(model, haystack, **options):
    options = {"lengths": (60, 80), "depths": (0.0, 0.5, 1.0), "needles": NEEDLES, "continuation": "forced"} | options
    return hw.retrieval_score(model, tiny.tokenizer("decoder"), haystack=haystack, **options)


def expected_scores(model, haystack, answer_of):
    """Return the score of each head on each text, from whole matrices, with the number of its needle."""
    tokenizer, found = tiny.tokenizer("decoder"), []
    for text in haystacks(tokenizer, read_haystack(haystack), NEEDLES, (60, 80), (0.0, 0.5, 1.0), 0):
        prompt, answer = text.text.split(), NEEDLES[text.needle].answer.split()
        start = next(i for i in range(len(prompt)) if prompt[i : i + len(answer)] == answer)
        continuation = answer_of(tokenizer, prompt, answer)
        ids = torch.tensor([tokenizer.convert_tokens_to_ids([*prompt, *continuation])])
        weights = weights_of(model, ids)[:, 0].flatten(0, 1)
        repeated = sum(min(answer.count(word), continuation.count(word)) for word in set(answer)) / len(answer)
        of_text = []
        for head in weights:
            places = set()
            for step, word in enumerate(continuation):
                key = int(head[len(prompt) - 1 + step].argmax())
                if start <= key < start + len(answer) and prompt[key] == word:
                    places.add(key)
            of_text.append(len(places) / len(answer))
        found.append((text.needle, repeated, torch.tensor(of_text, dtype=torch.float64)))
    return found


@pytest.mark.parametrize("kind", ["llama", "gpt2"])
def test_forced_scores_are_those_of_whole_matrices(kind, haystack):
    model = language_model(kind)
    table = scores(model, haystack)
    texts = expected_scores(model, haystack, lambda tokenizer, prompt, answer: answer)
    matrix = torch.stack([of_text for *_, of_text in texts])
    needles = torch.tensor([needle for needle, *_ in texts])
    assert len(texts) == 18
    assert float(matrix.max()) > 0
    for index, row in enumerate(table.rows):
        assert (row.layer, row.head) == (index // HEADS, index % HEADS)
        assert row.statistics["score"] == pytest.approx(jackknife(matrix[:, index], needles), rel=1e-10, abs=1e-12)
        of_short = torch.stack([of_text[index] for number, (*_, of_text) in enumerate(texts) if number % 6 < 3])
        assert row.statistics["score_60"].value == pytest.approx(of_short.mean().item())


@pytest.mark.parametrize("kind", ["llama", pytest.param("gpt2", marks=pytest.mark.slow)])
def test_generated_scores_are_those_of_the_greedy_answer(kind, haystack):
    model = language_model(kind)

    def generated(tokenizer, prompt, answer):
        ids = tokenizer.convert_tokens_to_ids(prompt)
        for _ in range(len(answer) + 4):
            with torch.no_grad():
                ids.append(int(model(torch.tensor([ids])).logits[0, -1].argmax()))
        return tokenizer.convert_ids_to_tokens(ids[len(prompt) :])

    model.generation_config.eos_token_id = None
    table = scores(model, haystack, continuation="generated", recall=0.0)
    texts = expected_scores(model, haystack, generated)
    kept = [(needle, of_text) for needle, repeated, of_text in texts if repeated > 0]
    assert 0 < len(kept) < len(texts)
    assert table.metadata["measured"]["sequences"] == len(kept)
    assert table.metadata["measured"]["recall"] == pytest.approx(sum(repeated for _, repeated, _ in texts) / len(texts))
    mean = torch.stack([of_text for _, of_text in kept]).mean(0).tolist()
    assert [row.statistics["score"].value for row in table.rows] == pytest.approx(mean, rel=1e-10)
    assert len(mean) == HEADS * LAYERS
    with pytest.raises(hw.InputError, match="^model: expected one that repeats more than 98% of the .* at most; "):
        scores(model, haystack, continuation="generated", recall=0.98)


def test_other_than_greedy_generation_is_refused(haystack):
    model = language_model("llama")
    answers = tiny.tokenizer("decoder").convert_tokens_to_ids(["w62", "w63", "w64"])
    model.generation_config.suppress_tokens = [token for token in range(97) if token not in answers]
    with pytest.raises(hw.InputError, match="^model: expected one that generates the tokens with the largest logits"):
        scores(model, haystack, continuation="generated", recall=0.0)


def test_the_test_compares_with_the_threshold(haystack):
    stats = pytest.importorskip("scipy.stats")
    table = scores(language_model("llama"), haystack)
    frame, sem = table.table(), table.sem()
    for index, row in enumerate(table.rows):
        score = row.statistics["score"]
        if score.sem > 1e-12:
            p = stats.t.sf((score.value - 0.1) / sem["score"][index], 2)
            assert frame["score_p"][index] == pytest.approx(p)
    first = table.rows[0]
    row = type(first)(**first.identifiers, statistics={"score": type(score)(0.4, 0.0, 6, 5)})
    constant = hw.Retrieval((row,), {})
    assert constant.tests()["score_p"] == [0.5**6]


def test_needles_are_drawn_at_depths():
    tokenizer, text = tiny.tokenizer("decoder"), read_haystack(None)
    assert len(text) > 300_000
    needles = draw_needles(9, 4)
    assert needles == draw_needles(9, 4)
    assert len({needle.question for needle in needles}) == 9
    drawn = list(haystacks(tokenizer, text, needles[:2], (200,), (0.0, 0.5, 1.0), 1))
    for haystack in drawn:
        start, stop = haystack.answer
        assert haystack.text[start:stop] == needles[haystack.needle].answer == haystack.continuation[1:]
        assert haystack.text.endswith(needles[haystack.needle].question)
        share = start / len(haystack.text)
        assert abs(share - haystack.depth) < 0.4
        assert haystack.depth > 0 or haystack.text.startswith(needles[haystack.needle].before)
        length = len(tokenizer(haystack.text + haystack.continuation)["input_ids"])
        assert 190 <= length <= 201


@pytest.mark.parametrize(
    ("message", "options"),
    [
        ("^continuation: expected 'generated' or 'forced', got 'free'", {"continuation": "free"}),
        ("^depths: expected numbers from 0 to 1, got 2", {"depths": (2,)}),
        ("^lengths: expected at least one number, got none", {"lengths": ()}),
        ("^lengths: expected room for needle and question, got 9", {"lengths": (9,)}),
        ("^needles: expected a number, or Needle objects with an answer", {"needles": ["text"]}),
        ("^haystack: expected a text of at least \\d+ tokens, got 200", {"lengths": (900,)}),
        (
            "^haystack: expected a text without the answers of needles",
            {"needles": [hw.Needle("w60 ", "w9", "", "w61")]},
        ),
    ],
)
def test_arguments_that_are_refused(haystack, message, options):
    with pytest.raises(hw.InputError, match=message):
        scores(language_model("llama"), haystack, **options)


def test_an_encoder_and_a_model_without_head_are_refused(haystack):
    with pytest.raises(hw.InputError, match="^model: expected a causal decoder, .*, got BertForMaskedLM, whose logits"):
        scores(language_model("bert"), haystack)
    with pytest.raises(hw.InputError, match="^model: expected a model that generates text, got LlamaModel; "):
        scores(language_model("llama").model, haystack, continuation="generated")
    with pytest.raises(hw.InputError, match="^tokenizer: expected a fast tokenizer"):
        hw.retrieval_score(language_model("llama"), SimpleNamespace(is_fast=False))


def test_a_text_over_the_limit_is_refused(haystack):
    model = language_model("llama", max_position_embeddings=40)
    with pytest.raises(hw.InputError, match="^lengths: expected at most 40 tokens, the model's limit, got 50"):
        scores(model, haystack, lengths=(50,), needles=NEEDLES[:2])
    table = scores(model, haystack, lengths=(34,), needles=NEEDLES[:2])
    assert table.statistics == ("score",)
    assert table.metadata["measured"]["texts"] == 6
