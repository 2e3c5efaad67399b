"""A text as batches for each task, and the tokenizer that is made for it."""

import json
import random
import re

import pytest
import torch

import headwise as hw
import tiny
from headwise.studies.classification import accuracy, class_loss
from headwise.studies.corpus import MAX_HELD_OUT, TextOptions, make_corpus
from headwise.studies.tokenizer import train_tokenizer

pytestmark = pytest.mark.usefixtures("as_user")

CONTEXT, BATCH = 16, 4
WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "über", "naïve", "東京", "day")


def text(words=900, seed=0):
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text(text(), encoding="utf-8")
    return path


def lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def of(task, source, tokenizer, **options):
    return make_corpus(source, tokenizer, TextOptions(task, **{"context": CONTEXT, "batch": BATCH} | options))


def sequences(batches):
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def test_a_tokenizer_that_gives_the_text_back(file):
    made = train_tokenizer(file, "text", 300)
    assert 259 < len(made) <= 300
    ids = made(text())["input_ids"]
    assert made.decode(ids) == text()
    other = "Quite another one:\n\ttabs, 'quotes' & \x07 bytes, \N{PILE OF POO}"  # every byte is in it
    assert made.decode(made(other)["input_ids"]) == other
    assert len(ids) < len(text().encode()) / 1.5
    special = [made.pad_token, made.eos_token, made.mask_token]
    assert special == ["<|pad|>", "<|end|>", "<|mask|>"]
    assert [made.pad_token_id, made.eos_token_id, made.mask_token_id] == [0, 1, 2]
    assert sorted(made.all_special_ids) == [0, 1, 2]


def test_a_tokenizer_made_again_is_the_same(file, tmp_path):
    one, two = (train_tokenizer(file, "text", 300) for _ in range(2))
    assert one.get_vocab() == two.get_vocab()
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    (tmp_path / "other.txt").write_text("lorem ipsum dolor sit amet " * 40)
    assert train_tokenizer(tmp_path / "other.txt", "text", 300).get_vocab() != one.get_vocab()


def test_a_tokenizer_of_a_column(tmp_path):
    rows = [{"text": "no " * 50, "body": "yes yes yesterday " * 50} for _ in range(3)]
    made = train_tokenizer(lines(tmp_path / "a.jsonl", rows), "body", 270)
    assert "yes" in "".join(made.tokenize("yes"))
    assert len(made.tokenize("yes yes")) < len(made.tokenize("no no "))


def test_a_vocabulary_that_does_not_hold_the_bytes(file):
    sentence = "vocabulary: expected at least 259, for bytes and special tokens, got 258"
    with pytest.raises(hw.InputError, match=f"^{sentence}$"):
        train_tokenizer(file, "text", 258)
    assert len(train_tokenizer(file, "text", 259)) == 259


