"""Progress bar of a study, in seconds of its time limit or in finished trainings."""

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from headwise.progress import progress_bar
from headwise.studies.budget import StudyBudget
from headwise.studies.trial_store import TrialStore

REFRESH_SECONDS = 1.0
"""Least seconds between two updates: each reads the database."""


@contextmanager
def study_progress(store: TrialStore, budget: StudyBudget, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Context manager that shows a progress bar of a study and yields the function that updates it. The bar counts
    seconds if the budget has a time limit, otherwise finished trainings. It is full at the end of a study, also if no
    further training fits into the time limit. If not `shown`, there is no bar and the function does nothing.
    """
    limit = budget.seconds
    total = len(store.settings) * (budget.max_trials + budget.seeds) if limit is None else round(limit)
    unit, shown_units, last_update = "trainings" if limit is None else "s", 0, -math.inf
    with progress_bar("study", total, unit, shown=shown) as bar:

        def update() -> None:
            """Set the progress bar to the study's progress in the database, at most once per second: the seconds spent
            so far if the study has a time limit, otherwise the number of finished trainings.
            """
            nonlocal shown_units, last_update
            if time.monotonic() - last_update < REFRESH_SECONDS:
                return
            last_update = time.monotonic()
            units = len(store.finished()) if limit is None else int(store.sessions.seconds_spent())
            units = min(units, total)
            (bar.advance if shown_units else bar.resume)(units - shown_units)
            shown_units = units

        yield update if shown else lambda: None
        bar.advance(total - shown_units)
