"""Tables of analyses in a terminal: the most remarkable heads of each, and what was found in all of them."""

from collections.abc import Collection, Sequence
from functools import singledispatch
from typing import Any

from rich.console import Console
from rich.text import Text

from headwise.analysis.ablation_result import Ablation, SetAblation
from headwise.analysis.circuits.scores import CircuitScores, Composition
from headwise.analysis.compare import Comparison
from headwise.analysis.curves.attention_distances import AttentionDistances
from headwise.analysis.curves.position_curves import SLOPE_SUFFIX, PositionCurves
from headwise.analysis.flow.norm_weighted import NORM_PREFIX, NormWeighted
from headwise.analysis.flow.rollout import ROLLED_PREFIX, Rollout
from headwise.analysis.head_tests.dependencies import DependencyAccuracy
from headwise.analysis.head_tests.name_movers import NameMovers
from headwise.analysis.head_tests.retrieval import THRESHOLD, Retrieval
from headwise.analysis.head_tests.sinks import SinkRate
from headwise.analysis.importance.importance import Importance
from headwise.analysis.in_context_score import InContextScores
from headwise.analysis.patching.activation_patching import Patching
from headwise.analysis.profile import Profile, ProfiledHead
from headwise.analysis.pruning_curve import RANDOM, PruningCurve
from headwise.analysis.roles import MIXED, ROLES
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import MeanEstimate
from headwise.runs.significance import in_errors
from headwise.runs.table import Table
from headwise.show.tables import AT_RATE, descending, means, print_table, print_title, run_title, significant, signs
from headwise.show.terminal import bold_colour
from headwise.statistics.by_distance import WITH_FIRST
from headwise.statistics.by_norm import MOVED, PREFERENCE
from headwise.statistics.columns import CHANGE_SUFFIX
from headwise.wording import counted, number, quotient


@singledispatch
def print_result(table: Table[Any], console: Console, top: int) -> None:
    """Print the result of an analysis: the `top` rows of its table with the largest mean of the table's first
    statistic. This is the default; other functions are registered for classes of tables that need more output.
    """
    print_title(console, run_title(table))
    print_scores(table, console, table.statistics[0], top)


def print_scores(
    table: Table[Any], console: Console, statistic: str, top: int, *, no_effect: float | None = None
) -> None:
    """Print the `top` rows of a table with the largest mean of `statistic` (NaN last). If `no_effect` is given, print
    the rows whose mean is farthest from `no_effect` instead. Columns are the mean and standard error of every
    statistic, and the table's summaries and tests. One more column is the distance of `statistic` from 0, or from
    `no_effect`, in standard errors.
    """
    summaries, tests = table.summaries(), table.tests()

    def order(index: int) -> float:
        value: float = table.rows[index].statistics[statistic].value
        return value if no_effect is None else abs(value - no_effect)

    def cells(index: int) -> list[str]:
        row = table.rows[index]
        measured = row.statistics[statistic]
        ratio = in_errors(measured._replace(value=measured.value - (no_effect or 0.0)))
        of_summaries = [values[index] for values in summaries.values()]
        return [
            row.name,
            *means(row, table.statistics),
            quotient(ratio, "+z.1f"),
            *(str(value) if isinstance(value, int) else number(value) for value in of_summaries),
            *(number(values[index], ".2g") for values in tests.values()),
        ]

    further = (name.removeprefix(f"{statistic}_") for name in (*summaries, *tests))
    columns = ["", *table.statistics, "standard errors", *further]
    print_table(console, columns, map(cells, descending(range(len(table.rows)), order)), top=top)


@print_result.register
def print_ablation(ablation: Ablation | SetAblation, console: Console, top: int) -> None:
    """Print the `top` heads (or sets of heads) without which the loss rises most. Print also how many of all change the
    loss significantly.
    """
    metadata: Any = ablation.metadata
    print_title(console, run_title(ablation))
    loss, replacement = metadata["settings"]["loss"], metadata["settings"]["replacement"]
    unchanged = ablation.baseline.text()
    console.print(f"loss: {loss}, {unchanged} for the unchanged model; replacement of head outputs: {replacement}")
    if "note" in metadata["measured"]:
        console.print(metadata["measured"]["note"])
    print_scores(ablation, console, "cost", top)
    if ablation.is_distance:
        console.print("\na distance cannot be negative: compare its errors between rows, not with zero")
        return
    rises, falls = signs(significant(ablation, "cost"))
    rows = len(ablation.rows)
    console.print(
        f"\nof {rows}, removed one at a time, {rises} raise the loss, {falls} lower it, "
        f"{rows - rises - falls} neither, {AT_RATE}"
    )


