"""Documents are read, tokenized, cut or packed, and batched as written out in the tests."""

import json

import numpy as np
import pandas
import pytest
import torch

import headwise as hw
import tiny
from headwise.data.documents import documents_in_memory, read_documents

ENCODER, DECODER = tiny.tokenizer("encoder"), tiny.tokenizer("decoder")
SEP, END = 3, 4


DOCUMENTS = ["w5 w6 w7", "w8 w9 w10 w11 w12", "w13"]


@pytest.mark.parametrize(
    ("tokenizer", "options", "expected"),
    [
        (DECODER, {"documents": "whole"}, [[5, 6, 7], [8, 9, 10, 11, 12], [13]]),
        (ENCODER, {"documents": "whole"}, [[2, 5, 6, 7, 3], [2, 8, 9, 10, 11, 12, 3], [2, 13, 3]]),
        (DECODER, {"documents": "truncate", "context": 2}, [[5, 6], [8, 9], [13]]),
        (ENCODER, {"documents": "truncate", "context": 4}, [[2, 5, 6, 3], [2, 8, 9, 3], [2, 13, 3]]),
        (DECODER, {"documents": "cut", "context": 2}, [[5, 6], [7], [8, 9], [10, 11], [12], [13]]),
        (ENCODER, {"documents": "cut", "context": 5}, [[2, 5, 6, 7, 3], [2, 8, 9, 10, 3], [2, 11, 12, 3], [2, 13, 3]]),
        (DECODER, {"documents": "pack", "context": 4}, [[5, 6, 7, END], [8, 9, 10, 11]]),
        (DECODER, {"documents": "pack", "context": 3}, [[5, 6, 7], [END, 8, 9], [10, 11, 12]]),
        (DECODER, {"documents": "pack", "context": 64}, [[5, 6, 7, END, 8, 9, 10, 11, 12, END, 13]]),
        (ENCODER, {"documents": "pack", "context": 6}, [[2, 5, 6, 7, SEP, 3], [2, 8, 9, 10, 11, 3]]),
        (DECODER, {"documents": "cut", "context": 2, "limit": 3}, [[5, 6], [7], [8, 9]]),
        (DECODER, {"documents": "pack", "context": 3, "limit": 1}, [[5, 6, 7]]),
    ],
)
def test_documents_become_the_expected_sequences(tokenizer, options, expected):
    texts = hw.Texts(DOCUMENTS, tokenizer, **options)
    assert [sequence.tolist() for sequence in texts.sequences] == expected
    assert texts.tokens == sum(map(len, expected))


def test_packing_equals_cutting_the_stream_of_all_documents():
    """For every context length, only an incomplete sequence at the end is lost, and no token appears twice."""
    for context in range(1, 13):
        documents = tiny.texts(3, 1, 11, 2, 5)
        stream = [token for text in documents for token in [*DECODER(text)["input_ids"], END]][:-1]
        packed = [s.tolist() for s in hw.Texts(documents, DECODER, context=context, documents="pack").sequences]
        complete = len(stream) // context * context
        assert packed == [stream[start : start + context] for start in range(0, complete, context)]


def test_batches_have_sequences_of_equal_length_longest_first():
    batches = list(hw.Texts([*DOCUMENTS, "w14 w15 w16", "w17 w18 w19"], ENCODER, batch=2))
    assert [batch["input_ids"].tolist() for batch in batches] == [
        [[2, 8, 9, 10, 11, 12, 3]],
        [[2, 5, 6, 7, 3], [2, 14, 15, 16, 3]],
        [[2, 17, 18, 19, 3]],
        [[2, 13, 3]],
    ]
    assert batches[1]["attention_mask"].tolist() == [[1] * 5] * 2
    assert all(tensor.dtype == torch.int64 for batch in batches for tensor in batch.values())


def test_texts_from_a_generator_can_be_iterated_repeatedly():
    texts = hw.Texts((text for text in DOCUMENTS), DECODER)
    first = [batch["input_ids"].tolist() for batch in texts]
    assert [batch["input_ids"].tolist() for batch in texts.within(tiny.model("decoder"))] == first


