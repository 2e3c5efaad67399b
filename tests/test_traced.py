"""The layer compiled, exported, and in onnxruntime: each check of tests/traced.py in an interpreter of its own."""

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
    "any rule",
    "grows",
    "relative",
    "scores",
    "sinks",
]


def run(*calls: str) -> None:
    code = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); import traced\n" + "\n".join(
        # A graph of one check must not be the second of the next.
        f"import torch; torch._dynamo.reset(); torch._dynamo.config.error_on_recompile = False; traced.{call}"
        for call in calls
    )
    # Measuring what they cover would take these as long again, and what is traced is not run line by line.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("COVERAGE_")}
    command = [sys.executable, "-c", code]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr[-3000:]


@pytest.mark.parametrize("names", [OPTIONS[:5], OPTIONS[5:]], ids=["first", "rest"])
def test_one_graph_for_every_length(names):
    run(*(f"compiles_for_every_length({name!r})" for name in names))


def test_decoding_from_a_static_cache_compiles_once():
    run(*(f"decodes_without_recompiling({name!r})" for name in OPTIONS), "removed_nan_reaches_no_compiled_call()")


def test_masks_made_inside_compile():
    run("masks_made_inside_compile()", "masks_padding_while_compiling()")


def test_inductor():
    run(
        "compiles_for_every_length_with_inductor()",
        "decodes_without_recompiling_with_inductor()",
        "a_full_static_cache_is_no_wrong_answer()",
    )


def test_export_for_every_batch_and_length():
    run(*(f"exports({name!r})" for name in OPTIONS))


def test_onnx():
    run(*(f"runs_in_onnxruntime({name!r})" for name in OPTIONS))
