"""Functions of headwise that not every version has."""

from importlib import import_module
from typing import Any

from headwise.errors import InputError


def public_function(name: str) -> Any:
    """Return the public function of headwise with this name.

    Raises:
        InputError: this version of headwise has none.
    """
    function = getattr(import_module("headwise"), name, None)
    if function is None:
        raise InputError("headwise", expected=f"a version with hw.{name}", got="one without")
    return function
