"""Verdict on one model type: build it, run it under `hw.watch`, and compare the statistics."""

import time
import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

import headwise as hw
from research.census.builder import build
from research.census.compare import Comparison, Place, compare, truth
from research.census.inputs import SIDES, attempts, takes_padding
from research.census.reference import recorded

SPECIAL = (7, 11, 13)
OF_OUTPUTS = {"output_norm", "written_norm"}
"""Statistics that need more than weights, which a watch does not always have."""
OUTCOMES = ("right", "partly seen", "refused", "wrong", "silent", "no attention", "not built")


@dataclass
class Verdict:
    """What the census says of a model type.

    Attributes:
        model_type: as `transformers` calls it.
        outcome: one of `OUTCOMES`.
        reason: why, where it is not right.
        model: the class.
        routes: how attention is called.
        sites, heads: how many the reference knows.
        worst: the largest error.
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
    """Build, run, compare; never raises but for what ends a process."""
    start = time.perf_counter()
    try:
        verdict = _judge(model_type)
    except Exception as error:
        verdict = Verdict(model_type, "not built", _said(error))
    verdict.seconds = round(time.perf_counter() - start, 2)
    return verdict


def _said(error: BaseException) -> str:
    import traceback

    frame = traceback.extract_tb(error.__traceback__)[-1]
    line = " ".join(str(error).split())[:240]
    return f"{type(error).__name__}: {line} ({frame.filename.rpartition('/')[2]}:{frame.lineno})"


@torch.no_grad()
def _run(model: nn.Module, inputs: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    return model(**inputs)


def _judge(model_type: str) -> Verdict:
    model = build(model_type)
    eager = build(model_type, "eager")
    eager.load_state_dict(model.state_dict())
    verdict = Verdict(model_type, "right", model=type(model).__name__)
    sides = SIDES if takes_padding(model) else (None,)
    for side in sides:
        inputs = _inputs(model_type, model, side)
        with recorded(eager) as record:
            _run(eager, inputs)
        with recorded(model) as own:
            _run(model, inputs)
        places, own_places = (truth(each.calls, SPECIAL) for each in (record, own))
        verdict.routes = sorted({place.route for place in places.values()} | set(verdict.routes))
        verdict.sites = max(verdict.sites, len(places))
        verdict.heads = max(verdict.heads, sum(place.heads for place in places.values()))
        for path, what in list(record.failures.items())[:2]:
            verdict.notes.append(f"no weights over keys: {what} in {path}")
        for name, each in (("default", model), ("eager", eager)):
            if name == "default" and getattr(model.config, "_attn_implementation", "eager") == "eager":
                continue
            run = f"{side or 'no padding'}, {name}"
            truths = Truths(places, own_places if name == "default" else None, record.failures)
            _watched(verdict, run, each, inputs, truths)
    if not verdict.sites and verdict.outcome == "right":
        verdict.outcome = "no attention"
    return verdict


def _inputs(model_type: str, model: nn.Module, side: str | None) -> dict[str, Any]:
    """The first arguments that the model takes; a model that takes none is not built."""
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


def _settle(verdict: Verdict, outcome: str, reason: str) -> None:
    """The worst outcome of all runs is the type's."""
    if WORSE.index(outcome) > WORSE.index(verdict.outcome):
        verdict.outcome, verdict.reason = outcome, reason


@dataclass
class Truths:
    """What a run should show.

    Attributes:
        places: by the weights of eager attention.
        own: by the definition of torch's attention, where the run calls that.
        unreadable: modules whose softmax is over something else than keys, and its shape.
    """

    places: dict[tuple[str, bool], Place]
    own: dict[tuple[str, bool], Place] | None
    unreadable: dict[str, str]


def _watched(verdict: Verdict, run: str, model: nn.Module, inputs: dict[str, Any], truths: Truths) -> None:
    """Run the model once under `hw.watch` and compare the statistics with the reference."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            with hw.watch(model, special=SPECIAL) as heads:
                _run(model, inputs)
        except hw.InputError as error:
            none = not truths.places and not truths.unreadable and str(error).endswith(f" {type(model).__name__}")
            return _settle(verdict, "no attention" if none else "refused", f"{run}: {error}")
        except Exception as error:
            return _settle(verdict, "wrong", f"{run}: {_said(error)}")
    said = [str(each.message) for each in caught if "was not seen" in str(each.message)]
    found = compare(heads.records, truths.places)
    if found.differences and truths.own is not None:
        mine = compare(heads.records, truths.own)
        if not mine.differences and not mine.missed:
            verdict.notes.append(f"{run}: this implementation is not eager's, and right as it is")
            found = mine
    if found.worst > verdict.worst:
        verdict.worst, verdict.worst_at = found.worst, f"{run}: {found.worst_at}"
    _weigh(verdict, run, found)
    # What else a module does beside a call that says its weights is no attention over keys.
    whole = {place.path for place in truths.places.values() if place.route != "softmax"}
    missed = [*found.missed, *(path for path in truths.unreadable if path not in whole)]
    unsaid = [each for each in missed if not any(_named(each, text) for text in said)]
    if unsaid:
        _settle(verdict, "silent", f"{run}: not seen and not said: {', '.join(unsaid[:4])} ({len(unsaid)})")
    if said:
        _settle(verdict, "partly seen", f"{run}: {said[0][:300]}")


def _weigh(verdict: Verdict, run: str, found: Comparison) -> None:
    """What was seen, against what it should be."""
    if found.differences:
        worst = max(found.differences, key=lambda each: each.error)
        wrong = ", ".join(sorted({each.statistic for each in found.differences}))
        numbers = f"{worst.got:.6g} where {worst.expected:.6g} is right"
        where = f"{worst.path} {worst.statistic} head {worst.head}"
        _settle(verdict, "wrong", f"{run}: {len(found.differences)} differ ({wrong}); {where}: {numbers}")
    if found.beyond:
        _settle(verdict, "wrong", f"{run}: seen, but no reference: {', '.join(found.beyond[:4])} ({len(found.beyond)})")
    for what, places in (("not checked", found.unchecked), ("not measured", found.absent)):
        names = sorted({each.rsplit(": ", 1)[1] for each in places})
        if names:
            verdict.notes.append(f"{run}: {what}: {', '.join(names)}")
        if what == "not measured" and not set(names) <= OF_OUTPUTS:
            _settle(verdict, "wrong", f"{run}: {what}: {', '.join(names)}")


def _named(place: str, text: str) -> bool:
    path = place.removesuffix(" (cross)")
    names = text.split("not seen: ", 1)[-1].split(", ")
    return any(path == name or path.startswith(f"{name}.") or name.startswith(f"{path}.") for name in names)