def test_blank_documents_are_left_out():
    assert len(hw.Texts(["", " \n", "w5", "\t"], DECODER).sequences) == 1


@pytest.fixture
def folder(tmp_path):
    """Return a folder with documents in every format, and a hidden file."""
    (tmp_path / "b.txt").write_bytes(b"\xef\xbb\xbfw5 w6\nw7\n")  # with a byte-order mark
    (tmp_path / "c.jsonl").write_text('{"text": "w8", "id": 1}\n\n{"text": "w9 w10"}\n')
    (tmp_path / ".hidden").write_bytes(b"\0")
    (tmp_path / "a").mkdir()
    pandas.DataFrame({"text": ["w11", "w12"], "id": [1, 2]}).to_parquet(tmp_path / "a" / "z.parquet")
    return tmp_path


def test_a_folder_contains_the_documents_of_all_its_files_in_order(folder):
    documents = list(read_documents(folder, "text"))
    assert [document.text for document in documents] == ["w11", "w12", "w5 w6\nw7\n", "w8", "w9 w10"]
    assert [document.location.removeprefix("row ").removeprefix("line ")[:4] for document in documents[:2]] == [
        "1 of",
        "2 of",
    ]
    assert documents[-1].location == f"line 3 of {folder / 'c.jsonl'}"


def test_documents_in_memory_can_be_rows():
    rows = [{"body": "w5", "id": 3}, {"body": "w6"}]
    assert [document.text for document in documents_in_memory(rows, "body")] == ["w5", "w6"]


NO_TEXT, NOT_UTF8 = (
    "data: expected at least one document, got no text in {file}",
    "data: expected UTF-8 in {file}, got ",
)
BEYOND = "data: expected JSON in line 1 of {file}, got a number or nesting beyond the limits"
HALF = "data: expected text that can be written as UTF-8, got half a character in line 1 of {file}"
LONG = (
    "data: expected documents of at most 8 tokens, the context without special tokens, got 9 in {file}; "
    "--documents cut, pack or truncate (documents=...) accepts longer ones"
)
BAD = {
    "empty.txt": (b"", NO_TEXT),
    "blank.txt": (b" \n\n", NO_TEXT),
    "binary.txt": (b"GIF89a\0\x01", "data: expected text in {file}, got a binary file"),
    "latin.txt": ("w5 café".encode("latin-1"), NOT_UTF8 + "another byte at offset 6"),
    "latin.jsonl": (b'{"text": "w5"}\n{"text": "caf\xe9"}\n', NOT_UTF8 + "another byte at offset 28"),
    "empty.jsonl": (b"", NO_TEXT),
    "broken.jsonl": (
        b'{"text": "w5"}\n{"text": \n',
        "data: expected JSON in line 2 of {file}, got Expecting value at column 1",
    ),
    "cut.jsonl": (
        b'{"text": "w5 w6',
        "data: expected JSON in line 1 of {file}, got Unterminated string starting at column 10",
    ),
    "list.jsonl": (b'["w5"]\n', "data: expected an object with a column 'text' in line 1 of {file}, got list"),
    "column.jsonl": (
        b'{"text": "w5"}\n{"body": "w6", "id": 1}\n',
        "column: expected one of line 2 of {file}, which has body, id, got 'text'",
    ),
    "number.jsonl": (b'{"text": 5}\n', "column: expected text in 'text' of line 1 of {file}, got int"),
    "nested.jsonl": (b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}\n", BEYOND),
    "digits.jsonl": (b'{"text": ' + b"9" * 5000 + b"}\n", BEYOND),
    "half.jsonl": (b'{"text": "w5 \\ud800"}\n', HALF),
    "no.parquet": (b"w5 w6", "data: expected a parquet file in {file}, got another format"),
    "long.txt": (b"w5 " * 9, LONG),
}


@pytest.mark.parametrize("name", BAD)
def test_unreadable_files_are_refused(name, tmp_path):
    content, sentence = BAD[name]
    (tmp_path / name).write_bytes(content)
    with pytest.raises(hw.InputError) as refused:
        _ = hw.Texts(tmp_path / name, DECODER, context=8).sequences
    assert str(refused.value) == sentence.format(file=tmp_path / name)