# -- next and masked tokens -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_all_of_a_text_in_sequences_of_the_context(task, file):
    tokenizer = train_tokenizer(file, "text", 300)
    found = of(task, file, tokenizer)
    ids = tokenizer(text())["input_ids"]
    wanted = [tuple(ids[start : start + CONTEXT]) for start in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
    training, held_out = sequences(found.training), sequences(found.held_out)
    assert len(set(wanted)) == len(wanted) > 40
    assert held_out == wanted[5::10][: len(held_out)]
    assert len(wanted[5::10]) - len(held_out) < BATCH
    assert not {*training} & {*wanted[5::10]}
    assert {*training} <= {*wanted} - {*wanted[5::10]}
    assert len(training) == len({*training}) > len(wanted) - len(wanted[5::10]) - BATCH
    assert training != [each for each in wanted if each in {*training}]  # in an order that was drawn
    assert sequences(of(task, file, tokenizer).training) == training
    for batch in (*found.training, *found.held_out):
        assert list(batch) == ["input_ids"]
        assert (batch["input_ids"].shape, batch["input_ids"].dtype) == ((BATCH, CONTEXT), torch.int64)
    assert found.labels == ()


def test_with_one_sequence_a_batch_nothing_is_lost(file):
    tokenizer = train_tokenizer(file, "text", 300)
    found = of("lm", file, tokenizer, batch=1)
    ids = tokenizer(text())["input_ids"]
    wanted = [tuple(ids[start : start + CONTEXT]) for start in range(0, len(ids) - CONTEXT + 1, CONTEXT)]
    training, held_out = sequences(found.training), sequences(found.held_out)
    assert sorted(training + held_out) == sorted(wanted)
    assert not {*training} & {*held_out}


def test_no_more_are_held_out_than_can_be_judged_quickly(tmp_path):
    (tmp_path / "long.txt").write_text(text(6000))
    tokenizer = train_tokenizer(tmp_path / "long.txt", "text", 300)
    found = of("lm", tmp_path / "long.txt", tokenizer, context=4, batch=1)
    whole = len(found.training) + len(found.held_out)
    assert whole > 20 * MAX_HELD_OUT
    assert MAX_HELD_OUT / 2 < len(found.held_out) <= MAX_HELD_OUT
    assert not {*map(id, found.training)} & {*map(id, found.held_out)}


def test_what_is_to_be_learned(file):
    tokenizer = train_tokenizer(file, "text", 300)
    assert of("lm", file, tokenizer).loss is hw.next_token_loss
    loss = of("mlm", file, tokenizer).loss
    assert isinstance(loss, hw.MaskedTokenLoss)
    assert (loss.mask_id, loss.special.tolist()) == (2, [0, 1, 2])


def test_documents_are_packed_with_a_token_of_end_between(tmp_path):
    path = lines(tmp_path / "a.jsonl", [{"text": "the cat sat " * 40}, {"text": " "}, {"text": "a dog ran " * 50}])
    tokenizer = train_tokenizer(path, "text", 280)
    found = of("lm", path, tokenizer, batch=1)
    flat = [token for each in sequences([*found.training, *found.held_out]) for token in each]
    assert flat.count(tokenizer.eos_token_id) == 1


# -- labels -----------------------------------------------------------------------------------------------------------

NAMES = ("good", "bad", "mixed")


def labelled(path, labels=NAMES, number=60, **more):
    rows = [
        {"text": f"{labels[n % len(labels)]} {n} {text(n % 7, n)}", "label": labels[n % len(labels)]}
        for n in range(number)
    ]
    return lines(path, [row | more for row in rows])


@pytest.mark.parametrize(
    ("labels", "classes"),
    [(NAMES, ("bad", "good", "mixed")), ((7, 10), ("10", "7")), ((True, False), ("False", "True"))],
)
def test_texts_with_labels(labels, classes, tmp_path):
    path = labelled(tmp_path / "a.jsonl", labels)
    tokenizer = train_tokenizer(path, "text", 300)
    found = of("classify", path, tokenizer, batch=2)
    assert found.labels == classes
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    wanted = {}
    for row in rows:
        wanted[tuple(tokenizer(row["text"])["input_ids"][:CONTEXT])] = classes.index(str(row["label"]))
    seen = []
    for batch in (*found.training, *found.held_out):
        assert list(batch) == ["input_ids", "attention_mask", "label"]
        for ids, real, label in zip(*batch.values(), strict=True):
            length = int(real.sum())
            assert real.tolist() == [1] * length + [0] * (len(real) - length)
            assert ids[length:].eq(tokenizer.pad_token_id).all()
            key = tuple(ids[:length].tolist())
            assert wanted[key] == label
            seen.append(key)
        assert batch["attention_mask"].sum(1).max() == batch["input_ids"].shape[1] <= CONTEXT
    assert len(seen) == len({*seen}) == 60
    held_out = [
        tuple(ids[real > 0].tolist())
        for b in found.held_out
        for ids, real in zip(b["input_ids"], b["attention_mask"], strict=True)
    ]
    assert held_out == [list(wanted)[place] for place in range(5, 60, 10)]


def test_the_loss_of_labels():
    torch.manual_seed(1)
    logits = torch.randn(3, 4)
    asked = []

    def model(**given):
        asked.append(sorted(given))
        return logits

    batch = {"input_ids": torch.zeros(3, 2), "attention_mask": torch.ones(3, 2), "label": torch.tensor([2, 0, 3])}
    got = class_loss(model, batch)
    assert asked == [["attention_mask", "input_ids"]]
    assert got == pytest.approx(-logits.softmax(1)[range(3), [2, 0, 3]].log(), rel=1e-5)


def test_the_share_that_is_right():
    class Model(torch.nn.Module):
        def forward(self, input_ids, attention_mask):
            assert not self.training
            return torch.nn.functional.one_hot(input_ids[:, 0], 4) * attention_mask[:, :1].float()

    def batch(first, label):
        ids = torch.tensor(first)[:, None].expand(-1, 3)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "label": torch.tensor(label)}

    model = Model()
    assert accuracy(model, [batch([0, 1, 3], [0, 2, 3]), batch([2, 2], [1, 3])]) == 2 / 5
    assert model.training


