"""Pairs of prompts as text, for patching."""

import pytest
import torch

import headwise as hw
import tiny


class Characters:
    """A tokenizer with a token for each character. `joined` are pairs of characters that are one token."""

    pad_token_id = None

    def __init__(self, first="", last="", joined=()):
        self.first, self.last, self.joined = first, last, joined

    def __call__(self, text, add_special_tokens=True):
        tokens = []
        for character in (self.first if add_special_tokens else "") + text + (self.last if add_special_tokens else ""):
            if tokens and tokens[-1] + character in self.joined:
                tokens[-1] += character
            else:
                tokens.append(character)
        return {"input_ids": [sum(ord(each) * 1000**place for place, each in enumerate(token)) for token in tokens]}

    def convert_ids_to_tokens(self, ids):
        return [chr(each % 1000) for each in ids] if isinstance(ids, list) else chr(ids % 1000)


def codes(text):
    return [ord(character) for character in text]


def test_pairs_are_padded_on_the_right():
    pair = hw.patching_prompts(Characters(first="<"), ["ab", "abcd"], ["xb", "xbcd"], answer="y", wrong=["z", "w"])
    assert pair["clean"]["input_ids"].tolist() == [[*codes("<ab"), 0, 0], codes("<abcd")]
    assert pair["corrupted"]["input_ids"].tolist() == [[*codes("<xb"), 0, 0], codes("<xbcd")]
    for batch in (pair["clean"], pair["corrupted"]):
        assert batch["attention_mask"].tolist() == [[1, 1, 1, 0, 0], [1] * 5]
    assert pair["answer"].tolist() == codes("yy")
    assert pair["wrong"].tolist() == codes("zw")


def test_padded_pairs_have_the_effects_of_single_ones():
    """Padding of the shorter pair must not change its effects."""
    model = tiny.model("decoder", top="ForCausalLM").double().eval()
    texts = [("ab", "xb"), ("abcd", "xbcd")]
    tokenizer = Characters()

    def small(pair):
        return {
            name: {key: value % 13 if key == "input_ids" else value for key, value in each.items()}
            if isinstance(each, dict)
            else each % 13
            for name, each in pair.items()
        }

    both = small(hw.patching_prompts(tokenizer, *zip(*texts, strict=True), answer="y", wrong="z"))
    together = hw.activation_patching(model, **both)
    singles = [
        hw.activation_patching(model, **small(hw.patching_prompts(tokenizer, *text, answer="y", wrong="z")))
        for text in texts
    ]
    for row, *each in zip(together.rows, *(single.rows for single in singles), strict=True):
        mean = sum(single.statistics["difference"].value for single in each) / 2
        assert row.statistics["difference"].value == pytest.approx(mean, rel=1e-9)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("ab", "abc", "y", "z"),
            "corrupted: expected as many tokens in the corrupted prompt of pair 0 as in the clean",
        ),
        (("ab", ["ab", "cd"], "y", "z"), "corrupted: expected 1 prompts, as many as in clean, got 2"),
        (("ab", "xb", "yy", "z"), "answer: expected an answer that continues the prompt with one token, got 'yy'"),
        (("ab", "xb", "q", "z"), "answer: expected an answer that continues the prompt with one token, got 'q'"),
        (("ab", "xb", "", "z"), "answer: expected a text or a sequence of texts, none of them empty, got ''"),
        (("ab", "xb", ["y", "y"], "z"), "answer: expected one answer for all prompts, or 1, got 2"),
        ((3, "xb", "y", "z"), "clean: expected a text or a sequence of texts, none of them empty, got 3"),
        (([], [], "y", "z"), "clean: expected a text or a sequence of texts"),
    ],
)
def test_prompts_that_do_not_correspond_are_refused(arguments, message):
    clean, corrupted, answer, wrong = arguments
    with pytest.raises(hw.InputError) as error:
        hw.patching_prompts(Characters(joined=("bq",)), clean, corrupted, answer=answer, wrong=wrong)
    assert str(error.value).startswith(message)


def test_an_answer_must_be_the_same_token_after_both_prompts():
    class ByPrompt(Characters):
        def __call__(self, text, add_special_tokens=True):
            ids = super().__call__(text, add_special_tokens)["input_ids"]
            return {"input_ids": [*ids[:-1], ids[-1] + 1000] if text.startswith("x") and len(text) == 3 else ids}

    with pytest.raises(hw.InputError, match="answer: expected an answer that is the same token after both prompts"):
        hw.patching_prompts(ByPrompt(), "ab", "xb", answer="y", wrong="z")


def test_a_tokenizer_that_ends_texts_is_refused():
    with pytest.raises(
        hw.InputError, match="clean: expected a tokenizer that ends a text with the text's last token, "
    ):
        hw.patching_prompts(Characters(last=">"), "ab", "xb", answer="y", wrong="z")


def test_effects_are_tested_against_no_effect():
    """Student's t over prompt pairs, as scipy computes it from the effects of single pairs."""
    from scipy import stats

    model = tiny.model("decoder", top="ForCausalLM").double().eval()
    torch.manual_seed(1)
    clean, corrupted = (torch.randint(13, (5, 6)) for _ in range(2))
    for direction, none in (("denoise", 0.0), ("noise", 1.0)):
        options = {"answer": 3, "wrong": 4, "direction": direction, "heads": [(0, 1), (0, 4), (1, 0), (1, 5)]}
        table = hw.activation_patching(model, clean, corrupted, **options)
        single = [
            hw.activation_patching(model, clean[each : each + 1], corrupted[each : each + 1], **options)
            for each in range(5)
        ]
        expected = [
            stats.ttest_1samp([one.rows[row].statistics["recovered"].value for one in single], none).pvalue
            for row in range(len(table.rows))
        ]
        assert table.tests()["recovered_p"] == pytest.approx(expected, rel=1e-6)
        adjusted = stats.false_discovery_control(expected)
        assert table.table()["recovered_q"].tolist() == pytest.approx(adjusted.tolist(), rel=1e-6)
