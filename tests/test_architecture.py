"""Floors import from the floors below them; importing headwise imports nothing, and using it nothing optional."""

import ast
import graphlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import headwise
from headwise.checks import called_by_compiler

SOURCE = Path(headwise.__file__).parent

FLOORS = (
    ("errors", "packaged_models", "settings", "shapes", "wording"),
    ("checks", "progress"),
    ("page", "plots"),
    ("attention",),
    ("nn",),
    ("compat",),
    ("families",),
    ("convert",),
    ("statistics",),
    ("removal",),
    ("intercept",),
    ("data",),
    ("runs",),
    ("analysis",),
    ("monitoring",),
    ("compression",),
    ("studies",),
    ("show",),
    ("cli",),
    ("__main__",),
)
"""From the bottom up. No module but the command line imports `headwise.__init__`, which gathers the public names."""


MODULES = {
    ".".join(("headwise", *path.relative_to(SOURCE).with_suffix("").parts)): path
    for path in sorted(SOURCE.rglob("*.py"))
    if path.name != "__init__.py"
}


def imports_of(source: str) -> list[str]:
    """Return the headwise modules that a source text imports, also inside functions."""
    modules = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and node.level == 0:
            # `from package import module` and `from module import name` look alike; what is a module decides.
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            modules.extend(name if name in MODULES else node.module for name in inside)
        elif isinstance(node, ast.ImportFrom):
            modules.append("a relative import")
        elif isinstance(node, ast.Import):
            modules.extend(alias.name for alias in node.names)
    return [name for name in modules if name.split(".")[0] in ("headwise", "a relative import")]


def floor(module: str) -> int:
    """Return the index of the layer (floor) that contains the package of a module, from the bottom up."""
    package = module.split(".")[1]
    return next(level for level, names in enumerate(FLOORS) if package in names)


def upward_arrows(module: str, source: str) -> list[str]:
    """Return the imports of a module from a higher floor, or from another package of its own floor."""
    arrows = []
    for target in imports_of(source):
        if target == "headwise" and module.split(".")[1] in ("cli", "__main__"):
            continue
        same_package = target.split(".")[:2] == module.split(".")[:2]
        if target in ("headwise", "a relative import") or (floor(target) >= floor(module) and not same_package):
            arrows.append(target)
    return arrows


def circle(graph: dict[str, list[str]]) -> list[str]:
    """Return the modules of one circle of imports, or an empty list."""
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return error.args[1]
    return []


@pytest.mark.parametrize("module", MODULES)
def test_no_import_points_up(module):
    assert upward_arrows(module, MODULES[module].read_text()) == []


def test_imports_make_no_circle():
    assert circle({module: imports_of(path.read_text()) for module, path in MODULES.items()}) == []


INTERCEPTORS = {f"headwise.intercept.{name}" for name in ("interceptor", "session", "module_call", "plans", "watch")}
"""Modules that know who intercepts a model."""


def reached_from(module: str) -> set[str]:
    """Return the modules that a module imports, itself or by another one."""
    reached, found = set(), [module]
    while found:
        new = {name for name in imports_of(MODULES[found.pop()].read_text()) if name in MODULES} - reached
        reached |= new
        found += new
    return reached


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("headwise.intercept.trace.")])
def test_tracing_knows_no_interceptors(module):
    assert not reached_from(module) & INTERCEPTORS


def test_who_knows_interceptors_is_detected():
    assert reached_from("headwise.intercept.session") > INTERCEPTORS - {
        "headwise.intercept.session",
        "headwise.intercept.watch",
    }


def test_a_circle_is_detected():
    assert circle({"a": ["b"], "b": ["c"], "c": []}) == []
    assert set(circle({"a": ["b"], "b": ["c"], "c": ["b"]})) == {"b", "c"}


def test_an_upward_import_is_detected():
    view, fused = "headwise.analysis.view", "headwise.attention.backends.fused"
    assert upward_arrows("headwise.nn.multihead", f"from {view} import view") == [view]
    assert upward_arrows("headwise.errors", f"import {fused}") == [fused]
    assert upward_arrows("headwise.attention.problem", "from headwise import attend") == ["headwise"]
    assert upward_arrows("headwise.nn.multihead", "def f():\n    from .heads import view") == ["a relative import"]


OF_THE_ENGINE = {
    "CheckpointedRun": "resumes in a folder",
    "locked_folder": "locks a folder",
    "write_atomically": "writes files",
    "iterate_batches": "loops over data",
    "require_same_data": "reads finished runs",
    "rank_and_world_size": "shares data between processes",
    "gather_from_ranks": "shares data between processes",
    "broadcast_from_rank0": "shares data between processes",
    "zero_tests": "tests means",
}
"""Parts of the engine that runs analyses, which only `analysis/head_pass.py` uses, with what each is for."""

