"""Fixtures of the tests of adapters."""

import sys

import pytest


@pytest.fixture
def flash_attn(monkeypatch):
    """Return the module that stands in for `flash_attn.flash_attn_interface`."""
    import flash_attn_stand_in

    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", flash_attn_stand_in)
    return flash_attn_stand_in
