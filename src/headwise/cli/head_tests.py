"""The commands that test single heads on texts of their own: `retrieval`, `name-movers` and `dependencies`."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import require_same_run
from headwise.cli.options import CausalFlags, Force, ModelFlags, TableOut, Top, choice, numbers, option, path_option
from headwise.cli.output import OutputFlags
from headwise.settings import CONTINUATIONS, COPIED_PROMPTS, FEWEST_PAIRS, NAME_PROMPTS, NEEDLE_LENGTHS, NEEDLES

if TYPE_CHECKING:
    from headwise.runs.table import Table


@dataclass(frozen=True, kw_only=True)
class HeadTestFlags:
    """Command-line options that all commands with a test of heads share: the model, the output folder and the output
    format. Such a test is, for example, the retrieval test.
    """

    model: ModelFlags
    out: TableOut = None
    force: Force = False
    output: OutputFlags

    def run(
        self,
        test: Callable[..., Any],
        table: "type[Table[Any]]",
        settings: Mapping[str, Any],
        top: int,
        *arguments: Any,
        **further: Any,
    ) -> None:
        """Load the model and its tokenizer, run a test of heads on them, and print the first `top` rows of the test's
        table. `test` is also called with `arguments`, `settings` and `further`. The table stores `settings`. If the
        output folder has a table with other settings, an error is raised before the model is loaded.
        """
        from headwise.runs.files import require_writable

        source = self.model.find()
        if self.out is not None:
            require_writable(self.out)
            require_same_run(table, self.out, source, None, self.model, force=self.force, **settings)
        tokenizer = source.tokenizer()
        model = self.model.load(source, "causal" if isinstance(self.model, CausalFlags) else None)
        further |= {"out": self.out, "force": self.force, "progress": not self.output.quiet, "title": source.title}
        self.output.show_table(test(model, tokenizer, *arguments, **settings, **further), self.out, top=top)


@dataclass(frozen=True, kw_only=True)
class CausalTestFlags(HeadTestFlags):
    """Command-line options of a test of heads that needs a causal language model."""

    model: CausalFlags


def retrieval(
    *,
    test: CausalTestFlags,
    haystack: Annotated[
        Path | None, path_option("PATH", "Text that hides needles. Default: the help topics of Python.")
    ] = None,
    lengths: Annotated[str, option("Numbers of tokens of the texts, about.", "N,N")] = ",".join(
        map(str, NEEDLE_LENGTHS)
    ),
    needles: Annotated[int, option("Number of needles.", "N", least=1)] = NEEDLES,
    continuation: Annotated[
        str, choice(CONTINUATIONS, "Whether the model generates its answers, or reads the right ones.")
    ] = "generated",
    seed: Annotated[int, option("Seed of needles and texts.", "N", least=0)] = 0,
    top: Top = 20,
) -> None:
    """Measure the retrieval score of each head: how often it attends most to the token that the model copies into its
    answer, from a sentence hidden in a long text. Prints the heads with the largest retrieval scores, and tests which
    scores are above 0.1.

    Examples:
    headwise retrieval --model smollm2 --out smollm2-retrieval
    headwise retrieval --model smollm2 --haystack book.txt --lengths 512,1024 --needles 20
    headwise retrieval --model smollm2 --continuation forced --json > retrieval.json
    """
    settings: dict[str, Any] = {"continuation": continuation, "seed": seed, "lengths": sorted(set(numbers(lengths)))}
    settings["needles"] = needles
    test.run(hw.retrieval_score, hw.Retrieval, settings, top, haystack=haystack)


def name_movers(
    *,
    test: CausalTestFlags,
    prompts: Annotated[int, option("Number of prompts.", "N", least=2)] = NAME_PROMPTS,
    copied: Annotated[
        int, option("Number of prompts whose names test the weights of heads.", "N", least=0)
    ] = COPIED_PROMPTS,
    seed: Annotated[int, option("Seed of the names.", "N", least=0)] = 0,
    top: Top = 20,
) -> None:
    """Find name movers, on prompts with two names: heads that attend from the end of a prompt to the name that must
    follow, and raise the logit of this name. Also finds negative name movers, which lower it. Prints the heads with the
    largest effects on the logits, and those that pass the tests.

    Examples:
    headwise name-movers --model smollm2 --out smollm2-name-movers
    headwise name-movers --model smollm2 --prompts 320 --copied 0
    headwise name-movers --model smollm2 --seed 1 --json > name-movers.json
    """
    settings = {"prompts": prompts, "copied": copied, "seed": seed}
    test.run(hw.name_movers, hw.NameMovers, settings, top)


def dependencies(
    *,
    treebank: Annotated[Path, path_option("PATH", "File in CoNLL-U format, or folder with such files.")],
    test: HeadTestFlags,
    limit: Annotated[int | None, option("Use only this many sentences.", "N", least=2)] = None,
    fewest: Annotated[int, option("Leave out relations with fewer pairs in a half.", "N", least=2)] = FEWEST_PAIRS,
    subtypes: Annotated[bool, typer.Option("--subtypes", help="Keep subtypes of relations.")] = False,
    start_token: Annotated[int | None, option("Token to put before each sentence.", "ID", least=0)] = None,
    seed: Annotated[int, option("Seed of the division into halves.", "N", least=0)] = 0,
    top: Top = 20,
) -> None:
    """Measure how often a head attends most, from a word, to the governor or to the dependent of this word. Compares
    each head with the best fixed offset, a rule that always picks the word at the same distance. Prints the heads with
    the largest gain over this rule.

    Examples:
    headwise dependencies --treebank en_ewt-ud-test.conllu --out minilm-dependencies
    headwise dependencies --model smollm2 --treebank treebank --limit 300 --start-token 1
    headwise dependencies --treebank en_ewt-ud-test.conllu --subtypes --json > dependencies.json
    """
    settings: dict[str, Any] = {"limit": limit, "fewest": fewest, "subtypes": subtypes, "seed": seed}
    settings["start_token"] = start_token
    test.run(hw.dependency_accuracy, hw.DependencyAccuracy, settings, top, treebank)
