"""The text and the generated tasks on which models are trained."""

from collections import Counter

import torch

from research.claims import (
    corpora,
)


def rows_of(batches):
    """Return how often each sequence of token ids occurs in the batches."""
    return Counter(tuple(row) for batch in batches for row in batch["input_ids"].tolist())


def test_text_is_split_into_training_and_held_out_rows():
    """Every row of the text is used at most once; a row that occurs twice in the text may be used twice."""
    training, held_out = corpora.next_bytes(3)
    assert {tuple(batch["input_ids"].shape) for batch in training + held_out} == {(8, 64)}
    number = {byte: place for place, byte in enumerate(sorted(set(corpora.text())))}
    ids = [number[byte] for byte in corpora.text()]
    all_rows = Counter(tuple(ids[start : start + 64]) for start in range(0, len(ids) // 64 * 64, 64))
    used_rows = rows_of(training) + rows_of(held_out)
    assert len(held_out) == 3
    assert used_rows <= all_rows
    assert all_rows.total() - used_rows.total() < 8
    assert max(number.values()) < corpora.MASK == corpora.VOCABULARY - 1


def test_batches_of_text_are_reproducible_and_held_out_rows_are_fixed():
    training, held_out = corpora.next_bytes(3)
    few, again = corpora.next_bytes(3, 5)
    assert len(few) == 5
    for one, other in ((few, training[:5]), (again, held_out)):
        assert [each["input_ids"].tolist() for each in one] == [each["input_ids"].tolist() for each in other]
    few[0]["input_ids"].zero_()
    assert corpora.next_bytes(3, 1)[0][0]["input_ids"].tolist() == training[0]["input_ids"].tolist()
    starts = [row[0] for row in rows_of(training[:4])]
    assert starts != sorted(starts)


def test_lookup_is_answered_by_the_first_half_of_the_sequence_only():
    batches = corpora.lookups(3, 7)
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
    assert [each["input_ids"].tolist() for each in corpora.lookups(3, 7)] == [b["input_ids"].tolist() for b in batches]
    assert corpora.lookups(1, 8)[0]["input_ids"].tolist() != batches[0]["input_ids"].tolist()


def test_symbols_are_drawn_from_a_seed():
    one, again, other = (corpora.symbols(2, seed) for seed in (1, 1, 2))
    assert [each["input_ids"].tolist() for each in one] == [each["input_ids"].tolist() for each in again]
    assert one[0]["input_ids"].tolist() != other[0]["input_ids"].tolist() != one[1]["input_ids"].tolist()
    assert one[0]["input_ids"].shape == (64, 16)
    assert set(one[0]["input_ids"].flatten().tolist()) == set(range(16))
