"""`plan_pruning`: the choice of heads that remain, from scores of heads and a constraint on their numbers.

The lowest scores are removed. Which heads compete with each other depends on the constraint:

    uniform   equally many heads remain in each module, with grouped queries in each group; heads of a module (of a
              group) compete
    groups    equally many key/value heads remain in each module, with all their query heads; groups of a module compete
    free      heads (with grouped queries: groups) of the whole model compete; at least one remains in each module
"""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol, runtime_checkable

from torch import nn

from headwise.checks import finite_number, whole_number
from headwise.compression.calibration.same_outputs import remove_heads_checked
from headwise.compression.pruning.pruning_plan import Head, PlannedModule, PruningPlan, planned_modules
from headwise.errors import InputError
from headwise.families.registry import head_module
from headwise.page.columns import ModelIdentity
from headwise.progress import progress_bar, shown_progress
from headwise.removal.remove_heads import loader_of
from headwise.removal.torch_layers import replace_torch_layers
from headwise.runs.fingerprint import identity_of
from headwise.runs.head_table import HeadTable
from headwise.settings import CONSTRAINTS

DEFAULT_ROUNDS = 8
"""Number of times that a function scores the heads."""

Unit = tuple[Head, ...]
"""Heads that are removed together."""


@runtime_checkable
class UnitScores(Protocol):
    """Interface of scores of units, which are the sets of heads that pruning removes at once. A score depends on the
    heads that are removed already.
    """

    @property
    def name(self) -> str:
        """Name of the scores, for display."""

    @property
    def rows(self) -> Sequence[Any]:
        """One row per head, with `layer`, `head`, `kv_head`, `module` and `kind`."""

    @property
    def identity(self) -> ModelIdentity | None:
        """Identity of the model; None if it is unknown."""

    @property
    def rounds(self) -> int | None:
        """Number of times that the heads are scored by default; None for once per removed unit."""

    @property
    def is_comparable(self) -> bool:
        """True if scores of heads of different modules can be compared."""

    def of(self, units: Sequence[Unit], removed: frozenset[Head]) -> list[float]:
        """Return the score of each unit, given that some heads were removed before. The larger, the more important."""


@runtime_checkable
class ScoresWithCandidates(UnitScores, Protocol):
    """Interface of scores that decide between the plans of several scores."""

    def candidates(self) -> Sequence[UnitScores]:
        """Return the scores, these first."""

    def choose(self, plans: Sequence[Sequence[PlannedModule]]) -> int:
        """Return the number of the best plan. The first is that of these scores."""


def plan_pruning(
    scores: HeadTable[Any] | Callable[[Mapping[Head, float]], HeadTable[Any]] | UnitScores,
    *,
    keep: float,
    constraint: str = "uniform",
    rounds: int | None = None,
    statistic: str | None = None,
    model: nn.Module | None = None,
    progress: bool = False,
) -> PruningPlan:
    """Choose the heads that remain in a model, by scores of its heads.

    Args:
        scores: a table of heads, such as `hw.ablate` and `hw.importance` return; a function that returns such a table
            for the model without some heads, which it receives as gates `{(layer, head): 0.0}`; or scores of
            `hw.LeastSquaresScores`, `hw.AblationScores`, `hw.ImportanceScores` or `hw.MagnitudeScores`. Least squares
            without a loss makes several plans. The one is returned whose model differs least from the dense model on
            held-out calibration data.
        keep: share of the heads that remain, above 0 and at most 1.
        constraint: "uniform", "groups" or "free"; see this module's docstring.
        rounds: number of rounds in which heads are removed; before each, the remaining ones are scored again. By
            default 8 for a function, ablation and importance, one for each removal for least squares, and 1 for
            magnitude and for a table, which cannot be scored again.
        statistic: statistic of the table that is the score; by default the one that its plots show.
        model: the model, from which the plan learns what can load the result. With scores of headwise that read data,
            it is also verified on these that the model without the heads returns the same as with outputs of 0 from
            them. Scores of a table have no data: `hw.prune` verifies it on calibration data.
        progress: show a progress bar on standard error.

    Returns:
        The plan, for `hw.prune`.

    Raises:
        InputError: an argument cannot be used, a score is NaN, scores of different modules cannot be compared, or an
            attention module computes something else than its class name says.

    Example:
        >>> plan = headwise.plan_pruning(headwise.ablate(model, texts, loss), keep=0.5)  # doctest: +SKIP
    """
    share = finite_number("keep", keep, above=0.0)
    if share > 1:
        raise InputError("keep", expected="a share above 0 and at most 1", got=keep)
    if constraint not in CONSTRAINTS:
        raise InputError("constraint", expected=f"one of {', '.join(CONSTRAINTS)}", got=repr(constraint))
    source = _unit_scores(scores, statistic)
    if rounds is not None and whole_number("rounds", rounds, least=1) > 1 and isinstance(source, _TableScores):
        remedy = "pass a function that scores the model without some heads"
        raise InputError("rounds", expected="1 for a table, which cannot be scored again", got=rounds, remedy=remedy)
    if constraint == "free" and not source.is_comparable:
        remedy = "pass a loss to the scores"
        raise InputError("constraint", expected="uniform or groups for these scores", got="free", remedy=remedy)
    pools = _pools(planned_modules(source.rows, frozenset()), share, constraint)
    plans: dict[tuple[PlannedModule, ...], tuple[str, int]] = {}
    for each in source.candidates() if isinstance(source, ScoresWithCandidates) else [source]:
        removed, scored = _remove_in_rounds(each, pools, each.rounds if rounds is None else rounds, shown=progress)
        plans.setdefault(planned_modules(source.rows, removed), (each.name, scored))
    modules, (name, scored) = next(iter(plans.items()))
    if len(plans) > 1 and isinstance(source, ScoresWithCandidates):
        modules, (name, scored) = list(plans.items())[source.choose(list(plans))]
        name += f", the best of {len(plans)} plans on held-out sequences"
    identity, loader = source.identity, None
    if model is not None:
        with shown_progress(progress):
            loader = _verified_loader(model, source, modules)
        identity = identity_of(model)
    return PruningPlan(modules, constraint, share, name, scored, loader, identity)