@print_result.register
def print_importance(importance: Importance, console: Console, top: int) -> None:
    """Print the `top` heads with the largest importance scores."""
    settings: Any = importance.metadata["settings"]
    print_title(console, run_title(importance))
    over = "normalised in each layer" if settings["normalise"] else "not normalised"
    console.print(f"importance by {settings['method']['name']} of {settings['loss']}, {over}")
    print_scores(importance, console, importance.statistics[0], top)


@print_result.register
def print_in_context(scores: InContextScores, console: Console, top: int) -> None:
    """Print the in-context learning score of a model, and the `top` heads without which it rises most. The score is the
    model's loss late in the context minus its loss early in it.
    """
    settings: Any = scores.metadata["settings"]
    print_title(console, run_title(scores))
    window = "" if settings["window"] == 1 else f", means over the {settings['window']} tokens up to each"
    console.print(
        f"in-context learning score {scores.score.text()}: "
        f"loss {scores.late_loss.text()} at token {settings['late']}, "
        f"minus {scores.early_loss.text()} at token {settings['early']}{window}"
    )
    print_scores(scores, console, scores.statistics[0], top)


@print_result.register
def print_patching(table: Patching, console: Console, top: int, *, title: str) -> None:
    """Print the `top` heads with the largest effects of patching, and the logit differences without patching."""
    measured: Any = table.metadata["measured"]
    print_title(console, f"{title}: {counted(measured['sequences'], 'prompt pair')}")
    clean, corrupted = (number(measured[name]) for name in ("clean", "corrupted"))
    direction = table.metadata["settings"]["direction"]
    console.print(f"logit of the right answer minus that of the wrong one: {clean} clean, {corrupted} corrupted")
    effect = "recovered is 0 without effect" if direction == "denoise" else "recovered is 1 without effect"
    console.print(f"direction: {direction}; {effect}")
    print_scores(table, console, "recovered", top, no_effect=table.no_effect("recovered"))


@print_result.register
def print_curve(curve: PruningCurve, console: Console) -> None:
    """Print the loss for each number of removed heads: one column per order of removal, and the range over random
    orders.
    """
    print_title(console, run_title(curve))
    console.print(f"loss of the unchanged model: {curve.baseline.text()}")
    names = list(dict.fromkeys(row.order for row in curve.rows if row.order != RANDOM))
    band = {count: f"{number(low)} to {number(high)}" for count, low, _, high in curve.band()}
    rows = (
        [
            str(points[0].removed),
            f"{points[0].share:.0%}",
            *(point.statistics["loss"].text() for point in points),
            band.get(points[0].removed, ""),
        ]
        for points in zip(*(curve.curve(name) for name in names), strict=True)
    )
    print_table(console, ("removed heads", "share", *names, "random (range)"), rows)


@print_result.register
def print_retrieval(table: Retrieval, console: Console, top: int) -> None:
    """Print the `top` heads with the largest retrieval scores, and the number of heads whose score is significantly
    above 0.1. The score is the share of copied answer tokens to which the head attends most when the model writes them.
    """
    measured: Any = table.metadata["measured"]
    texts = (
        f"{measured['sequences']} of {counted(measured['texts'], 'text')} with {counted(measured['needles'], 'needle')}"
    )
    repeated = f"the model repeats {measured['recall']:.0%} of the answers"
    print_title(console, f"{table.model_name}: {texts}; {repeated}")
    print_scores(table, console, "score", top)
    found = counted(len(significant(table, "score")), "head")
    console.print(f"\n{found} of {len(table.rows)} with a score above {THRESHOLD}, {AT_RATE}")


@print_result.register
def print_sinks(table: SinkRate, console: Console, top: int) -> None:
    """Print the `top` heads with the largest sink rates, and the mean of the rates over all heads of the model. The
    sink rate of a head is the share of sequences in which its mean attention on the first token exceeds a threshold.
    """
    measured: Any = table.metadata["measured"]
    settings: Any = table.metadata["settings"]
    sequences = counted(measured["sequences"], "sequence")
    print_title(console, f"{table.model_name}: {sequences}; threshold {settings['epsilon']:g}")
    print_scores(table, console, table.statistics[0], top)
    console.print()
    for name, estimate in measured["model"].items():
        console.print(f"{name} of the model: {MeanEstimate(**estimate).text()}")


@print_result.register
def print_name_movers(table: NameMovers, console: Console, top: int) -> None:
    """Print the `top` heads with the largest direct effect on the logits, and the heads that pass the tests for name
    movers.
    """
    measured: Any = table.metadata["measured"]
    logit = MeanEstimate(**measured["logit"]).text("z.3f")
    prompts, solved = counted(measured["sequences"], "prompt"), f"positive in {measured['solved']:.0%}"
    print_title(console, f"{table.model_name}: {prompts}; logit difference {logit}, {solved}")
    if measured["no_copying"] is not None:
        console.print(Text(f"no copying scores: {measured['no_copying']}"), soft_wrap=True)
    print_scores(table, console, "logit", top)
    console.print()
    for kind, title in (("name_mover", "name movers"), ("negative", "negative name movers")):
        names = ", ".join(row.name for row in table.found(kind)) or "none"
        console.print(Text(f"{title} {AT_RATE}: {names}"), soft_wrap=True)


