"""The commands that measure the attention of every head over data, `headwise profile` and others, and compare it."""

from pathlib import Path
from typing import Annotated

import typer

import headwise as hw
from headwise.cli.loading import RunFlags
from headwise.cli.options import Html, Top, added_statistics, choice, numbers, option, path
from headwise.cli.output import OutputFlags, require_writable_page
from headwise.errors import InputError
from headwise.settings import NORMED_STATISTICS, ROLLOUT_RESIDUAL, ROLLOUT_STATISTICS, ROW_STATISTICS, SINK_EPSILON


def profile(
    *,
    run: RunFlags,
    repeats: Annotated[bool, option("Also measure induction on repeated random tokens.")] = True,
    html: Html = None,
    statistic: Annotated[
        str | None,
        choice(
            ROW_STATISTICS,
            "Statistic by which the page of --html colours and sorts heads.",
            others=added_statistics,
        ),
    ] = None,
) -> None:
    """Measure the attention statistics of every head on a data set. Assigns a role to each head (such as previous
    token, induction or broad), prints the heads of each role, and saves roles and statistics in --out as a profile.
    Processes started by torchrun share the work.

    Examples:
    headwise profile --data corpus.txt --documents cut --out profile --html profile.html
    headwise profile --model smollm2 --data corpus.jsonl --documents pack --context 1024 --out smollm2-profile
    headwise profile --data corpus.jsonl --out profile --csv > heads.csv
    """
    require_writable_page(html)
    if statistic is not None and html is None:
        raise InputError("statistic", expected="--html, whose page opens on it", got="no --html")
    with run.open(shared=True) as opened:
        model = opened.load(hw.Profile, repeats={} if repeats else None)
        result = hw.profile(model, opened.dataset, repeats=repeats, **opened.options)
        opened.write_page(html, result, model, statistic)
        opened.show(result, page=html)


def compare(
    *,
    a: Annotated[Path, typer.Argument(parser=path, metavar="A", help="Folder of the first profile.")],
    b: Annotated[
        Path,
        typer.Argument(parser=path, metavar="B", help="Folder of the second profile, of a model with the same heads."),
    ],
    statistic: Annotated[list[str] | None, option("Compare only this statistic. Can be repeated.", "NAME")] = None,
    top: Top = 20,
    html: Html = None,
    output: OutputFlags,
) -> None:
    """Show the heads that differ most between two profiles. Each profile is a folder that `headwise profile` wrote,
    with the attention statistics of every head. Prints a table with one row per head and statistic; the largest
    differences, measured in standard errors, are first. Lists the heads whose role differs.

    Examples:
    headwise compare text-profile code-profile
    headwise compare before after --statistic entropy --statistic first --top 50 --html differences.html
    headwise compare before after --json > differences.json
    """
    from headwise.show.records import comparison_records
    from headwise.show.results import print_comparison

    require_writable_page(html)
    comparison = hw.compare(hw.load_profile(a), hw.load_profile(b))
    statistics = statistic or []
    if html is not None:
        hw.write_page(html, comparison.a, against=[comparison.b], statistic=next(iter(statistics), None))
    output.show(
        lambda: comparison_records(comparison, statistics),
        lambda console: print_comparison(comparison, console, statistics, top),
        page=html,
    )


def positions(
    *,
    run: RunFlags,
    edges: Annotated[
        str | None,
        option("First position of each bin, and the end. Default: powers of two.", "N,N,..."),
    ] = None,
    by: Annotated[str, choice(ROW_STATISTICS, "Statistic that is printed.", others=added_statistics)] = "entropy",
    top: Annotated[int, option("Number of heads to print, steepest slope first.", least=1)] = 20,
) -> None:
    """Measure the attention statistics of every head against the position of the query: in bins of positions, and their
    slope on the logarithm of the position. Prints one statistic of the heads with the steepest slopes, and saves curves
    and slopes of all statistics in --out. Processes started by torchrun share the work.

    Examples:
    headwise positions --model smollm2 --data corpus.jsonl --documents cut --context 2048 --out positions
    headwise positions --data corpus.txt --documents cut --by distance --out positions
    headwise positions --data corpus.txt --documents cut --edges 0,8,64,512 --out positions --csv > curves.csv
    """
    bins = None if edges is None else numbers(edges)
    run.measure(hw.position_curves, hw.PositionCurves, {"edges": bins}, top=top, statistic=by)


