"""Fixtures of all tests; every test runs with the shapes in headwise's annotations checked at run time."""

import gc
import os
import re
import sys
from pathlib import Path

import jaxtyping
import pytest

from tracing import TracingServer

SOURCES = Path(__file__).parent.parent / "src"


def modules_with_shapes() -> list[str]:
    """Return the modules of headwise whose signatures state shapes. Checks of the others, which mypy covers, would take
    half of the time of the tests.
    """
    files = [file for file in SOURCES.rglob("*.py") if "headwise.shapes import" in file.read_text(encoding="utf-8")]
    return [".".join(file.relative_to(SOURCES).with_suffix("").parts) for file in files]


# Triton reads this when it is first imported: its interpreter runs the kernels on tensors of the CPU.
os.environ["TRITON_INTERPRET"] = "1"

# All processes of all tests share the converted copies of models, and leave those of the user alone.
os.environ.setdefault("HEADWISE_CACHE", str(SOURCES.parent / ".pytest_cache" / "headwise"))

# The compiler's own processes would each import torch first, to compile what one process compiles in less time.
os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "1")

# With `--numprocesses`, the first process only distributes the tests, and needs neither headwise nor torch.
if "PYTEST_XDIST_WORKER" in os.environ or not re.search(" (-n|--numprocesses)[ =]?[1-9al]", " ".join(sys.argv)):
    import shape_checks

    # headwise.shapes defines placeholders; the tests replace them by jaxtyping before headwise is imported.
    sys.modules["headwise.shapes"] = jaxtyping
    shape_checks.install(modules_with_shapes())

# Importing torch, transformers and the tests creates millions of objects that are never freed. The garbage collector
# would traverse all of them again and again. It is off during the imports, then ignores these objects and runs seldom.
gc.disable()


def pytest_collection_finish():
    """Exclude the objects of all imported modules from garbage collection during the tests."""
    gc.freeze()
    gc.set_threshold(10_000, 10, 10)
    gc.enable()


frozen_modules: set[str] = set()
"""Names of the modules that were imported before the last `gc.freeze`."""


def pytest_runtest_teardown():
    """Exclude the objects of modules that the test was the first to import, such as models of transformers: each call
    of `gc.collect` would traverse them, and accelerate has one in each training.
    """
    if len(sys.modules) > len(frozen_modules) + 20:
        gc.collect()
        gc.freeze()
        frozen_modules.update(sys.modules)


def pytest_runtest_setup():
    """Check the first calls of each test."""
    shape_checks.calls.clear()


@pytest.fixture
def as_user():
    """Turn off the shape checks, as for users, so that a test gets headwise's own error messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Use one thread: tests are small and run in parallel, so that threads would only wait for each other."""
    import torch

    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    """Start every test with the same state of torch's random numbers."""
    import torch

    # Without a GPU, `torch.manual_seed` keeps the seed for each kind of GPU, with a traceback, until one is used.
    (torch.manual_seed if torch.cuda.is_available() else torch.default_generator.manual_seed)(0)


@pytest.fixture(autouse=True)
def _no_prepared_calls():
    """Start every test without prepared calls, so that a test may replace what prepares them."""
    if module := sys.modules.get("headwise.attention.prepared_calls"):
        module.clear()


@pytest.fixture(scope="session")
def tracing_server(tmp_path_factory):
    """Server whose `run` runs code in a new process without shape checks, which torch's compiler cannot trace."""
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # the folder of a worker is in that of the run, whose process started it
        return TracingServer(folder.parent, os.getppid())
    return TracingServer(folder, os.getpid())


@pytest.fixture
def statistics_in_triton(monkeypatch):
    """Let the Triton kernels compute the statistics of attention, as on a GPU."""
    from headwise.statistics import kernel_statistics

    pytest.importorskip("triton")
    monkeypatch.setattr(kernel_statistics, "is_on_gpu", lambda problem: True)


@pytest.fixture(scope="session")
def minilm():
    """Model and tokenizer of all-MiniLM-L6-v2, loaded from its Python package."""
    from headwise.data.models import load

    return load("minilm")


@pytest.fixture(scope="session")
def smollm2():
    """Model and tokenizer of SmolLM2, loaded from its Python package."""
    from headwise.data.models import load

    return load("smollm2")


@pytest.fixture(scope="session")
def coffee(minilm):
    """View of MiniLM's attention heads on the question of the demo."""
    from headwise.analysis.view import view

    return view(minilm.model, minilm.tokenizer, "Which do you like better, coffee or tea?", title=minilm.title)
