"""The commands that find circuits: `headwise circuits` in the weights, and `patch` in the answers to prompts."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.options import CausalFlags, Force, ModelFlags, TableFolder, Top, choice, option, path_option
from headwise.cli.output import OutputFlags, require_new_tables
from headwise.data.documents import read_json_lines
from headwise.errors import InputError
from headwise.settings import COMPOSITION_KINDS, MLP_MODES, PATCH_DIRECTIONS


def circuits(
    *,
    model: ModelFlags,
    composition: Annotated[
        str, choice((*COMPOSITION_KINDS, "none"), "Kind of composition of which pairs of heads are printed.")
    ] = "k",
    distance: Annotated[int, option("Tokens from the key to the query, for rotary positions.", "N", least=0)] = 0,
    out: TableFolder = None,
    top: Top = 20,
    force: Force = False,
    output: OutputFlags,
) -> None:
    """Read the circuits of every head from the weights of a model, without data: how much the head copies what it
    attends to, whether it attends to equal tokens, and how much it reads from heads of earlier layers. Prints the heads
    with the largest copying scores, and the pairs with the largest composition scores.

    Examples:
    headwise circuits --model smollm2 --out smollm2-circuits
    headwise circuits --model smollm2 --composition v --top 30
    headwise circuits --model smollm2 --composition none --json > circuits.json
    """
    from headwise.analysis.circuits.circuits import SCORES

    require_new_tables(out, "circuits", "composition", force=force)
    source = model.find()
    found = hw.circuits(model.load(source, source.lm_head()), title=source.title)
    scores = found.scores(*_available(found, SCORES, "scores"), distance=distance)
    pairs = None
    if composition != "none" and (kinds := _available(found, COMPOSITION_KINDS, "composition scores")):
        if composition not in kinds:
            found.composition(composition)  # raises the reason
        pairs = found.composition(*kinds, distance=distance)
    if out is not None:
        scores.save(out, force=force)
        if pairs is not None:
            pairs.save(out, force=force)
    output.show_table(scores, out, composition=pairs, kind=composition, top=top)


def _available(found: "hw.Circuits", names: Sequence[str], plural: str) -> list[str]:
    """Return the names of those scores of heads that can be computed for a model. Print on standard error which of
    `names` cannot be computed, and why. `plural` is the noun for the scores in that message.
    """
    reasons = {name: found.why_not(name) for name in names}
    for reason in dict.fromkeys(each for each in reasons.values() if each is not None):
        missing = ", ".join(name for name in names if reasons[name] == reason)
        typer.echo(f"headwise: warning: the {plural} {missing} are left out: the model has {reason}", err=True)
    return [name for name in names if reasons[name] is None]


METHODS: dict[str, tuple[str, str]] = {
    "activation": ("Patching", "activation_patching"),
    "attribution": ("AttributionPatching", "attribution_patching"),
    "path": ("PathPatching", "path_patching"),
}
"""Names of the table and the function of each method."""

PARTS = ("clean", "corrupted", "answer", "wrong")


@dataclass(frozen=True)
class PairFlags:
    """Command-line options of `headwise patch` for the prompts: either the texts of one pair of prompts with their
    answers, or a file with several pairs.
    """

    clean: Annotated[str | None, option("A prompt that the model answers correctly.", "TEXT")] = None
    corrupted: Annotated[str | None, option("A prompt with another answer.", "TEXT")] = None
    answer: Annotated[str | None, option("Right answer of the clean prompt.", "TEXT")] = None
    wrong: Annotated[str | None, option("Right answer of the corrupted prompt.", "TEXT")] = None
    pairs: Annotated[
        Path | None, path_option("FILE", "JSON lines, each with the texts clean, corrupted, answer and wrong.")
    ] = None

    def texts(self) -> dict[str, list[str]]:
        """Return the texts of all pairs of prompts. The keys are "clean", "corrupted", "answer" and "wrong", and each
        value is a list with one text per pair, from the file or from the options.
        """
        single = {part: getattr(self, part) for part in PARTS}
        given = [part for part, text in single.items() if text is not None]
        if self.pairs is not None:
            if given:
                raise InputError("pairs", expected="a file or the texts of one pair", got=f"both, with --{given[0]}")
            texts: dict[str, list[str]] = {part: [] for part in PARTS}
            for pair, location in read_json_lines(self.pairs):
                for part in PARTS:
                    text = pair.get(part) if isinstance(pair, dict) else None
                    if not isinstance(text, str):
                        expected = f"a JSON object with the texts {', '.join(PARTS)} in {location}"
                        raise InputError("pairs", expected=expected, got=f"no text {part}")
                    texts[part].append(text)
            if not texts["clean"]:
                raise InputError("pairs", expected="at least one pair", got=f"none in {str(self.pairs)!r}")
            return texts
        missing = [f"--{part}" for part in PARTS if part not in given]
        if missing:
            expected = "--clean, --corrupted, --answer and --wrong, or --pairs FILE"
            raise InputError("clean", expected=expected, got=f"no {' and no '.join(missing)}")
        return {part: [text] for part, text in single.items()}


@dataclass(frozen=True)
class MethodFlags:
    """Command-line options of `headwise patch` that only one patching method (a value of --method) accepts. A field is
    None if its option is not used on the command line; the method then uses its own default value.
    """

    steps: Annotated[int | None, option("attribution: number of points.", "N", least=1)] = None
    receiver: Annotated[
        list[str] | None,
        option("path: a receiving head, such as 9.6. Can be repeated. Default: the logits.", "HEAD"),
    ] = None
    input: Annotated[str | None, option("path: inputs of the receivers: q, k, v or several of them.", "LETTERS")] = None
    mlps: Annotated[str | None, choice(MLP_MODES, "path: what MLPs do along the paths.")] = None

    def options(self, method: str) -> dict[str, Any]:
        """Return the options that the user stated for a patching method, by the names of the arguments of the method's
        function. Raise `InputError` if the user stated an option of another method.
        """
        from headwise.checks import head_pair

        receivers = [head_pair("receiver", name, of="a layer and a head, such as 9.6") for name in self.receiver or ()]
        of_methods: dict[str, dict[str, Any]] = {
            "attribution": {"steps": self.steps},
            "path": {"receivers": receivers or None, "input": self.input, "mlps": self.mlps},
        }
        for other, options in of_methods.items():
            for name, value in options.items():
                if other != method and value is not None:
                    option = "receiver" if name == "receivers" else name
                    raise InputError(option, expected=f"--method {other}", got=f"--method {method}")
        return {name: value for name, value in of_methods.get(method, {}).items() if value is not None}


def patch(
    *,
    model: CausalFlags,
    prompts: PairFlags,
    method: Annotated[
        str, choice(METHODS, "Patch each head, estimate this from derivatives, or patch paths.")
    ] = "activation",
    direction: Annotated[
        str, choice(PATCH_DIRECTIONS, "Patch into the run on the corrupted prompts, or into the clean one.")
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

    Examples:
    headwise patch --model smollm2 --clean "Paris is in" --corrupted "Rome is in" --answer " France" --wrong " Italy"
    headwise patch --model smollm2 --pairs pairs.jsonl --method path --receiver 23.3 --input q --out patching
    headwise patch --model smollm2 --pairs pairs.jsonl --method attribution --steps 4 --json > patching.json
    """
    texts, options = prompts.texts(), method_options.options(method)
    table, function = (getattr(hw, name) for name in METHODS[method])
    require_new_tables(out, table.NAME, force=force)
    source = model.find()
    pairs = hw.patching_prompts(source.tokenizer(), **texts)
    options |= {"direction": direction, "progress": not output.quiet}
    result = function(model.load(source, "causal"), **pairs, **options)
    if out is not None:
        result.save(out, force=force)
    output.show_table(result, out, top=top, title=source.title)