EXCEPTIONS = {
    "headwise.analysis.ablate": {"iterate_batches"},  # reads the first batch, on which it finds the sites
    "headwise.analysis.in_context_score": {"iterate_batches"},  # chooses sequences, without a model
    "headwise.analysis.replacements": {"iterate_batches"},  # means of outputs, when a gate is entered
    "headwise.analysis.importance.hard_concrete": {"iterate_batches"},  # trains gates, in several epochs
    "headwise.analysis.redundancy.redundancy": {"broadcast_from_rank0"},  # adds effects of clusters to its file
}
"""Parts of the engine that other modules use."""

OF_TABLES = {"save", "load", "records", "sem"}
"""Methods that all tables have from `runs/table.py`; a view of words is none."""


def machinery_of_its_own(module: str, source: str) -> list[str]:
    """Return the parts of the engine that the module of an analysis uses, and the methods of tables that it defines."""
    tree = ast.parse(source)
    imported = {
        alias.name
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("headwise.")
        for alias in node.names
    }
    methods = {
        f"{node.name}.{each.name}"
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef)
        for each in node.body
        if isinstance(each, ast.FunctionDef) and each.name in OF_TABLES
    }
    return sorted((imported & OF_THE_ENGINE.keys()) - EXCEPTIONS.get(module, set())) + sorted(methods)


OTHERS = {"headwise.analysis.head_pass", "headwise.analysis.view_result"}


@pytest.mark.parametrize("module", [name for name in MODULES if name.startswith("headwise.analysis.")])
def test_analyses_have_no_loop_resume_or_table_of_their_own(module):
    if module not in OTHERS:
        assert machinery_of_its_own(module, MODULES[module].read_text()) == []


def test_machinery_of_an_analysis_is_detected():
    engine = MODULES["headwise.analysis.head_pass"].read_text()
    assert set(machinery_of_its_own("headwise.analysis.new", engine)) > {"CheckpointedRun", "require_same_data"}
    for module, names in EXCEPTIONS.items():
        assert machinery_of_its_own("headwise.analysis.new", MODULES[module].read_text()) == sorted(names)
    source = "from headwise.data.batches import iterate_batches\nclass Own:\n    def save(self): ...\n"
    assert machinery_of_its_own("headwise.analysis.new", source) == ["iterate_batches", "Own.save"]


def test_packages_have_nothing_in_their_init():
    for path in SOURCE.rglob("*/__init__.py"):
        assert [type(node) for node in ast.parse(path.read_text()).body] == [ast.Expr], path


OPTIONAL = [
    *("accelerate", "beartype", "conllu", "gguf", "huggingface_hub", "jaxtyping", "jinja2", "matplotlib", "optuna"),
    *("pandas", "pyarrow", "rich", "safetensors", "scipy", "sqlalchemy", "tokenizers", "transformers", "typer"),
    *("lightning", "pytorch_lightning"),
]


