"""How many heads: models of every setting trained on the same batches, the learning rate searched for each.

The work is a list of jobs. First, learning rates are tried for each setting, with one seed; on their way Optuna gives
up those that are behind. Then each setting is trained with its best rate and several other seeds: these are what is
compared. A budget decides, from steps that were timed, how many batches a training takes, and then how long the search
goes on: until what is left is what the seeds need.
"""

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from headwise.analysis.losses import Loss, next_token_loss
from headwise.checks import finite_number, whole_number
from headwise.data.batches import digest_of
from headwise.data.batches import iterate_batches as as_batches
from headwise.errors import InputError
from headwise.runs.distributed import usable_device
from headwise.runs.files import writable_folder
from headwise.runs.progress import progress_bar
from headwise.runs.table import require_parquet, table_path
from headwise.studies.budget import Measure, Plan, Work, planned
from headwise.studies.conclusions import Study, collected, require_scipy
from headwise.studies.scheduler import Wanted, run
from headwise.studies.space import Setting, Space
from headwise.studies.training import RECIPE, Batches, Recipe
from headwise.studies.trial_store import Ledger, require_optuna

if TYPE_CHECKING:
    import optuna

RATES = (3e-4, 3e-2)
"""Learning rates among which is searched."""

HELD_OUT = 10
"""One batch of so many is held out where none are given."""

SECOND = 1.0
"""How often the bar moves."""

FORCE = "--force (force=True) begins again"


def study(
    build_model: Callable[[Setting], nn.Module],
    data: Iterable[Any],
    space: Space | Sequence[Setting],
    *,
    held_out: Iterable[Any] | None = None,
    loss: Loss = next_token_loss,
    budget: float | None = None,
    steps: int | None = None,
    trials: int | None = None,
    seeds: int = 3,
    baseline: Setting | None = None,
    rates: tuple[float, float] = RATES,
    recipe: Recipe = RECIPE,
    measures: Mapping[str, Measure] | None = None,
    keep: Callable[[nn.Module, Setting, int], None] | None = None,
    pruner: "optuna.pruners.BasePruner | None" = None,
    device: torch.device | str | None = None,
    seed: int = 0,
    out: str | Path | None = None,
    storage: str | None = None,
    name: str = "study",
    title: str | None = None,
    progress: bool = False,
    force: bool = False,
) -> Study:
    """Train models of every setting and compare them: the same batches, several seeds, a learning rate for each.

    Interrupted, it goes on where it was, given the same arguments. Processes that share a database share the work.
    With `steps` and `trials`, and one process, the same seeds give the same losses; a budget sets both by the clock.

    Args:
        build_model: gives a model with the heads of a `Setting`. Its weights are drawn as usual: the seed is set
            before. To be fair, all should have about as many parameters; the table says how many they have.
        data: batches to train on, as elsewhere: tensors, or mappings of the model's arguments. They are kept in
            memory, and taken in an order that depends on the seed alone.
        space: what is compared: a `Space`, or settings.
        held_out: batches to judge by; by default every tenth of `data`, which is then not trained on.
        loss: `(model, batch) -> (batch,)`.
        budget: seconds for everything, during which at least one process is at work.
        steps: batches of a training; set by the budget if not given.
        trials: learning rates that are tried for each setting; by default as many as the budget allows, and 3
            without one.
        seeds: trainings of each setting with its best rate.
        baseline: the setting that is in use: another one is recommended only where it is better.
        rates: the least and the largest learning rate.
        recipe: how a model is trained.
        measures: more numbers of each trained model, by name.
        keep: `(model, setting, seed)`, called with each trained model that is compared.
        pruner: of Optuna: which learning rates are given up; by default those behind the median at half of the steps.
        device: of the models; by default where `build_model` makes them.
        seed: of everything that is drawn.
        out: a folder for the table and, unless there is a `storage`, for a SQLite database.
        storage: the URL of a database, as Optuna takes it, for processes on several machines.
        name: of the study in the database.
        title: of the model, to show.
        progress: show a bar on standard error.
        force: begin again where there is a study in `out`, or of that name in the database.

    Raises:
        InputError: arguments of another kind; no batches to train on or to judge by; a space without a setting; a
            budget that is too small for the trainings it asks for; a study that was begun with other arguments.
        MissingExtra: optuna, scipy or, with `out`, pyarrow is not installed.
    """
    require_optuna()
    require_scipy()
    wanted = _wanted(budget, steps, trials, seeds)
    settings = _settings(space, baseline)
    training, judged = divided(data, held_out)
    place = None if device is None else usable_device(device)
    work = Work(build_model, settings, training, judged, loss, recipe, measures or {}, keep, place, seed)
    spec = _spec(work, _range(rates), steps, trials)
    if out is not None:
        require_parquet(Study.NAME)
        out = writable_folder(out)
    with _database(out, storage, force=force) as url:
        ledger = Ledger(url, name, settings, rates, pruner, force=force)
        try:
            with _showing(ledger, wanted, len(settings), shown=progress) as show:
                plan = _agreed(ledger, work, spec, wanted)
                run(ledger, work, plan, wanted, show)
            left_out = space.left_out() if isinstance(space, Space) else ()
            metadata = {"model": {"name": title or name}, "settings": spec, "steps": plan.steps, "left_out": left_out}
            found = collected(ledger.done(), settings, plan.parameters, metadata, seeds, baseline)
        finally:
            ledger.leave()
    if out is not None:
        found.save(out, force=True)
    return found


