"""Fast SQLite databases for the tests of studies."""

import pytest
import sqlalchemy


@pytest.fixture(autouse=True, scope="session")
def _writes_without_waiting_for_the_disk():
    """Turn off SQLite's waits for the disk: they protect from power failures, and slow down every write."""

    def set_synchronous_off(connection, _record):
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", set_synchronous_off)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", set_synchronous_off)