def test_another_column_for_text_and_label(tmp_path):
    rows = [{"body": f"word{n} and more", "kind": n % 2, "text": 3, "label": None} for n in range(20)]
    path = lines(tmp_path / "a.jsonl", rows)
    found = of("classify", path, train_tokenizer(path, "body", 300), column="body", label="kind")
    assert found.labels == ("0", "1")


# -- what cannot be ---------------------------------------------------------------------------------------------------


def refused(sentence, *arguments, **options):
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        of(*arguments, **options)


def test_no_such_task(file):
    refused("task: expected one of lm, mlm, classify, got 'foo'", "foo", file, tiny.tokenizer("decoder"))


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_a_text_that_is_too_short(task, file, tmp_path):
    (tmp_path / "short.txt").write_text("the cat sat on the mat. " * 5)
    tokenizer = train_tokenizer(file, "text", 300)
    tokens = 9 * CONTEXT + CONTEXT - 1
    for number in (tokens, CONTEXT - 1):
        (tmp_path / "short.txt").write_text(tokenizer.decode(tokenizer(text())["input_ids"][:number]))
        ids = tokenizer((tmp_path / "short.txt").read_text())["input_ids"]
        kept = len(ids) if len(ids) < CONTEXT else len(ids) // CONTEXT * CONTEXT
        refused(
            "data: expected text of at least 160 tokens, for 10 sequences of 16 with one held out, "
            f"got {kept} tokens in {tmp_path / 'short.txt'}",
            *(task, tmp_path / "short.txt", tokenizer),
        )


@pytest.mark.parametrize("content", [b"", b" \n\t "])
def test_no_text(content, file, tmp_path):
    (tmp_path / "empty.txt").write_bytes(content)
    sentence = f"data: expected at least one document, got no text in {tmp_path / 'empty.txt'}"
    refused(sentence, "lm", tmp_path / "empty.txt", train_tokenizer(file, "text", 300))
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        train_tokenizer(tmp_path / "empty.txt", "text", 300)


def test_no_text_file(tmp_path):
    (tmp_path / "a.png").write_bytes(b"\x89PNG\0\0" * 99)
    sentence = f"data: expected text in {tmp_path / 'a.png'}, got a binary file"
    refused(sentence, "lm", tmp_path / "a.png", tiny.tokenizer("decoder"))
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        train_tokenizer(tmp_path / "a.png", "text", 300)


def test_a_tokenizer_without_a_mask(file):
    refused(
        "tokenizer: expected a tokenizer with a mask token, got one without", "mlm", file, tiny.tokenizer("decoder")
    )


def test_labels_are_not_in_a_plain_text(file, tmp_path):
    sentence = f"data: expected JSON lines or Parquet with a column 'label', got {file}"
    refused(sentence, "classify", file, tiny.tokenizer("decoder"))
    (tmp_path / "more").mkdir()
    labelled(tmp_path / "more" / "a.jsonl")
    (tmp_path / "more" / "notes.md").write_text("notes")
    sentence = f"data: expected JSON lines or Parquet with a column 'label', got {tmp_path / 'more' / 'notes.md'}"
    refused(sentence, "classify", tmp_path / "more", tiny.tokenizer("decoder"))


@pytest.mark.parametrize(
    ("labels", "number", "got"),
    [(("one",), 60, "60 texts with 1 labels"), (NAMES, 9, "9 texts with 3 labels")],
)
def test_too_few_labels_or_texts(labels, number, got, tmp_path):
    path = labelled(tmp_path / "a.jsonl", labels, number)
    sentence = (
        f"data: expected at least 10 texts, of which one is held out, with at least two labels, got {got} in {path}"
    )
    refused(sentence, "classify", path, tiny.tokenizer("decoder"))


def test_labels_of_other_kinds(tmp_path):
    tokenizer = tiny.tokenizer("decoder")
    path = lines(tmp_path / "a.jsonl", [{"text": "w5", "label": "a"}, {"text": "w6", "label": 0.5}])
    refused(f"column: expected text in 'label' of line 2 of {path}, got float", "classify", path, tokenizer)
    path = lines(tmp_path / "b.jsonl", [{"text": "w5", "kind": "a"}])
    sentence = f"column: expected one of line 1 of {path}, which has text, kind, got 'label'"
    refused(sentence, "classify", path, tokenizer)
    path = lines(tmp_path / "c.jsonl", [{"text": 5, "label": "a"}])
    refused(f"column: expected text in 'text' of line 1 of {path}, got int", "classify", path, tokenizer)
