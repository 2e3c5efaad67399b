"""The commands that make models smaller: prune, merge, compress and localize."""

import json

import pytest
import torch
import transformers

import headwise as hw
import tiny
from command_lines import RECIPE, printed_by, refusal


@pytest.fixture
def prune(headwise, folder, tmp_path):
    """Function that runs `headwise prune` on the tiny model."""

    def run(*options):
        data = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out")
        return headwise("prune", *data, *options)

    return run


def test_prune_saves_what_the_functions_return(prune, folder, tmp_path):
    out = printed_by(prune("--keep", 0.5, "--constraint", "groups"))
    dense, tokenizer = hw.load(str(folder / "decoder"), "causal")
    texts = hw.Texts(folder / "data.jsonl", tokenizer).within(dense)
    plan = hw.plan_pruning(hw.LeastSquaresScores(dense, texts), keep=0.5, constraint="groups", model=dense)
    expected = hw.prune(dense, plan, calibration=texts)
    before, after = (sum(weight.numel() for weight in each.parameters()) for each in (dense, expected))
    assert out.startswith(f"{plan}\n\nparameters: {before:,} before, {after:,} after (")
    assert out.endswith(f"\nwrote {tmp_path / 'out'}\n")
    assert (tmp_path / "out" / "plan.json").read_text() == plan.to_json()
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected.state_dict()[name])
    assert transformers.AutoTokenizer.from_pretrained(tmp_path / "out").vocab_size == tokenizer.vocab_size
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_plan_is_applied_without_fitting(prune, folder, tmp_path):
    dense, _ = hw.load(str(folder / "decoder"), "causal")
    plan = hw.plan_pruning(hw.MagnitudeScores(dense, {"input_ids": tiny.TOKENS}), keep=0.5)
    plan.save(tmp_path / "plan.json")
    assert prune("--plan", tmp_path / "plan.json", "--no-fit", "--quiet")[0::2] == (0, "")
    loaded, _ = hw.load(str(tmp_path / "out"), "causal")
    expected = hw.prune(dense, plan)
    with torch.no_grad():
        assert torch.equal(loaded(tiny.TOKENS).logits, expected(tiny.TOKENS).logits)


def test_rows_are_modules(prune):
    result = json.loads(printed_by(prune("--keep", 0.5, "--constraint", "free", "--scores", "magnitude", "--json")))
    assert [row["layer"] for row in result["rows"]] == [0, 1]
    assert result["metadata"]["plan"]["constraint"] == "free"
    assert result["metadata"]["parameters_after"] < result["metadata"]["parameters_before"]


@pytest.mark.slow
@pytest.mark.parametrize("scores", ["least-squares", "importance", "ablation"])
@pytest.mark.parametrize("constraint", ["uniform", "groups", "free"])
def test_all_scores_are_those_of_the_functions(scores, constraint, prune, folder, tmp_path):
    printed_by(prune("--keep", 0.5, "--constraint", constraint, "--scores", scores, "--rounds", 1))
    dense, tokenizer = hw.load(str(folder / "decoder"), "causal")
    texts = hw.Texts(folder / "data.jsonl", tokenizer).within(dense)
    made = {
        "least-squares": lambda: hw.LeastSquaresScores(
            dense, texts, hw.next_token_loss if constraint == "free" else None
        ),
        "importance": lambda: hw.importance(dense, texts, hw.next_token_loss),
        "ablation": lambda: hw.ablate(dense, texts, hw.next_token_loss),
    }[scores]()
    expected = hw.plan_pruning(made, keep=0.5, constraint=constraint, model=dense, rounds=1)
    assert hw.PruningPlan.load(tmp_path / "out" / "plan.json").modules == expected.modules


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--keep", 0), "keep: expected a share above 0 and at most 1, got 0.0"),
        (("--keep", 1.5), "keep: expected a share above 0 and at most 1, got 1.5"),
        (("--keep", "nan"), "keep: expected a share above 0 and at most 1, got nan"),
        ((), "keep: expected one of --keep and --plan, got neither"),
        (("--keep", 0.5, "--plan", "p"), "keep: expected one of --keep and --plan, got both"),
        (("--plan", "no.json"), "plan: expected a file with a plan, got 'no.json'"),
        (
            ("--keep", 0.5, "--scores", "size"),
            "Invalid value for '--scores': expected one of least-squares, magnitude,",
        ),
        (("--keep", 0.5, "--out", "{folder}/decoder"), "out: expected a new or empty folder, got files in '"),
        (
            ("--keep", 0.5, "--out", "{folder}", "--force"),
            "out: expected the folder of a saved model, with a config.js",
        ),
    ],
)
@pytest.mark.usefixtures("no_weights")
def test_mistakes_are_found_before_the_weights_are_loaded(options, sentence, headwise, folder, tmp_path):
    options = [str(option).format(folder=folder) for option in options]
    out = () if "--out" in options else ("--out", tmp_path / "out")
    data = ("--model", folder / "decoder", "--data", folder / "data.jsonl")
    assert refusal(headwise("prune", *data, *out, *options)).startswith(sentence)
    assert not (tmp_path / "out").exists()


