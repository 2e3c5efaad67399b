"""Commands that test single heads of a model, on texts of the test's own."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from headwise.cli.loading import find_causal, quiet_libraries, require_same_run
from headwise.cli.options import DecoderFlags, Force, ModelFlags, TableOut
from headwise.cli.output import OutputFlags

if TYPE_CHECKING:
    from headwise.runs.table import Table


@dataclass(frozen=True, kw_only=True)
class HeadTestFlags:
    """Command-line options of every test of heads.

    Attributes:
        model: options that name the model.
        out: folder for the table; None to print it alone.
        force: replace another run in the folder.
        output: format of the output.
    """

    model: ModelFlags
    out: TableOut = None
    force: Force = False
    output: OutputFlags

    def run(
        self,
        test: Callable[..., Any],
        table: "type[Table[Any]]",
        stored: Mapping[str, Any],
        print_result: Callable[..., None],
        top: int,
        *arguments: Any,
        **settings: Any,
    ) -> None:
        """Run a test, and print its result as text by `print_result(result, console, top)`.

        Args:
            test: function of the model, the tokenizer, `arguments` and `settings`.
            table: class of its result.
            stored: settings as the table stores them, by which another run in the folder is found early.
            print_result: function that prints the result.
            top: number of rows to print.
            arguments: further arguments of the test.
            settings: its options.
        """
        from headwise.runs.files import require_writable

        quiet_libraries()
        is_decoder = isinstance(self.model, DecoderFlags)
        source = find_causal(self.model) if is_decoder else self.model.find()
        if self.out is not None:
            require_writable(self.out)
            require_same_run(table, self.out, source, None, self.model, force=self.force, **stored)
        tokenizer, device = source.tokenizer(), self.model.torch_device
        model = source.model("causal" if is_decoder else None, self.model.torch_dtype).to(device)
        settings |= {"out": self.out, "force": self.force, "progress": not self.output.quiet, "title": source.title}
        result = test(model, tokenizer, *arguments, **settings)
        self.output.show(result, lambda console: print_result(result, console, top), written=self.out)


@dataclass(frozen=True, kw_only=True)
class DecoderTestFlags(HeadTestFlags):
    """Command-line options of a test that needs a causal language model."""

    model: DecoderFlags
