"""The data and random sets of the findings: drawn with a seed, without duplicates."""

from collections import Counter
from pydoc_data.topics import topics

import pytest
import torch

from research.findings import data
from research.findings.control_sets import with_controls


def test_documents_are_spread_and_share_no_passage():
    drawn = data.documents()
    assert len(drawn) == data.DOCUMENTS
    assert drawn == data.documents()
    assert all(topics[name] == text for name, text in drawn.items())
    names = sorted(name for name in topics if len(topics[name]) >= data.CHARACTERS)
    places = [names.index(name) for name in drawn]
    assert min(places) < len(names) / 6
    assert max(places) > 5 * len(names) / 6
    assert places != sorted(places)
    read = [" ".join(text[: data.CHARACTERS].lower().split()).split(" ") for text in drawn.values()]
    runs = Counter(run for words in read for run in {tuple(words[n : n + 12]) for n in range(len(words) - 11)})
    assert max(runs.values()) == 1


def test_sentences_are_different_and_from_many_topics():
    drawn = data.sentences()
    assert len(drawn) == len({sentence.text for sentence in drawn}) == data.SENTENCES
    assert drawn == data.sentences()
    of_topics = Counter(sentence.topic for sentence in drawn)
    assert len(of_topics) > 40
    assert max(of_topics.values()) == data.MOST_OF_TOPIC
    assert all(sentence.text in " ".join(topics[sentence.topic].split()) for sentence in drawn)
    last = sorted(topics)[int(0.71 * len(topics)) :]
    assert sum(topic in last for topic in of_topics) > 8


def test_shuffled_tokens_are_the_same_tokens():
    ids = torch.tensor([[1, 7, 8, 9, 10, 2], [1, 7, 7, 5, 2, 0]])
    found = data.shuffled(ids, {0, 1, 2})
    assert found.sort(1).values.equal(ids.sort(1).values)
    for token in (0, 1, 2):
        assert (found == token).equal(ids == token)
    assert not found.equal(ids)
    assert found.equal(data.shuffled(ids, {0, 1, 2}))


def test_random_sets_are_different_and_have_no_induction_head():
    every = [(layer, head) for layer in range(6) for head in range(9)]
    heads = [(2, 1), (2, 3), (4, 0)]
    sets = with_controls(heads, every, 30)
    assert sets.pop("induction") == heads
    assert len(sets) == 60
    for kind in ("anywhere", "same layers"):
        drawn = [tuple(chosen) for name, chosen in sets.items() if name.startswith(kind)]
        assert len(set(drawn)) == 30
        assert all(len(set(chosen)) == 3 and not set(chosen) & set(heads) for chosen in drawn)
        layers = {tuple(sorted(layer for layer, _ in chosen)) for chosen in drawn}
        assert (layers == {(2, 2, 4)}) == (kind == "same layers")
    with pytest.raises(ValueError, match="expected at least 169 different sets .* got 168"):
        with_controls(heads, every, 169)
    few = with_controls(heads, every, 10)
    assert all(sets[name] == chosen for name, chosen in few.items() if name != "induction")
