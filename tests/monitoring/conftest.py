"""Fixtures of the tests of monitors."""

import pytest
import torch

SDPA = torch.nn.functional.scaled_dot_product_attention


@pytest.fixture(autouse=True)
def is_intercepted():
    """Return a function that is True while attention calls are intercepted; none are at the end of every test."""

    def is_patched():
        return torch.nn.functional.scaled_dot_product_attention is not SDPA

    yield is_patched
    assert not is_patched()
