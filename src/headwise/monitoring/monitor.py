"""`monitor`: statistics of every head during training, at the cost of the steps that are observed."""

import threading
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn

from headwise.checks import collection_of, is_whole, require_module, whole_number
from headwise.errors import InputError
from headwise.intercept.heads import Heads
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Observation
from headwise.intercept.session import current_session
from headwise.intercept.sites import SiteRegistry
from headwise.intercept.statistics_observer import StatisticsObserver
from headwise.monitoring.alarms import Alarm, AlarmLimits
from headwise.monitoring.history import History, Row
from headwise.runs.distributed import broadcast_from_rank0, gather_from_ranks, rank_and_world_size
from headwise.runs.files import locked_folder
from headwise.statistics.registry import OF_TOKENS, STATISTICS

INDICATORS = frozenset({"entropy", "output_norm"})
"""Statistics that show NaN and infinite numbers, and are always computed."""


class TrainingObserver(StatisticsObserver):
    """Interceptor that computes head statistics in the forward passes of a training. The model's own functions compute
    all outputs, which therefore stay equal in every bit. Modules in evaluation mode are not observed, nor are forward
    passes that activation checkpointing repeats. After a module has read `sequences` sequences, its further forward
    passes are not observed.

    Attributes:
        inputs: arguments of the latest call of the model, by name; None before the first one.
    """

    def __init__(self, model: nn.Module, heads: Heads, statistics: Collection[str], sequences: int | None) -> None:
        measured = frozenset(statistics) | INDICATORS
        super().__init__(model, heads, (), None, measured=measured, keeps_output=True)
        self._modules = dict(model.named_modules())
        self._most_sequences, self._observed_sequences = sequences, Counter[str]()
        self._of_thread = threading.local()
        self.inputs: Mapping[str, Any] | None = None

    def on_model_call(self) -> None:
        """Start a forward pass of the model in this thread. Add the sequences of the previous pass to the number that
        each module has observed. The sequences are added after the pass, since a module may attend several times to the
        same sequences in one pass.
        """
        super().on_model_call()
        self._observed_sequences.update(vars(self._of_thread).pop("sequences", {}))

    def on_module_call(self, path: str) -> None:
        """Record that a module ran in training mode. Modules in evaluation mode are ignored, so that their attention is
        not reported as missing.
        """
        if self._modules[path].training:
            if not path:
                self.inputs = current_session().module_calls[-1].arguments
            super().on_module_call(path)

    def observe(self, call: Call) -> Observation | None:
        """Return the functions that observe an attention call. Return None if its module is in evaluation mode, if
        activation checkpointing repeats it, or if enough sequences were observed.
        """
        path = call.site.path
        if call.is_recomputation or not self._modules[path].training:
            return None
        if self._most_sequences is not None:
            if self._observed_sequences[path] >= self._most_sequences:
                return None
            of_call = vars(self._of_thread).setdefault("sequences", dict[str, int]())
            of_call[path] = max(of_call.get(path, 0), call.grid.batch)
        return super().observe(call)


class _ForcedEager:
    """Context manager in which compiled modules run without compilation. It may be entered several times at once, and
    left in any order.
    """

    def __init__(self) -> None:
        self._lock, self._depth = threading.Lock(), 0
        self._stance: Any = None

    def __enter__(self) -> None:
        with self._lock:
            if not self._depth:
                self._stance = torch.compiler.set_stance("force_eager")
            self._depth += 1

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            if not self._depth:
                self._stance.__exit__(None, None, None)


forced_eager = _ForcedEager()
"""Context in which compiled modules run without compilation; the monitors of several models share it."""


@contextmanager
def _observing(model: nn.Module, observer: TrainingObserver) -> Iterator[None]:
    """Context manager within which `observer` observes a model, and compiled modules run without compilation. The
    observation also ends when the monitor that started it is deleted without being closed, as after an error in a
    training with a callback.
    """
    with forced_eager, intercepted(model, observer, context="hw.monitor", runs_eagerly=True):
        yield


BY_DEFAULT = ("max_logit", "entropy", "first", "output_norm")
"""Names of the statistics that are observed by default."""

OnAlarm = Callable[[Alarm], None]
"""Function that is called with each alarm."""


