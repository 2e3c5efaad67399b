"""All runs of one model under `hw.watch` and `hw.gate`, each with its verdict."""

import copy
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from research.census import batches, gates, steps, training
from research.census.batches import Batch
from research.census.compare import TOLERANCE, Findings, compare, is_named
from research.census.expected import Sites, agree, merged, sites_of
from research.census.watched import TIMES, Watched, repeated, watch
from research.dispatcher_truth.recorder import Record, dispatcher_truth

SINGLE_TOLERANCE = 2e-4
"""Tolerance for models that run in float32 only: the truth is then in float32, too."""


@dataclass
class Run:
    """Verdict on one run.

    Attributes:
        name: name of the run.
        outcome: "wrong", "crash" (another error than `InputError` under headwise), "silent", "right", "partly",
            "refused", "unverified" (the truth does not know what is reported), "no attention", or "skipped".
        problems: what is wrong, silent, refused or skipped, in words.
        named: modules or statistics that a warning names.
        left_out: statistics that are missing and not named.
        unverified: what was reported, but the truth does not know.
        checked: number of values that agree.
        confirmed: every sequence alone gave the same statistics; None if that was not tried.
        followed: number of calls of the model that followed a plan to their end.
    """

    name: str
    outcome: str
    problems: list[str] = field(default_factory=list)
    named: list[str] = field(default_factory=list)
    left_out: list[str] = field(default_factory=list)
    unverified: list[str] = field(default_factory=list)
    checked: int = 0
    confirmed: bool | None = None
    followed: int = 0


@dataclass
class Subject:
    """A model that runs, with the inputs that it accepts, and the attention of that run.

    Attributes:
        generator: model of the same type that generates text; None if there is none.
    """

    model: nn.Module
    batch: Batch
    record: Record
    dtype: torch.dtype
    special: set[int]
    generator: nn.Module | None = None

    @property
    def tolerance(self) -> float:
        """Largest difference that is rounding."""
        return TOLERANCE if self.dtype == torch.float64 else SINGLE_TOLERANCE


def call(model: nn.Module, batch: Batch) -> Any:
    """Run a model, always with the same random numbers."""
    torch.manual_seed(0)
    return model(**batch.inputs)


def recorded(model: nn.Module, batch: Batch) -> Record:
    """Return the attention of a run, recorded at the dispatcher."""
    return recorded_with_output(model, batch)[0]


def recorded_with_output(model: nn.Module, batch: Batch) -> tuple[Record, list[Tensor]]:
    """Return the attention of a run, recorded at the dispatcher, and the floating tensors of the model's output."""
    with dispatcher_truth(model) as record:
        output = training.floating(call(model, batch))
    return record, output


def all_runs(subject: Subject) -> Iterator[Run]:
    """Yield the verdicts on all runs of a model."""
    state = library_state(subject.model)
    padded = list(batches.padded(subject.batch, subject.model))
    eager = _eager(subject.model) if padded else None
    yield _guarded("unpadded", lambda: _batched(subject, subject.model, subject.batch))
    for batch in padded:
        yield _guarded(batch.name, lambda batch=batch: _batched(subject, subject.model, batch))  # type: ignore[misc]
        if eager is not None:
            yield _guarded(f"{batch.name}, eager", lambda batch=batch: _batched(subject, eager, batch))  # type: ignore[misc]
    alone = batches.alone(padded[0]) if padded else None
    for one in list(alone or ())[1:]:
        yield _guarded("shorter sequence alone", lambda one=one: _batched(subject, subject.model, one))  # type: ignore[misc]
    yield from _stepwise(subject, steps.cached, subject.model)
    if subject.generator is not None:
        yield from _stepwise(subject, steps.generated, subject.generator)
    if subject.record.calls:
        yield _guarded("training", lambda: _training(subject))
        for dtype in (torch.float32, torch.bfloat16):
            name = str(dtype).removeprefix("torch.")
            yield _guarded(name, lambda dtype=dtype: _in_dtype(subject, dtype))  # type: ignore[misc]
        yield _guarded("gates", lambda: _gates(subject))
    after = library_state(subject.model)
    changed = [name for name, value in state.items() if after[name] != value]
    yield Run("restored", "wrong" if changed else "right", [f"changed: {name}" for name in changed])


