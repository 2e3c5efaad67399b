"""Optuna's database of a study: its options, and a function that opens it."""

import logging
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.errors import InputError, require

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

    is_sqlite = url.startswith("sqlite")
    engine: dict[str, Any] = {"connect_args": {"timeout": LOCK_TIMEOUT}} if is_sqlite else {"pool_pre_ping": True}
    options: Any = {"heartbeat_interval": HEARTBEAT, "grace_period": GRACE_PERIOD, "engine_kwargs": engine}
    for attempt in range(ATTEMPTS):
        try:
            return optuna.storages.RDBStorage(url, **options)
        except (ImportError, ArgumentError, ValueError) as error:
            reason = str(error).splitlines()[0]
            raise InputError("storage", expected="the URL of a database", got=f"{url!r}: {reason}") from None
        except (SQLAlchemyError, RuntimeError) as error:
            if attempt == ATTEMPTS - 1:
                reason = str(getattr(error, "orig", error)).splitlines()[0]
                raise InputError("storage", expected="a usable database", got=f"{url!r}: {reason}") from None
            time.sleep(0.2 * 2**attempt)
    raise AssertionError


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
