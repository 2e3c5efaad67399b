"""Commands that run a model over data: all checks that do not need the weights come first."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import headwise as hw
from headwise.cli.options import CausalFlags, Data, Force, ModelFlags, Out, TextFlags
from headwise.cli.output import OutputFlags
from headwise.data.documents import require_first_document
from headwise.errors import InputError
from headwise.settings import LOSSES

if TYPE_CHECKING:
    import torch
    from torch import nn

    from headwise.data.models import ModelSource
    from headwise.runs.head_table import HeadTable
    from headwise.runs.table import Table


@dataclass(frozen=True, kw_only=True)
class RunFlags:
    """Command-line options of a command that runs a model over data and stores the results in a folder."""

    data: Data
    out: Out
    model: ModelFlags
    texts: TextFlags
    force: Force = False
    output: OutputFlags

    @contextmanager
    def open(self, *, shared: bool = False) -> Iterator["OpenRun"]:
        """Find the model and tokenize the data, and yield an open run of the command. With `shared`, the processes that
        torchrun started form a group to share the work. If the user presses Ctrl-C in the context, state how to resume.
        """
        from headwise.runs.distributed import LocalProcess, process_group

        with process_group() if shared else nullcontext(LocalProcess(True, 0)) as process, resumable(self.out):
            device, shown = process.device(self.model.device), process.is_first and not self.output.quiet
            source, dataset = find_inputs(self.model, self.data, self.texts, self.out, shown=shown)
            yield OpenRun(self, source, dataset, device, process.is_first)

    def measure(
        self, analysis: Callable[..., Any], table: "type[Table[Any]]", settings: Mapping[str, Any], **printed: Any
    ) -> None:
        """Run an analysis over the data, and print its table with the options `printed`. `analysis` is called with the
        model (without a language-model head), the data and `settings`, which its table stores under the same names. The
        processes of torchrun share the work.
        """
        with self.open(shared=True) as opened:
            model = opened.load(table, **settings)
            opened.show(analysis(model, opened.dataset, **settings, **opened.options), **printed)


@dataclass(frozen=True, kw_only=True)
class CausalRunFlags(RunFlags):
    """Command-line options of a command that runs a causal language model over data."""

    model: CausalFlags


@dataclass(frozen=True)
class OpenRun:
    """A started run of a command that reads data: its options, the location of the model, the tokenized data, and the
    device of this process. If several processes share the work, `is_first` is True in the first one, which prints
    results and writes pages.
    """

    flags: RunFlags
    source: "ModelSource"
    dataset: "hw.Texts"
    device: "torch.device"
    is_first: bool

    @property
    def options(self) -> dict[str, Any]:
        """Arguments for every analysis that stores its results: output folder, whether to replace another run, whether
        to show a progress bar, and the model's title.
        """
        shown = self.is_first and not self.flags.output.quiet
        return {"out": self.flags.out, "force": self.flags.force, "progress": shown, "title": self.source.title}

    def load(self, table: "type[Table[Any]]", lm_head: str | None = None, **settings: Any) -> "nn.Module":
        """Load the model onto the device of this process, with the kind of language-model head that `lm_head` names, or
        without one. Before that, raise `InputError` if the output folder has a result of the type `table` from a run
        with other settings.
        """
        flags = self.flags
        require_same_run(table, flags.out, self.source, self.dataset, flags.model, force=flags.force, **settings)
        loaded: nn.Module = self.source.model(lm_head, flags.model.torch_dtype)
        return loaded.to(self.device)

    def show(self, result: Any, page: Path | None = None, **printed: Any) -> None:
        """In the first process, print a result with the options `printed`, and state that the result and the page were
        written.
        """
        if self.is_first:
            self.flags.output.show_table(result, self.flags.out, page, **printed)

    def write_page(
        self, html: Path | None, table: "HeadTable[Any]", model: "nn.Module", statistic: str | None = None
    ) -> None:
        """In the first process, write an HTML page with a table of heads, and their attention on some of the texts. The
        page opens on `statistic`. Nothing is written if `html` is None.
        """
        if html is not None and self.is_first:
            examples = hw.view_examples(model, self.dataset, title=self.source.title)
            hw.write_page(html, examples, table, statistic=statistic)


def find_inputs(
    model: ModelFlags, data: Path, texts: TextFlags, out: Path, *, shown: bool
) -> "tuple[ModelSource, hw.Texts]":
    """Find a model and tokenize the data for it. The model's weights are not loaded, so that mistakes in the options
    and in the data are reported at once. A progress bar is shown if `shown` is True.
    """
    from headwise.runs.data_pass import tokenize
    from headwise.runs.files import require_outside_data, require_writable

    require_writable(out)
    require_outside_data(out, data)
    require_first_document(data, texts.column)
    source = model.find()
    dataset = texts.texts(data, source.tokenizer())
    if texts.context is not None:
        limit = getattr(source.config(), "max_position_embeddings", None) or texts.context
        if texts.context > limit:
            raise InputError("context", expected=f"at most {limit} tokens, the model's limit", got=texts.context)
    tokenize(dataset, shown=shown)
    return source, dataset


def require_same_run(
    table: "type[Table[Any]]",
    out: Path,
    source: "ModelSource",
    dataset: "hw.Texts | None",
    model: ModelFlags,
    *,
    force: bool,
    **settings: Any,
) -> None:
    """Raise `InputError` if the folder `out` already has a result of the type `table` from a run with another model,
    other settings or other data. The check uses what is known before the model is loaded. Data are not compared if
    `dataset` is None.
    """
    from headwise.runs import checkpoint, fingerprint

    loaded = {"name": source.title, "device": model.torch_device.type}
    if model.dtype is not None:
        loaded["dtype"] = model.dtype
    settings = json.loads(json.dumps(settings))  # tuples become lists, as in the folder
    known: dict[str, Any] = {"model": loaded, "settings": settings}
    if dataset is not None:
        data = {name: value for name, value in fingerprint.text_options(dataset).items() if value is not None}
        known["data"] = data if dataset.limit is not None else {**data, "limit": None}
    checkpoint.require_same_run(out, table, known, force=force)


def find_loss(source: "ModelSource", tokenizer: Any, name: str | None) -> tuple[str | None, Any]:
    """Return the kind of language-model head that a loss needs, and the loss function. Without a `name`, the saved
    model determines the loss: next-token for a causal language model, masked-token for a masked one, otherwise
    embedding distance.
    """
    from headwise.analysis.losses import loss_by_name

    trained_head = source.lm_head()
    if name is None:
        name = next(loss for loss, head in LOSSES.items() if head == trained_head)
    loss = loss_by_name(name, tokenizer)
    needed = LOSSES[name]
    if needed is not None and needed != trained_head:
        fitting = " or ".join(each for each, head in LOSSES.items() if head in (None, trained_head))
        got = f"{name}, the loss of a {needed} language model, which {source.title} is not"
        raise InputError("loss", expected=f"a loss of this model: {fitting}", got=got)
    return needed, loss


@contextmanager
def resumable(out: Path) -> Iterator[None]:
    """If the user presses Ctrl-C in the context, print a message before the command ends. If the folder `out` has a
    checkpoint, the message states that the same command resumes the run.
    """
    try:
        yield
    except KeyboardInterrupt:
        from headwise.runs.checkpoint import has_checkpoints

        again = "; run the same command again to resume" if has_checkpoints(out) else ""
        typer.echo(f"headwise: interrupted{again}", err=True)
        raise
