"""The package's exceptions, and the import of optional packages."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import Any


class HeadwiseError(Exception):
    """Base class of the errors that headwise raises deliberately, such as for unusable input. The command-line tool
    shows such an error and exits with status 2.
    """

    def __reduce__(self) -> tuple[Any, ...]:
        # By default, copies and pickles call the class with `args`, which are not the arguments of a subclass.
        return _restore, (type(self), self.args), vars(self)


def _restore(error_class: type[HeadwiseError], args: tuple[Any, ...]) -> HeadwiseError:
    """Recreate an error of the class `error_class` from its attribute `args` after it was copied or pickled. The
    constructor is not called, because it expects the parts of the message, whereas `args` has the finished message.
    """
    error = error_class.__new__(error_class)
    super(HeadwiseError, error).__init__(*args)  # ValueError, ImportError or Exception
    return error


LONGEST_VALUE = 500
"""Characters of an unusable value that are shown in an error message, at most."""


class InputError(HeadwiseError, ValueError):
    """Error for an unusable argument. Its message is one sentence with the argument's name, the expected value, the
    actual value and, in some cases, a remedy.
    """

    def __init__(self, argument: str, *, expected: str, got: object, remedy: str | None = None):
        self.argument = argument
        sentence = f"{argument}: expected {expected}, got {_shortened(str(got))}"
        super().__init__(f"{sentence}; {remedy}" if remedy else sentence)


def _shortened(text: str) -> str:
    """Return a text on one line; the middle of a text of more than `LONGEST_VALUE` characters is replaced by an
    ellipsis.
    """
    line = " ".join(text.splitlines())
    return line if len(line) <= LONGEST_VALUE else f"{line[: LONGEST_VALUE - 100]} … {line[-100:]}"


class MissingExtra(HeadwiseError, ImportError):
    """Error for an optional package that is not installed; its message contains the `pip install` command."""

    def __init__(self, package: str, *, extra: str, purpose: str):
        super().__init__(
            f'{purpose} needs the package {package}, which is not installed; pip install "headwise[{extra}]"'
        )


def require(package: str, *, purpose: str, extra: str) -> Any:
    """Import and return an optional package, or one of its modules such as `matplotlib.figure`. If the package is not
    installed, raise `MissingExtra`. Its message states what the package is needed for (`purpose`), and the extra of
    headwise (`extra`) that installs it.

    Args:
        package: name of the package or, with dots, of a module in it.
        purpose: the work that needs the package; the subject of the error message ("a table", "drawing heads").
        extra: the extra of headwise that installs the package.

    Raises:
        MissingExtra: the package is not installed.
        ImportError: the package is installed, but fails to import.
    """
    root = package.partition(".")[0]
    try:
        return import_module(package)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != root:  # the package is there, and misses another one
            raise
        raise MissingExtra(root, extra=extra, purpose=purpose) from error


@contextmanager
def errors_of(argument: str, *, expected: str) -> Iterator[None]:
    """Replace errors that other libraries raise in the context by an `InputError`. It names the argument `argument` and
    what was `expected`, and quotes the first 200 characters of the original message.
    """
    try:
        yield
    except HeadwiseError:
        raise
    except Exception as error:
        got = f"{type(error).__name__} ({' '.join(str(error).split())[:200]})"
        raise InputError(argument, expected=expected, got=got) from error
