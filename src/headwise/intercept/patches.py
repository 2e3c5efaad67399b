"""Temporary replacement of functions of other libraries and of headwise, shared by everyone who needs it."""

import threading
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple


class Replacement(NamedTuple):
    """Attribute of a module or class that is to be replaced, and the function that takes its place."""

    owner: Any
    name: str
    function: Any


class Patches:
    """Context in which some functions of torch or other libraries are replaced, in all threads. A context that is
    active may be entered again; the last exit restores the functions. If other code has replaced one of them in the
    meantime, that replacement stays.

    Args:
        replacements: function that returns what to replace, called when the context is first entered.
        others: patches that are needed as well.
    """

    def __init__(self, replacements: Callable[[], Iterable[Replacement]], *others: "Patches") -> None:
        self._replacements, self._others = replacements, others
        self._lock, self._depth = threading.Lock(), 0
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        for other in self._others:
            other.__enter__()
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                for replacement in self._replacements():
                    self._replace(*replacement)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            while not self._depth and self._restore:
                self._restore.pop()()
        for other in reversed(self._others):
            other.__exit__()

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        """Replace the attribute `name` of `owner` by `function`, and store a function that restores the previous
        value.
        """
        is_inherited, before = name not in vars(owner), vars(owner).get(name)

        def restore() -> None:
            if vars(owner).get(name) is not function:
                return
            if is_inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._restore.append(restore)
        setattr(owner, name, function)
