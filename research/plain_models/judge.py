"""Judge `hw.watch` and `hw.gate` on one call of one model against the attention derived from its operators."""

import math
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.statistics.registry import unit_of
from research.census.watched import repeated
from research.plain_models.dispatcher import record
from research.plain_models.registry import Built, Case
from research.plain_models.sites import Matched, Site, match_rows, sites_of
from research.plain_models.statistics import POSITIONAL
from research.plain_models.tracing import Call
from research.plain_models.truth import attention_of

OUTCOMES = ("wrong", "silent", "not verified", "refused", "partly", "right", "no attention")
"""Outcomes of a call, worst first."""


@dataclass
class Verdict:
    """Outcome of one call.

    Attributes:
        outcome: one of `OUTCOMES`.
        sites: number of sites with right statistics.
        left_out: names of statistics that were left out with a warning.
        gates: number of gated heads that were right.
        problems: what is wrong or missing.
        reasons: warnings and errors that name modules.
        followed: number of calls of the model that followed a plan to their end.
    """

    outcome: str = "right"
    sites: int = 0
    left_out: list[str] = field(default_factory=list)
    gates: int = 0
    problems: list[str] = field(default_factory=list)
    reasons: list[str] = field(default_factory=list)
    followed: int = 0

    def add(self, outcome: str, problem: str) -> None:
        """Record a problem; the outcome becomes the worse one."""
        self.problems.append(problem)
        self.outcome = min(self.outcome, outcome, key=OUTCOMES.index)


def judge(built: Built, case: Case, *, budget: float, gates: int = 3) -> Verdict:
    """Return the verdict on one call of a built model.

    Args:
        built: the model.
        case: the call.
        budget: largest accepted error of a statistic.
        gates: number of heads to gate at most.
    """
    verdict, model = Verdict(), built.model
    same = model if built.same is None else built.same
    plain, of_batch = attention_of(same, case.call)
    runs = [attention_of(same, call)[1] for call in case.alone] or [of_batch]
    rows, output = _watched(model, case.call, budget, verdict)
    if rows is None:
        expected = [attention for attention in of_batch if attention.is_scored]
        if verdict.outcome == "refused" and not expected and not of_batch:
            verdict.outcome = "no attention"
        return verdict
    if not _close(output, plain.output):
        verdict.add("wrong", f"the output of the watched model differs by {_difference(output, plain.output):.1e}")
    if len({tuple(sorted(attention.path for attention in run)) for run in runs}) > 1:
        verdict.add("not verified", "the sequences have other softmaxes when they run alone")
        return verdict
    sites = sites_of(runs, built)
    matched = match_rows(rows, sites, len(runs))
    for key, (labels, site) in matched.items():
        _judge_site(key, labels, site, budget, verdict)
    seen = {id(attention) for _, site in matched.values() if site is not None for attention in site.attentions}
    for site in sites:
        is_seen = any(id(attention) in seen for attention in site.attentions)
        if not is_seen and any(attention.is_scored for attention in site.attentions):
            reason = site.attentions[0].reason
            if not _is_named(site.path, verdict.reasons):
                verdict.add("silent", f"{site.path}: attention is missing without a warning ({reason or 'derived'})")
            else:
                verdict.outcome = min(verdict.outcome, "partly", key=OUTCOMES.index)
    if not case.alone and gates:
        _judge_gates(model, same, case.call, matched, plain.output, gates, verdict)
    return verdict


def _watched(model: nn.Module, call: Call, budget: float, verdict: Verdict) -> tuple[list[dict[str, Any]] | None, Any]:
    """Run a call several times under `hw.watch`; all must have the same result, and the last one follows a plan if
    there can be one. Return the rows and the output; None as rows if it was refused or failed.
    """

    def run() -> Any:
        torch.manual_seed(0)
        return call(model)

    try:
        first, *others = repeated(model, run)
    except Exception as error:
        verdict.add("wrong", f"{type(error).__name__}: {str(error)[:200]}")
        return None, None
    if first.refused:
        verdict.reasons.append(first.refused)
        verdict.outcome = "refused"
        return None, None
    verdict.reasons += [text for text in first.warned.splitlines() if ": " in text]  # texts of headwise end with paths
    for difference in (text for other in others for text in first.differences(other, budget)):
        verdict.add("wrong", difference)
    verdict.followed = sum(each.followed for each in (first, *others))
    return first.rows, first.output


def _is_named(path: str, reasons: Iterable[str]) -> bool:
    """Return True if a reason names the module at `path`, a module inside of it, or one around it."""
    for reason in reasons:
        for name in reason.rsplit(": ", 1)[-1].replace(" and ", ", ").split(", "):
            if name == path or name.startswith(f"{path}.") or path.startswith(f"{name}.") or (not path and name):
                return True
    return False


