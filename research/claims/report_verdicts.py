"""Sentences of docs/reports/claims.md that state the verdicts; all numbers come from verdicts.json."""

from collections.abc import Sequence
from typing import Any

from research.claims.report_text import TITLES
from research.claims.result_files import Results


def figures(results: Results) -> dict[str, str]:
    """Return the decisive figure of each claim in a few words."""
    verdicts = results.verdicts
    different, eight = verdicts["different"], verdicts["eight"]
    return {
        "different": (
            f"of {different['of']} settings and published models, heads are farther apart than equally sharp untrained "
            f"ones in {different['farther']}, closer together in {different['closer']}"
        ),
        "capacity": f"one head is significantly worse than the best in {_count(verdicts['capacity'])}",
        "parallel": "; ".join(_device(name, row) for name, row in verdicts["parallel"]["devices"].items()),
        "regularises": f"a smaller gap at no larger test loss in {_count(verdicts['regularises'])}",
        "robust": f"half of the heads costs a smaller share in {_count(verdicts['robust'])}",
        "more": f"the largest number is significantly worse than the best in {_count(verdicts['more'])}",
        "eight": f"good in {eight['settings in which a number is good'].get('8', 0)} of {eight['of']} settings",
    }


def _count(verdict: Any) -> str:
    """Return in how many settings a claim is true, by position scheme."""
    parts = []
    for scheme, row in verdict["schemes"].items():
        true, all_of = len(row["true in"]), len(row["true in"]) + len(row["false in"])
        parts.append(f"{true} of {all_of} ({scheme})")
    return ", ".join(parts)


def _device(name: str, row: Any) -> str:
    counts, number = row["counts"], len(row["cases"])
    where = f"{row['threads']} CPU threads" if name == "cpu" else name
    return f"on {where}: free in {counts['free']} of {number} cases, not free in {counts['not free']}"


def sentence(results: Results, claim: str) -> str:
    """Return the verdict of a claim with what decides it."""
    verdict = results.verdicts[claim]
    text = f'{verdict["outcome"].capitalize()}: the claim "{TITLES[claim]}"; {figures(results)[claim]}.'
    named = _named(verdict)
    return f"**{text}** {named}" if named else f"**{text}**"


def _named(verdict: Any) -> str:
    """Return in which tasks the claim is true and false, for the schemes under which it depends on the data."""
    parts = [
        f"Under {scheme}, it is true in {_listed(row['true in'])} and not in {_listed(row['false in'])}."
        for scheme, row in verdict.get("schemes", {}).items()
        if row["true in"] and row["false in"]
    ]
    return " ".join(parts)


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def five_sentences(results: Results) -> list[str]:
    """Return what can be said, in five sentences."""
    verdicts, found = results.verdicts, figures(results)
    ranges = [f"{scheme} {min(each):+.2f} to {max(each):+.2f}" for scheme, each in _penalties(verdicts["more"]).items()]
    good = verdicts["eight"]["settings in which a number is good"]
    most = max(good.values())
    leaders = _listed([heads for heads, number in good.items() if number == most])
    return [
        f"1. Of {found['different'].removeprefix('of ')}; so sharpness, not diversity, is what training adds wherever "
        "they are not farther apart.",
        f"2. At equal parameters, {found['capacity']}; the losses say where.",
        f"3. With the most heads at a fixed width, {found['more']}; the penalty in nats depends on the position scheme "
        f"({'; '.join(ranges)}).",
        f"4. Many heads regularise: {found['regularises']}; many heads make a model robust: {found['robust']}.",
        f"5. 8 heads are {found['eight']}, and {leaders} heads in the most, {most}; more heads cost time "
        f"{found['parallel'] or '(not measured)'}.",
    ]


def _penalties(verdict: Any) -> dict[str, list[float]]:
    """Return the penalties of the largest number of heads in all settings that count, by position scheme."""
    penalties: dict[str, list[float]] = {}
    for row in verdict["settings"].values():
        penalties.setdefault(row["scheme"], []).append(row["difference"])
    return penalties
