"""The command `headwise patch`."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import find_causal, quiet_libraries
from headwise.cli.options import DecoderFlags, Force, TableFolder, Top
from headwise.cli.output import OutputFlags, require_new_tables
from headwise.cli.quantities import choice, path
from headwise.data.documents import read_json_lines
from headwise.errors import InputError
from headwise.settings import MLP_MODES, PATCH_DIRECTIONS

EXAMPLES = """
headwise patch --model smollm2 --clean "Paris is in" --corrupted "Rome is in" --answer " France" --wrong " Italy"
headwise patch --model smollm2 --pairs pairs.jsonl --method path --receiver 23.3 --input q --out patching
headwise patch --model smollm2 --pairs pairs.jsonl --method attribution --steps 4 --json > patching.json
"""

METHODS: dict[str, tuple[str, str]] = {
    "activation": ("Patching", "activation_patching"),
    "attribution": ("AttributionPatching", "attribution_patching"),
    "path": ("PathPatching", "path_patching"),
}
"""Names of the table and the function of each method."""

PARTS = ("clean", "corrupted", "answer", "wrong")


@dataclass(frozen=True)
class PairFlags:
    """Command-line options for the texts: those of one pair of prompts and its answers, or a file with several pairs.

    Attributes:
        clean: prompt that the model answers correctly.
        corrupted: prompt with another answer.
        answer: right answer of the clean prompt.
        wrong: right answer of the corrupted prompt.
        pairs: file with the texts of several pairs.
    """

    clean: Annotated[str | None, typer.Option(metavar="TEXT", help="A prompt that the model answers correctly.")] = None
    corrupted: Annotated[str | None, typer.Option(metavar="TEXT", help="A prompt with another answer.")] = None
    answer: Annotated[str | None, typer.Option(metavar="TEXT", help="Right answer of the clean prompt.")] = None
    wrong: Annotated[str | None, typer.Option(metavar="TEXT", help="Right answer of the corrupted prompt.")] = None
    pairs: Annotated[
        Path | None,
        typer.Option(
            parser=path, metavar="FILE", help="JSON lines, each with the texts clean, corrupted, answer and wrong."
        ),
    ] = None

    def texts(self) -> dict[str, list[str]]:
        """Return the texts of all pairs by part: those of the file, or those of the single pair.

        Raises:
            InputError: neither or both are given, or a part is missing.
        """
        single = {part: getattr(self, part) for part in PARTS}
        given = [part for part, text in single.items() if text is not None]
        if self.pairs is not None:
            if given:
                raise InputError("pairs", expected="a file or the texts of one pair", got=f"both, with --{given[0]}")
            return _read_pairs(self.pairs)
        missing = [f"--{part}" for part in PARTS if part not in given]
        if missing:
            expected = "--clean, --corrupted, --answer and --wrong, or --pairs FILE"
            raise InputError("clean", expected=expected, got=f"no {' and no '.join(missing)}")
        return {part: [text] for part, text in single.items()}


@dataclass(frozen=True)
class MethodFlags:
    """Command-line options of `headwise patch` that apply to one method. A field is None if its option is not used;
    the method then uses its own default value.

    Attributes:
        steps: number of points of the method attribution.
        receiver: receiving heads of the method path.
        input: inputs of the receivers that are patched.
        mlps: what MLPs do along the paths.
    """

    steps: Annotated[int | None, typer.Option(min=1, metavar="N", help="attribution: number of points.")] = None
    receiver: Annotated[
        list[str] | None,
        typer.Option(metavar="HEAD", help="path: a receiving head, such as 9.6. Can be repeated. Default: the logits."),
    ] = None
    input: Annotated[
        str | None, typer.Option(metavar="LETTERS", help="path: inputs of the receivers: q, k, v or several of them.")
    ] = None
    mlps: Annotated[str | None, typer.Option(help="path: what MLPs do along the paths.", **choice(MLP_MODES))] = None

    def options(self, method: str) -> dict[str, Any]:
        """Return the options of a method that are given, by the names of its function's arguments.

        Raises:
            InputError: an option of another method is given.
        """
        of_methods: dict[str, dict[str, Any]] = {
            "attribution": {"steps": self.steps},
            "path": {
                "receivers": [_head(name) for name in self.receiver or ()] or None,
                "input": self.input,
                "mlps": self.mlps,
            },
        }
        for other, options in of_methods.items():
            for name, value in options.items():
                if other != method and value is not None:
                    option = "receiver" if name == "receivers" else name
                    raise InputError(option, expected=f"--method {other}", got=f"--method {method}")
        return {name: value for name, value in of_methods.get(method, {}).items() if value is not None}


def patch(
    *,
    model: DecoderFlags,
    prompts: PairFlags,
    method: Annotated[
        str, typer.Option(help="Patch each head, estimate this from derivatives, or patch paths.", **choice(METHODS))
    ] = "activation",
    direction: Annotated[
        str,
        typer.Option(
            help="Patch into the run on the corrupted prompts, or into the clean one.", **choice(PATCH_DIRECTIONS)
        ),
    ] = PATCH_DIRECTIONS[0],
    method_options: MethodFlags,
    out: TableFolder = None,
    top: Top = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Find the heads behind an answer of a causal language model: replace the output of one head at a time, in the run
    on one prompt, by its output in the run on another prompt with another answer. Prints the heads with the largest
    effect on the difference between the logits of the two answers.
    """
    from headwise.show.results import print_patching

    texts, options = prompts.texts(), method_options.options(method)
    table, function = (getattr(hw, name) for name in METHODS[method])
    require_new_tables(out, table.NAME, force=force)
    quiet_libraries()
    source = find_causal(model)
    pairs = hw.patching_prompts(source.tokenizer(), **texts)
    loaded = source.model("causal", model.torch_dtype).to(model.torch_device)
    options |= {"direction": direction, "progress": not output.quiet}
    result = function(loaded, **pairs, **options)
    if out is not None:
        result.save(out, force=force)

    def print_text(console: Any) -> None:
        print_patching(result, console, top, title=source.title)

    output.show(result, print_text, written=out)


def _read_pairs(file: Path) -> dict[str, list[str]]:
    """Return the texts of all pairs of a file of JSON lines, by part.

    Raises:
        InputError: the file is not UTF-8, a line is no JSON object with the texts of all parts, or there is none.
    """
    texts: dict[str, list[str]] = {part: [] for part in PARTS}
    for pair, location in read_json_lines(file):
        for part in PARTS:
            text = pair.get(part) if isinstance(pair, dict) else None
            if not isinstance(text, str):
                expected = f"a JSON object with the texts {', '.join(PARTS)} in {location}"
                raise InputError("pairs", expected=expected, got=f"no text {part}")
            texts[part].append(text)
    if not texts["clean"]:
        raise InputError("pairs", expected="at least one pair", got=f"none in {str(file)!r}")
    return texts


def _head(name: str) -> tuple[int, int]:
    """Return layer and head of a name such as 9.6.

    Raises:
        InputError: it is no such name.
    """
    from headwise.checks import head_pair

    return head_pair("receiver", name, of="a layer and a head, such as 9.6")