@print_result.register
def print_dependencies(table: DependencyAccuracy, console: Console, top: int) -> None:
    """Print the `top` heads with the largest gain (accuracy minus that of the best fixed offset, such as the previous
    word) in the syntactic relation selected for each head. Print also the number of significant gains.
    """
    measured, best = table.metadata["measured"], table.best()
    sentences, pairs = counted(measured["sequences"], "sentence"), counted(measured["pairs"], "pair")
    print_title(console, f"{table.model_name}: {sentences}, {pairs}")
    for reason, count in measured["left_out"].items():
        console.print(Text(f"left out: {count} {reason}"), soft_wrap=True)
    q = best.tests()["gain_q"]

    def cells(index: int) -> list[str]:
        row = best.rows[index]
        accuracy, by_offset, gain = (row.statistics[name] for name in ("accuracy", "offset_accuracy", "gain"))
        return [
            row.name,
            row.relation,
            row.direction,
            number(accuracy.value, ".3f"),
            f"{number(by_offset.value, '.3f')} ({row.offset:+})",
            gain.text(),
            number(q[index], ".2g"),
        ]

    order = descending(range(len(best.rows)), lambda index: best.rows[index].statistics["gain"].value)
    columns = ("", "relation", "direction", "accuracy", "best offset", "gain", "q")
    print_table(console, columns, map(cells, order), top=top)
    better, _ = signs(significant(best, "gain"))
    console.print(f"\n{counted(better, 'head')} of {len(best.rows)} better than the best fixed offset, {AT_RATE}")


@print_result.register
def print_norm_weighted(table: NormWeighted, console: Console, top: int, *, statistic: str) -> None:
    """Print the `top` heads in which norm-weighted attention differs most from the attention weights, with the columns
    of `statistic`. Print also how many changes of `statistic`, and how many preferences for long vectors, are
    significant.
    """
    print_title(console, run_title(table, head=len(table.rows)))
    change = statistic + CHANGE_SUFFIX
    columns = [name for name in (MOVED, PREFERENCE, NORM_PREFIX + statistic, change) if name in table.statistics]
    _print_means(table, console, columns, MOVED, top)
    for name in (PREFERENCE, change):
        _print_found(table, console, name)


@print_result.register
def print_rollout(table: Rollout, console: Console, top: int, *, statistic: str) -> None:
    """Print attention rollout (attention multiplied over layers) for each layer, and the `top` heads in which it
    differs most from their own attention.
    """
    print_title(console, run_title(table, head=len(table.rows)))
    names = table.layers.statistics
    print_table(console, ("layer", *names), ([str(row.layer), *means(row, names)] for row in table.layers.rows))
    change = statistic + CHANGE_SUFFIX
    columns = [name for name in (ROLLED_PREFIX + statistic, change) if name in table.statistics]
    if not columns:
        console.print(f"\n{statistic} was not measured")
        return
    _print_means(table, console, columns, change, top)
    _print_found(table, console, change)


def _print_means(
    table: HeadTable[Any], console: Console, columns: Sequence[str], order: str, top: int, form: str = "z.4f"
) -> None:
    """Print the columns `columns` for the `top` heads with the largest absolute values in the column `order`."""
    rows = descending(table.rows, lambda row: abs(row.statistics[order].value))
    print_table(console, ("", *columns), ([row.name, *means(row, columns, form)] for row in rows), top=top)


def _print_found(table: HeadTable[Any], console: Console, name: str) -> None:
    """Print in how many heads a column of the table is significantly above 0, and in how many it is below."""
    if name in table.statistics:
        above, below = signs(significant(table, name))
        console.print(f"\n{name}: {above} of {len(table.rows)} heads above 0, {below} below, {AT_RATE}")


@print_result.register
def print_positions(curves: PositionCurves, console: Console, top: int, *, statistic: str) -> None:
    """Print a statistic in bins (ranges) of query positions, for the `top` heads with the steepest slopes."""
    name = statistic + SLOPE_SUFFIX
    slopes = {row.name: row.statistics[name] for row in curves.slopes.rows if name in row.statistics}
    print_title(console, run_title(curves, head=len(curves.slopes.rows)))
    if not slopes:
        console.print(f"{statistic} was not measured")
        return
    q = dict(zip(slopes, curves.slopes.tests()[f"{name}_q"], strict=True))
    console.print(f"{statistic} by position of the query; slope on ln(position), counted from 1")
    bins = list(dict.fromkeys((row.position_from, row.position_to) for row in curves.rows))
    values = {(row.name, row.position_from): row.statistics[statistic].value for row in curves.rows}
    rows = (
        [
            head,
            slopes[head].text("z.3f"),
            number(q[head], ".2g"),
            *(number(values[head, first], "z.3g") for first, _ in bins),
        ]
        for head in descending(slopes, lambda head: abs(slopes[head].value))
    )
    columns = ("", "slope", "q", *(str(first) if first == last else f"{first}-{last}" for first, last in bins))
    print_table(console, columns, rows, top=top)


