"""Progress bars of long runs on standard error, which also move while a model runs on a batch."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, TypeVar

from headwise.errors import require

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID
    from torch import nn

ESTIMATE_MINUTES = 10
"""Minutes over which the remaining time is estimated: a single batch may take one."""

T = TypeVar("T")

_shows_all: ContextVar[bool] = ContextVar("_shows_all", default=False)
_innermost: ContextVar["ProgressBar | None"] = ContextVar("_innermost", default=None)


class ProgressBar:
    """Counter of finished units of work. It is shown as a progress bar if it has a display; otherwise nothing is shown.

    Attributes:
        step: number of units that are done when the model has run once more: the bar moves by a part of it after each
            layer of the model. By default 0, for a unit of which the model runs several times, or not at all.
    """

    def __init__(self, display: "Progress | None" = None, task: Any = None) -> None:
        self.step = 0
        self._display, self._task, self._done, self._part = display, task, 0, 0.0
        self._layers: dict[Any, list[nn.Module]] = {}

    def advance(self, units: int = 1) -> None:
        """Add `units` units of work that this run has finished, and update the display."""
        self._done, self._part = self._done + units, 0.0
        self._show()

    def resume(self, units: int) -> None:
        """Add `units` units of work that an earlier run finished before it was stopped. They are left out of the
        estimate of the remaining time.
        """
        self._done += units
        if self._display is not None:
            self._display.reset(self._task, completed=self._done)

    def track(self, items: Iterable[T], *, step: int = 0) -> Iterator[T]:
        """Yield items, and count each one as a unit of work when the caller's loop asks for the next. `step=1` states
        that the model runs once for each item; the bar then also moves after each layer of the model.
        """
        self.step = step
        for item in items:
            yield item
            self.advance()

    def _show(self) -> None:
        """Update the display with the number of finished units of work, plus the finished part of the next one."""
        if self._display is not None:
            self._display.update(self._task, completed=self._done + self.step * self._part)

    @contextmanager
    def _moving(self, model: "nn.Module") -> Iterator[None]:
        """While the context is open, move the bar after each layer of `model` that has run."""
        import torch
        from torch import nn

        if model not in self._layers:
            lists = [each for each in model.modules() if isinstance(each, nn.ModuleList | nn.Sequential)]
            children = dict.fromkeys(child for each in lists for child in each)
            self._layers[model] = [child for child in children if next(child.children(), None) is not None]
        layers, calls = self._layers[model], 0

        def on_end(*_: Any) -> None:
            nonlocal calls
            if not torch.compiler.is_compiling():
                calls = min(calls + 1, len(layers))
                self._part = max(self._part, calls / (len(layers) + 1))  # the step ends after the last layer
                self._show()

        handles = [
            layer.register_forward_hook(on_end)
            for layer in layers
            if layer._forward_hooks or not isinstance(layer, nn.TransformerEncoderLayer)  # a hook turns its kernel off
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


@contextmanager
def progress_bar(
    title: str, total: int | None, unit: str, *, shown: bool = False, transient: bool = False
) -> Iterator[ProgressBar]:
    """Open a progress bar with a `title` for `total` units of work (None if unknown), called `unit`, and yield it. The
    bar is displayed in three cases: `shown` is True, another bar is displayed, or the call is inside
    `shown_progress(True)`. At the end the bar disappears if `transient` is True, if `shown` is False, or if the bar is
    below another one.
    """
    outer = _innermost.get()
    if not (shown or outer or _shows_all.get()):
        yield ProgressBar()
        return
    own: Any = _new_display(transient=transient or not shown) if outer is None else nullcontext(outer._display)
    with own as display:
        task: TaskID = display.add_task(title, total=total, unit=unit)
        token = _innermost.set(bar := ProgressBar(display, task))
        try:
            yield bar
        finally:
            _innermost.reset(token)
            if outer is None:
                display.refresh()  # which rich leaves out at the end in a notebook
            else:
                display.remove_task(task)


def _new_display(*, transient: bool) -> "Progress":
    """Return a new display of progress bars (of the package `rich`), on standard error or in a notebook's cell."""
    require("rich", purpose="a progress bar", extra="cli")
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    has_widgets = find_spec("ipywidgets") is not None  # without, rich warns in a notebook and shows no bar
    console = Console(stderr=True, force_jupyter=None if has_widgets else False)
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[unit]}"),
        TimeRemainingColumn(elapsed_when_finished=True),
        console=console,
        speed_estimate_period=60 * ESTIMATE_MINUTES,
        transient=transient,
        disable=transient and not (console.is_terminal or console.is_jupyter),  # it would print an empty line
    )


@contextmanager
def shown_progress(shown: bool) -> Iterator[None]:
    """Display every progress bar that is opened while the context is open, if `shown` is True."""
    token = _shows_all.set(_shows_all.get() or shown)
    try:
        yield
    finally:
        _shows_all.reset(token)


@contextmanager
def moving_with(model: "nn.Module") -> Iterator[None]:
    """Move the innermost displayed progress bar after each layer of `model` that runs while the context is open.
    Without such a bar, or if its unit is not one run of the model, do nothing.
    """
    bar = _innermost.get()
    if bar is None or not bar.step:
        yield
    else:
        with bar._moving(model):
            yield
