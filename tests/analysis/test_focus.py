"""Heads by focus, against loops over words with weights that are known."""

import dataclasses
import math

import pytest
import scipy.stats
import torch

import headwise as hw
import tiny
from headwise.runs.rows import MeanEstimate

SENTENCES = (
    "She ordered tea but he wanted coffee.",
    "Tea is cheaper than coffee in this shop.",
    "Coffee keeps me awake, and tea calms me.",
    "They sell coffee beans and green tea.",
    "After coffee she never drinks tea.",
)


@pytest.fixture(scope="module")
def drinks(minilm):
    """Views of five sentences about coffee and tea."""
    return hw.view(minilm.model, minilm.tokenizer, SENTENCES)


def loops(weights, allowed, word_of, special, words, kind):
    """Return share and uniform share of a focus, by loops over query words and their tokens."""
    shares, uniform_shares = [], []
    for word in range(max(word_of) + 1):
        rows = [token for token, own in enumerate(word_of) if own == word]
        keys = [token for token, own in enumerate(word_of) if own in words and (kind == "received" or own != word)]
        if special[word] or (word in words) == (kind == "received"):
            continue
        if kind == "exchanged" and not any(allowed[row][key] for row in rows for key in keys):
            continue
        shares.append(sum(float(weights[row][key]) for row in rows for key in keys) / len(rows))
        uniform_shares.append(
            sum(sum(allowed[row][key] for key in keys) / sum(allowed[row]) for row in rows) / len(rows)
        )
    return math.fsum(shares) / len(shares), math.fsum(uniform_shares) / len(uniform_shares)


@pytest.mark.parametrize("kind", ["received", "exchanged"])
@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_shares_equal_loops_over_words(side, kind):
    model, tokenizer = tiny.model(side), tiny.tokenizer(side)
    seen = hw.view(model, tokenizer, "w5 w6 w7 w8 w6 w9 w5 w10")
    text = seen.texts[0]
    chosen = [index for index, word in enumerate(text.words) if word.text in ("w6", "w9")]
    assert len(chosen) == 3  # w6 comes twice
    tokens = len(text.tokens)
    allowed = [[side == "encoder" or key <= query for key in range(tokens)] for query in range(tokens)]
    focus = seen.find(["w6", "w9"], kind=kind)
    assert focus.words == (tuple(chosen),)
    assert len(focus.heads) == 12
    for each in focus.heads:
        weights = seen.heads[each.index].attention.weights.weights
        special = [word.special for word in text.words]
        share, uniform = loops(weights, allowed, text.word_of.tolist(), special, chosen, kind)
        assert (each.share, each.uniform) == pytest.approx((share, uniform), rel=1e-5)
        assert each.excess.value == pytest.approx(share - uniform, abs=1e-6)
        assert seen.heads[each.index] is each.head
    excesses = [each.excess.value for each in focus.heads]
    assert excesses == sorted(excesses, reverse=True)


def test_words_of_several_tokens_are_summed_and_averaged(minilm):
    seen = hw.view(minilm.model, minilm.tokenizer, "Headwise prunes antidisestablishmentarianism gracefully")
    text = seen.texts[0]
    assert len(text.tokens) > len(text.words)
    chosen = [index for index, word in enumerate(text.words) if word.text == "antidisestablishmentarianism"]
    tokens, special = len(text.tokens), [word.special for word in text.words]
    for each in seen.find(["Antidisestablishmentarianism"]).heads:
        weights = seen.heads[each.index].attention.weights.weights
        expected = loops(weights, [[True] * tokens] * tokens, text.word_of.tolist(), special, chosen, "received")
        assert (each.share, each.uniform) == pytest.approx(expected, rel=1e-5)


def test_the_objects_of_the_question_are_the_focus_of_head_5_11(coffee):
    focus = coffee.find(["you", "coffee", "tea"])
    assert focus.heads[0].head.name == "5.11"
    assert focus.heads[0].share == pytest.approx(0.77, abs=0.01)
    assert focus.heads[0].uniform == pytest.approx(3 / 12)
    assert focus.heads[0].has_focus
    assert focus.verdict.startswith("Heads 5.11, ")
    exchanged = coffee.find(["you", "coffee", "tea"], kind="exchanged")
    half = "at least half of its attention is among these words"
    assert exchanged.verdict == f"Head 5.11 has this focus: {half}, more than under uniform attention."


def test_the_note_names_what_the_best_head_attends_to_more(coffee, minilm):
    words = coffee.texts[0].words
    position = {word.text: index for index, word in enumerate(words)}
    focus = coffee.find(["like"])
    best = focus.heads[0]
    rows = [index for index, word in enumerate(words) if not word.special and word.text != "like"]
    means = best.head.attention.weights.weights[rows].double().mean(0)  # each word is one token
    assert best.share == pytest.approx(float(means[position["like"]]), rel=1e-5)
    means[position["like"]] = 0.0
    name = words[int(means.argmax())].text
    assert best.other == (name if name.startswith("[") else repr(name))
    assert best.other_share == pytest.approx(float(means.max()), rel=1e-5)
    puts_more = f"Head {best.head.name} puts more on {best.other}: {100 * float(means.max()):.0f} %."
    assert focus.note == (puts_more if float(means.max()) > best.share else "")
    assert coffee.find(["you", "coffee", "tea"]).note == ""
    sides = [coffee.find([word]).note for word in ("Which", "do", "like", ",", "or")]
    assert any("puts more on [" in note for note in sides)


