"""The progress bar of a run, on standard error."""

import pytest

import headwise as hw
import tiny
from headwise.runs.progress import progress_bar
from profile_runs import texts

pytestmark = pytest.mark.usefixtures("as_user")


def test_a_profile_shows_tokens_or_batches(capsys):
    model = tiny.model("decoder")
    hw.profile(model, texts(), progress=True, repeats=False)
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "70/70 tokens" in printed.err
    hw.profile(model, (batch for batch in texts()), progress=True)
    assert "6/?" in capsys.readouterr().err
    hw.profile(model, texts(), repeats=False)
    assert capsys.readouterr().err == ""


def test_resumed_units_count_towards_the_total(capsys):
    with progress_bar("data", 10, "batches", shown=True) as advance:
        advance(7, True)
        advance(3, False)
    assert "10/10 batches" in capsys.readouterr().err
