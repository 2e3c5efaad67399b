"""Checks of arguments, and imports of optional packages."""

import sys

import pytest

import headwise as hw
from headwise import checks
from headwise.errors import MissingExtra, require


def test_numbers_that_are_no_floats_are_refused(as_user):
    for value in (10**400, float("nan"), float("inf"), "0.5", None, [0.5]):
        with pytest.raises(hw.InputError, match="x: expected a finite number, got"):
            checks.finite_number("x", value)
        with pytest.raises(hw.InputError, match="x: expected a probability of 0 or more and less than 1, got"):
            checks.probability("x", value)


def test_a_package_that_is_not_installed_is_reported_with_its_extra():
    message = "a test needs the package no_such_package"
    with pytest.raises(MissingExtra, match=message):
        require("no_such_package.part", purpose="a test", extra="all")


def test_an_installed_package_that_is_broken_is_not_reported_as_missing(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    for name, code in (
        ("broken_package", "from math import no_such_name"),
        ("needy_package", "import no_such_package"),
    ):
        (tmp_path / f"{name}.py").write_text(code)
        with pytest.raises(ImportError) as error:
            require(name, purpose="a test", extra="all")
        assert not isinstance(error.value, MissingExtra)
        assert name not in sys.modules
