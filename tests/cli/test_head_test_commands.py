"""The commands that test single heads: retrieval, sinks, name-movers and dependencies."""

import json
import re

import pytest
import tokenizers
import transformers
from tokenizers import models, pre_tokenizers

import headwise as hw
import tiny
from command_lines import printed_by, refusal
from headwise.analysis.head_tests.haystacks import ANSWERS, PLACES, THINGS
from headwise.analysis.head_tests.name_prompts import NAMES, TEMPLATES

TREEBANK = """\
1\tThe\t_\t_\t_\t_\t2\tdet\t_\t_
2\tsmall\t_\t_\t_\t_\t3\tnsubj\t_\t_
3\tship\t_\t_\t_\t_\t0\troot\t_\tSpaceAfter=No
4\t.\t_\t_\t_\t_\t3\tpunct\t_\t_

"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Folder with a tiny decoder and an encoder that know the words of prompts, a haystack, a treebank and texts."""
    path = tmp_path_factory.mktemp("models")
    words = [*NAMES, *ANSWERS, *PLACES, *THINGS, *TEMPLATES, "The of is Question What Answer ? : . small ship"]
    found = dict.fromkeys(re.findall(r"\w+|[^\w\s]", " ".join(words)))
    vocabulary = {word: number for number, word in enumerate(["[UNK]", "[END]", *found])}
    inner = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, unk_token="[UNK]", eos_token="[END]")
    for kind, top in (("decoder", "ForCausalLM"), ("encoder", "")):
        model = tiny.model(kind, top=top, vocab_size=len(vocabulary), max_position_embeddings=256)
        model.save_pretrained(path / kind)
        tokenizer.save_pretrained(path / kind)
    (path / "haystack.txt").write_text("\n\n".join(["The small ship is warm . What is the boat ?"] * 60))
    (path / "trees.conllu").write_text(TREEBANK * 12)
    lines = [json.dumps({"text": "The small ship " * size}) + "\n" for size in (2, 5, 3)]
    (path / "texts.jsonl").write_text("".join(lines))
    return path


def test_retrieval_is_printed_and_saved(folder, headwise, tmp_path):
    options = ("--haystack", folder / "haystack.txt", "--lengths", "60,80", "--needles", 3, "--continuation", "forced")
    command = ("retrieval", "--model", folder / "decoder", *options, "--out", tmp_path / "out", "--top", 2)
    out = printed_by(headwise(*command, "--quiet"))
    table = hw.Retrieval.load(tmp_path / "out")
    assert out.splitlines()[0] == "decoder: 18 of 18 texts with 3 needles; the model repeats 100% of the answers"
    best = max(row.statistics["score"].value for row in table.rows)
    assert f"{best:.4f}" in out
    assert "of 12 with a score above 0.1, at a false discovery rate of 5%" in out
    assert "got another run (settings.seed differs) in " in refusal(headwise(*command, "--seed", 1))
    out = printed_by(headwise(*command, "--force", "--json"))
    assert [row["score"] for row in json.loads(out)["rows"]] == [row.statistics["score"].value for row in table.rows]


def test_sinks_are_printed_and_saved(folder, headwise, tmp_path):
    command = ("sinks", "--model", folder / "encoder", "--data", folder / "texts.jsonl", "--positions", "0,3")
    out = printed_by(headwise(*command, "--out", tmp_path / "out", "--quiet"))
    table = hw.SinkRate.load(tmp_path / "out")
    assert out.splitlines()[0] == "encoder: 3 sequences; threshold 0.3"
    of_model = table.metadata["measured"]["model"]["sink_3"]
    assert f"sink_3 of the model: {of_model['value']:.4f} ± {of_model['sem']:.2g}" in out
    assert set(table.statistics) == {"attention_0", "attention_3", "sink_0", "sink_3"}


def test_name_movers_are_printed_and_saved(folder, headwise, tmp_path):
    command = ("name-movers", "--model", folder / "decoder", "--prompts", 32, "--copied", 2, "--out", tmp_path / "out")
    status, out, err = headwise(*command, "--quiet")
    assert (status, err) == (0, "")
    table = hw.NameMovers.load(tmp_path / "out")
    assert out.startswith("decoder: 32 prompts; logit difference ")
    names = ", ".join(row.name for row in table.found()) or "none"
    assert f"name movers at a false discovery rate of 5%: {names}" in out
    model, tokenizer = hw.load(str(folder / "decoder"), lm_head="causal")
    again = hw.name_movers(model, tokenizer, prompts=32, copied=2)
    assert [row.statistics["logit"].value for row in again.rows] == pytest.approx(
        [row.statistics["logit"].value for row in table.rows], rel=1e-4, abs=1e-6
    )


def test_dependencies_are_printed_and_saved(folder, headwise, tmp_path):
    pytest.importorskip("conllu")
    command = ("dependencies", "--model", folder / "encoder", "--treebank", folder / "trees.conllu", "--fewest", 3)
    out = printed_by(headwise(*command, "--out", tmp_path / "out", "--quiet"))
    table = hw.DependencyAccuracy.load(tmp_path / "out")
    assert {row.relation for row in table.rows} == {"det", "nsubj"}
    assert out.splitlines()[0] == "encoder: 12 sentences, 48 pairs"
    assert "of 12 better than the best fixed offset, at a false discovery rate of 5%" in out
    assert "(+1)" in out
    refused = refusal(headwise("dependencies", "--model", folder / "encoder", "--treebank", folder / "none.conllu"))
    assert refused.startswith("treebank: expected a file ")
