"""Corpora of studies: texts as training and held-out batches for each task, and tokenizers trained on them."""

import json
import random
import re

import pytest
import torch

import headwise as hw
import tiny
from headwise.studies.text_options import TextOptions
from headwise.studies.text_study import MAX_HELD_OUT, accuracy, class_loss, make_corpus, train_tokenizer

pytestmark = pytest.mark.usefixtures("as_user")

CONTEXT, BATCH = 16, 4
WORDS = ("the", "a", "cat", "dog", "sat", "ran", "on", "under", "mat", "tree", "über", "naïve", "東京", "day")


def text(words=900, seed=0):
    chosen = random.Random(seed)
    return " ".join(chosen.choice(WORDS) for _ in range(words))


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text(), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def trained(file):
    """Return a tokenizer that was trained on the file."""
    return train_tokenizer(file, "text", 300)


def write_json_lines(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def corpus_of(task, source, tokenizer, **options):
    """Return the corpus of a source for a task, in small batches by default."""
    return make_corpus(source, tokenizer, TextOptions(task, **{"context": CONTEXT, "batch": BATCH} | options))


def sequences(batches):
    """Return the token ids of every sequence of the batches."""
    return [tuple(row) for batch in batches for row in batch["input_ids"].tolist()]


# -- the tokenizer ----------------------------------------------------------------------------------------------------


def test_a_trained_tokenizer_decodes_every_text_unchanged(trained):
    made = trained
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


def test_training_a_tokenizer_is_deterministic(trained, file, tmp_path):
    one, two = trained, train_tokenizer(file, "text", 300)
    assert one.backend_tokenizer.to_str() == two.backend_tokenizer.to_str()
    (tmp_path / "other.txt").write_text("lorem ipsum dolor sit amet " * 40)
    assert train_tokenizer(tmp_path / "other.txt", "text", 300).get_vocab() != one.get_vocab()


def test_a_tokenizer_is_trained_on_the_chosen_column(tmp_path):
    rows = [{"text": "no " * 50, "body": "yes yes yesterday " * 50} for _ in range(3)]
    made = train_tokenizer(write_json_lines(tmp_path / "a.jsonl", rows), "body", 270)
    assert "yes" in "".join(made.tokenize("yes"))
    assert len(made.tokenize("yes yes")) < len(made.tokenize("no no "))


def test_a_vocabulary_too_small_for_all_bytes_is_refused(file):
    sentence = "vocabulary: expected at least 259, for bytes and special tokens, got 258"
    with pytest.raises(hw.InputError, match=f"^{sentence}$"):
        train_tokenizer(file, "text", 258)
    assert len(train_tokenizer(file, "text", 259)) == 259


# -- next and masked tokens -------------------------------------------------------------------------------------------


def sequences_of_the_text(tokenizer):
    """Return the text as sequences of token ids, without the incomplete last one."""
    ids = tokenizer(text())["input_ids"]
    return [tuple(ids[start : start + CONTEXT]) for start in range(0, len(ids) - CONTEXT + 1, CONTEXT)]


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_a_text_is_split_into_sequences_of_the_context_and_every_tenth_is_held_out(task, file, trained):
    corpus, expected = corpus_of(task, file, trained), sequences_of_the_text(trained)
    training, held_out = sequences(corpus.training), sequences(corpus.held_out)
    assert len(set(expected)) == len(expected) > 40
    assert held_out == expected[5::10][: len(held_out)]
    assert len(expected[5::10]) - len(held_out) < BATCH
    assert not {*training} & {*expected[5::10]}
    assert {*training} <= {*expected} - {*expected[5::10]}
    assert len(training) == len({*training}) > len(expected) - len(expected[5::10]) - BATCH
    assert training != [sequence for sequence in expected if sequence in {*training}]  # in random order
    assert sequences(corpus_of(task, file, trained).training) == training
    for batch in (*corpus.training, *corpus.held_out):
        assert list(batch) == ["input_ids"]
        assert (batch["input_ids"].shape, batch["input_ids"].dtype) == ((BATCH, CONTEXT), torch.int64)
    assert corpus.labels == ()
    one_by_one = corpus_of(task, file, trained, batch=1)
    assert sorted(sequences([*one_by_one.training, *one_by_one.held_out])) == sorted(expected)


def test_the_number_of_held_out_batches_is_limited(tmp_path):
    (tmp_path / "long.txt").write_text(text(6000))
    tokenizer = train_tokenizer(tmp_path / "long.txt", "text", 300)
    corpus = corpus_of("lm", tmp_path / "long.txt", tokenizer, context=4, batch=1)
    total = len(corpus.training) + len(corpus.held_out)
    assert total > 20 * MAX_HELD_OUT
    assert MAX_HELD_OUT / 2 < len(corpus.held_out) <= MAX_HELD_OUT
    assert not {*map(id, corpus.training)} & {*map(id, corpus.held_out)}


def test_each_task_has_its_loss(file, trained):
    assert corpus_of("lm", file, trained).loss is hw.next_token_loss
    loss = corpus_of("mlm", file, trained).loss
    assert isinstance(loss, hw.MaskedTokenLoss)
    assert (loss.mask_id, loss.special.tolist()) == (2, [0, 1, 2])


def test_documents_are_packed_with_an_end_token_between_them(tmp_path):
    path = write_json_lines(
        tmp_path / "a.jsonl", [{"text": "the cat sat " * 40}, {"text": " "}, {"text": "a dog ran " * 50}]
    )
    tokenizer = train_tokenizer(path, "text", 280)
    corpus = corpus_of("lm", path, tokenizer, batch=1)
    flat = [token for sequence in sequences([*corpus.training, *corpus.held_out]) for token in sequence]
    assert flat.count(tokenizer.eos_token_id) == 1


# -- labels -----------------------------------------------------------------------------------------------------------

NAMES = ("good", "bad", "mixed")


def write_labelled_texts(path, labels=NAMES, number=60, **more):
    """Write texts with a label column as JSON lines and return the path; `more` adds columns to every row."""
    rows = [
        {"text": f"{labels[n % len(labels)]} {n} {text(n % 7, n)}", "label": labels[n % len(labels)]}
        for n in range(number)
    ]
    return write_json_lines(path, [row | more for row in rows])


@pytest.mark.parametrize(
    ("labels", "classes"),
    [(NAMES, ("bad", "good", "mixed")), ((7, 10), ("10", "7")), ((True, False), ("False", "True"))],
)
def test_labelled_texts_are_truncated_padded_and_numbered_by_class(labels, classes, tmp_path):
    path = write_labelled_texts(tmp_path / "a.jsonl", labels)
    tokenizer = train_tokenizer(path, "text", 300)
    corpus = corpus_of("classify", path, tokenizer, batch=2)
    assert corpus.labels == classes
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    expected = {}
    for row in rows:
        expected[tuple(tokenizer(row["text"])["input_ids"][:CONTEXT])] = classes.index(str(row["label"]))
    keys = []
    for batch in (*corpus.training, *corpus.held_out):
        assert list(batch) == ["input_ids", "attention_mask", "label"]
        for ids, mask, label in zip(*batch.values(), strict=True):
            length = int(mask.sum())
            assert mask.tolist() == [1] * length + [0] * (len(mask) - length)
            assert ids[length:].eq(tokenizer.pad_token_id).all()
            key = tuple(ids[:length].tolist())
            assert expected[key] == label
            keys.append(key)
        assert batch["attention_mask"].sum(1).max() == batch["input_ids"].shape[1] <= CONTEXT
    assert len(keys) == len({*keys}) == 60
    held_out = [
        tuple(ids[mask > 0].tolist())
        for b in corpus.held_out
        for ids, mask in zip(b["input_ids"], b["attention_mask"], strict=True)
    ]
    assert held_out == [list(expected)[index] for index in range(5, 60, 10)]


def test_the_class_loss_is_the_negative_log_likelihood_of_the_label():
    torch.manual_seed(1)
    logits = torch.randn(3, 4)
    argument_names = []

    def model(**inputs):
        argument_names.append(sorted(inputs))
        return logits

    batch = {"input_ids": torch.zeros(3, 2), "attention_mask": torch.ones(3, 2), "label": torch.tensor([2, 0, 3])}
    losses = class_loss(model, batch)
    assert argument_names == [["attention_mask", "input_ids"]]
    assert losses == pytest.approx(-logits.softmax(1)[range(3), [2, 0, 3]].log(), rel=1e-5)


def test_accuracy_is_the_share_of_correct_classes():
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


def test_text_and_label_columns_can_be_chosen(tmp_path):
    rows = [{"body": f"word{n} and more", "kind": n % 2, "text": 3, "label": None} for n in range(20)]
    path = write_json_lines(tmp_path / "a.jsonl", rows)
    corpus = corpus_of("classify", path, train_tokenizer(path, "body", 300), column="body", label="kind")
    assert corpus.labels == ("0", "1")


# -- refused inputs --------------------------------------------------------------------------------------------------


def assert_refused(sentence, *arguments, **options):
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        corpus_of(*arguments, **options)


def test_an_unknown_task_is_refused(file):
    assert_refused("task: expected one of lm, mlm, classify, got 'foo'", "foo", file, tiny.tokenizer("decoder"))


@pytest.mark.parametrize("task", ["lm", "mlm"])
def test_a_text_that_is_too_short_is_refused(task, trained, tmp_path):
    for number in (9 * CONTEXT + CONTEXT - 1, CONTEXT - 1):
        (tmp_path / "short.txt").write_text(trained.decode(trained(text())["input_ids"][:number]))
        ids = trained((tmp_path / "short.txt").read_text())["input_ids"]
        used = len(ids) if len(ids) < CONTEXT else len(ids) // CONTEXT * CONTEXT
        assert_refused(
            "data: expected text of at least 160 tokens, for 10 sequences of 16 with one held out, "
            f"got {used} tokens in {tmp_path / 'short.txt'}",
            *(task, tmp_path / "short.txt", trained),
        )


NO_TEXT, BINARY = "at least one document, got no text in {file}", "text in {file}, got a binary file"


@pytest.mark.parametrize(("content", "expected"), [(b"", NO_TEXT), (b" \n\t ", NO_TEXT), (b"\x89PNG\0\0" * 99, BINARY)])
def test_an_empty_text_and_a_binary_file_are_refused(content, expected, tmp_path):
    file = tmp_path / "file.txt"
    file.write_bytes(content)
    sentence = f"data: expected {expected.format(file=file)}"
    assert_refused(sentence, "lm", file, tiny.tokenizer("decoder"))
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        train_tokenizer(file, "text", 300)


def test_a_tokenizer_without_a_mask_token_is_refused(file):
    assert_refused(
        "tokenizer: expected a tokenizer with a mask token, got one without", "mlm", file, tiny.tokenizer("decoder")
    )


def test_a_plain_text_has_no_labels_and_is_refused(file, tmp_path):
    sentence = f"data: expected JSON lines, CSV or Parquet with a column 'label', got {file}"
    assert_refused(sentence, "classify", file, tiny.tokenizer("decoder"))
    (tmp_path / "more").mkdir()
    write_labelled_texts(tmp_path / "more" / "a.jsonl")
    (tmp_path / "more" / "notes.md").write_text("notes")
    sentence = f"data: expected JSON lines, CSV or Parquet with a column 'label', got {tmp_path / 'more' / 'notes.md'}"
    assert_refused(sentence, "classify", tmp_path / "more", tiny.tokenizer("decoder"))


@pytest.mark.parametrize(
    ("labels", "number", "got"),
    [(("one",), 60, "60 texts with 1 labels"), (NAMES, 9, "9 texts with 3 labels")],
)
def test_too_few_labels_or_texts_are_refused(labels, number, got, tmp_path):
    path = write_labelled_texts(tmp_path / "a.jsonl", labels, number)
    sentence = (
        f"data: expected at least 10 texts, of which one is held out, with at least two labels, got {got} in {path}"
    )
    assert_refused(sentence, "classify", path, tiny.tokenizer("decoder"))


def test_unusable_labels_and_columns_are_refused(tmp_path):
    tokenizer = tiny.tokenizer("decoder")
    path = write_json_lines(tmp_path / "a.jsonl", [{"text": "w5", "label": "a"}, {"text": "w6", "label": 0.5}])
    assert_refused(f"column: expected text in 'label' of line 2 of {path}, got float", "classify", path, tokenizer)
    path = write_json_lines(tmp_path / "b.jsonl", [{"text": "w5", "kind": "a"}])
    sentence = f"column: expected one of line 1 of {path}, which has text, kind, got 'label'"
    assert_refused(sentence, "classify", path, tokenizer)
    path = write_json_lines(tmp_path / "c.jsonl", [{"text": 5, "label": "a"}])
    assert_refused(f"column: expected text in 'text' of line 1 of {path}, got int", "classify", path, tokenizer)
