"""Fixtures of the tests of the command line."""

import sys

import pytest

from headwise.cli import app as cli


@pytest.fixture
def headwise(monkeypatch, capsys, as_user):
    """Function that runs the command in this process and returns its status, output and errors."""

    def run(*arguments):
        monkeypatch.setattr(sys, "argv", ["headwise", *map(str, arguments)])
        capsys.readouterr()  # what the test itself printed
        status = cli.run()
        printed = capsys.readouterr()
        return status, printed.out, printed.err

    return run