def library_state(model: nn.Module) -> dict[str, object]:
    """Return what watching may replace: functions of torch, hooks and attributes of modules."""
    functional = torch.nn.functional
    state: dict[str, object] = {}
    for name in ("scaled_dot_product_attention", "softmax", "multi_head_attention_forward", "dropout"):
        state[name] = id(getattr(functional, name))
    state |= {"torch.softmax": id(torch.softmax), "Tensor.softmax": id(Tensor.softmax)}
    state["fast path"] = torch.backends.mha.get_fastpath_enabled()
    for path, module in model.named_modules():
        hooks = (len(module._forward_hooks), len(module._forward_pre_hooks))
        state[path] = (hooks, tuple(vars(module)), type(module))
    return state


def _guarded(name: str, run: Callable[[], Run]) -> Run:
    """Return the verdict on a run. An unexpected error is a crash if it passed through headwise."""
    try:
        verdict = run()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        places = [frame for frame in frames if "/src/headwise/" in frame.filename]
        where = f" ({places[-1].filename.rsplit('/', 1)[-1]}:{places[-1].lineno})" if places else ""
        text = f"{type(error).__name__}: {str(error)[:200]}{where}"
        verdict = Run(name, "crash" if places else "skipped", [text])
    verdict.name = name
    return verdict


# -- single calls -----------------------------------------------------------------------------------------------------


def _batched(subject: Subject, model: nn.Module, batch: Batch) -> Run:
    """Compare a run with the truth of the same batch, and this truth with that of every sequence alone."""
    tolerance = subject.tolerance
    try:
        record, output = recorded_with_output(model, batch)
        sites = sites_of(record, batch, subject.special)
        is_finite = not any("not finite" in site.uncertain for site in sites.values())
    except RuntimeError:
        is_finite = False
    if not is_finite:  # masks of some models are not made for float64
        model, tolerance = copy.deepcopy(model).float(), SINGLE_TOLERANCE
        batch = replace(batch, inputs=batches.in_dtype(batch.inputs, torch.float32))
        record, output = recorded_with_output(model, batch)
        sites = sites_of(record, batch, subject.special)
    alone = batches.alone(batch) if batch.name != "unpadded" else None
    confirmed = None
    if alone is not None:
        try:
            runs = [sites_of(recorded(model, one), one, subject.special) for one in alone]
        except Exception:
            runs = []  # some models need two sequences
        confirmed = agree(sites, merged(runs)) if runs else None
    results = repeated(model, lambda: call(model, batch), subject.special)
    verdict = _compared(results, sites, record, tolerance)
    verdict.confirmed = confirmed
    watched = training.floating(results[0].output)
    if sites and not all(training.is_close(one, other, tolerance) for one, other in zip(watched, output, strict=True)):
        verdict.outcome = "wrong"
        verdict.problems.append("the output of the model changes under watch")
    if verdict.outcome == "wrong" and not _is_stable(model, batch, output, tolerance):
        return Run("", "skipped", ["the model itself computes something else with torch's math backend of attention"])
    return verdict


@torch.no_grad()
def _is_stable(model: nn.Module, batch: Batch, output: list[Tensor], tolerance: float) -> bool:
    """Return whether a model has the same `output` with another backend of attention than that of the truth: whether
    it amplifies rounding to other results.
    """
    plain = training.floating(call(model, batch))
    return all(training.is_close(one, other, tolerance) for one, other in zip(plain, output, strict=True))


def _eager(model: nn.Module) -> nn.Module | None:
    """Return a copy with eager attention; None if that is what it has, or it cannot change."""
    if getattr(model.config, "_attn_implementation", "eager") == "eager":
        return None
    try:
        eager: Any = copy.deepcopy(model)
        eager.set_attn_implementation("eager")
    except Exception:
        return None
    return eager


