"""Optuna's database of a study: its options, and a function that opens it."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError, require
from headwise.wording import without_passwords, without_passwords_of

if TYPE_CHECKING:
    import optuna

HEARTBEAT, GRACE_PERIOD = 5, 20
"""Seconds between two heartbeats of a running trial, and seconds without one after which its process counts as dead."""

LOCK_TIMEOUT = 60.0
"""Seconds that a process waits while another one writes to an SQLite file."""

ATTEMPTS = 5
"""Number of attempts to open a database: of several processes that create its tables at once, all but one fail."""


@dataclass(frozen=True)
class OptunaOptions:
    """Database, study name and pruner for Optuna, which stores the trials of a study and searches learning rates. The
    pruner decides which learning-rate trials are stopped early.

    Attributes:
        storage: URL of a database, as SQLAlchemy accepts it, for processes on several machines; by default an SQLite
            file in the output folder.
        name: name of the study in the database.
        pruner: decides which learning-rate trials are stopped early; by default, those with a loss above the median
            of their setting at half or at three quarters of the steps.
    """

    storage: str | None = None
    name: str = "study"
    pruner: "optuna.pruners.BasePruner | None" = None


def open_storage(url: str) -> Any:
    """Open the database at a URL as an Optuna storage in which running trials send heartbeats. Missing tables are
    created. If the database cannot be opened, up to 5 attempts are made, since other processes may be creating the same
    tables.

    Raises:
        InputError: the URL is invalid, or the database cannot be used.
        MissingExtra: optuna is not installed.
    """
    optuna = require_optuna()
    from sqlalchemy.exc import ArgumentError, SQLAlchemyError

    require_database_url(url)
    is_sqlite = url.startswith("sqlite")
    engine: dict[str, Any] = {"connect_args": {"timeout": LOCK_TIMEOUT}} if is_sqlite else {"pool_pre_ping": True}
    options: Any = {"heartbeat_interval": HEARTBEAT, "grace_period": GRACE_PERIOD, "engine_kwargs": engine}
    for attempt in range(ATTEMPTS):
        try:
            return optuna.storages.RDBStorage(url, **options)
        except (ImportError, ArgumentError, ValueError) as error:
            raise _unusable(url, "the URL of a database", error) from None
        except (SQLAlchemyError, RuntimeError) as error:
            if attempt == ATTEMPTS - 1:
                raise _unusable(url, "a usable database", getattr(error, "orig", None) or error) from None
            time.sleep(0.2 * 2**attempt)
    raise AssertionError


def require_database_url(url: str) -> None:
    """Raise `InputError` if a URL is not that of a database, or if the Python package that connects to such databases
    (the driver) is not installed. No connection is made.

    Raises:
        InputError: the URL cannot be used; the message does not contain its password.
        MissingExtra: optuna is not installed.
    """
    require_optuna()
    from sqlalchemy.engine import make_url
    from sqlalchemy.exc import ArgumentError

    expected = "the URL of a database"
    if not isinstance(url, str):
        raise InputError("storage", expected=expected, got=repr(url))
    try:
        dialect = make_url(url).get_dialect()
        dialect.import_dbapi()
    except ModuleNotFoundError as error:
        got = f"{without_passwords(url)!r}, whose driver {error.name} is not installed"
        raise InputError("storage", expected=expected, got=got, remedy=f"pip install {error.name}") from None
    except (ImportError, ArgumentError, ValueError, AttributeError) as error:
        raise _unusable(url, expected, error) from None


def _unusable(url: str, expected: str, error: BaseException) -> InputError:
    """Return the error for the URL of a database that cannot be used, with the first line of the reason. The password
    in the URL is hidden, wherever it occurs.
    """
    reason = (str(error).splitlines() or [type(error).__name__])[0]
    got = f"{without_passwords(url)!r}: {without_passwords_of(url, reason)}"
    return InputError("storage", expected=expected, got=got)


def require_optuna() -> Any:
    """Import and return the package optuna, or raise `MissingExtra` if it is not installed."""
    return require("optuna", purpose="a study", extra="study")


@contextmanager
def quiet(optuna: Any) -> Iterator[None]:
    """Context manager in which Optuna's log messages (except critical ones) and its warnings about experimental
    features are suppressed.
    """
    level = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(level)
