"""Verdict on one model type: build a tiny model, run it under `hw.watch`, and compare the statistics with their
definition.
"""

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import headwise as hw
from research.census.builder import build
from research.census.compare import OF_POSITIONS, Comparison, SiteStatistics, compare, truth
from research.census.inputs import SIDES, attempts, takes_padding
from research.census.reference import recorded

SPECIAL = (7, 11, 13)
OF_OUTPUTS = {"output_norm", "written_norm"}
"""Statistics that need the head outputs in addition to the weights; a watch may leave them out."""
OUTCOMES = ("right", "partly seen", "refused", "wrong", "silent", "no attention", "not built")


@dataclass
class Verdict:
    """Result of the census for one model type.

    Attributes:
        model_type: name of the model type in `transformers`.
        outcome: one of `OUTCOMES`.
        reason: reason for an outcome other than "right".
        model: name of the model class.
        routes: ways in which the model computes attention.
        sites, heads: number of attention sites and of their heads in the reference.
        worst: the largest error.
        worst_at: run, site, statistic and head of the largest error.
        notes: exceptions in the comparison, such as statistics that were not checked.
        runs: always empty; part of the saved format.
        seconds: duration.
    """

    model_type: str
    outcome: str
    reason: str = ""
    model: str = ""
    routes: list[str] = field(default_factory=list)
    sites: int = 0
    heads: int = 0
    worst: float = 0.0
    worst_at: str = ""
    notes: list[str] = field(default_factory=list)
    runs: list[str] = field(default_factory=list)
    seconds: float = 0.0


def judge(model_type: str) -> Verdict:
    """Build, run and compare a model type, and return its verdict. An exception while the model is built or run gives
    the outcome "not built".
    """
    start = time.perf_counter()
    try:
        verdict = _judge(model_type)
    except Exception as error:
        verdict = Verdict(model_type, "not built", _described(error))
    verdict.seconds = round(time.perf_counter() - start, 2)
    return verdict


def _described(error: BaseException) -> str:
    """Return an exception as one line: class, message, file and line."""
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = " ".join(str(error).split())[:240]
    return f"{type(error).__name__}: {line} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"


@torch.no_grad()
def _run(model: nn.Module, inputs: dict[str, Any]) -> Any:
    """Return the output of the model for the inputs, without gradients and with a fixed seed."""
    torch.manual_seed(0)
    return model(**inputs)


def _judge(model_type: str) -> Verdict:
    """Build a model type with its default and with eager attention, run both under a watch with padding on each side,
    and return the verdict.
    """
    model = build(model_type)
    eager = build(model_type, "eager")
    eager.load_state_dict(model.state_dict())
    verdict = Verdict(model_type, "right", model=type(model).__name__)
    sides = SIDES if takes_padding(model) else (None,)
    for side in sides:
        inputs = _inputs(model_type, model, side)
        with recorded(eager) as record:
            _run(eager, inputs)
        with recorded(model) as own_record:
            _run(model, inputs)
        places, own_places = (truth(calls, SPECIAL) for calls in (record.calls, own_record.calls))
        verdict.routes = sorted({place.route for place in places.values()} | set(verdict.routes))
        verdict.sites = max(verdict.sites, len(places))
        verdict.heads = max(verdict.heads, sum(place.heads for place in places.values()))
        for path, failure in list(record.failures.items())[:2]:
            verdict.notes.append(f"no weights over keys: {failure} in {path}")
        for name, run_model in (("default", model), ("eager", eager)):
            if name == "default" and getattr(model.config, "_attn_implementation", "eager") == "eager":
                continue
            run = f"{side or 'no padding'}, {name}"
            truths = Truths(places, own_places if name == "default" else None, record.failures)
            _watched(verdict, run, run_model, inputs, truths)
    if not verdict.sites and verdict.outcome == "right":
        verdict.outcome = "no attention"
    return verdict


def _inputs(model_type: str, model: nn.Module, side: str | None) -> dict[str, Any]:
    """Return the first set of arguments that the model accepts. If it accepts none, raise the error of the first
    set.
    """
    failure: Exception | None = None
    for inputs in attempts(model_type, model, side):
        try:
            _run(model, inputs)
        except Exception as error:
            failure = failure or error
        else:
            return inputs
    raise failure or LookupError("no inputs")


WORSE = ("right", "no attention", "refused", "partly seen", "silent", "wrong")


def _worsen(verdict: Verdict, outcome: str, reason: str) -> None:
    """Set the outcome and reason of a verdict if the outcome is worse than those of earlier runs."""
    if WORSE.index(outcome) > WORSE.index(verdict.outcome):
        verdict.outcome, verdict.reason = outcome, reason


