"""The function `study`: train models with different heads on the same batches, and compare their losses.

A study has two stages. First, learning rates are tried for each setting with one seed, and Optuna stops trainings whose
loss is above the median of their setting. Then each setting is trained with its best learning rate and several other
seeds; these models are compared.

For a fair comparison, all models should have about the same number of parameters; the table shows the numbers. torch is
seeded before each model is built, and the order of the batches depends on the seed alone.

An interrupted study resumes when it is called with the same arguments. Processes that share a database share the work.
With a number of steps and of trials, and one process, equal seeds give equal losses. With a time limit, the clock
decides how many steps and trials there are.
"""

import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import nn

from headwise.analysis.losses import Loss, next_token_loss
from headwise.data.batches import iterate_batches
from headwise.errors import InputError, require
from headwise.progress import progress_bar
from headwise.runs.files import writable_folder
from headwise.runs.table import require_parquet, table_path
from headwise.studies.scheduler import StudyPlan, make_plan, run_trials
from headwise.studies.space import Setting, Space, StudyBudget
from headwise.studies.study_result import Study, collect_results
from headwise.studies.training import DEFAULT_RECIPE, Batches, Corpus, Measure, Recipe, StudyDefinition, TrainedCallback
from headwise.studies.trials import OptunaOptions, TrialStore, require_optuna

HELD_OUT = 10
"""By default, one batch in this many is held out."""

REFRESH_SECONDS = 1.0
"""Least seconds between two updates of the progress bar: each reads the database."""

DEFAULT_OPTUNA = OptunaOptions()


def study(
    build_model: Callable[[Setting], nn.Module],
    data: Iterable[Any],
    space: Space | Sequence[Setting],
    *,
    budget: StudyBudget,
    held_out: Iterable[Any] | None = None,
    loss: Loss = next_token_loss,
    measures: Mapping[str, Measure] | None = None,
    on_trained: TrainedCallback | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
    baseline: Setting | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    optuna: OptunaOptions = DEFAULT_OPTUNA,
    progress: bool = False,
    force: bool = False,
) -> Study:
    """Train models with different heads on the same batches. Each head setting uses the best of several learning rates,
    and is then trained with several seeds. Return a table with one row per head setting, which compares mean held-out
    losses and recommends a setting if the differences are significant.

    Args:
        build_model: returns an untrained model with the heads of a `Setting`, on the device to train on.
        data: training batches, which stay in memory: tensors, or mappings of the model's arguments.
        space: settings to compare, as a `Space` or a sequence of settings.
        budget: time limit or training length, and the numbers of learning rates and seeds per setting.
        held_out: batches on which trained models are compared; by default every tenth batch of `data`, not trained on.
        loss: `(model, batch) -> (batch,)`, whose mean is minimized and compared.
        measures: functions of a trained model that return a number, by name; each adds a column to the table.
        on_trained: `(model, setting, seed)`, called with each trained model that is compared.
        recipe: optimizer, learning-rate schedule and range of learning rates.
        baseline: the setting in use. It is compared as well, and another one is recommended only if it is better.
        seed: base seed of weights, batch order and learning-rate search.
        out: folder for the table and, without `optuna.storage`, for an SQLite database; an existing study resumes.
        optuna: database, name and pruner of the Optuna study.
        progress: show a progress bar on standard error.
        force: delete an existing study in `out`, or with the same name in the database, and start again.

    Raises:
        InputError: an argument has the wrong type; there are no training or no held-out batches; the space has no valid
            setting; the time limit is too short; `out` or the database has a study with other arguments.
        MissingExtra: optuna, scipy or, with `out`, pyarrow is not installed.

    Example:
        >>> result = hw.study(build, batches, hw.Space(512, heads=(4, 8, 16)), budget=hw.StudyBudget(seconds=3600))
        >>> result.recommendation.sentence  # doctest: +SKIP
    """
    check_requirements(budget)
    if budget.tokens is not None:
        raise InputError("tokens", expected="steps: a batch may have any number of tokens", got=budget.tokens)
    settings = settings_to_compare(space, baseline)
    corpus = Corpus(*split_batches(data, held_out), loss)
    definition = StudyDefinition(build_model, settings, corpus, recipe, measures or {}, on_trained, seed)
    return run_study(
        definition,
        budget,
        title=optuna.name,
        baseline=baseline,
        left_out=space.left_out() if isinstance(space, Space) else (),
        out=out,
        optuna=optuna,
        progress=progress,
        force=force,
    )


def check_requirements(budget: Any) -> None:
    """Raise an error if optuna or scipy is not installed, or if `budget` is not a `StudyBudget`."""
    require_optuna()
    require("scipy.stats", purpose="a study", extra="study")
    if not isinstance(budget, StudyBudget):
        raise InputError("budget", expected="a StudyBudget, such as hw.StudyBudget(seconds=3600)", got=repr(budget))