def _judge_site(
    key: tuple[str, str], rows: list[dict[str, Any]], site: Site | None, budget: float, verdict: Verdict
) -> None:
    """Compare the rows of one site with its truth."""
    path, kind = key
    if site is None:
        verdict.add("wrong", f"{path}: reported, but no softmax of it is attention")
        return
    if not site.attentions[0].is_scored and site.attentions[0].reason:
        verdict.add("wrong", f"{path}: reported, but {site.attentions[0].reason}")
        return
    if site.attentions[0].reason:
        verdict.add("not verified", f"{path}: {site.attentions[0].reason}")
        return
    if site.is_cross is not None and site.is_cross is not (kind == "cross"):
        verdict.add("wrong", f"{path}: reported as {kind}-attention")
    truth = site.statistics()
    if len(truth) != len(rows):
        verdict.add("wrong", f"{path}: {len(rows)} heads instead of {len(truth)}")
        return
    before = len(verdict.problems)
    for row, expected in zip(rows, truth, strict=True):
        _judge_head(f"{path} {kind} head {row['head']}", site.path, row, expected, budget, verdict)
    verdict.sites += len(verdict.problems) == before


def _judge_head(
    label: str, path: str, row: dict[str, Any], expected: dict[str, float], budget: float, verdict: Verdict
) -> None:
    """Compare the statistics of one head with its truth."""
    measured = {name: value for name, value in row.items() if isinstance(value, float) and not math.isnan(value)}
    for name, number in expected.items():
        if name not in measured:
            if _is_named(path, verdict.reasons):
                verdict.left_out = sorted({*verdict.left_out, name})
            elif name != "written_norm":
                verdict.add("silent", f"{label}: {name} is missing without a warning")
            continue
        error = abs(measured[name] - number) / (1 if unit_of(name) == "share" else 1 + abs(number))
        if not error <= budget:
            verdict.add("wrong", f"{label}: {name} is {measured[name]:.5f} instead of {number:.5f}")
    for name in sorted(measured.keys() & set(POSITIONAL) - expected.keys()):
        verdict.add("wrong", f"{label}: {name} is {measured[name]:.5f}, but there are no such positions")


def _judge_gates(
    model: nn.Module, same: nn.Module, call: Call, matched: Matched, plain: Any, count: int, verdict: Verdict
) -> None:
    """Gate some heads to 0, and compare the output of the model with that of zeroed columns of `same`, the model from
    which the truth is derived.
    """
    heads = [
        (path, row["head"])
        for (path, _), (rows, site) in matched.items()
        for row in rows
        if site is not None and len(site.attentions[0].gate) == len(rows)
    ]
    step = max(1, len(heads) // count)
    for path, head in heads[step // 2 :: step][:count]:
        silenced: dict[str, dict[int, Any]] = {"inputs": {}, "results": {}}
        for other_path, (_, other) in matched.items():
            if other_path[0] == path and other is not None:
                for attention in other.attentions:
                    for name, replacements in attention.gate[head].items() if head < len(attention.gate) else ():
                        silenced[name].update(replacements)
        expected = record(same, call, **silenced).output
        torch.manual_seed(0)
        try:
            with torch.no_grad(), warnings.catch_warnings(), hw.gate(model, {(path, head): 0.0}):
                warnings.simplefilter("ignore")
                gated = call(model)
        except hw.InputError as error:
            verdict.reasons.append(f"gate refused: {error}")
            continue
        except Exception as error:
            verdict.add("wrong", f"gate of {path} head {head}: {type(error).__name__}: {str(error)[:200]}")
            continue
        if _close(expected, plain):
            verdict.problems.append(f"gate of {path} head {head}: the output does not depend on it")
        elif not _close(gated, expected):
            difference = _difference(gated, expected) / max(_difference(expected, plain), 1e-30)
            verdict.add("wrong", f"gate of {path} head {head}: off by {difference:.2f} of its effect")
        else:
            verdict.gates += 1


def _tensors(output: Any) -> list[Tensor]:
    """Return all floating-point tensors in nested output."""
    if isinstance(output, Tensor):
        return [output.detach()] if output.is_floating_point() else []
    if isinstance(output, dict):
        return [tensor for value in output.values() for tensor in _tensors(value)]
    if isinstance(output, list | tuple):
        return [tensor for value in output for tensor in _tensors(value)]
    if hasattr(output, "__dataclass_fields__"):
        return [tensor for name in output.__dataclass_fields__ for tensor in _tensors(getattr(output, name))]
    return []


def _difference(output: Any, expected: Any) -> float:
    """Return the largest difference of two outputs, infinity if they have other shapes."""
    ours, theirs = _tensors(output), _tensors(expected)
    if [tensor.shape for tensor in ours] != [tensor.shape for tensor in theirs]:
        return math.inf
    differences = [
        float((a.double() - b.double()).nan_to_num(0.0).abs().max())
        for a, b in zip(ours, theirs, strict=True)
        if a.numel()
    ]
    return max(differences, default=0.0)


def _close(output: Any, expected: Any) -> bool:
    """Return True if two outputs are equal up to rounding."""
    largest = max(
        (float(tensor.abs().nan_to_num(0.0).max()) for tensor in _tensors(expected) if tensor.numel()), default=1.0
    )
    dtypes = [tensor.dtype for tensor in _tensors(expected)]
    return _difference(output, expected) <= (1e-4 if torch.float32 in dtypes else 1e-8) * (1 + largest)
