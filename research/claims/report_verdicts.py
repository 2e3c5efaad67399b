"""Sentences of docs/reports/claims.md that state the verdicts; all numbers come from verdicts.json."""

import re
from collections.abc import Sequence
from typing import Any

from research.claims.report_text import OBJECTIONS, TITLES
from research.claims.result_files import Results
from research.markdown import markdown_table

WORDS = {"held": "held", "did not hold": "did not hold", "depends": "depends", "not measured": "is not decided"}
"""Verb of each outcome."""


def figures(results: Results) -> dict[str, str]:
    """Return the decisive figure of each claim in a few words."""
    verdicts = results.verdicts
    different, devices = verdicts["different"], verdicts["parallel"]["devices"]
    return {
        "different": (
            f"in {different['farther']} of {different['of']} settings and published models, the heads of a layer are "
            "farther apart than those of untrained models whose attention is equally sharp; in "
            f"{different['closer']}, they are closer together"
        ),
        "capacity": f"one head is significantly worse than the best number in {_count(verdicts['capacity'])}",
        "parallel": "; ".join(_device(name, row) for name, row in devices.items()) or "no times were taken",
        "regularises": "some number of heads has a smaller gap between test and training loss than one head, at no "
        "larger test loss, in "
        f"{_count(verdicts['regularises'])}",
        "robust": "removing half of the heads costs a smaller share with many heads than with one head in "
        f"{_count(verdicts['robust'])}",
        "more": f"the largest number is significantly worse than the best number in {_count(verdicts['more'])}",
        "eight": _grades(verdicts["eight"]),
    }


def _count(verdict: Any) -> str:
    """Return in how many settings a claim is true, by position scheme."""
    parts = []
    for scheme, row in verdict["schemes"].items():
        true, all_of = len(row["true in"]), len(row["true in"]) + len(row["false in"])
        parts.append(f"{true} of {all_of} settings ({scheme})")
    return ", ".join(parts) or "none of 0 settings"


def _grades(verdict: Any) -> str:
    good, bad, undecided = (verdict["settings by grade"][grade].get("8", 0) for grade in ("good", "bad", "open"))
    return (
        f"the loss with 8 heads is within 1 % of that with the best number of heads in {good} of {verdict['of']} "
        f"settings, and not in {bad} (undecided: {undecided})"
    )


def _device(name: str, row: Any) -> str:
    counts, number, threads = row["counts"], len(row["cases"]), row["threads"]
    where = f"{threads} CPU thread{'s' * (threads > 1)}" if name == "cpu" else row["gpu"] or name
    free, slower, undecided = counts["free"], counts["not free"], counts["open"]
    return (
        f"on {where}, several heads take no extra time compared with one head in {free} of {number} cases, and extra "
        f"time in {slower} (undecided: {undecided})"
    )


def sentence(results: Results, claim: str) -> str:
    """Return the verdict of a claim with what decides it, and what could not be compared."""
    verdict = results.verdicts[claim]
    on = " (on the data or the position scheme)" if verdict["outcome"] == "depends" and verdict.get("schemes") else ""
    text = f'The verdict on the claim "{TITLES[claim]}" is "{verdict["outcome"]}"{on}: {figures(results)[claim]}.'
    brackets = "A setting is a task with a position scheme; the scheme is in brackets." if "settings (" in text else ""
    return " ".join(filter(None, (f"**{text}**", brackets, _named(verdict), *_left_out(verdict))))


def _named(verdict: Any) -> str:
    """Return in which tasks the claim is true and false, for the schemes under which it depends on the data."""
    parts = [
        f'With the position scheme "{scheme}", the claim is true for the data {_listed(row["true in"])}, '
        f"and not for {_listed(row['false in'])}."
        for scheme, row in verdict.get("schemes", {}).items()
        if row["true in"] and row["false in"]
    ]
    return " ".join(parts)


def _left_out(verdict: Any) -> list[str]:
    """Return sentences on the settings that are not compared, and on those that are not measured yet."""
    missing = [
        f"{task}, {scheme}" for scheme, row in verdict.get("schemes", {}).items() for task in row.get("missing", ())
    ]
    return [
        f"{words}: {'; '.join(names)}."
        for words, names in (
            ("Not compared, because trainings diverged or the control missed the entropy", verdict.get("not compared")),
            (
                "Not compared, because the removal of all heads raises the loss in fewer than two seeds",
                verdict.get("without effect"),
            ),
            ("Not measured", missing),
        )
        if names
    ]


def _listed(names: Sequence[str]) -> str:
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))


def five_sentences(results: Results) -> list[str]:
    """Return what can be said, in five sentences."""
    found = figures(results)
    claims = {name: f'"{title}" {WORDS[results.verdicts[name]["outcome"]]}' for name, title in TITLES.items()}
    good = results.verdicts["eight"]["settings by grade"]["good"]
    most = max(good.values(), default=0)
    leaders = _listed([heads for heads, number in good.items() if number == most])
    best = f"; {leaders} heads are within 1 % in the most settings, {most}" if most else ""
    return [
        f"1. {claims['different']}: {found['different']}.",
        f"2. {claims['capacity']}: at equal parameters, {found['capacity']}.",
        f"3. {claims['more']}: {found['more']}; the loss of the largest number minus that of the best is, in nats, "
        f"{penalties_by_scheme(results) or 'not known'}.",
        f"4. {claims['regularises']}: {found['regularises']}; {claims['robust']}: {found['robust']}.",
        f"5. {claims['eight']}: {found['eight']}{best}; {claims['parallel']}: {found['parallel']}.",
    ]


def penalties_by_scheme(results: Results) -> str:
    """Return the range of the penalties of the largest number of heads under each position scheme."""
    penalties = _penalties(results.verdicts["more"])
    return "; ".join(f"{min(each):+.2f} to {max(each):+.2f} ({scheme})" for scheme, each in penalties.items())


def _penalties(verdict: Any) -> dict[str, list[float]]:
    """Return the penalties of the largest number of heads in all settings that count, by position scheme."""
    penalties: dict[str, list[float]] = {}
    for row in verdict["settings"].values():
        penalties.setdefault(row["scheme"], []).append(row["difference"])
    return penalties


def objections(results: Results) -> list[str]:
    """Write what a review objected to, what was done before, what is done now, and what came of it."""
    found = figures(results)
    overlaps = [100 * each["overlap"]["64"]["test"] for each in results.corpora.values()]
    edges, number = results.verdicts["rates at an edge"], results.verdicts["rates"]
    came_of_it = {
        "schemes": f"penalties in nats: {penalties_by_scheme(results)}",
        "different": found["different"],
        "robust": found["robust"],
        "rates": f"{len(edges)} of {number} best rates at an edge",
        "overlap": f"at most {max(overlaps, default=0.0):.1f} % of the windows of 64 bytes of a test part",
        "parallel": found["parallel"],
    }
    rows = [(*row, came_of_it.get(name, "")) for name, row in OBJECTIONS.items()]
    return markdown_table(("objection", "before", "now", "result now"), rows)


def deviations(rules: str) -> list[str]:
    """Return the last section of the rules, the deviations from them, with one line for each."""
    items = re.split(r"\n(?=- )", rules.split("## Deviations\n")[1].strip())
    return ["## Deviations from the rules", "", *(" ".join(item.split()) for item in items), ""]