def run_study(
    definition: StudyDefinition,
    budget: StudyBudget,
    *,
    title: str,
    baseline: Setting | None,
    left_out: Sequence[str],
    out: str | Path | None,
    optuna: OptunaOptions,
    progress: bool,
    force: bool,
) -> Study:
    """Train and compare the models of a study, or resume it if it was interrupted, and return the table of results. The
    table also stores `title` (name of the data or model), `baseline`, and `left_out` (a sentence on each invalid
    setting). Other arguments are as for `study`.
    """
    spec = definition.fingerprint(budget)
    if out is not None:
        require_parquet(Study.NAME)
        out = writable_folder(out)
    with (
        _database_url(out, optuna.storage, force=force) as url,
        closing(TrialStore(url, optuna, definition.settings, definition.recipe.rates, force=force)) as store,
    ):

        def seconds_spent() -> float:
            store.update_session()
            return store.seconds_spent()

        with study_progress(store, budget, shown=progress) as show_progress:
            plan = StudyPlan(**store.agree_on_plan(lambda: asdict(make_plan(definition, spec, budget, seconds_spent))))
            for name, value in spec.items():
                if plan.spec.get(name) != value:
                    expected, remedy = (
                        f"a study that was started with the same {name}",
                        "--force (force=True) starts again",
                    )
                    raise InputError("out", expected=expected, got="another", remedy=remedy)
            run_trials(store, definition, plan, budget, show_progress)
        metadata = {"model": {"name": title}, "settings": spec, "steps": plan.steps, "left_out": left_out}
        trials = store.finished()
    result = collect_results(trials, definition.settings, plan.parameters, metadata, budget.seeds, baseline)
    if out is not None:
        result.save(out, force=True)
    return result


@contextmanager
def study_progress(store: TrialStore, budget: StudyBudget, *, shown: bool) -> Iterator[Callable[[], None]]:
    """Context manager that shows the progress of a study, if `shown`. It yields a function that updates the progress
    bar. The bar counts seconds if the budget has a time limit, otherwise finished trainings. At the end of the study,
    the bar is set to full.
    """
    limit = budget.seconds
    total = len(store.settings) * (budget.max_trials + budget.seeds) if limit is None else round(limit)
    unit, shown_units, last_update = "trainings" if limit is None else "s", 0, -math.inf
    with progress_bar("study", total, unit, shown=shown) as bar:

        def update() -> None:
            nonlocal shown_units, last_update
            if time.monotonic() - last_update < REFRESH_SECONDS:
                return
            last_update = time.monotonic()
            units = min(total, len(store.finished()) if limit is None else int(store.seconds_spent()))
            (bar.advance if shown_units else bar.resume)(units - shown_units)
            shown_units = units

        yield update if shown else lambda: None
        bar.advance(total - shown_units)


def settings_to_compare(space: Any, baseline: Setting | None) -> tuple[Setting, ...]:
    """Return the head settings of a space and the baseline setting, if there is one, sorted and without duplicates."""
    settings = space.settings() if isinstance(space, Space) else tuple(space)
    if not settings or not all(isinstance(setting, Setting) for setting in settings):
        raise InputError("space", expected="a Space or a sequence of settings", got=repr(space))
    return tuple(sorted({*settings, *(() if baseline is None else (baseline,))}))


def split_batches(data: Iterable[Any], held_out: Iterable[Any] | None) -> tuple[Batches, Batches]:
    """Return the training batches and the held-out batches. If `held_out` is None, every tenth batch of `data` is held
    out.
    """
    batches = list(iterate_batches(data))
    training, judged = (batches, list(iterate_batches(held_out))) if held_out is not None else every_nth(batches)
    if not training or not judged:
        expected = f"at least {HELD_OUT // 2 + 1} batches, of which one in {HELD_OUT} is held out"
        if held_out is not None:
            expected = "at least one training batch and one held-out batch"
        raise InputError("data", expected=expected, got=f"{len(training)} and {len(judged)}")
    return training, judged


def every_nth(examples: Sequence[Any], n: int = HELD_OUT) -> tuple[list[Any], list[Any]]:
    """Divide examples into two lists: all except every n-th example, and every n-th example."""
    return [each for number, each in enumerate(examples) if (number - n // 2) % n], list(examples[n // 2 :: n])


@contextmanager
def _database_url(out: Path | None, storage: str | None, *, force: bool) -> Iterator[str]:
    """Context manager that yields the URL of the trial database: `storage`, or an SQLite file in the folder `out`, or
    else a temporary file. With `force`, the database and results of an earlier study in `out` are deleted first.
    """
    if out is not None and force:
        for path in (out / f"{Study.NAME}.db", table_path(out, Study.NAME)):
            path.unlink(missing_ok=True)
    if storage is not None:
        yield storage
    elif out is not None:
        yield f"sqlite:///{(out / Study.NAME).resolve()}.db"
    else:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            yield f"sqlite:///{folder}/{Study.NAME}.db"