# -- arguments --------------------------------------------------------------------------------------------------------


def _wanted(budget: float | None, steps: int | None, trials: int | None, seeds: int) -> Wanted:
    if budget is None and steps is None:
        raise InputError("budget", expected="a budget, or steps of each training", got="neither")
    if budget is not None:
        budget = finite_number("budget", budget, above=0.0)
    for argument, number in (("steps", steps), ("trials", trials), ("seeds", seeds)):
        if number is not None:
            whole_number(argument, number, least=1)
    return Wanted(budget, steps, trials, seeds)


def _settings(space: Any, baseline: Setting | None) -> tuple[Setting, ...]:
    """What is compared, each once, the baseline among them."""
    found = space.settings() if isinstance(space, Space) else tuple(space)
    if not found or not all(isinstance(setting, Setting) for setting in found):
        raise InputError("space", expected="a Space, or settings", got=repr(space))
    return tuple(sorted({*found, *(() if baseline is None else (baseline,))}))


def _range(rates: Any) -> tuple[float, float]:
    low, high = (finite_number("rates", rate, above=0.0) for rate in rates)
    if not low < high:
        raise InputError("rates", expected="the least learning rate, then the largest", got=rates)
    return low, high


def divided(data: Iterable[Any], held_out: Iterable[Any] | None) -> tuple[Batches, Batches]:
    """Batches to train on, and to judge by."""
    found = list(as_batches(data))
    if held_out is not None:
        training, judged = found, list(as_batches(held_out))
    else:
        judged = found[HELD_OUT // 2 :: HELD_OUT]
        training = [batch for number, batch in enumerate(found) if (number - HELD_OUT // 2) % HELD_OUT]
    if not training or not judged:
        expected = f"at least {HELD_OUT // 2 + 1} batches, one of {HELD_OUT} to be held out"
        if held_out is not None:
            expected = "at least one batch to train on and one to judge by"
        raise InputError("data", expected=expected, got=f"{len(training)} and {len(judged)}")
    return training, judged


def _spec(work: Work, rates: tuple[float, float], steps: int | None, trials: int | None) -> dict[str, Any]:
    """What a study was begun with and goes on only with, as it comes back from a file."""
    parts = [part for batch in (*work.training, {"": None}, *work.held_out) for pair in batch.items() for part in pair]
    models = [work.model(setting, work.seed).named_parameters() for setting in work.settings]
    spec = {
        "space": [setting.name for setting in work.settings],
        "model": digest_of((name, tuple(each.shape)) for model in models for name, each in model),
        "data": digest_of(parts),
        "loss": getattr(work.loss, "__name__", type(work.loss).__name__),
        "steps": steps,
        "trials": trials,
        "rates": rates,
        "recipe": asdict(work.recipe),
        "seed": work.seed,
        "training batches": len(work.training),
        "held-out batches": len(work.held_out),
    }
    copied: dict[str, Any] = json.loads(json.dumps(spec))
    return copied


@contextmanager
def _database(out: Path | None, storage: str | None, *, force: bool) -> Iterator[str]:
    """The URL of the database: the given one, one in the folder, or one that is gone afterwards."""
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


def _agreed(ledger: Ledger, work: Work, spec: dict[str, Any], wanted: Wanted) -> Plan:
    """The plan that was made first. `InputError` where that was for another study."""

    def make() -> dict[str, Any]:
        clock: Any = {"budget": wanted.budget, "spent": spent}
        options: Any = {"steps": wanted.steps, "trials": wanted.least_trials, "seeds": wanted.seeds}
        return planned(work, spec, **clock, **options).packed()

    def spent() -> float:
        ledger.tick()
        return ledger.spent()

    plan = Plan(**ledger.agreed(make))
    for name, value in spec.items():
        if plan.spec.get(name) != value:
            expected = f"a study that was begun with the same {name}"
            raise InputError("out", expected=expected, got="another", remedy=FORCE)
    return plan


@contextmanager
def _showing(ledger: Ledger, wanted: Wanted, settings: int, *, shown: bool) -> Iterator[Callable[[], None]]:
    """A function that tells a bar how far all is: in seconds of the budget, or in trainings."""
    timed = wanted.budget is not None
    total = round(wanted.budget) if wanted.budget is not None else settings * (wanted.most_trials + wanted.seeds)
    unit, told, last = "s" if timed else "trainings", 0, -math.inf
    with progress_bar("study", total, unit, shown=shown) as advance:

        def show() -> None:
            nonlocal told, last
            if time.monotonic() - last < SECOND:  # the database is asked each time
                return
            last = time.monotonic()
            now = min(int(ledger.spent()) if timed else len(ledger.done()), total)
            advance(now - told, not told)
            told = now

        yield show if shown else lambda: None
