"""Every test runs with the shapes in headwise's annotations checked at run time."""

import sys

import jaxtyping
import pytest
import torch

# headwise.shapes holds names without meaning; here they mean what jaxtyping says. Before headwise is imported.
sys.modules["headwise.shapes"] = jaxtyping
jaxtyping.install_import_hook("headwise", "beartype.beartype")


@pytest.fixture
def as_user():
    """Shape checks off, as they are for users: for tests of what our own messages say."""
    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture(autouse=True, scope="session")
def _one_thread():
    """Tests are small and run side by side; threads would only wait for each other."""
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def minilm():
    """all-MiniLM-L6-v2, as its package carries it."""
    from headwise.data.models import load

    return load("minilm")


@pytest.fixture(scope="session")
def coffee(minilm):
    """The view of the demo's question."""
    from headwise.analysis.view import view

    return view(minilm.model, minilm.tokenizer, "Which do you like better, coffee or tea?", title=minilm.title)
