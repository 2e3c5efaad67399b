"""Fixtures of all tests; every test runs with the shapes in headwise's annotations checked at run time."""

import sys

import jaxtyping
import pytest
import torch

# headwise.shapes defines placeholders; the tests replace them by jaxtyping before headwise is imported.
sys.modules["headwise.shapes"] = jaxtyping
jaxtyping.install_import_hook("headwise", "beartype.beartype")


@pytest.fixture
def as_user():
    """Turn off the shape checks, as for users, so that a test gets headwise's own error messages."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Use one thread: tests are small and run in parallel, so that threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    """Start every test with the same state of torch's random numbers."""
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def minilm():
    """Model and tokenizer of all-MiniLM-L6-v2, loaded from its Python package."""
    from headwise.data.models import load

    return load("minilm")


@pytest.fixture(scope="session")
def coffee(minilm):
    """View of MiniLM's attention heads on the question of the demo."""
    from headwise.analysis.view import view

    return view(minilm.model, minilm.tokenizer, "Which do you like better, coffee or tea?", title=minilm.title)
