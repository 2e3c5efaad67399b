"""The examples, tables and links of the README, the docs and the docstrings are correct."""

import contextlib
import doctest
import functools
import io
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

import headwise
import tiny
from headwise.analysis.roles import ROLES
from headwise.attention.masks import factories
from headwise.data.models import load
from headwise.show.terminal import print_view

ROOT = Path(__file__).parent.parent


def code_blocks(page: str) -> list[tuple[str, str]]:
    """Return the Python blocks of a page, each with the output block that follows it or an empty string."""
    return re.findall(r"```python\n(.*?)```(?:\n```\n(.*?)```)?", text_of(page), re.DOTALL)


def run(blocks: list[tuple[str, str]], names: dict) -> str:
    """Execute blocks of code in one namespace and return what they print."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        for code, _ in blocks:
            exec(code, names)
    return printed.getvalue()


def text_of(page: str) -> str:
    """Return the text of a page."""
    return (ROOT / page).read_text(encoding="utf-8")


def write_json_lines(path: Path, texts: Iterable[str]) -> None:
    """Write texts to a file of JSON lines."""
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf-8")


@pytest.mark.filterwarnings("ignore:attention is not accelerated")  # without a compiler
def test_the_code_of_the_readme_runs_and_prints_the_shown_output(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    texts = ("A cup of tea.", "And one of coffee.", "One cup of tea, and then another one. " * 200)
    write_json_lines(tmp_path / "corpus.jsonl", texts)
    names = {}
    blocks = code_blocks("README.md")
    assert len(blocks) == 7
    assert run(blocks, names) == "".join(output for _, output in blocks)
    assert len(names["table"]) == len(names["effects"].table()) == len(names["scores"].table()) == 72
    assert names["out"].shape == (1, 8, 4096, 64)
    assert names["monitor"].history.steps == [0, 10]


def test_the_code_of_the_page_about_view_runs(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names: dict = {}
    blocks = code_blocks("docs/view.md")
    assert run(blocks, names).split() == "".join(output for _, output in blocks).split()
    assert names["seen"].head(0, 2).role.name == "previous token"
    assert round(names["seen"].head(0, 2).means["entropy"], 4) == 0.0008
    assert (tmp_path / "page.html").stat().st_size > 100_000


def test_the_code_of_the_page_about_pages_runs(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text("A cup of tea.\n\nAnd one of coffee.\n")
    run(code_blocks("docs/page.md"), {})
    assert {path.name for path in tmp_path.iterdir()} == {"corpus.txt", "page.html", "entropy.html", "compared.html"}


@pytest.mark.slow
def test_the_code_of_the_page_about_analyses_joins_tables(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "corpus.jsonl", ("A cup of tea.", "And one of coffee."))
    names: dict = {}
    blocks = code_blocks("docs/analyses.md")
    assert run(blocks, names) == "".join(output for _, output in blocks) == "(2, 2)\n"
    assert len(names["joined"]) == 72


def test_the_code_of_the_pages_about_norms_and_rollout_runs(minilm, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_json_lines(tmp_path / "corpus.jsonl", ("A cup of tea.", "And one of coffee."))
    names: dict = {}
    run(code_blocks("docs/norm-weighted.md") + code_blocks("docs/rollout.md"), names)
    assert len(names["norms"].table()) == len(names["rollout"].table()) == 72
    assert len(names["rollout"].layers.table()) == 6
    assert names["rolled"].weights.sum(-1).tolist() == pytest.approx([1.0, 1.0])


@pytest.mark.slow
def test_the_code_of_the_page_about_the_formation_of_heads_runs():
    names: dict = {}
    assert len(run(code_blocks("docs/formation.md"), names).splitlines()) == 2
    assert names["monitor"].history.steps == [0, 20]


def test_the_recipe_of_the_page_about_pruning_runs(tmp_path):
    (recipe,) = re.findall(r"```toml\n(.*?)```", text_of("docs/prune.md"), re.DOTALL)
    tiny.save(tmp_path / "tiny", "decoder", top="ForCausalLM")
    first, *others = tiny.texts(200, 30, 150, 20)
    (tmp_path / "corpus.txt").write_text(first)
    write_json_lines(tmp_path / "held-out.jsonl", others)
    (tmp_path / "recipe.toml").write_text(recipe.replace('"smollm2"', '"tiny"').replace("steps = 200", "steps = 4"))
    report = headwise.compress(tmp_path / "recipe.toml", tmp_path / "smaller")
    assert [stage.name for stage in report.stages] == ["dense", "pruned", "healed"]
    assert (report.documents, report.stages[0].loss.n) == (3, 3)
    names = {path.name for path in (tmp_path / "smaller").iterdir()}
    assert names == {"model", "plan.json", "report.json", "pruned", "recipe.json"}


@pytest.mark.slow
def test_the_code_of_the_page_about_streaming_heads_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text(text_of("docs/layer.md"))
    names: dict = {}
    assert "of 90 key/value heads stream (the first 4 tokens and a window of 64), budget 1.00%" in run(
        code_blocks("docs/localize.md"), names
    )
    before, after = names["streaming"].selection_losses
    assert before < after <= 1.01 * before
    assert names["streaming"].cache_bytes(8192).saved > 0.1
    assert names["out"].shape[1] == names["prompt"]["input_ids"].shape[1] + 20


@pytest.mark.slow
def test_the_code_of_the_page_about_circuits_runs():
    names: dict = {}
    assert run(code_blocks("docs/circuits.md"), names).startswith("[HeadPair(17.8>18.7, q ")
    composition = names["composition"]
    page = text_of("docs/circuits.md")
    rows = re.findall(r"^\| (\d+)\.(\d+) \| (.*) \| (0\.\d+) \|$", page, re.MULTILINE)
    assert len(rows) == 9
    for layer, head, partners, other in rows:
        pairs = [row for row in composition.rows if (row.layer, row.head) == (int(layer), int(head))]
        ranked = sorted(pairs, key=lambda row: -row.statistics["k"].value)
        written = [*re.findall(r"([\d.]+) \((0\.\d+)\)", partners), (None, other)]
        for row, (name, value) in zip(ranked, written, strict=False):
            assert name in (None, f"{row.earlier_layer}.{row.earlier_head}")
            assert f"{row.statistics['k'].value:.3f}" == value
    assert sum(row.statistics["k"].value >= 3 * composition.expected for row in composition.rows) == 20
    copying = [row.statistics["copying"].value for row in names["scores"].rows]
    assert round(torch.tensor(copying).quantile(0.5).item(), 2) == 0.43


@pytest.mark.slow
def test_the_code_of_the_page_about_pruning_runs(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "corpus.txt").write_text(text_of("docs/layer.md"))
    write_json_lines(tmp_path / "held-out.jsonl", text_of("docs/watch.md").split("\n## "))
    model, tokenizer = headwise.load("smollm2", "causal")
    model.model.layers, model.config.num_hidden_layers = model.model.layers[:2], 2
    for each in (model, tokenizer):
        each.save_pretrained("two-layers")
    names: dict = {}
    shorter = {
        "texts, 200, out": "texts, 2, out",
        "limit=8": "limit=2",
        "limit=16": "limit=2",
        "context=128": "context=80",
    }
    shorter['"smollm2"'] = '"./two-layers"'
    blocks = [
        (functools.reduce(lambda text, pair: text.replace(*pair), shorter.items(), code), output)
        for code, output in code_blocks("docs/prune.md")
    ]
    assert "12 of 18 heads remain (67%), constraint groups" in run(blocks, names)
    assert names["plan"].kept_heads == 9
    assert names["report"].row("parameters in attention").change == pytest.approx(2 / 3)
    assert names["report"].row("cache per token").dense == 2 * 2 * 3 * 64 * 4
    assert {path.suffix for path in (tmp_path / "smaller").iterdir()} == {".json", ".safetensors"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "healed").eval()
    assert names["smaller"] is names["healed"]
    ids = torch.arange(100, 120)[None]
    with torch.no_grad():
        assert torch.equal(loaded(ids).logits, names["smaller"](ids).logits)
    assert (loaded.config.num_attention_heads, loaded.config.num_key_value_heads) == (6, 2)


def test_the_code_and_the_examples_of_the_page_about_plots_run(minilm, coffee, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    names: dict = {"seen": coffee, "effects": headwise.Ablation.load(ROOT / "research/findings/results/minilm/heads")}
    run(code_blocks("docs/plots.md"), names)
    assert Path("entropy.svg").stat().st_size > 1000
    names["pyplot"].close(names["figure"])
    inputs = minilm.tokenizer("A cup of tea.", return_tensors="pt")
    with headwise.watch(minilm.model) as names["heads"]:
        minilm.model(**inputs)
    text = text_of("docs/plots.md")
    rows = re.findall(r'^\| `"(\w+)"` \|.*\| `(.*)` \|$', text, re.MULTILINE)
    assert len(rows) == 8
    for kind, example in rows:
        assert f'kind="{kind}"' in example or kind == "heatmap"
        assert eval(example, names).has_data()


def test_the_page_about_plots_names_the_kinds_of_every_result(coffee):
    text = text_of("docs/plots.md")
    rows = re.findall(r"^\| `(\w+)` \| .* \| ([\w, ]+) \|$", text, re.MULTILINE)
    with pytest.raises(headwise.InputError) as caught:
        coffee.plot(kind="no such kind")
    assert f"one of {dict(rows)['View']}, got" in str(caught.value)


@pytest.fixture
def reader(tmp_path, monkeypatch, request):
    """Folder of a reader with data: a short document and very long ones. `hw.load("smollm2")` returns a small decoder
    of 2 layers, or as many as the test states, in place of the real one.
    """
    options = {"top": "ForCausalLM", "max_position_embeddings": 2048}
    small = (
        tiny.model("decoder", num_hidden_layers=getattr(request, "param", 2), **options),
        tiny.tokenizer("decoder"),
    )
    monkeypatch.setattr(headwise, "load", lambda name, *a, **k: small if name == "smollm2" else load(name, *a, **k))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MPLBACKEND", "agg")
    documents = ["A cup of tea.", *tiny.texts(700, 650, 600)]
    for number, name in enumerate(("corpus", "validation", "test")):
        write_json_lines(tmp_path / f"{name}.jsonl", (f"w{90 + number} {text}" for text in documents))
    return tmp_path


PAGES = (
    *("accelerate", "backends", "convert", "cpu", "distances", "gates", "gpu", "importance", "in-context", "masks"),
    *("positions", "profile", "relevance", "roles", "study", "watch"),
)
"""Pages whose examples run as they stand, with small models. Other tests run the examples of the other pages."""

NOT_RUN = ("head-tests", "patching")
"""Pages whose examples need what the real SmolLM2 has learned, for many minutes. Their names are checked alone."""


@pytest.mark.filterwarnings("ignore:attention is not accelerated")
@pytest.mark.parametrize(
    ("page", "reader"), [(page, 8 if page == "gates" else 2) for page in PAGES], ids=PAGES, indirect=["reader"]
)
def test_the_examples_of_a_page_run_in_order(page, reader):
    names: dict = {}
    run(code_blocks(f"docs/{page}.md"), names)
    if "acceleration" in names:
        assert not names["acceleration"].is_active
    if page == "masks":
        assert names["reason"] == "torch's fused operators have no softcap"
    if page == "convert":
        for ours, theirs in zip(
            names["layer"].parameters(), headwise.from_torch(names["theirs"]).parameters(), strict=True
        ):
            assert torch.equal(ours, theirs)


def undefined_names(code: str) -> list[str]:
    """Return the names that code uses and nothing defines."""
    command = [sys.executable, "-m", "ruff", "check", "--isolated", "--select=F821", "--output-format=json", "-"]
    result = subprocess.run(command, input=code, capture_output=True, text=True, check=False)
    return [each["message"] for each in json.loads(result.stdout)]


def test_every_name_in_the_examples_of_a_page_is_defined_on_it():
    pages = [page for page in (ROOT / "docs").glob("*.md") if "```python" in page.read_text(encoding="utf-8")]
    assert len(pages) > 25
    for page in (ROOT / "README.md", *pages):
        code = "\n".join(block for block, _ in code_blocks(str(page.relative_to(ROOT))))
        assert undefined_names(code) == [], page.name
    assert undefined_names("import torch\nprint(torch, model)") == ["Undefined name `model`"]
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    named = {name for text in texts for name in re.findall(r"[\w-]+\.md", text)}
    for page in pages:  # the examples of every page are run by some test
        assert page.stem in (*PAGES, *NOT_RUN) or page.name in named, page.name


def test_the_code_of_the_page_about_monitoring_runs(reader):
    names: dict = {}
    blocks = code_blocks("docs/monitor.md")
    without_lightning = [block for block in blocks if "import lightning" not in block[0]]
    run(without_lightning, names)
    assert len(blocks) - len(without_lightning) == 1
    assert headwise.History.load("run").steps == [0, 10, 20]
    assert names["history"].steps == [0, 10, 20]
    assert headwise.History.load("trainer-run").steps == [0]
    assert {path.name for path in Path("run").glob("*.png")} >= {"max_logit.png", "entropy.png"}


def test_the_code_for_lightning_on_the_page_about_monitoring_runs(reader):
    pytest.importorskip("lightning.pytorch")
    first, *_, of_lightning = code_blocks("docs/monitor.md")
    run([(first[0].partition("with hw.monitor")[0], ""), of_lightning], {})
    assert headwise.History.load("lightning-run").steps == [0]


def test_the_code_of_the_tour_of_the_layer_runs():
    names: dict = {}
    run(code_blocks("docs/layer.md"), names)
    assert names["latent"].static_cache(1, 1).slots[0].shape[-1] == 80


def test_the_output_in_the_readme_is_that_of_the_terminal(coffee):
    stream = io.StringIO()
    print_view(coffee, Console(file=stream, width=140, highlight=False))
    printed = [line.rstrip() for line in stream.getvalue().splitlines()]
    sample = re.search(r"```\n(previous token.*?)```", text_of("README.md"), re.DOTALL)[1].splitlines()
    assert [line.rstrip() for line in sample] == printed[3 : 3 + len(sample)]


def test_examples_in_docstrings_print_the_shown_output():
    assert doctest.testmod(factories) == (0, 1)


def test_the_findings_page_matches_the_saved_tables():
    from research.findings import report as make_findings

    assert text_of("docs/reports/findings.md") == make_findings.document()


def test_links_between_documents_have_targets():
    for document in (*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")):
        for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
            assert (document.parent / target).is_file(), f"{document.name}: {target}"


def test_the_table_of_backends_matches_why_not():
    from headwise.attention.backends.native import library
    from research.tables import backends as make_backends

    if library.why_not_loaded() is not None:
        pytest.skip("the table was written with native kernels")
    written = text_of("docs/reports/backends.md")
    assert "\n".join(make_backends.table()) in written


def test_some_backend_supports_every_pair_of_options():
    from research.tables import backends as make_backends

    found = make_backends.combinations(2)
    assert found["some backend"] == found["all"] > 50


def test_every_role_is_documented():
    text = text_of("docs/roles.md")
    for role in ROLES:
        assert f"| {role.name} |" in text
