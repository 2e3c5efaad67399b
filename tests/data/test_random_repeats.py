"""Sequences of random tokens, repeated several times: distinct ids, special tokens, and refused sizes."""

import pytest

import headwise as hw
import tiny
from headwise.data.random_repeats import repeats_for_model


def test_by_default_25_distinct_tokens_repeat_4_times_in_10_samples():
    ids = hw.random_repeats(97, avoid=[0, 3, 96])
    assert ids.shape == (10, 100)
    for sample in ids.tolist():
        assert sample == sample[:25] * 4
        assert len(set(sample)) == 25
        assert not {0, 3, 96} & set(sample)
    assert len({tuple(sample) for sample in ids.tolist()}) == 10
    assert ids.equal(hw.random_repeats(97, avoid=[0, 3, 96]))
    assert not ids.equal(hw.random_repeats(97, avoid=[0, 3, 96], seed=1))


def test_every_allowed_id_is_drawn():
    ids = hw.random_repeats(7, tokens=5, times=2, samples=200, avoid=[1, 5])
    assert ids.shape == (200, 10)
    assert set(ids.flatten().tolist()) == {0, 2, 3, 4, 6}


def test_repeats_are_surrounded_by_the_special_tokens_of_the_tokenizer():
    ids = repeats_for_model(tiny.model("encoder"), range(5), tiny.tokenizer("encoder"))
    assert ids.shape == (10, 102)
    assert ids[:, 0].tolist() == [2] * 10
    assert ids[:, -1].tolist() == [3] * 10
    assert ids[:, 1:-1].min() >= 5
    assert repeats_for_model(tiny.model("decoder"), range(5), tiny.tokenizer("decoder")).shape == (10, 100)


def test_ids_outside_the_tokenizer_are_left_out():
    assert repeats_for_model(tiny.model("decoder", vocab_size=500), (), tiny.tokenizer("decoder")).max() < 97
    assert repeats_for_model(tiny.model("decoder", vocab_size=500), ()).max() >= 97


@pytest.mark.usefixtures("as_user")
def test_unusable_sizes_are_refused():
    with pytest.raises(hw.InputError, match="^vocabulary: expected at least 25 ids to draw from, got 24$"):
        hw.random_repeats(25, avoid=[3])
    with pytest.raises(hw.InputError, match="^times: expected a whole number of 1 or more, got 0$"):
        hw.random_repeats(97, times=0)
    with pytest.raises(hw.InputError, match="^vocabulary: expected a whole number of 1 or more, got 'abc'$"):
        hw.random_repeats("abc")
    with pytest.raises(hw.InputError, match="^avoid: expected token ids, got 'abc'; tokenizer"):
        hw.random_repeats(97, avoid="abc")
    sentence = (
        "^model: expected room for 102 random tokens, got 101; --no-repeats .repeats=False. leaves out the random"
    )
    with pytest.raises(hw.InputError, match=sentence):
        repeats_for_model(tiny.model("encoder", max_position_embeddings=101), (), tiny.tokenizer("encoder"))