def monitor(
    model: nn.Module,
    *,
    every: int = 100,
    statistics: Collection[str] = BY_DEFAULT,
    sequences: int | None = None,
    layers: Collection[int] | None = None,
    out: str | Path | None = None,
    start: int | None = None,
    alarms: AlarmLimits | None = None,
    on_alarm: OnAlarm | None = None,
) -> "Monitor":
    """Return a context manager that records statistics of every attention head of a model while it trains.

    In every `every`-th step it observes the training forward passes themselves, without passes of its own. The model's
    own functions compute all outputs, so losses and gradients have the same bits. In the other steps nothing is hooked
    or patched. All forward passes of a step in training mode count, as with gradient accumulation; passes in evaluation
    mode and those that activation checkpointing repeats do not. Compiled modules run without compilation in observed
    steps. With torch.distributed, statistics are those of the sequences of all processes.

    Args:
        model: the model that trains: any module that `watch` supports, also one in DistributedDataParallel, one that
            was sharded by `fully_shard`, or a compiled one.
        every: number of steps from one observed step to the next. The first step is observed.
        statistics: names of the statistics, as in `watch`. With a softcap, "max_logit" adds "max_logit_uncapped".
        sequences: number of sequences in each process after which further forward passes of a step are not observed;
            by default all are.
        layers: numbers of the layers in the results; by default all.
        out: run folder for the history, which a resumed training continues; by default it is in memory alone.
        start: number of the first step; by default 0. It is required if the folder has steps already.
        alarms: limits outside of which a head causes an alarm.
        on_alarm: function that is called with each `Alarm` of an observed step, in the first process.

    Raises:
        InputError: an argument cannot be used, or the folder is another run's.
        MissingExtra: a package that `out` needs is not installed.

    Example:
        with hw.monitor(model, every=100, out="run") as monitor:
            for batch in batches:
                model(**batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                monitor.step()
        monitor.history.table()
    """
    return Monitor(model, every, statistics, sequences, layers, out, start, alarms, on_alarm)


