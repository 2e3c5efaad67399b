"""Fixtures of the tests of interception."""

import pytest


@pytest.fixture
def kernels_count_as_faster(monkeypatch):
    """Let the native kernels count as faster than torch for small inputs, too."""
    from headwise.intercept import accelerated_sdpa

    monkeypatch.setattr(accelerated_sdpa, "_why_slower", lambda problem, hides_nothing: None)
    monkeypatch.setattr(accelerated_sdpa, "_reasons", {})


@pytest.fixture
def no_grad():
    """Record no gradients during a test."""
    import torch

    with torch.no_grad():
        yield