def _verified_loader(model: nn.Module, scores: UnitScores, modules: Sequence[PlannedModule]) -> str:
    """Return what loads the pruned model. If the scores read data, verify on these, with a copy of the model, that its
    heads can be removed as the class names of its modules say.
    """
    if scores.identity is not None and scores.identity.is_other(identity_of(model)):
        raise InputError("model", expected="the model of the scores", got="one with other weights")
    kept = {each.module: each.kept for each in modules}
    loader = loader_of(model, kept)
    if batches := getattr(scores, "batches", None):
        copy = replace_torch_layers(deepcopy(model))
        remove_heads_checked(copy, {path: head_module(copy, path).kept(query) for path, query in kept.items()}, batches)
    return loader


@dataclass
class _Pool:
    """Units that compete with each other.

    Attributes:
        units: the units.
        keep: number of units that remain.
        of_module: for each unit, the key of its module, in which at least one unit remains.
    """

    units: list[Unit]
    keep: int
    of_module: list[int]


def _pools(modules: Sequence[PlannedModule], share: float, constraint: str) -> list[_Pool]:
    """Return the units of all modules as pools of competing units."""
    pools: list[_Pool] = []
    for index, each in enumerate(modules):
        group = each.num_heads // each.num_kv_heads
        groups = [
            [(each.layer, head) for head in range(start, start + group)] for start in range(0, each.num_heads, group)
        ]
        if constraint == "uniform" and group > 1:
            pools += [_pool([(head,) for head in heads], share, index) for heads in groups]
        else:
            pools.append(_pool([tuple(heads) for heads in groups], share, index))
    if constraint != "free":
        return pools
    units = [unit for pool in pools for unit in pool.units]
    owners = [owner for pool in pools for owner in pool.of_module]
    return [_Pool(units, max(_rounded(share * len(units)), len(modules)), owners)]


def _pool(units: list[Unit], share: float, module: int) -> _Pool:
    """Return a pool of units of one module, of which a share remains, but at least one."""
    return _Pool(units, max(1, _rounded(share * len(units))), [module] * len(units))


def _rounded(number: float) -> int:
    """Return the nearest whole number; of two, the larger one."""
    return math.floor(number + 0.5)


def _remove_in_rounds(
    scores: UnitScores, pools: Sequence[_Pool], rounds: int | None, *, shown: bool
) -> tuple[frozenset[Head], int]:
    """Remove the units with the lowest scores from each pool until `keep` units remain, and return the removed heads
    and the number of times that units were scored.
    """
    excess = max((len(pool.units) - pool.keep for pool in pools), default=0)
    rounds = min(excess, excess if rounds is None else rounds)
    removed: frozenset[Head] = frozenset()
    with progress_bar("plan", rounds, "rounds", shown=shown) as bar:
        for number in bar.track(range(1, rounds + 1)):
            taken: set[Head] = set()
            for pool, values in zip(pools, _scores_of(scores, pools, removed), strict=True):
                target = len(pool.units) - _rounded((len(pool.units) - pool.keep) * number / rounds)
                taken |= _lowest(pool, values, target, removed)
            removed |= taken
    return removed, rounds


