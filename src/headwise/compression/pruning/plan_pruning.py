"""`plan_pruning`: the choice of heads that remain, from scores of heads and a constraint on their numbers.

The lowest scores are removed. Which heads compete with each other depends on the constraint:

    uniform   equally many heads remain in each module, with grouped queries in each group; heads of a module (of a
              group) compete
    groups    equally many key/value heads remain in each module, with all their query heads; groups of a module compete
    free      heads (with grouped queries: groups) of the whole model compete; at least one remains in each module
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any, Protocol, runtime_checkable

from torch import nn

from headwise.checks import finite_number, require_one_of, whole_number
from headwise.compression.calibration.same_outputs import remove_heads_checked
from headwise.compression.pruning.pruning_plan import DEFAULT_ROUNDS, Head, PlannedModule, PruningPlan, planned_modules
from headwise.compression.scores.least_squares import LeastSquaresScores
from headwise.errors import InputError
from headwise.families.registry import head_module
from headwise.page.columns import ModelIdentity
from headwise.progress import progress_bar, shown_progress
from headwise.removal.remove_heads import loader_of
from headwise.removal.torch_layers import replace_torch_layers
from headwise.runs.fingerprint import identity_of
from headwise.runs.head_table import HeadTable
from headwise.settings import CONSTRAINTS

Unit = tuple[Head, ...]
"""Heads that are removed together."""


@runtime_checkable
class UnitScores(Protocol):
    """Interface of objects that score units for pruning. A unit is a set of heads that are removed together, such as
    one head, or all query heads of a key/value head. A score may depend on the heads that are removed already.

    Attributes:
        name: name of the scores, for display.
        rows: one row per head, with `layer`, `head`, `kv_head`, `module` and `kind`.
        identity: identity of the model; None if it is unknown.
        rounds: number of times that the heads are scored by default; None for once per removed unit.
        is_comparable: True if scores of heads of different modules can be compared.
    """

    name: str
    rows: Sequence[Any]
    identity: ModelIdentity | None
    rounds: int | None
    is_comparable: bool

    def of(self, units: Sequence[Unit], removed: frozenset[Head]) -> list[float]:
        """Return the importance of each unit (set of heads that are removed together) in the model from which the heads
        `removed` are already removed. Units of low importance are removed first.
        """


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
    """Choose the attention heads that remain in a model when it is pruned: the heads with the lowest scores are
    removed.

    Args:
        scores: a table of heads, such as `hw.ablate` and `hw.importance` return; a function that returns such a table
            for the model without some heads, which it receives as gates `{(layer, head): 0.0}`; or scores of
            `hw.LeastSquaresScores`, `hw.AblationScores`, `hw.ImportanceScores` or `hw.MagnitudeScores`. Least squares
            without a loss makes several plans, and the plan is returned whose model differs least from the dense model
            on held-out calibration data.
        keep: share of the heads that remain, above 0 and at most 1.
        constraint: "uniform", "groups" or "free"; see this module's docstring.
        rounds: number of rounds in which heads are removed; before each round, the remaining heads are scored again. By
            default 8 for a function, ablation and importance, one for each removal for least squares, and 1 for
            magnitude and for a table, which cannot be scored again.
        statistic: statistic of the table that is the score; by default the one that its plots show.
        model: the model. The plan then also states what can load the pruned model. If the scores are objects of
            headwise that read data, the function also verifies on this data that the model without the removed heads
            returns the same as the model in which the outputs of these heads are 0. Scores of a table have no data;
            `hw.prune` verifies the same on calibration data.
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
    require_one_of("constraint", constraint, CONSTRAINTS)
    source: UnitScores
    if isinstance(scores, UnitScores):
        if statistic is not None:
            raise InputError("statistic", expected="None for scores that are no table", got=repr(statistic))
        source = scores
    else:
        source = _TableScores(scores, statistic)
    if rounds is not None and whole_number("rounds", rounds, least=1) > 1 and isinstance(scores, HeadTable):
        remedy = "pass a function that scores the model without some heads"
        raise InputError("rounds", expected="1 for a table, which cannot be scored again", got=rounds, remedy=remedy)
    if constraint == "free" and not source.is_comparable:
        remedy = "pass a loss to the scores"
        raise InputError("constraint", expected="uniform or groups for these scores", got="free", remedy=remedy)
    pools = _pools(planned_modules(source.rows, frozenset()), share, constraint)
    plans: dict[tuple[PlannedModule, ...], tuple[str, int]] = {}
    for each in source.candidates() if isinstance(source, LeastSquaresScores) else [source]:
        removed, scored = _remove_in_rounds(each, pools, each.rounds if rounds is None else rounds, shown=progress)
        plans.setdefault(planned_modules(source.rows, removed), (each.name, scored))
    modules, (name, scored) = next(iter(plans.items()))
    if len(plans) > 1 and isinstance(source, LeastSquaresScores):
        modules, (name, scored) = list(plans.items())[source.choose(list(plans))]
        name += f", the best of {len(plans)} plans on held-out sequences"
    identity, loader = source.identity, None
    if model is not None:
        identity = identity_of(model)
        if source.identity is not None and source.identity.is_other(identity):
            raise InputError("model", expected="the model of the scores", got="one with other weights")
        kept = {each.module: each.kept for each in modules}
        loader = loader_of(model, kept)
        if batches := getattr(source, "batches", None):
            # Heads can be removed as the class names of the modules say: verified on the data of the scores.
            copy = replace_torch_layers(deepcopy(model))
            with shown_progress(progress):
                remaining = {path: head_module(copy, path).kept(query) for path, query in kept.items()}
                remove_heads_checked(copy, remaining, batches)
    return PruningPlan(modules, constraint, share, name, scored, loader, identity)


