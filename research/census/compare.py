"""Comparison of the rows that `hw.watch` returns with the expected statistics."""

import math
import re
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any

from research.census.definitions import OF_VISIBLE, POSITIONAL
from research.census.expected import Expected, Sites

TOLERANCE = 2e-6
OF_OUTPUTS = frozenset(("output_norm", "written_norm"))
OF_SCORES = frozenset(("max_logit", "max_logit_uncapped"))
"""Statistics of scores, which the truth does not record: it has weights and outputs. They are not compared."""

LABELS = ("layer", "head", "kv_head", "module", "kind")


@dataclass
class Findings:
    """Differences between the result of `watch` and the truth.

    Attributes:
        wrong: statistics, heads or kinds that differ, in words.
        silent: modules that attended, and were neither reported nor named in a warning.
        named: modules that were not reported, but named.
        left_out: (module, statistic) not reported, although the truth has it, and not named.
        unverified: reported modules of which the truth is not known.
        checked: number of (head, statistic) that agree.
        worst: largest difference of those.
    """

    wrong: list[str] = field(default_factory=list)
    silent: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    checked: int = 0
    worst: float = 0.0

    def add(self, other: "Findings") -> None:
        """Add the findings about another module."""
        for name in ("wrong", "silent", "named", "left_out", "unverified"):
            getattr(self, name).extend(getattr(other, name))
        self.checked, self.worst = self.checked + other.checked, max(self.worst, other.worst)


def is_related(path: str, other: str) -> bool:
    """Return whether one module is the other, or inside of it."""
    path, other = without_part(path), without_part(other)
    return (
        path == other or f"{path}.".startswith(f"{other}.") or f"{other}.".startswith(f"{path}.") or "" in (path, other)
    )


def compare(
    rows: list[dict[str, Any]], sites: Sites, warned: str, maybe: Collection[str], tolerance: float = TOLERANCE
) -> Findings:
    """Compare the rows of a watched run with the expected statistics.

    Args:
        rows: `heads.rows()`.
        sites: expected statistics.
        warned: text of all warnings.
        maybe: paths at which there was a softmax that could not be resolved.
        tolerance: largest difference; absolute below 1, relative above.
    """
    findings = Findings()
    reported: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        reported[row["module"], row["kind"]].append(row)
    used: set[tuple[str, str]] = set()
    for site in sites.values():
        key = _match(site, reported)
        if key is None:
            _unreported(site, warned, findings)
            continue
        used.add(key)
        parts = [other for other in reported if without_part(other[0]) == key[0] and other[1] == key[1]]
        used.update(parts)
        layers = list(site.layers.values()) if len(parts) > 1 else [site]
        labels = [(label, key[1]) for label in (key[0], *(f"{key[0]}[{i}]" for i in range(1, len(layers))))]
        if {*labels} != {*parts}:
            findings.unverified.append(f"{site.path}: {len(parts)} layers in one module")
            continue
        # Softmaxes over both axes of the same scores have no order that truth and headwise share.
        orders = [layers, layers[::-1]] if key[1] == "cross" and len(layers) == 2 else [layers]
        trials = [Findings() for _ in orders]
        for order, trial in zip(orders, trials, strict=True):
            for layer, label in zip(order, labels, strict=True):
                _compare_site(layer, reported[label], label, warned, trial, tolerance)
        findings.add(min(trials, key=lambda trial: len(trial.wrong)))
    for path, kind in reported.keys() - used:
        if any(is_related(path, other) for other in maybe):
            findings.unverified.append(f"{path} ({kind}): its softmax was not resolved by the truth")
        else:
            findings.wrong.append(f"{path} ({kind}) is reported, but has no attention")
    return findings


def without_part(label: str) -> str:
    """Return the path in the label of one of several layers that a module computes, such as `blocks[1]`."""
    return re.sub(r"\[\d+\]$", "", label)


def is_named(path: str, warned: str) -> bool:
    """Return whether a warning names a module or one around or inside of it."""
    words = {word.strip(",;:()'\"`") for word in warned.replace("\n", " ").split()}
    return any(word and ("." in word or word == path) and is_related(path, word) for word in words)


def _match(site: Expected, reported: dict[tuple[str, str], list[dict[str, Any]]]) -> tuple[str, str] | None:
    """Return the reported module and kind that belong to a site."""
    kinds = {True: ("self", "cross"), False: ("cross", "self"), None: ("self", "cross")}[site.is_self]
    same = [path for path, _ in reported if path == site.path]
    near = same or [path for path, _ in reported if path and is_related(path, site.path)]
    near = near or [path for path, _ in reported if not path]
    candidates = [(path, kind) for kind in kinds for path in near if (path, kind) in reported]
    fitting = [key for key in candidates if len(reported[key]) == site.heads]
    return next(iter(fitting or candidates), None)


