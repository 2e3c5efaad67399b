"""Fixtures of the tests of the command line."""

import io
import json
import sys

import pytest

import headwise as hw
import tiny
from command_lines import RECIPE
from headwise.cli import app as cli

PAIRS = (
    {"clean": "w13 w14 w5", "corrupted": "w6 w14 w5", "answer": " w7", "wrong": " w8"},
    {"clean": "w11 w12 w19 w13", "corrupted": "w11 w15 w19 w13", "answer": " w12", "wrong": " w8"},
)


@pytest.fixture
def headwise(monkeypatch, capsys, as_user):
    """Function that runs the command in this process, with bytes on standard input, and returns its status, output and
    errors.
    """

    def run(*arguments, stdin=b""):
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(stdin)))
        capsys.readouterr()  # what the test itself printed
        status = cli.run()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run


@pytest.fixture
def no_weights(monkeypatch):
    """Make loading the weights of any model an error of the test."""
    monkeypatch.setattr("headwise.data.models.ModelSource.model", pytest.fail)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Folder with tiny models (a decoder, another one, an encoder without and with a head), two profiles and scores of
    the decoder, texts, a recipe, and pairs of prompts. Tests do not change them.
    """
    path = tmp_path_factory.mktemp("commands")
    for name, seed in (("decoder", 0), ("other", 1)):
        tiny.save(path / name, "decoder", seed=seed, top="ForCausalLM", eos_token_id=None)
    tiny.save(path / "encoder", "encoder")
    tiny.save(path / "masked", "encoder", top="ForMaskedLM")
    texts = [json.dumps({"text": text}) + "\n" for text in tiny.texts(21, 19, 23, 7, 12, 9, 5)]
    (path / "data.jsonl").write_text("".join(texts[:4]))
    (path / "held-out.jsonl").write_text("".join(texts[4:]))
    (path / "recipe.toml").write_text(RECIPE)
    (path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in PAIRS))
    model, tokenizer = tiny.model("decoder", top="ForCausalLM"), tiny.tokenizer("decoder")
    for name, seed, number in (("a", 0, 4), ("b", 0, 3), ("of-other", 1, 4)):
        profiled = tiny.model("decoder", seed=seed, top="ForCausalLM").model
        data, title = hw.Texts(path / "data.jsonl", tokenizer, limit=number), "other" if seed else "decoder"
        hw.profile(profiled, data, repeats=False, out=path / name, title=title)
    hw.importance(model, hw.Texts(path / "held-out.jsonl", tokenizer), hw.next_token_loss, out=path / "scores")
    return path
