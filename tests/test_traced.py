"""The layer under torch.compile, torch.export and onnxruntime: the checks of tests/traced.py, in new interpreters."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

OPTIONS = [
    "plain",
    "decoder",
    "window",
    "window per head",
    "chunked",
    "mask rule",
    "dynamic angles",
    "relative",
    "scores",
    "sinks",
]


def run(*calls: str) -> None:
    """Run calls of functions of tests/traced.py in a new interpreter, and check that none raises."""
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import traced\n" + "\n".join(
        # Graphs of one check must not count as recompilations in the next.
        f"import torch; torch._dynamo.reset(); torch._dynamo.config.error_on_recompile = False; traced.{call}"
        for call in calls
    )
    # Measuring coverage would double the time, and traced code is not run line by line.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("names", [OPTIONS[:5], OPTIONS[5:]], ids=["first five", "last five"])
def test_one_compiled_graph_serves_every_length(names):
    run(*(f"compiles_for_every_length({name!r})" for name in names))


def test_decoding_from_a_static_cache_compiles_once():
    run(*(f"decodes_without_recompiling({name!r})" for name in OPTIONS), "nan_does_not_survive_a_reset_of_the_cache()")


def test_masks_can_be_created_inside_a_compiled_function():
    run("masks_made_inside_compile()", "masks_padding_while_compiling()")


def test_code_generated_by_inductor_computes_the_same():
    run(
        "compiles_for_every_length_with_inductor()",
        "decodes_without_recompiling_with_inductor()",
        "a_full_static_cache_raises()",
    )


def test_one_exported_program_serves_every_batch_size_and_length():
    run(*(f"exports({name!r})" for name in OPTIONS))


def test_onnxruntime_computes_the_same():
    run(*(f"runs_in_onnxruntime({name!r})" for name in OPTIONS))