def test_the_other_word_of_several_texts_is_that_with_the_largest_mean(drinks):
    focus = drinks.find(["coffee", "tea"])
    alone = [view.find(["coffee", "tea"]) for view in drinks]
    for each in focus.heads:
        single = [next(other for other in found.heads if other.index == each.index) for found in alone]
        assert each.other_share <= sum(other.other_share for other in single) / 5 + 1e-9
        if all(other.other == "[SEP]" for other in single):
            assert each.other == "[SEP]"
            assert each.other_share == pytest.approx(sum(other.other_share for other in single) / 5)


def test_the_verdict_says_so_if_no_head_has_the_focus(coffee):
    focus = coffee.find(["like", "better"], name="sentiment")
    assert not any(each.has_focus for each in focus.heads)
    assert focus.verdict == (
        "No head puts at least half of its attention on these words. "
        "Head 5.9 comes closest: 33 % (uniform attention: 17 %)."
    )
    assert focus.name == "sentiment"


def test_several_sentences_have_standard_errors_and_a_corrected_test(drinks):
    focus = drinks.find(["coffee", "tea"], kind="exchanged")
    single = [view.find(["coffee", "tea"], kind="exchanged") for view in drinks]
    for each in focus.heads:
        excesses = [next(other.excess.value for other in alone.heads if other.index == each.index) for alone in single]
        mean, sem = scipy.stats.tmean(excesses), scipy.stats.sem(excesses)
        assert (each.excess.value, each.excess.sem, each.excess.n) == pytest.approx((mean, sem, 5))
        p = scipy.stats.t.sf(mean / sem, df=4) * 72
        assert each.p == pytest.approx(min(1.0, p))
    assert "5 texts, one-sided t-test at 5 %, Bonferroni-corrected" in focus.verdict
    (selected,) = drinks.select(layers=[5], heads=[11]).find(["coffee", "tea"], kind="exchanged").heads
    assert selected.p == pytest.approx(next(each.p for each in focus.heads if each.head.name == "5.11"))
    of_four = hw.ViewSet(drinks.views[:4]).find(["coffee", "tea"], kind="exchanged")
    assert all(math.isnan(each.p) for each in of_four.heads)
    assert of_four.verdict.endswith("This is not tested: 4 texts are fewer than 5.")


@pytest.mark.parametrize("again", [SENTENCES[0], SENTENCES[0].upper()])
def test_texts_with_the_same_tokens_are_no_evidence(minilm, drinks, again):
    seen = hw.ViewSet((*drinks, hw.view(minilm.model, minilm.tokenizer, again)))  # the model is uncased
    with pytest.raises(hw.InputError, match="^texts: expected different texts, got '(?i:She ordered) .*' twice"):
        seen.find(["coffee", "tea"])


def test_most_words_of_a_text_are_no_focus(coffee):
    focus = coffee.find(list(range(1, 10)))
    assert any(each.share >= 0.5 for each in focus.heads)
    assert all(each.has_focus == (each.share >= 0.5 and each.share > each.uniform) for each in focus.heads)


def test_words_may_be_stated_for_each_text(minilm):
    seen = hw.view(minilm.model, minilm.tokenizer, ["Dogs chase cats.", "Tea or coffee?"])
    focus = seen.find([["dogs", "cats"], ["tea", "coffee"]])
    words = [[view.words[index].text for index in chosen] for view, chosen in zip(seen, focus.words, strict=True)]
    assert words == [["Dogs", "cats"], ["Tea", "coffee"]]


@pytest.mark.parametrize(
    ("focus", "options", "message"),
    [
        (["milk"], {}, r"^focus: expected words of the text \(\[CLS\], Which, .*\), got 'milk'"),
        ("coffee", {}, r"^focus: expected a list of words, such as \[\"coffee\", \"tea\"\], got 'coffee'"),
        ([], {}, "^focus: expected a list of words"),
        ([99], {}, "^focus: expected indices of words from 0 to 11, got 99"),
        ([["coffee"], ["tea"]], {}, "^focus: expected 1 lists of words, one per text, got 2"),
        (["coffee"], {"kind": "liked"}, '^kind: expected "received" or "exchanged", got \'liked\''),
        (["coffee"], {"kind": "exchanged"}, "^focus: expected two words that can attend to each other, got coffee"),
        (list(range(12)), {}, "^focus: expected a word outside of the focus"),
    ],
)
def test_mistakes_are_named(coffee, focus, options, message):
    with pytest.raises(hw.InputError, match=message):
        coffee.find(focus, **options)


def test_a_long_text_needs_all_its_weights():
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    text = " ".join(tiny.WORDS[:40])
    with pytest.raises(hw.InputError, match=r"^focus: expected a text whose weights were all kept.*keep_all=40"):
        hw.view(model, tokenizer, text, keep_all=39).find(["w5"])
    assert hw.view(model, tokenizer, text, keep_all=40).find(["w5"]).heads


def test_the_table_of_a_focus_has_all_heads(coffee):
    table = coffee.find(["coffee", "tea"]).table()
    assert len(table) == 72
    assert list(table.columns[:7]) == ["layer", "head", "module", "kind", "role", "share", "uniform"]
    assert torch.tensor(table["excess"].values).diff().max() <= 0


def test_the_least_excess_is_larger_than_rounding(coffee):
    head = next(each for each in coffee.find(["coffee", "tea"]).heads if each.share >= 0)
    nearly_uniform = dataclasses.replace(head, share=0.6, uniform=0.6, excess=MeanEstimate(3e-7, math.nan, 1, 0))
    assert not nearly_uniform.has_focus
    assert dataclasses.replace(nearly_uniform, excess=MeanEstimate(3e-4, math.nan, 1, 0)).has_focus