def _pools(modules: Sequence[PlannedModule], share: float, constraint: str) -> list[tuple[list[Unit], int]]:
    """Return pools of units (sets of heads that are removed together), each with the number of its units that remain.
    The score of a unit is compared with the scores of units in the same pool only.
    """
    layers = [each.layer for each in modules]
    if len(set(layers)) < len(layers):  # a head is named by layer and number
        raise InputError("scores", expected="a layer of its own for each module", got=layers)
    pools: list[list[Unit]] = []
    for each in modules:
        group = each.num_heads // each.num_kv_heads
        heads = [(each.layer, head) for head in range(each.num_heads)]
        groups: list[Unit] = [tuple(heads[start : start + group]) for start in range(0, each.num_heads, group)]
        if constraint == "uniform" and group > 1:
            pools += [[(head,) for head in unit] for unit in groups]
        else:
            pools.append(groups)
    if constraint == "free":
        units = [unit for pool in pools for unit in pool]
        return [(units, max(_rounded(share * len(units)), len(modules)))]
    return [(units, max(1, _rounded(share * len(units)))) for units in pools]


def _rounded(number: float) -> int:
    """Return the nearest whole number; a half is rounded up."""
    return math.floor(number + 0.5)


def _remove_in_rounds(
    scores: UnitScores, pools: Sequence[tuple[list[Unit], int]], rounds: int | None, *, shown: bool
) -> tuple[frozenset[Head], int]:
    """Remove the units (sets of heads that are removed together) with the lowest scores from each pool, until as many
    units remain as `pools` states for this pool. Units are removed in rounds, and are scored again before each round.
    At least one unit remains in each layer. Return the removed heads and the number of rounds.

    Args:
        scores: scores of the units.
        pools: for each pool, its units and the number of units that remain.
        rounds: number of rounds; None to remove one unit per round.
        shown: True to show a progress bar.
    """
    excess = max((len(units) - keep for units, keep in pools), default=0)
    rounds = min(excess, excess if rounds is None else rounds)
    removed: frozenset[Head] = frozenset()
    with progress_bar("plan", rounds, "rounds", shown=shown) as bar:
        for number in bar.track(range(1, rounds + 1)):
            remaining = [unit for units, _ in pools for unit in units if unit[0] not in removed]
            score_of = dict(zip(remaining, scores.of(remaining, removed), strict=True))
            for unit, score in score_of.items():
                if math.isnan(score):
                    names = ", ".join(f"{layer}.{head}" for layer, head in unit)
                    raise InputError("scores", expected="a number for each head", got=f"NaN for {names}")
            for units, keep in pools:
                own = [unit for unit in units if unit in score_of]
                surplus = len(own) - len(units) + _rounded((len(units) - keep) * number / rounds)
                in_layer = Counter(unit[0][0] for unit in own)
                for unit in sorted(own, key=score_of.__getitem__):
                    layer = unit[0][0]
                    if surplus > 0 and in_layer[layer] > 1:
                        removed |= set(unit)
                        in_layer[layer] -= 1
                        surplus -= 1
    return removed, rounds


class _TableScores:
    """Pruning scores from a table with one row per head, or from a function that returns such a table for the model
    without some heads. The score of a set of heads is the sum of one statistic over the heads, by default of the
    statistic that the table's plots show.
    """

    is_comparable = True

    def __init__(self, scores: Any, statistic: str | None) -> None:
        self._function, self._statistic = scores if callable(scores) else None, statistic
        self.rounds: int | None = 1 if self._function is None else DEFAULT_ROUNDS
        table = scores if self._function is None else scores({})
        if not isinstance(table, HeadTable):
            expected = "a table of heads, a function that returns one, or scores of headwise"
            raise InputError("scores", expected=expected, got=type(table).__name__)
        known = table.statistics
        default = table.PLOTTED if table.PLOTTED in known else next(iter(known), None)
        chosen = require_one_of("statistic", default if statistic is None else statistic, known)
        self.name = f"{chosen} of the {table.NAME}"
        self.rows: Sequence[Any] = table.heads
        self.identity: ModelIdentity | None = table.identity
        self._value_of = {(row.layer, row.head): row.statistics[chosen].value for row in table.heads}

    def of(self, units: Sequence[Unit], removed: frozenset[Head]) -> list[float]:
        """Return the sum of the statistic over the heads of each unit (set of heads that are removed together). If a
        function computes the statistic, it is called again to measure the model without the heads `removed`.
        """
        if removed and self._function is not None:
            table = self._function(dict.fromkeys(sorted(removed), 0.0))
            return _TableScores(table, self._statistic).of(units, frozenset())
        return [math.fsum(self._value_of[head] for head in unit) for unit in units]
