"""Databases of studies, made quickly."""

import pytest
import sqlalchemy


@pytest.fixture(autouse=True, scope="session")
def _without_waiting_for_the_disk():
    """Nobody pulls the plug: a database need not be safe from that, and each of its writes is far quicker."""

    def connected(connection, _record):
        connection.execute("PRAGMA synchronous=OFF")

    sqlalchemy.event.listen(sqlalchemy.engine.Engine, "connect", connected)
    yield
    sqlalchemy.event.remove(sqlalchemy.engine.Engine, "connect", connected)