def test_a_parquet_file_without_the_column_or_its_text_is_refused(tmp_path):
    pandas.DataFrame({"body": ["w5"], "id": [1]}).to_parquet(tmp_path / "rows.parquet")
    sentence = "^column: expected one of .*rows.parquet, which has body, id, got 'text'$"
    with pytest.raises(hw.InputError, match=sentence):
        list(read_documents(tmp_path / "rows.parquet", "text"))
    pandas.DataFrame({"text": ["w5", None]}).to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(hw.InputError, match="^column: expected text in 'text' of row 2 of .*, got NoneType$"):
        list(read_documents(tmp_path / "rows.parquet", "text"))


def test_a_damaged_parquet_file_is_refused(tmp_path):
    path = tmp_path / "rows.parquet"
    pandas.DataFrame({"text": ["w5", "w6"]}).to_parquet(path)
    data = path.read_bytes()
    path.write_bytes(data[:4] + bytes(40) + data[44:])
    with pytest.raises(
        hw.InputError, match="^data: expected a file .*rows.parquet' that can be read, got .*$"
    ) as refused:
        list(read_documents(path, "text"))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_an_impossible_path_is_refused(name):
    with pytest.raises(hw.InputError, match="^data: expected a file .* that can be read, got "):
        list(read_documents(name, "text"))


def test_missing_files_are_refused(tmp_path):
    with pytest.raises(hw.InputError, match="^data: expected a file .*no.txt' that can be read, got No such file or"):
        list(read_documents(tmp_path / "no.txt", "text"))
    (tmp_path / ".hidden").write_text("w5")
    with pytest.raises(hw.InputError, match="^data: expected a folder with files, got none in "):
        list(read_documents(tmp_path, "text"))


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"documents": "split"}, "documents: expected one of whole, truncate, cut, pack, got 'split'"),
        ({"context": 0}, "context: expected a whole number of 1 or more, got 0"),
        ({"batch": 0}, "batch: expected a whole number of 1 or more, got 0"),
        ({"limit": 2**63}, f"limit: expected a whole number from 1 to {2**63 - 1}, got {2**63}"),
        ({"batch": True}, "batch: expected a whole number of 1 or more, got True"),
        ({"limit": -1}, "limit: expected a whole number of 1 or more, got -1"),
        ({"documents": ["cut"]}, "documents: expected one of whole, truncate, cut, pack, got ['cut']"),
        ({"source": 5}, "source: expected a file, a folder, or documents: strings or mappings, got int"),
        ({"source": None}, "source: expected a file, a folder, or documents: strings or mappings, got NoneType"),
        ({"tokenizer": None}, "tokenizer: expected a transformers tokenizer, got NoneType"),
        ({"context": 2}, "context: expected more than the 2 special tokens of a sequence, got 2"),
    ],
)
def test_unusable_options_are_refused(options, sentence):
    with pytest.raises(hw.InputError) as refused:
        _ = hw.Texts(**{"source": DOCUMENTS, "tokenizer": ENCODER} | options).sequences
    assert str(refused.value) == sentence


def test_the_default_context_is_the_limit_of_the_model():
    model = tiny.model("decoder")
    assert hw.Texts(DOCUMENTS, DECODER).within(model).context == 128
    assert hw.Texts(DOCUMENTS, DECODER, context=5).within(model).context == 5
    with pytest.raises(hw.InputError, match="^context: expected at most 128 tokens, the model's limit, got 129$"):
        hw.Texts(DOCUMENTS, DECODER, context=129).within(model)


def test_json_lines_can_contain_any_script(tmp_path):
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "茶 ☕ é"}))
    assert [document.text for document in read_documents(tmp_path / "a.jsonl", "text")] == ["茶 ☕ é"]


@pytest.mark.usefixtures("as_user")
def test_sizes_may_be_integers_of_numpy():
    texts = hw.Texts(DOCUMENTS, DECODER, context=np.int64(5), batch=np.int32(2), limit=np.int64(1))
    assert [type(each) for each in (texts.context, texts.batch, texts.limit)] == [int, int, int]