def _in_dtype(subject: Subject, dtype: torch.dtype) -> Run:
    """Compare statistics in a dtype with those in float64. The error may be twice that of the plain model's weights."""
    model = copy.deepcopy(subject.model).to(dtype)
    inputs = batches.in_dtype(subject.batch.inputs, dtype)
    batch = Batch("", inputs, subject.batch.real, subject.batch.tokens)
    try:
        record = recorded(model, batch)
    except Exception as error:
        return Run("", "skipped", [f"the model does not run so: {type(error).__name__}: {str(error)[:150]}"])
    truth, plain = sites_of(subject.record, subject.batch, subject.special), sites_of(record, batch, subject.special)
    if truth.keys() != plain.keys():
        return Run("", "skipped", ["the model computes something else in this dtype"])
    budget = max(1e-3 if dtype == torch.bfloat16 else 1e-5, 2 * _largest_difference(truth, plain))
    results = repeated(model, lambda: call(model, batch), subject.special)
    verdict = _compared(results, truth, record, budget)
    if verdict.outcome == "wrong" and budget < 2 * _effect_of_rounding(subject, model, batch, plain):
        return Run("", "skipped", ["the model amplifies rounding of its inputs to other statistics"])
    return verdict


def _largest_difference(sites: Sites, others: Sites) -> float:
    """Return the largest difference between the means of two runs; relative above 1."""
    return max(
        float(((means[name] - rounded[name]).abs() / means[name].abs().clamp(min=1.0)).nan_to_num().max())
        for key, site in sites.items()
        for means, rounded in [(site.means(), others[key].means())]
        for name in means.keys() & rounded.keys()
    )


def _effect_of_rounding(subject: Subject, model: nn.Module, batch: Batch, plain: Sites) -> float:
    """Return the largest difference of the statistics `plain` from those of a run with inputs that differ in their last
    bits; infinity if that run has other sites.
    """
    torch.manual_seed(0)
    rounded = {
        name: value * (1 + torch.finfo(value.dtype).eps * torch.randn_like(value).sign())
        for name, value in batch.inputs.items()
        if isinstance(value, Tensor) and value.is_floating_point()
    }
    other = replace(batch, inputs=batch.inputs | rounded)
    sites = sites_of(recorded(model, other), batch, subject.special)
    return _largest_difference(plain, sites) if sites.keys() == plain.keys() else float("inf")


def _compared(results: list[Watched], sites: Sites, record: Record, tolerance: float) -> Run:
    """Return the verdict on a run that was watched several times, with the same results each time."""
    first, *others = results
    if first.refused:
        verdict = _of_refusal(first.refused, sites)
    else:
        maybe = {softmax.path for softmax, _ in record.unresolved} | {path for path, _ in record.fused}
        verdict = _of_findings(compare(first.rows, sites, first.warned, maybe, tolerance))
    differences = [text for other in others for text in first.differences(other, tolerance)]
    if differences:
        verdict.outcome = "wrong"
        verdict.problems.extend(differences)
    verdict.followed = sum(result.followed for result in results)
    return verdict


def _of_findings(findings: Findings) -> Run:
    outcome = "wrong" if findings.wrong else "silent" if findings.silent else "partly" if findings.named else "right"
    if outcome == "right" and not findings.checked:
        outcome = "unverified" if findings.unverified else "no attention"
    problems = findings.wrong + [f"not reported and not named: {path}" for path in findings.silent]
    named = sorted(set(findings.named))
    return Run("", outcome, problems, named, findings.left_out, findings.unverified, findings.checked)


def _of_refusal(message: str, sites: Sites) -> Run:
    """Return the verdict on a refusal: without attention there is nothing to refuse; otherwise it names a module."""
    if not sites:
        return Run("", "no attention", [message])
    named = any(is_named(site.path, message) for site in sites.values())
    return Run("", "refused", [message, *([] if named else ["the message names no attention module"])])


# -- steps, training, gates -------------------------------------------------------------------------------------------


def _stepwise(
    subject: Subject, make: Callable[[nn.Module, Batch], Iterator[steps.Steps]], model: nn.Module
) -> Iterator[Run]:
    """Yield the verdicts on runs in steps."""
    try:
        runs = list(make(model, subject.batch))
    except Exception as error:
        yield Run("steps", "skipped", [f"{type(error).__name__}: {str(error)[:200]}"])
        return
    for one in runs:
        yield _guarded(one.name, lambda one=one: _steps(subject, one, model))  # type: ignore[misc]