@dataclass
class Truths:
    """Reference statistics for one run.

    Attributes:
        places: statistics by site from the weights of eager attention.
        own: statistics by site from the definition of torch's attention, if the run does not use eager attention.
        unreadable: shape of each softmax that is not over keys, by module path.
    """

    places: dict[tuple[str, bool], SiteStatistics]
    own: dict[tuple[str, bool], SiteStatistics] | None
    unreadable: dict[str, str]


def _watched(verdict: Verdict, run: str, model: nn.Module, inputs: dict[str, Any], truths: Truths) -> None:
    """Run the model once under `hw.watch` and compare the statistics with the reference."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with hw.watch(model, special=SPECIAL) as heads:
                _run(model, inputs)
        except hw.InputError as error:
            has_no_attention = (
                not truths.places and not truths.unreadable and str(error).endswith(f" {type(model).__name__}")
            )
            return _worsen(verdict, "no attention" if has_no_attention else "refused", f"{run}: {error}")
        except Exception as error:
            return _worsen(verdict, "wrong", f"{run}: {_described(error)}")
    paths = {path or type(model).__name__ for path, _ in model.named_modules()}
    warned = [text for text in (str(warning.message) for warning in caught) if paths.issuperset(_names_in(text))]
    comparison = compare(heads.records, truths.places)
    if comparison.differences and truths.own is not None:
        own_comparison = compare(heads.records, truths.own)
        if not own_comparison.differences and not own_comparison.missed:
            verdict.notes.append(f"{run}: this implementation is not eager's, and right as it is")
            comparison = own_comparison
    if comparison.worst > verdict.worst:
        verdict.worst, verdict.worst_at = comparison.worst, f"{run}: {comparison.worst_at}"
    _add_findings(verdict, run, comparison, warned)
    # In a module with a recorded attention call, another softmax is not attention over keys.
    recorded_paths = {place.path for place in truths.places.values() if place.route != "softmax"}
    missed = [*comparison.missed, *(path for path in truths.unreadable if path not in recorded_paths)]
    unnamed = [path for path in missed if not any(_named(path, text) for text in warned)]
    if unnamed:
        _worsen(verdict, "silent", f"{run}: not seen and not said: {', '.join(unnamed[:4])} ({len(unnamed)})")
    if warned:
        _worsen(verdict, "partly seen", f"{run}: {warned[0][:300]}")


def _add_findings(verdict: Verdict, run: str, comparison: Comparison, warned: list[str]) -> None:
    """Worsen the verdict for statistics that differ, sites without a reference, statistics that were not measured, and
    statistics of positions that do not exist; note those that were not checked. Statistics of positions may be left out
    where one of the warnings in `warned` says so.
    """
    if comparison.differences:
        worst = max(comparison.differences, key=lambda difference: difference.error)
        wrong = ", ".join(sorted({difference.statistic for difference in comparison.differences}))
        numbers = f"{worst.got:.6g} where {worst.expected:.6g} is right"
        where = f"{worst.path} {worst.statistic} head {worst.head}"
        _worsen(verdict, "wrong", f"{run}: {len(comparison.differences)} differ ({wrong}); {where}: {numbers}")
    if comparison.beyond:
        _worsen(
            verdict,
            "wrong",
            f"{run}: seen, but no reference: {', '.join(comparison.beyond[:4])} ({len(comparison.beyond)})",
        )
    without_positions = [text for text in warned if text.startswith("positions of ")]
    for problem, sites in (("not checked", comparison.unchecked), ("not measured", comparison.absent)):
        names = sorted({site.rsplit(": ", 1)[1] for site in sites})
        if names:
            verdict.notes.append(f"{run}: {problem}: {', '.join(names)}")
        if problem == "not checked":
            forbidden = [name for name in names if name in OF_POSITIONS]
        else:
            forbidden = [site for site in sites if not _may_be_absent(site, without_positions)]
        if forbidden:
            _worsen(verdict, "wrong", f"{run}: {problem}: {', '.join(names)}")


def _may_be_absent(absent: str, without_positions: list[str]) -> bool:
    """Return whether a watch may leave out a statistic, `absent`, written as "path: statistic": it needs head outputs,
    or it needs positions and a warning in `without_positions` names the module.
    """
    path, statistic = absent.rsplit(": ", 1)
    if statistic in (*OF_POSITIONS, "first"):
        return any(_named(path, text) for text in without_positions)
    return statistic in OF_OUTPUTS


def _names_in(text: str) -> list[str]:
    """Return the names of modules in a watch's warning, which ends with ": " and a list of them."""
    return text.rpartition(": ")[2].split(", ")


def _named(site: str, text: str) -> bool:
    """Return whether a watch's warning names the site, a module around it, or one inside of it."""
    path = site.removesuffix(" (cross)")
    names = _names_in(text)
    return any(path == name or path.startswith(f"{name}.") or name.startswith(f"{path}.") for name in names)