def test_a_plan_for_another_model_is_refused(prune, tmp_path):
    other = tiny.model("decoder", seed=1, top="ForCausalLM")
    hw.plan_pruning(hw.MagnitudeScores(other, {"input_ids": tiny.TOKENS}), keep=0.5).save(tmp_path / "plan.json")
    refused = refusal(prune("--plan", tmp_path / "plan.json", "--quiet"))
    assert refused == "plan: expected a plan for this model, got one for a model with other weights"
    assert not (tmp_path / "out").exists()


def test_scores_that_need_a_loss_are_refused_for_encoders(headwise, folder, tmp_path):
    data = ("--model", folder / "encoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out", "--quiet")
    for options in (("--scores", "importance"), ("--constraint", "free")):
        refused = refusal(headwise("prune", *data, "--keep", 0.5, *options))
        assert refused.startswith("scores: expected ablation or magnitude for a model without a language-model h")
    printed_by(headwise("prune", *data, "--keep", 0.5))


def test_force_replaces_a_saved_model(prune, tmp_path):
    assert prune("--keep", 0.5, "--scores", "magnitude", "--quiet")[0] == 0
    (tmp_path / "out" / "notes.txt").touch()
    assert refusal(prune("--keep", 0.5, "--scores", "magnitude")).endswith("; --force (force=True) replaces it")
    assert prune("--keep", 0.5, "--scores", "magnitude", "--force", "--quiet")[0] == 0
    assert not (tmp_path / "out" / "notes.txt").exists()


# -- recipes ----------------------------------------------------------------------------------------------------------


def test_compress_prints_the_losses_of_all_steps(headwise, folder, tmp_path):
    out = tmp_path / "out"
    printed = printed_by(headwise("compress", folder / "recipe.toml", "--out", out))
    assert printed.startswith("decoder: next_token_loss on 3 held-out documents\nplain transformers loads the smaller")
    assert printed.endswith(f"wrote {out}\n")
    lines = [line.split() for line in printed.splitlines() if line.startswith(("dense", "pruned"))]
    result = json.loads(printed_by(headwise("compress", folder / "recipe.toml", "--out", out, "--json")))
    described = {"loader": "transformers", "loss": "next_token_loss", "documents": 3}
    assert result["metadata"] == {"model": {"name": "decoder"}, **described}
    for line, row in zip(lines, result["rows"], strict=True):
        assert line[:3] == [row["step"], f"{row['parameters']:,}", f"{row['loss']:.4f}"]
        assert row["loss_n"] == 3


