"""Fast databases and quantiles for the tests of studies."""

from functools import cache

import optuna.storages._rdb.storage
import pytest
import scipy.stats
import sqlalchemy


@pytest.fixture(autouse=True, scope="session")
def _writes_without_waiting_for_the_disk():
    """Turn off SQLite's waits for the disk: they protect from power failures, and slow down every write."""

    def set_synchronous_off(connection, _record):
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", set_synchronous_off)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", set_synchronous_off)


@pytest.fixture(autouse=True, scope="session")
def _migrations_read_once():
    """Read Optuna's migration scripts once: every new database imports a dozen of them to get their last version."""
    versions = optuna.storages._rdb.storage._VersionManager
    read, scripts = versions._create_alembic_script, []

    def read_once(self):
        if not scripts:
            scripts.append(read(self))
        return scripts[0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(versions, "_create_alembic_script", read_once)
        yield


@pytest.fixture(autouse=True, scope="session")
def _each_quantile_computed_once():
    """Compute each quantile of the studentized range once: SciPy integrates numerically, for a third of a second."""
    distribution = scipy.stats.studentized_range
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distribution, "ppf", cache(distribution.ppf))
        yield