def _steps(subject: Subject, one: steps.Steps, model: nn.Module) -> Run:
    """Compare a run in steps with the single call over the same tokens, if the model computes the same in both."""
    with dispatcher_truth(model) as record:
        whole = one.read(call(model, one.whole))
    try:
        with torch.no_grad():
            plain = one.run()
    except Exception as error:
        return Run("", "skipped", [f"the model does not run so: {type(error).__name__}: {str(error)[:150]}"])
    if not training.is_close(plain, whole, subject.tolerance / 10):
        return Run("", "skipped", ["the model itself computes something else in steps"])
    sites = sites_of(record, one.whole, subject.special)
    return _compared([watch(model, one.run, subject.special)], sites, record, subject.tolerance)


def _training(subject: Subject) -> Run:
    """Compare training steps under `watch` with steps without, and their statistics with the truth before dropout."""
    model, batch, tolerance = training.with_dropout(subject.model), subject.batch, subject.tolerance
    try:
        plain = _trained(model, batch.inputs)
        again = training.step(copy.deepcopy(model), batch.inputs)
    except Exception as error:
        return Run("", "skipped", [f"the model does not train: {type(error).__name__}: {str(error)[:150]}"])
    if plain[0].difference(again, 0.0):
        return Run("", "skipped", ["two steps of the model differ"])
    results = _watched_training(model, batch.inputs, subject.special)
    difference = _difference_of_steps(results, plain, tolerance)
    if difference and _differs_in_single(model, batch, subject.special):
        return Run("", "wrong", [f"the training step changes under watch: {difference}"])
    if difference:  # torch's fused attention is wrong with float64 and a float32 mask of more than some ten keys
        return Run("", "skipped", [f"only in float64: {difference}"])
    trained = copy.deepcopy(model)
    with dispatcher_truth(trained) as record:
        torch.manual_seed(training.SEED)
        outputs = training.floating(trained(**batch.inputs))
    if not all(training.is_close(one, other, tolerance) for one, other in zip(outputs, plain[0].outputs, strict=True)):
        return Run("", "right", unverified=["statistics: dropout of the truth is another"])
    if plain[0].difference(plain[-1], tolerance):
        results = results[:1]  # the steps change a state of the model
    sites = sites_of(record, batch, subject.special)
    for site in sites.values():
        site.uncertain.discard("changed")  # by dropout
    return _compared(results, sites, record, tolerance)


def _trained(model: nn.Module, inputs: dict[str, Any]) -> list[training.TrainingStep]:
    """Run training steps of a copy of a model, as many as are watched."""
    model = copy.deepcopy(model)
    return [training.step(model, inputs) for _ in range(TIMES)]


def _watched_training(model: nn.Module, inputs: dict[str, Any], special: set[int]) -> list[Watched]:
    """Run training steps of a copy of a model under `hw.watch`."""
    model = copy.deepcopy(model)
    return repeated(model, torch.enable_grad()(lambda: training.step(model, inputs)), special)


def _difference_of_steps(results: list[Watched], steps: list[training.TrainingStep], tolerance: float) -> str:
    """Return the first difference of watched training steps from others, or ""."""
    differences = (result.output.difference(one, tolerance) for result, one in zip(results, steps, strict=False))
    return next(filter(None, differences), "")


def _differs_in_single(model: nn.Module, batch: Batch, special: set[int]) -> bool:
    """Return whether training steps change under `watch` in float32, too."""
    model, inputs = copy.deepcopy(model).float(), batches.in_dtype(batch.inputs, torch.float32)
    results = _watched_training(model, inputs, special)
    return bool(_difference_of_steps(results, _trained(model, inputs), SINGLE_TOLERANCE))


def _gates(subject: Subject) -> Run:
    """Compare gated runs with runs in which the head's columns of the output projection are zero."""
    result = watch(subject.model, lambda: call(subject.model, subject.batch))
    if result.refused or not result.rows:
        return Run("", "skipped", ["nothing is reported"])
    record = recorded(subject.model, subject.batch)
    problems = gates.check(subject.model, subject.batch, record, result.rows, subject.tolerance)
    unverified = [problem for problem in problems if problem.startswith("unverified")]
    refused = [problem for problem in problems if problem.startswith("refused")]
    wrong = [problem for problem in problems if problem not in unverified and problem not in refused]
    outcome = "wrong" if wrong else "refused" if refused else "right"
    checked = len(gates.sample(result.rows)) - len(problems)
    return Run("", outcome, wrong + refused, unverified=unverified, checked=checked)