def _scores_of(scores: UnitScores, pools: Sequence[_Pool], removed: frozenset[Head]) -> list[list[float]]:
    """Return the scores of the units of each pool; infinity for removed ones."""
    remaining = [unit for pool in pools for unit in pool.units if unit[0] not in removed]
    values = dict(zip(remaining, scores.of(remaining, removed), strict=True))
    for unit, value in values.items():
        if math.isnan(value):
            names = ", ".join(f"{layer}.{head}" for layer, head in unit)
            raise InputError("scores", expected="a number for each head", got=f"NaN for {names}")
    return [[values.get(unit, math.inf) for unit in pool.units] for pool in pools]


def _lowest(pool: _Pool, values: Sequence[float], target: int, removed: frozenset[Head]) -> set[Head]:
    """Return the heads of the units with the lowest scores that are removed so that `target` units of a pool remain, at
    least one in each module.
    """
    remaining = [index for index, unit in enumerate(pool.units) if unit[0] not in removed]
    in_module: dict[int, int] = {}
    for index in remaining:
        in_module[pool.of_module[index]] = in_module.get(pool.of_module[index], 0) + 1
    taken: set[Head] = set()
    left = len(remaining)
    for index in sorted(remaining, key=lambda index: values[index]):
        if left <= target:
            break
        owner = pool.of_module[index]
        if in_module[owner] == 1:
            continue
        taken |= set(pool.units[index])
        in_module[owner] -= 1
        left -= 1
    return taken


@dataclass(frozen=True)
class _TableScores:
    """Scores of a table of heads, which do not depend on removed heads. A unit's score is the sum over its heads.

    Attributes:
        table: the table.
        statistic: statistic that is the score; None for the one that the table's plots show.
    """

    table: HeadTable[Any]
    statistic: str | None
    is_comparable: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Name of the table and of the statistic."""
        return f"{self._chosen} of the {self.table.NAME}"

    @property
    def rows(self) -> Sequence[Any]:
        """Rows of the table."""
        return self.table.heads

    @property
    def identity(self) -> ModelIdentity | None:
        """Identity of the model, from the metadata of the table."""
        return self.table.identity

    @property
    def rounds(self) -> int:
        """A table is scored once."""
        return 1

    @property
    def _chosen(self) -> str:
        """Statistic that is the score."""
        known = self.table.statistics
        default = self.table.PLOTTED if self.table.PLOTTED in known else next(iter(known), None)
        chosen = default if self.statistic is None else self.statistic
        if chosen not in known:
            raise InputError("statistic", expected=f"one of {', '.join(known)}", got=repr(chosen))
        return str(chosen)

    def of(self, units: Sequence[Unit], removed: frozenset[Head]) -> list[float]:
        """Return the sum of the scores of each unit's heads."""
        name = self._chosen
        value_of = {(row.layer, row.head): row.statistics[name].value for row in self.table.heads}
        return [math.fsum(value_of[head] for head in unit) for unit in units]


@dataclass(frozen=True)
class _FunctionScores:
    """Scores of a function that returns a table of heads for the model without some heads.

    Attributes:
        function: the function.
        first: scores of the unchanged model.
        statistic: statistic that is the score.
    """

    function: Callable[[Mapping[Head, float]], HeadTable[Any]]
    first: _TableScores
    statistic: str | None
    is_comparable: ClassVar[bool] = True

    @property
    def name(self) -> str:
        """Name of the tables and of the statistic."""
        return self.first.name

    @property
    def rows(self) -> Sequence[Any]:
        """Rows of the first table."""
        return self.first.rows

    @property
    def identity(self) -> ModelIdentity | None:
        """Identity of the model, from the metadata of the first table."""
        return self.first.identity

    @property
    def rounds(self) -> int:
        """Number of times that the heads are scored by default."""
        return DEFAULT_ROUNDS

    def of(self, units: Sequence[Unit], removed: frozenset[Head]) -> list[float]:
        """Return the scores in the model without the removed heads."""
        if not removed:
            return self.first.of(units, removed)
        table = self.function(dict.fromkeys(sorted(removed), 0.0))
        return _TableScores(_require_table(table), self.statistic).of(units, removed)


def _unit_scores(scores: Any, statistic: str | None) -> UnitScores:
    """Return scores in the form that the choice of heads takes."""
    if isinstance(scores, HeadTable):
        return _TableScores(scores, statistic)
    if isinstance(scores, UnitScores):
        if statistic is not None:
            raise InputError("statistic", expected="None for scores that are no table", got=repr(statistic))
        return scores
    if callable(scores):
        return _FunctionScores(scores, _TableScores(_require_table(scores({})), statistic), statistic)
    return _TableScores(_require_table(scores), statistic)


def _require_table(table: Any) -> HeadTable[Any]:
    """Return `table` if it is a table of heads; otherwise raise `InputError`."""
    if not isinstance(table, HeadTable):
        expected = "a table of heads, a function that returns one, or scores of headwise"
        raise InputError("scores", expected=expected, got=type(table).__name__)
    return table