def distances(
    *,
    run: RunFlags,
    quantiles: Annotated[str, option("Shares of the attention, above 0 and below 1.", "P,P,...")] = "0.5,0.9",
    first: Annotated[int, option("First tokens that also count as near, in columns of their own.", "N", least=0)] = 4,
    top: Annotated[int, option("Number of heads to print, longest distance first.", least=1)] = 20,
) -> None:
    """Measure how far every head reaches: the smallest distance within which it puts 50 % and 90 % of its attention.
    Prints the heads with the longest distances, and saves these distances and the share of attention within each
    distance in --out. Processes started by torchrun share the work.

    Examples:
    headwise distances --model smollm2 --data corpus.jsonl --documents cut --context 2048 --out distances
    headwise distances --data corpus.txt --documents cut --quantiles 0.5,0.9,0.99 --out distances
    headwise distances --data corpus.txt --documents cut --first 0 --out distances --csv > distances.csv
    """
    settings = {"quantiles": sorted({*numbers(quantiles, float, "0.5,0.9")}), "first": first}
    run.measure(hw.attention_distances, hw.AttentionDistances, settings, top=top)


def norm_weighted(
    *,
    run: RunFlags,
    by: Annotated[str, choice(NORMED_STATISTICS, "Statistic that is printed.", others=added_statistics)] = "first",
    top: Annotated[int, option("Number of heads to print, those that differ most first.", least=1)] = 20,
) -> None:
    """Measure where every head reads from by the norms of the vectors that it adds up (attention weight times projected
    value), instead of by attention weights alone. Prints the heads in which these two measures differ most, and saves
    all statistics in --out. Processes started by torchrun share the work.

    Examples:
    headwise norm-weighted --model smollm2 --data corpus.jsonl --documents truncate --context 512 --out norms
    headwise norm-weighted --data sentences.jsonl --by special --out norms
    headwise norm-weighted --data sentences.jsonl --out norms --csv > norms.csv
    """
    run.measure(hw.norm_weighted, hw.NormWeighted, {}, top=top, statistic=by)


def rollout(
    *,
    run: RunFlags,
    residual: Annotated[
        float, option("Share of the residual connection in each layer, below 1.", "X")
    ] = ROLLOUT_RESIDUAL,
    by: Annotated[str, choice(ROLLOUT_STATISTICS, "Statistic of heads that is printed.")] = "first",
    top: Annotated[int, option("Number of heads to print, those that differ most first.", least=1)] = 20,
) -> None:
    """Measure to which input tokens the attention of every layer and head leads, if attention is multiplied over layers
    (attention rollout). Prints the layers, and the heads whose rollout differs most from their own attention. Saves the
    tables of layers and of heads in --out. Processes started by torchrun share the work.

    Examples:
    headwise rollout --model smollm2 --data corpus.jsonl --documents truncate --context 512 --out rollout
    headwise rollout --data sentences.jsonl --by special --out rollout
    headwise rollout --data sentences.jsonl --residual 0.3 --out rollout --json > rollout.json
    """
    run.measure(hw.rollout, hw.Rollout, {"residual": residual}, top=top, statistic=by)


def sinks(
    *,
    run: RunFlags,
    epsilon: Annotated[float, option("Threshold of the mean attention, above 0 and below 1.", "X")] = SINK_EPSILON,
    positions: Annotated[str, option("Numbers of the tokens, from 0.", "N,N")] = "0",
    top: Top = 20,
) -> None:
    """Measure the sink rate of each head: the share of sequences in which its mean attention on the first token exceeds
    a threshold. Prints the heads with the largest sink rates, and the mean of the rates over all heads. Processes
    started by torchrun share the work.

    Examples:
    headwise sinks --model smollm2 --data corpus.jsonl --documents truncate --context 64 --out smollm2-sinks
    headwise sinks --data sentences.jsonl --positions 0,1,2 --out sinks
    headwise sinks --data sentences.jsonl --epsilon 0.2 --out sinks --json > sinks.json
    """
    from headwise.analysis.head_tests.sinks import sink_threshold

    settings = {"epsilon": sink_threshold(epsilon), "positions": numbers(positions)}
    run.measure(hw.sink_rate, hw.SinkRate, settings, top=top)