def recipe_in(tmp_path, folder, text):
    """Write a recipe with the model and the data of a folder to a file, and return its path."""
    for name in ("decoder", "data.jsonl", "held-out.jsonl"):
        text = text.replace(f'"{name}"', f'"{folder / name}"')
    (tmp_path / "recipe.toml").write_text(text)
    return tmp_path / "recipe.toml"


@pytest.mark.filterwarnings("ignore:no speed-up is shown")  # depends on the machine
def test_compress_prints_the_report_of_the_recipe(headwise, folder, tmp_path):
    report = "[report]\nprompt = 5\nnew_tokens = 2\nbatches = [1]\nrounds = 6\n"
    recipe, out = recipe_in(tmp_path, folder, RECIPE + report), tmp_path / "out"
    printed = printed_by(headwise("compress", recipe, "--out", out))
    assert printed.endswith(f"\n\n{hw.CompressionReport.load(out / 'before-after.json')}\n\nwrote {out}\n")


def test_mistakes_in_a_recipe_are_one_sentence(headwise, folder, tmp_path):
    recipe, missing = recipe_in(tmp_path, folder, RECIPE.replace("keep = 0.5", "keep = 2")), tmp_path / "no.toml"
    for path, sentence in (
        (recipe, "keep: expected a share above 0 and at most 1, got 2.0, in [prune]"),
        (missing, f"recipe: expected a TOML file '{missing}' that can be read, got No such"),
    ):
        assert refusal(headwise("compress", path, "--out", tmp_path / "out")).startswith(sentence)
    assert not (tmp_path / "out").exists()


# -- merging and localizing -------------------------------------------------------------------------------------------


def test_merge_saves_what_merge_kv_returns(headwise, folder, tmp_path):
    data = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out")
    out = printed_by(headwise("merge", *data, "--kv-heads", 1))
    assert out.startswith("key/value heads in each layer: 1\n")
    model, tokenizer = hw.load(str(folder / "decoder"), "causal")
    texts = hw.Texts(str(folder / "data.jsonl"), tokenizer).within(model)
    expected = hw.merge_kv(model, num_kv_heads=1, calibration=texts, method="procrustes").state_dict()
    found, _ = hw.load(str(tmp_path / "out"), "causal")
    assert found.config.num_key_value_heads == 1
    for name, value in found.state_dict().items():
        torch.testing.assert_close(value, expected[name], rtol=1e-4, atol=1e-5)
    out = printed_by(headwise("merge", *data, "--kv-heads", 1, "--method", "mean", "--force", "--csv"))
    assert out.splitlines()[0] == "kv_heads,parameters_before,parameters_after"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (("--kv-heads", 3), "num_kv_heads: expected"),
        (("--kv-heads", 1, "--method", "median"), "Invalid value for '--method': expected one of"),
        (("--kv-heads", 1, "--grouping", "random"), "Invalid value for '--grouping': expected one of"),
    ],
)
def test_mistakes_in_a_merge_are_one_sentence(options, sentence, headwise, folder, tmp_path):
    data = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", tmp_path / "out")
    assert refusal(headwise("merge", *data, *options, "--quiet")).startswith(sentence)
    assert not (tmp_path / "out").exists()


def test_localize_saves_the_streaming_heads(headwise, folder, tmp_path):
    file = tmp_path / "heads.json"
    data = ("--model", folder / "decoder", "--data", folder / "data.jsonl", "--out", file)
    options = ("--window", 3, "--first", 1, "--budget", 0.5)
    out = printed_by(headwise("localize", *data, *options))
    assert out.endswith("heads.json\n")
    saved = hw.StreamingHeads.load(file)
    assert (saved.window, saved.first, saved.budget) == (3, 1, 0.5)
    assert str(saved) in out
    assert refusal(headwise("localize", *data, *options)).startswith("out: expected a new file, got")
    rows = json.loads(printed_by(headwise("localize", *data, *options, "--force", "--json")))["rows"]
    assert [row["layer"] for row in rows] == [module.layer for module in saved.modules]
