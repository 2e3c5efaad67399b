"""Pages, foci, several texts and generated text on the command line, on a tiny model."""

import json
import re

import pytest

import headwise as hw
import tiny
from headwise.page.columns import sorted_by


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny decoder, another one, two profiles, and texts."""
    path = tmp_path_factory.mktemp("pages")
    for name, seed in (("model", 0), ("other", 1)):
        model = tiny.model("decoder", seed=seed, top="ForCausalLM", eos_token_id=None)
        model.save_pretrained(path / name)
        tiny.tokenizer("decoder").save_pretrained(path / name)
        texts = hw.Texts(tiny.texts(4, 9, 6), tiny.tokenizer("decoder"))
        hw.profile(model.model, texts, repeats=False, out=path / f"{name}-profile", title=name)
    tiny.write_texts(path / "data.jsonl", 11, 5, 23, 7)
    (path / "lines.txt").write_text("w5 w6 w7\n\n   \nw7 w5 w8 w9\n")
    return path


def contents_of(page):
    """Return the contents of a page."""
    text = page.read_text(encoding="utf-8")
    return json.loads(re.search(r'id="contents">(.*?)</script>', text, re.DOTALL)[1])


@pytest.mark.parametrize(
    ("command", "options", "sources"),
    [
        ("profile", ["--no-repeats"], {"4 texts", "profile"}),
        ("ablate", [], {"4 texts", "ablation"}),
        ("importance", ["--method", "gradient"], {"4 texts", "importance"}),
    ],
)
def test_tables_are_written_with_the_attention_on_some_texts(headwise, folder, tmp_path, command, options, sources):
    page = tmp_path / "page.html"
    data = ["--data", folder / "data.jsonl", "--out", tmp_path / "out", "--html", page]
    status, _, err = headwise(command, "--model", folder / "model", *data, *options)
    assert status == 0, err
    contents = contents_of(page)
    assert {statistic["source"] for statistic in contents["statistics"]} == sources
    assert len(contents["models"][0]["heads"]) == 12
    assert sorted(len(passage["sides"][0]["words"]) for passage in contents["passages"]) == [5, 7, 11, 23]


def test_the_page_of_a_profile_opens_on_a_statistic(headwise, folder, tmp_path):
    data = ["--data", folder / "data.jsonl", "--out", tmp_path / "out", "--no-repeats", "--statistic", "evenness"]
    status, _, err = headwise("profile", "--model", folder / "model", *data)
    assert (status, err) == (2, "headwise: statistic: expected --html, whose page opens on it, got no --html\n")
    status, _, err = headwise("profile", "--model", folder / "model", *data, "--html", tmp_path / "page.html")
    assert status == 0, err
    contents = contents_of(tmp_path / "page.html")
    index = [(each["source"], each["name"]) for each in contents["statistics"]].index(("profile", "evenness"))
    assert contents["opening"] == sorted_by(index)


def test_two_profiles_are_compared_on_a_page(headwise, folder, tmp_path):
    page = tmp_path / "page.html"
    status, out, err = headwise("compare", folder / "model-profile", folder / "other-profile", "--html", page)
    assert status == 0, err
    assert f"wrote {page}" in out
    assert [model["name"] for model in contents_of(page)["models"]] == ["model", "other"]


def test_effects_of_layers_have_no_page(headwise, folder, tmp_path):
    options = [
        "--data",
        folder / "data.jsonl",
        "--out",
        tmp_path / "out",
        "--units",
        "layers",
        "--html",
        tmp_path / "p.html",
    ]
    status, _, err = headwise("ablate", "--model", folder / "model", *options)
    assert status == 2
    assert err == "headwise: html: expected --units heads, whose effects a page shows, got --units layers\n"


def test_lines_are_texts_and_foci_are_ranked(headwise, folder):
    view = ["view", f"@{folder / 'lines.txt'}", "--model", folder / "model", "--lines"]
    status, out, err = headwise(*view, "--focus", "fives=w5", "--focus", "w5,w7", "--focus-kind", "received")
    assert status == 0, err
    assert "model, 2 texts, 12 heads" in out
    assert re.search(r"^fives · attention received$", out, re.MULTILINE)
    assert re.search(r"^w5, w7 · attention received$", out, re.MULTILINE)
    assert " ".join(out.split()).count("2 texts are fewer than 5") == 2
    result = json.loads(headwise(*view, "--focus", "fives=w5", "--json")[1])
    assert len(result["rows"]) == 12
    assert {"entropy", "entropy_sem", "entropy_n", "role"} <= set(result["rows"][0])
    assert [text["text"] for text in result["metadata"]["texts"]] == ["w5 w6 w7", "w7 w5 w8 w9"]
    (focus,) = result["metadata"]["foci"]
    assert focus["name"] == "fives"
    assert len(focus["heads"]) == 12
    excesses = [head["excess"] for head in focus["heads"]]
    assert excesses == sorted(excesses, reverse=True)


def test_generated_text_is_viewed(headwise, folder):
    status, out, err = headwise("view", "w5 w6", "--model", folder / "model", "--generate", 4, "--json")
    assert status == 0, err
    (text,) = json.loads(out)["metadata"]["texts"]
    assert text["parts"][0]["first_generated"] == 2
    assert len(text["parts"][0]["words"]) == 6


def test_two_models_are_compared_on_a_page(headwise, folder, tmp_path):
    page = tmp_path / "page.html"
    view = ["view", "w5 w6 w7", "--model", folder / "model", "--against", folder / "other"]
    status, _, err = headwise(*view, "--html", page)
    assert status == 0, err
    assert [model["name"] for model in contents_of(page)["models"]] == ["model", "other"]
    status, _, err = headwise(*view)
    assert status == 2
    assert err == "headwise: against: expected --html, whose page compares both models, got no --html\n"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--focus", "milk"], "focus: expected words of the text (w5, w6, w7), got 'milk'"),
        (["--focus", ","], "focus: expected words between commas, such as coffee,tea, got ','"),
        (["--focus-kind", "exchanged"], "focus-kind: expected --focus, whose words receive or exchange attention, got"),
        (["--generate", "1000"], "generate: expected at most 128 tokens, the model's limit"),
    ],
)
def test_mistakes_are_named(headwise, folder, options, message):
    status, _, err = headwise("view", "w5 w6 w7", "--model", folder / "model", *options)
    assert status == 2
    assert message in err
