"""The real texts, split by document, and the generated tasks on which models are trained."""

import itertools

import pytest
import torch

from research.claims import corpora, generated_tasks
from research.claims.corpora import Corpus, windows


def text_of(number, shared=()):
    """Return a corpus of documents of 100 random passages each; passage 7 of the documents in `shared` is the same."""
    draw = torch.Generator().manual_seed(1)

    def passage():
        return bytes(torch.randint(97, 123, (90,), generator=draw).tolist()).decode()

    same = passage()
    documents = {f"d{each:02}": [passage() for _ in range(100)] for each in range(number)}
    for name in shared:
        documents[name][7] = f"xx{same}yy"
    return documents


def all_windows(passages, width):
    """Return all windows of passages, found one start at a time."""
    found = set()
    for passage in passages:
        for start in range(len(passage)):
            if start + width <= len(passage):
                found.add(passage[start : start + width])
    return found


def test_documents_are_split_in_three_parts_that_cover_all():
    corpus = Corpus(text_of(40))
    parts = corpus.drawn
    assert sorted(itertools.chain(*parts.values())) == sorted(corpus.documents)
    assert {part: len(names) for part, names in parts.items()} == {"training": 28, "test": 6, "validation": 6}
    assert Corpus(text_of(40)).drawn == parts
    assert Corpus(text_of(40), seed=1).drawn != parts


def test_large_documents_are_for_training():
    documents = text_of(40)
    documents["d03"] *= 10
    for seed in range(5):
        assert "d03" in Corpus(documents, seed=seed).drawn["training"]


def test_passages_that_parts_share_stay_in_the_part_judged_last():
    names = sorted(text_of(40))
    corpus = Corpus(text_of(40, shared=names))
    kept = {part: list(itertools.chain(*each.values())) for part, each in corpus.passages.items()}
    assert len(kept["test"]) == 600
    assert len(kept["validation"]) == 6 * 99
    assert len(kept["training"]) == 28 * 99
    for one, other in itertools.combinations(kept, 2):
        assert not all_windows(kept[one], 48) & all_windows(kept[other], 48)
    overlap = corpus.description()["overlap"]
    assert overlap[48] == {"test": 0.0, "validation": 0.0}


def test_overlap_is_the_share_of_windows_that_occur_in_training():
    corpus = Corpus({"a": ["abcabcab"], "b": ["cabx"], "c": ["zzzz"]})
    training = windows([[b"abcabcab"]], 3)
    assert training == {b"abc", b"bca", b"cab"}
    assert corpora._share_in({"b": [b"cabx"], "c": [b"zz"]}, training, 3) == 0.5
    assert corpus.vocabulary == 7  # a, b, c, x, z, the separator and the mask
    assert corpus.mask == 6


def test_rows_are_cut_from_single_documents():
    corpus = Corpus(text_of(40))
    rows = corpus.rows("test", 64)
    names = corpus.drawn["test"]
    joined = {name: b"\n".join(corpus.passages["test"][name]) for name in names}
    expected = sorted((joined[name][s : s + 64], name) for name in names for s in range(0, len(joined[name]) - 63, 64))
    table = dict(enumerate(corpus.alphabet))
    found = [
        (bytes(table[each] for each in row), name) for row, name in zip(rows.ids.tolist(), rows.documents, strict=True)
    ]
    assert sorted(found) == sorted((row, name) for row, name in expected)
    batches = rows.batches(16, 3)
    assert [tuple(batch["input_ids"].shape) for batch in batches] == [(16, 64)] * 3
    assert torch.equal(torch.cat([batch["input_ids"] for batch in batches]), rows.ids[:48])
    batches[0]["input_ids"].zero_()
    assert rows.ids[:16].any()


@pytest.mark.parametrize("name", corpora.CORPORA)
def test_the_texts_of_packages_share_no_long_passage(name):
    about = corpora.CORPORA[name]().description()
    assert about["overlap"][48] == about["overlap"][64] == {"test": 0.0, "validation": 0.0}
    assert all(about["sizes"][part]["documents"] > 15 for part in about["sizes"])


def test_lookup_is_answered_by_the_first_half_of_the_sequence_only():
    batches = generated_tasks.lookups(3, 7)
    values = {}
    changed = 0
    for row in torch.cat([batch["input_ids"] for batch in batches]).tolist():
        pairs = list(zip(row[::2], row[1::2], strict=True))
        first, second = pairs[:6], pairs[6:]
        assert len(row) == 24
        assert sorted(first) == sorted(second)
        assert len({key for key, _ in second}) == 6
        assert all(0 <= key < 16 <= value < 32 for key, value in pairs)
        changed += first != second
        for key, value in first:
            values.setdefault(key, set()).add(value)
    assert changed > 90
    assert len(values) == 16
    assert min(map(len, values.values())) > 8  # a key does not tell its value
    again = generated_tasks.lookups(3, 7)
    assert [each["input_ids"].tolist() for each in again] == [each["input_ids"].tolist() for each in batches]
    assert generated_tasks.lookups(1, 8)[0]["input_ids"].tolist() != batches[0]["input_ids"].tolist()


def test_symbols_are_drawn_from_a_seed():
    one, again, other = (generated_tasks.symbols(2, seed) for seed in (1, 1, 2))
    assert [each["input_ids"].tolist() for each in one] == [each["input_ids"].tolist() for each in again]
    assert one[0]["input_ids"].tolist() != other[0]["input_ids"].tolist() != one[1]["input_ids"].tolist()
    assert one[0]["input_ids"].shape == (64, 16)
    assert set(one[0]["input_ids"].flatten().tolist()) == set(range(16))
