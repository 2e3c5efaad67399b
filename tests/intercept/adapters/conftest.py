"""Fixtures of the tests of adapters."""

import sys

import pytest


@pytest.fixture
def flash_attn(monkeypatch):
    """Return the module that stands in for `flash_attn.flash_attn_interface`."""
    import flash_attn_stand_in

    monkeypatch.setitem(sys.modules, "flash_attn.flash_attn_interface", flash_attn_stand_in)
    return flash_attn_stand_in


@pytest.fixture
def flash_attn_3(monkeypatch):
    """Return the module that stands in for `flash_attn_interface` of FlashAttention 3."""
    import flash_attn_3_stand_in

    monkeypatch.setitem(sys.modules, "flash_attn_interface", flash_attn_3_stand_in)
    return flash_attn_3_stand_in


@pytest.fixture
def xformers(monkeypatch):
    """Return the module that stands in for `xformers.ops.fmha`."""
    import xformers_stand_in

    monkeypatch.setitem(sys.modules, "xformers.ops.fmha", xformers_stand_in)
    return xformers_stand_in
