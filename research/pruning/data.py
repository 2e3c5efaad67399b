"""Text data of the pruning measurements, in three parts without a common document.

    calibration   docstrings of modules of Python's standard library; heads are scored and projections fitted on them
    test          topics of Python's language reference; only the losses in the report are measured on them

Documents are drawn with a fixed seed. Both sources come with Python itself.
"""

import ast
import random
import sys
import sysconfig
from functools import cache
from pathlib import Path
from pydoc_data.topics import topics

LENGTH = 256
"""Tokens of a sequence, the beginning of its document."""

CALIBRATION, TEST = 32, 40
"""Numbers of documents."""

SHORTEST = 1400
"""Characters of a document, at least. It ensures that a document has `LENGTH` tokens."""

SHINGLE = 64
"""Characters of the pieces by which the overlap of two sets of documents is measured."""


@cache
def calibration() -> tuple[str, ...]:
    """Return the calibration documents: for each of some modules of the standard library, all its docstrings."""
    folder = Path(sysconfig.get_path("stdlib"))
    modules = sorted(name for name in sys.stdlib_module_names if (folder / f"{name}.py").is_file())
    documents = [_docstrings(folder / f"{name}.py") for name in modules if name != "pydoc_data"]
    return _drawn([document for document in documents if len(document) >= SHORTEST], CALIBRATION)


@cache
def test() -> tuple[str, ...]:
    """Return the test documents: long topics of the language reference."""
    return _drawn([topics[name] for name in sorted(topics) if len(topics[name]) >= SHORTEST], TEST)


def overlap() -> float:
    """Return the share of pieces of `SHINGLE` characters of the test documents that occur in a calibration document."""
    known = {piece for document in calibration() for piece in _pieces(document)}
    pieces = [piece for document in test() for piece in _pieces(document)]
    return sum(piece in known for piece in pieces) / len(pieces)


def _drawn(documents: list[str], number: int) -> tuple[str, ...]:
    """Return some documents, drawn with a fixed seed."""
    return tuple(random.Random(0).sample(documents, number))


def _docstrings(path: Path) -> str:
    """Return all docstrings of a module."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    texts = [ast.get_docstring(node) for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(text for text in texts if text)


def _pieces(document: str) -> list[str]:
    """Return all pieces of `SHINGLE` characters of a document, with each run of white space as one blank."""
    text = " ".join(document.split())
    return [text[start : start + SHINGLE] for start in range(len(text) - SHINGLE + 1)]
