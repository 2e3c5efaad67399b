"""Checks of arguments, and imports of optional packages."""

import copy
import pickle
import sys

import pytest
import torch

import headwise as hw
from headwise import checks
from headwise.errors import MissingExtra, require


def test_numbers_that_are_no_floats_are_refused(as_user):
    for value in (10**400, float("nan"), float("inf"), "0.5", None, [0.5]):
        with pytest.raises(hw.InputError, match="x: expected a finite number, got"):
            checks.finite_number("x", value)
        with pytest.raises(hw.InputError, match="x: expected a probability of 0 or more and less than 1, got"):
            checks.probability("x", value)


def test_numbers_that_require_grad_are_refused(as_user):
    value = torch.tensor(0.5, requires_grad=True)
    message = "x: expected a number, got a tensor that requires grad; its gradient would be lost: pass float"
    for check in (checks.finite_number, checks.probability):
        with pytest.raises(hw.InputError, match=message):
            check("x", value)
        assert check("x", value.detach()) == 0.5


ERRORS = {
    "input": hw.InputError("x", expected="a number", got=None, remedy="pass 1"),
    "missing extra": MissingExtra("optuna", extra="study", purpose="a study"),
    "base class": hw.HeadwiseError("a sentence", 2),
}


@pytest.mark.parametrize("error", ERRORS.values(), ids=ERRORS)
@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, lambda error: pickle.loads(pickle.dumps(error))])
def test_an_error_survives_copying_and_pickling(error, duplicate):
    error.add_note("from a worker process")
    result = duplicate(error)
    assert type(result) is type(error)
    assert str(result) == str(error)
    assert result.args == error.args
    assert vars(result) == vars(error)
    assert getattr(result, "msg", None) == getattr(error, "msg", None)


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
