"""Commands that run a model over data: all checks that do not need the weights come first."""

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

import headwise as hw
from headwise.cli.options import Data, DecoderFlags, Force, ModelFlags, Out, TextFlags
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
    """Command-line options of a command that runs a model over data, and stores the results in a folder."""

    data: Data
    out: Out
    model: ModelFlags
    texts: TextFlags
    force: Force = False
    output: OutputFlags

    @contextmanager
    def open(self, *, shared: bool = False) -> Iterator["OpenRun"]:
        """Find the model and tokenize the data, and yield the run. With `shared`, the processes of torchrun join a
        group, to share the work. If the user ends the run, say how it resumes.
        """
        from headwise.runs.distributed import LocalProcess, process_group

        with process_group() if shared else nullcontext(LocalProcess(True, 0)) as process, resumable(self.out):
            device, shown = process.device(self.model.device), process.is_first and not self.output.quiet
            source, dataset = find_inputs(self.model, self.data, self.texts, self.out, shown=shown)
            yield OpenRun(self, source, dataset, device, process.is_first)

    def measure(
        self, analysis: Callable[..., Any], table: "type[Table[Any]]", settings: Mapping[str, Any], **printed: Any
    ) -> None:
        """Run an analysis of a model without a language-model head, and print its result. The processes of torchrun
        share the work.

        Args:
            analysis: function of the model, the data and `settings`.
            table: class of its result.
            settings: arguments of the analysis, which the table stores under the same names.
            printed: options of `print_result`.
        """
        with self.open(shared=True) as opened:
            model = opened.load(table, **settings)
            opened.show(analysis(model, opened.dataset, **settings, **opened.options), **printed)


@dataclass(frozen=True, kw_only=True)
class DecoderRunFlags(RunFlags):
    """Command-line options of a command that runs a causal language model over data."""

    model: DecoderFlags


@dataclass(frozen=True)
class OpenRun:
    """A run of a command: its options, and the model and data that they name.

    Attributes:
        flags: options of the command.
        source: the model.
        dataset: the data, tokenized.
        device: device of the model.
        is_first: True for the only process, or the first of those that share the work: it prints and writes pages.
    """

    flags: RunFlags
    source: "ModelSource"
    dataset: "hw.Texts"
    device: "torch.device"
    is_first: bool

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of every analysis that stores its results: folder, replacement, progress bar and title."""
        shown = self.is_first and not self.flags.output.quiet
        return {"out": self.flags.out, "force": self.flags.force, "progress": shown, "title": self.source.title}

    def load(self, table: "type[Table[Any]]", lm_head: str | None = None, **settings: Any) -> "nn.Module":
        """Return the model on its device, after checking that the folder has no other run.

        Args:
            table: table that the command writes.
            lm_head: kind of the language-model head; None for a model without one.
            settings: settings of the run, as its table stores them.
        """
        flags = self.flags
        require_same_run(table, flags.out, self.source, self.dataset, flags.model, force=flags.force, **settings)
        loaded: nn.Module = self.source.model(lm_head, flags.model.torch_dtype)
        return loaded.to(self.device)

    def show(self, result: Any, page: Path | None = None, **printed: Any) -> None:
        """Print a result in the first process, with the options `printed` of `print_result`, and state that the results
        and the page were written.
        """
        if self.is_first:
            self.flags.output.show_table(result, self.flags.out, page, **printed)

    def write_page(
        self, html: Path | None, table: "HeadTable[Any]", model: "nn.Module", statistic: str | None = None
    ) -> None:
        """Write a page to the path `html` in the first process, with a table of heads, and the attention of these heads
        on some of the texts; do nothing if `html` is None. The page opens on `statistic`, by default as `hw.write_page`
        states.
        """
        if html is not None and self.is_first:
            examples = hw.view_examples(model, self.dataset, title=self.source.title)
            hw.write_page(html, examples, table, statistic=statistic)


def find_inputs(
    model: ModelFlags, data: Path, texts: TextFlags, out: Path, *, shown: bool
) -> "tuple[ModelSource, hw.Texts]":
    """Find a model and tokenize the data for it, without loading the model's weights, so that mistakes in the options
    and in the data are reported at once. If `shown`, a progress bar is shown.

    Raises:
        InputError: the output folder cannot be used, the model cannot be found, or the data cannot be read.
    """
    from headwise.runs.data_pass import tokenize
    from headwise.runs.files import require_outside_data, require_writable

    quiet_libraries()
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
    """Raise `InputError` if the folder `out` has another run, as far as this is known before the model is loaded.

    Args:
        table: table that the command writes.
        out: output folder.
        source: the model.
        dataset: the data; None if the run does not store their options.
        model: options that say how the model is loaded.
        force: replace the other run; nothing is checked.
        settings: settings of the run, as its table stores them.
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


def find_causal(model: ModelFlags) -> "ModelSource":
    """Return the location of a model after checking that it is a causal language model.

    Raises:
        InputError: it is another kind of model.
    """
    source = model.find()
    if source.lm_head() != "causal":
        expected = "a causal language model (a decoder), such as smollm2"
        raise InputError("model", expected=expected, got=repr(source.title))
    return source


def find_loss(source: "ModelSource", tokenizer: Any, name: str | None) -> tuple[str | None, Any]:
    """Return the kind of language-model head that the loss called `name` needs, and the loss function. If `name` is
    None, the saved model determines the loss: next-token for a causal language model, masked-token for a masked one,
    otherwise embedding distance.

    Raises:
        InputError: the loss needs a language-model head that the saved model lacks, or a mask token that the tokenizer
            lacks.
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
    """If the context is left by Ctrl-C, say that the run in the folder `out` resumes when the command is repeated,
    provided that the folder has a checkpoint.
    """
    try:
        yield
    except KeyboardInterrupt:
        from headwise.runs.checkpoint import has_checkpoints

        again = "; run the same command again to resume" if has_checkpoints(out) else ""
        typer.echo(f"headwise: interrupted{again}", err=True)
        raise


def quiet_libraries() -> None:
    """Turn off the warnings and progress bars of transformers in this process, if transformers is installed. The
    conversion of a GGUF file still shows its progress.
    """
    try:
        from transformers.utils import logging
    except ImportError:
        return  # `find_model` reports the missing package
    logging.set_verbosity_error()
    logging.disable_progress_bar()