@print_result.register
def print_distances(distances: AttentionDistances, console: Console, top: int) -> None:
    """Print the distances within which heads put given shares of their attention, for the `top` heads with the longest
    distances.
    """
    names = distances.statistics
    last = [name for name in names if not name.endswith(WITH_FIRST)][-1]
    print_title(console, run_title(distances, head=len(distances.rows)))
    console.print(f"distance in tokens that holds a percentage of the attention; heads by {last}")
    _print_means(distances, console, names, last, top, "z.1f")


@print_result.register
def print_circuits(
    scores: CircuitScores, console: Console, top: int, *, composition: Composition | None, kind: str
) -> None:
    """Print the `top` heads with the largest values in the first column of `scores`. With `composition`, print also the
    `top` pairs of heads with the largest composition score of type `kind`.
    """
    print_title(console, f"{scores.model_name}: {len(scores.rows)} heads")
    names = scores.statistics
    console.print(f"scores from weights; heads by {names[0]}")
    heads = descending(scores.rows, lambda row: row.statistics[names[0]].value)
    rows = ([row.name, *(number(row.statistics[name].value) for name in names)] for row in heads)
    print_table(console, ("", *names), rows, top=top)
    if composition is None:
        return
    expected = composition.expected
    console.print(f"\n{kind.upper()}-composition, earlier head > later head; {number(expected)} for random matrices")
    pairs = descending(composition.rows, lambda pair: pair.statistics[kind].value)
    scored = ((pair.name, pair.statistics[kind].value) for pair in pairs)
    cells = ([name, number(value), quotient(value / expected, ".1f")] for name, value in scored)
    print_table(console, ("", kind, "times random"), cells, top=top)


@print_result.register
def print_profile(profile: Profile, console: Console) -> None:
    """Print the heads of each role (name for what they attend to) with the statistic that decides it, the largest mean
    first.
    """
    print_title(console, run_title(profile, head=len(profile.heads)))
    heads_by_role = profile.roles()
    for role in ROLES:
        members = [profile.head(*layer_and_head) for layer_and_head in heads_by_role.get(role.name, ())]
        if not members:
            continue
        if role is not MIXED:
            members.sort(key=profile.role_share, reverse=True)
        count = counted(len(members), "head")
        console.print()
        console.print(Text.assemble((role.name, bold_colour(role)), f" · {count} · {role.rule}"))
        share = {} if role is MIXED else {head.name: f" {number(profile.role_share(head), '.2f')}" for head in members}
        console.print(Text("   ".join(head.name + share.get(head.name, "") for head in members)))


def print_comparison(comparison: Comparison, console: Console, statistics: Collection[str], top: int) -> None:
    """Print the `top` largest differences between two profiles, in standard errors, and the heads whose role differs.
    `statistics` names the statistics to compare; all are compared if it is empty.
    """
    for letter, profile in (("A", comparison.a), ("B", comparison.b)):
        console.print(
            Text.assemble((f"{letter}  ", "bold"), run_title(profile, head=len(profile.heads))), soft_wrap=True
        )
    rows = (
        [
            change.a.name,
            change.statistic,
            *(number(head.statistics[change.statistic].value, "z.3f") for head in (change.a, change.b)),
            number(change.difference, "+z.3f"),
            quotient(change.errors, "+z.1f"),
            _role_text(change.a, change.b),
        ]
        for change in comparison.largest(statistics)[:top]
    )
    columns = ("head", "statistic", "A", "B", "difference", "in standard errors", "role")
    print_table(console, columns, rows, left=("statistic", "role"))
    changed = comparison.changed_roles()
    verb = "has" if len(changed) == 1 else "have"
    console.print(f"\n{len(changed)} of {counted(len(comparison.a.heads), 'head')} {verb} a different role")
    for one, other in changed:
        console.print(Text(f"{one.name}  {_role_text(one, other)}"))


def _role_text(one: ProfiledHead, other: ProfiledHead) -> str:
    """Return the role of a head in two compared profiles as text: one role, or `A → B` if it differs between the
    profiles.
    """
    return one.role if one.role == other.role else f"{one.role} → {other.role}"