class Monitor:
    """Context manager that observes the heads of a model during training; `headwise.monitor` returns it. Call its
    method `step` after each step of the optimizer.

    Attributes:
        history: statistics of the steps observed so far. In processes other than the first it is in memory alone.
        alarms: the alarms so far.
        inputs: arguments of the latest observed call of the model, by name; None before the first observed step has
            ended.
    """

    def __init__(
        self,
        model: nn.Module,
        every: int,
        statistics: Collection[str],
        sequences: int | None,
        layers: Collection[int] | None,
        out: str | Path | None,
        start: int | None,
        alarms: AlarmLimits | None,
        on_alarm: OnAlarm | None,
    ) -> None:
        self._statistics = tuple(dict.fromkeys(collection_of("statistics", statistics, of="names of statistics")))
        available = STATISTICS.keys() - OF_TOKENS
        for name in self._statistics:
            if name not in available:
                raise InputError("statistics", expected=f"names among {', '.join(sorted(available))}", got=repr(name))
        if not self._statistics:
            raise InputError("statistics", expected="at least one name", got="none")
        # The statistics in the history: with a softcap there are two largest logits.
        self._recorded = {*self._statistics, *(("max_logit_uncapped",) if "max_logit" in self._statistics else ())}
        self._layers = None if layers is None else frozenset(collection_of("layers", layers, of="numbers of layers"))
        for number in self._layers or ():
            if not is_whole(number, 0):
                raise InputError("layers", expected="whole numbers from 0", got=repr(number))
        if alarms is not None and not isinstance(alarms, AlarmLimits):
            raise InputError("alarms", expected="headwise.AlarmLimits or None", got=type(alarms).__name__)
        self._model, self._every = inner_model(require_module(model)), whole_number("every", every, least=1)
        self._sequences = None if sequences is None else whole_number("sequences", sequences, least=1)
        self._out, self._limits, self._on_alarm = None if out is None else Path(out), alarms or AlarmLimits(), on_alarm
        self._start = None if start is None else whole_number("start", start, least=0)
        self._next = self._start or 0
        self._heads: Heads | None = None
        self._observer: TrainingObserver | None = None
        self.inputs: Mapping[str, Any] | None = None
        self._of_run, self._of_step = ExitStack(), ExitStack()
        self._has_warned = self._is_open = False
        self.history = History({})
        self.alarms: list[Alarm] = []

    def __repr__(self) -> str:
        return f"Monitor(every {self._every} steps, next step {self._next}, {self.history!r})"

    def __enter__(self) -> "Monitor":
        if self._is_open:
            raise InputError("monitor", expected="one that is not entered yet", got="one that is in use")
        settings = {"model": type(self._model).__name__, "statistics": list(self._statistics)}
        folder = self._out if rank_and_world_size()[0] == 0 else None
        with ExitStack() as stack:
            recorded = broadcast_from_rank0(lambda: self._open(folder, settings, stack))
            if folder is None:
                self.history = History(settings)
            self.history.begins_unobserved = self._next % self._every > 0
            if recorded and self._start is None:
                got = f"None, with steps up to {recorded[-1]} in {str(self._out)!r}"
                raise InputError("start", expected="the number of the step at which the training resumes", got=got)
            self._observe_if_due()
            self._of_run, self._is_open = stack.pop_all(), True
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._is_open, self._heads = False, None
        try:
            self._of_step.close()
        finally:
            self._of_run.close()

    def step(self) -> list[Alarm]:
        """Record that a training step ended, and return its alarms: statistics of heads outside of the limits. Call
        this method once after each step of the optimizer.

        Raises:
            InputError: the monitor is not entered; the step was to be observed, and no attention of the model was seen
                in training mode; or the run folder cannot be written.
        """
        if not self._is_open:
            remedy = "call monitor.step() within `with hw.monitor(...) as monitor:`"
            expected = "one that is entered as a context manager"
            raise InputError("monitor", expected=expected, got="another", remedy=remedy)
        try:
            return [] if self._heads is None else self._record(self._heads)
        finally:
            self._next += 1
            self._observe_if_due()

    def _open(self, folder: Path | None, settings: dict[str, Any], stack: ExitStack) -> list[int]:
        """Open the run folder and its history, and return the numbers of the steps that were recorded in it before.
        Without a folder, return an empty list.
        """
        if folder is None:
            return []
        self.history = History.create(stack.enter_context(locked_folder(folder)), settings)
        recorded = self.history.steps
        if self._start is not None:
            self.history.abandon(self._start)
        return recorded

    def _observe_if_due(self) -> None:
        """Start observing the model if the next training step is one to be observed."""
        if self._next % self._every == 0:
            heads = Heads(self._model)
            observer = TrainingObserver(self._model, heads, self._recorded, self._sequences)
            self._of_step.enter_context(_observing(self._model, observer))
            self._heads, self._observer = heads, observer

    def _record(self, heads: Heads) -> list[Alarm]:
        """Stop observing, add the step's statistics over all processes to the history, and return the alarms of the
        step.
        """
        self._heads = None
        self._of_step.close()
        if self._observer is not None:
            self._observer.finish()
            self.inputs, self._observer = self._observer.inputs, None
        registry: SiteRegistry = heads
        if rank_and_world_size()[1] > 1:
            registry = SiteRegistry(self._model)
            for records in gather_from_ranks(heads.records):
                registry.merge(records)
        if not self._has_warned:
            heads.warn_of_unread(stacklevel=4)
            self._has_warned = bool(registry.records)
        if not registry.records:
            if heads.ran:
                heads.require_attention()
            remedy = "call monitor.step() after each step of the optimizer, with the model in training mode"
            got = "none, since the model did not run in this mode"
            raise InputError("model", expected="attention in training mode", got=got, remedy=remedy)
        rows = self._rows(registry)
        broadcast_from_rank0(lambda: self.history.append(self._next, rows))
        if rank_and_world_size()[0] != 0:
            self.history.append(self._next, rows)
        alarms = list(self._limits.alarms(self.history.rows(self._next)))
        self.alarms += alarms
        if self._on_alarm is not None and rank_and_world_size()[0] == 0:
            for alarm in alarms:
                self._on_alarm(alarm)
        return alarms

    def _rows(self, registry: SiteRegistry) -> list[Row]:
        """Return one row of statistics for each head in the layers that the caller chose."""
        labelled = list(registry.head_labels())
        of_sites = {}
        for record in registry.records:
            chosen = {name: each for name, each in record.statistics.items() if name in self._recorded}
            of_heads = zip(*(each.count.tolist() for each in chosen.values()), strict=True)
            counts = [int(max(of_head)) for of_head in of_heads]
            of_sites[record.site] = counts, {name: each.value.tolist() for name, each in chosen.items()}
        rows = []
        for record, labels in labelled:
            if self._layers is not None and labels["layer"] not in self._layers:
                continue
            head, (counts, values) = labels["head"], of_sites[record.site]
            numbers = {name: each[head] for name, each in values.items()}
            sequences = counts[head] if counts else 0
            rows.append({**labels, "sequences": sequences, "nonfinite_rows": record.nonfinite_rows, **numbers})
        if not rows:
            available = sorted({labels["layer"] for _, labels in labelled})
            raise InputError("layers", expected=f"some of {available}", got=sorted(self._layers or ()))
        return rows


def inner_model(model: Any) -> nn.Module:
    """Return the module inside of the wrappers of `torch.compile` and DistributedDataParallel; the model itself if
    there are none.
    """
    inner: nn.Module = model
    while hasattr(model, "_orig_mod") or isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model = model._orig_mod if hasattr(model, "_orig_mod") else model.module
    return inner