FORKS = """
import json, os, sys, torch
for line in sys.stdin:
    code, out, err = json.loads(line)
    if not (child := os.fork()):
        for path, stream in ((out, 1), (err, 2)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
        exec(code, {"__name__": "__main__"})
        sys.exit()
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.fixture(scope="module")
def run_in_new_process(tmp_path_factory):
    """Function that runs code in a new interpreter, and returns its status, output and errors.

    Each is the fork of an interpreter that has imported torch, which takes seconds, and nothing else.
    """
    folder, number = tmp_path_factory.mktemp("processes"), itertools.count()
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", FORKS], **pipes) as interpreter:

        def run(code: str) -> SimpleNamespace:
            name = next(number)
            out, err = folder / f"{name}.out", folder / f"{name}.err"
            interpreter.stdin.write(json.dumps([code, str(out), str(err)]) + "\n")
            interpreter.stdin.flush()
            status = int(interpreter.stdout.readline())
            return SimpleNamespace(returncode=status, stdout=out.read_text(), stderr=err.read_text())

        yield run


def new_modules(code: str) -> set[str]:
    """Return the roots of the modules that code imports into a new interpreter without torch."""
    code = f"import sys; before = set(sys.modules)\n{code}\nprint(*set(sys.modules) - before)"
    result = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return {name.partition(".")[0] for name in result.stdout.split()} - sys.stdlib_module_names


def test_importing_headwise_imports_nothing():
    assert new_modules("import headwise; dir(headwise), headwise.__version__") == {"headwise"}
    assert new_modules("import headwise, typer") > {"headwise", "typer"}


COMPILER = ("torch._dynamo", "torch._inductor", "torch.fx.experimental.symbolic_shapes", "sympy")
"""Modules whose import takes seconds, and which `import torch` leaves out."""


def test_public_names_import_neither_optional_packages_nor_the_compiler(run_in_new_process):
    code = "import sys, headwise; [getattr(headwise, name) for name in headwise.__all__]\n"
    code += f"print(len(sys.modules) > 1000, [name for name in {[*OPTIONAL, *COMPILER]} if name in sys.modules])"
    result = run_in_new_process(code)
    assert result.stdout.strip() == "True []", result.stderr


def test_layers_import_no_package_that_runs_models_over_data(run_in_new_process):
    result = run_in_new_process(
        "import sys, headwise as hw; hw.MultiHeadAttention, hw.attend, hw.causal, hw.watch, hw.from_torch\n"
        f"print([name for name in {LAZY_PACKAGES} if f'headwise.{{name}}' in sys.modules])"
    )
    assert result.stdout.strip() == "[]", result.stderr


LAZY_PACKAGES = ["analysis", "cli", "data", "monitoring", "runs", "show", "studies"]


def test_every_public_name_can_be_imported():
    assert set(headwise.__all__) <= set(dir(headwise))
    for name in headwise.__all__:
        assert getattr(headwise, name) is not None
    with pytest.raises(AttributeError, match="module 'headwise' has no attribute 'nothing'"):
        headwise.nothing  # noqa: B018
    with pytest.raises(ImportError, match="cannot import name 'nothing' from 'headwise'"):
        from headwise import nothing  # noqa: F401


def test_type_checkers_see_every_public_name_under_its_own_name():
    tree = ast.parse((SOURCE / "__init__.pyi").read_text())
    names = [alias for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names]
    assert [alias.asname for alias in names] == [alias.name for alias in names]  # otherwise the name is private
    assert sorted(alias.name for alias in names) == sorted(headwise.__all__)
    assert {"attend", "view", "replacements"} < set(headwise.__all__)


def test_the_compiler_calls_the_functions_that_it_shall_call():
    def ours(): ...
    def theirs(): ...

    assert vars(called_by_compiler(ours)) == vars(torch.compiler.assume_constant_result(theirs)) != {}


BLOCKED = "import sys\nfor name in {blocked}: sys.modules[name] = None\n"
"""To Python, a module that is None is not installed."""


def test_the_core_runs_without_the_extras(run_in_new_process):
    code = BLOCKED.format(blocked=OPTIONAL) + (
        "import torch, headwise as hw\n"
        "layer = hw.MultiHeadAttention(12, 3, mask=hw.causal() & hw.window(2))\n"
        "y, weights = layer(torch.randn(2, 5, 12), return_weights=True)\n"
        "print(tuple(y.shape), tuple(weights.shape))\n"
    )
    result = run_in_new_process(code)
    assert result.stdout.strip() == "(2, 5, 12) (2, 3, 5, 5)", result.stderr


def test_blocked_modules_cannot_be_imported(run_in_new_process):
    result = run_in_new_process(BLOCKED.format(blocked=OPTIONAL) + "import transformers")
    assert "import of transformers halted" in result.stderr


STUDY = ["study", "--data", "x", "--out", "{page}"]


@pytest.mark.parametrize(
    ("blocked", "arguments", "sentence"),
    [
        ("typer", ["view", "hi"], 'the command line needs the package typer, .* pip install "headwise[cli]"'),
        pytest.param(
            "rich",
            ["view", "hi"],
            'the command line needs the package rich, .* pip install "headwise[cli]"',
            marks=pytest.mark.slow,
        ),
        ("transformers", ["view", "hi"], 'loading a model needs the package transformers, .* "headwise[hf]"'),
        pytest.param(
            "jinja2",
            ["view", "hi", "--html", "{page}"],
            'writing a page needs the package jinja2, .* "headwise[plot]"',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gguf",
            ["view", "hi", "--model", "smollm2"],
            'reading SmolLM2.* needs the package gguf, .* "headwise[gguf]"',
            marks=pytest.mark.slow,
        ),
        pytest.param("optuna", STUDY, 'a study needs the package optuna, .* "headwise[study]"', marks=pytest.mark.slow),
        pytest.param("scipy", STUDY, 'a study needs the package scipy, .* "headwise[study]"', marks=pytest.mark.slow),
    ],
)
def test_a_missing_extra_is_one_sentence_and_status_2(run_in_new_process, blocked, arguments, sentence, tmp_path):
    arguments = [argument.format(page=tmp_path / "page.html") for argument in arguments]
    code = BLOCKED.format(blocked=[blocked]) + (
        f"sys.argv = ['headwise', *{arguments}]\nfrom headwise.__main__ import main\nmain()"
    )
    result = run_in_new_process(code)
    assert result.returncode == 2, result.stderr
    lines = result.stderr.strip().splitlines()
    assert len(lines) == 1, result.stderr
    before, after = sentence.split(".*")[0], sentence.split(".*")[-1]
    assert lines[0].startswith("headwise: " + before.strip())
    assert lines[0].endswith(after.strip())