def _unreported(site: Expected, warned: str, findings: Findings) -> None:
    if is_named(site.path, warned):
        findings.named.append(site.path)
    elif site.form == "bmm":
        findings.silent.append(f"{site.path} ({site.heads} heads)")


def _compare_site(
    site: Expected, rows: list[dict[str, Any]], key: tuple[str, str], warned: str, findings: Findings, tolerance: float
) -> None:
    path, kind = key
    where = path if path == site.path else f"{path} (truth: {site.path})"
    if len(rows) != site.heads:
        findings.wrong.append(f"{where}: {len(rows)} heads instead of {site.heads}")
        return
    if site.has_known_kind and (kind == "self") != site.is_self:
        findings.wrong.append(f"{where}: kind {kind} instead of {'self' if site.is_self else 'cross'}")
    if site.uncertain & {"padding", "changed", "unmasked", "not finite"}:
        findings.unverified.append(f"{where}: {', '.join(sorted(site.uncertain))}")
        return
    by_head = sorted(rows, key=lambda row: row["head"])
    names = [name for name in rows[0] if name not in LABELS and name not in OF_SCORES]
    got = {name: [float(row.get(name, math.nan)) for row in by_head] for name in names}
    reported = {name for name, numbers in got.items() if not all(math.isnan(number) for number in numbers)}
    _compare_existence(site, where, kind, reported, warned, findings)
    known = reported & site.means().keys()
    if "visible" in site.uncertain:
        known -= set(OF_VISIBLE)
        findings.unverified.extend(f"{where}: {name}" for name in OF_VISIBLE)
    if "rescaled" in site.uncertain:  # by a learned sink, a gate or a norm: either norm is the head's output
        findings.unverified.extend(f"{where}: {name}" for name in sorted(known & OF_OUTPUTS))
        known -= OF_OUTPUTS
    wrong: list[list[str]] = []
    for means in site.possible_means() if is_named(site.path, warned) else [site.means()]:
        problems = []
        for name in sorted(known & means.keys()):
            problems.extend(_differences(f"{where} head", name, got[name], means[name].tolist(), tolerance, findings))
        wrong.append(problems)
        if not problems:
            return
    findings.wrong.extend(wrong[0])


def _compare_existence(
    site: Expected, where: str, kind: str, reported: set[str], warned: str, findings: Findings
) -> None:
    """Compare which statistics are reported with which exist."""
    means = site.means()
    extra = [name for name in POSITIONAL if name in reported and name not in means]
    if extra and (kind == "cross" or site.is_self is False):
        findings.wrong.append(f"{where}: positions in cross-attention: {', '.join(extra)}")
    elif extra and "positions" in site.uncertain and not any(name in POSITIONAL for name in means):
        findings.wrong.append(f"{where}: positions, with other keys than queries: {', '.join(extra)}")
    elif extra:
        findings.unverified.append(f"{where}: {', '.join(extra)}")
    beyond = reported - means.keys() - set(POSITIONAL)
    if beyond:
        findings.unverified.append(f"{where}: {', '.join(sorted(beyond))}")
    for name, values in means.items():
        expected = values.tolist()
        exists = not all(math.isnan(number) for number in expected)
        is_known = not (name in POSITIONAL and "positions" in site.uncertain)
        if name not in reported and exists and is_known and not _is_vacuous(name, expected):
            named = is_named(site.path, warned) or is_named(where.split(" ", maxsplit=1)[0], warned)
            (findings.named if named else findings.left_out).append(f"{where}: {name}")


def _differences(
    where: str, name: str, got: list[float], expected: list[float], tolerance: float, findings: Findings
) -> list[str]:
    """Return the first head at which a statistic differs, in words; count the heads that agree."""
    for head, (number, truth) in enumerate(zip(got, expected, strict=True)):
        if math.isnan(number) and math.isnan(truth):
            continue
        error = abs(number - truth) / max(1.0, abs(truth))
        if not error <= tolerance:
            return [f"{where} {head}: {name} {number:.7g} instead of {truth:.7g}"]
        findings.checked += 1
        findings.worst = max(findings.worst, error)
    return []


def _is_vacuous(name: str, expected: list[float]) -> bool:
    """Return whether a statistic says nothing: no row of a decoding step has a next key, and its weight is 0 anyway."""
    return name == "next" and all(number == 0 or math.isnan(number) for number in expected)
