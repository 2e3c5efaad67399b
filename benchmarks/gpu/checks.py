"""Checks of correctness, in plain Python: each one is a function that raises `CheckError`, and all of them run."""

import traceback
from collections.abc import Callable, Iterable
from typing import NamedTuple

from benchmarks.gpu.budget import Budget


class CheckError(Exception):
    """A result is wrong; the message is one sentence."""


class Check(NamedTuple):
    """One check: its name, and the function that raises an error if it fails. The function may return the reason that
    nothing was to be checked.
    """

    name: str
    run: Callable[[], str | None]


class Outcome(NamedTuple):
    """Outcomes of all checks.

    Attributes:
        passed: number of checks that passed.
        skipped: reason for each check that had nothing to check, by name.
        failed: error of each check that failed, by name.
    """

    passed: int
    skipped: dict[str, str]
    failed: dict[str, str]


def run_checks(checks: Iterable[Check], budget: Budget, share: float) -> Outcome:
    """Run checks until a share of the time budget is used, print each failure, and return all outcomes."""
    passed, skipped, failed = 0, {}, {}
    for check in checks:
        if not budget.allows(f"check: {check.name}", share):
            continue
        try:
            reason = check.run()
        except CheckError as error:
            failed[check.name] = str(error)
        except Exception as error:
            frame = traceback.extract_tb(error.__traceback__)[-1]
            first_line = (str(error).strip().splitlines() or [""])[0]
            failed[check.name] = f"{type(error).__name__}: {first_line} ({frame.filename}:{frame.lineno})"
        else:
            if reason is None:
                passed += 1
            else:
                skipped[check.name] = reason
            continue
        print(f"FAILED  {check.name}: {failed[check.name]}", flush=True)
    print(f"checks: {passed} passed, {len(skipped)} had nothing to check, {len(failed)} failed", flush=True)
    return Outcome(passed, skipped, failed)
