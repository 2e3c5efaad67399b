"""The command `headwise importance`."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

import headwise as hw
from headwise.cli.loading import RunFlags, find_loss
from headwise.cli.options import Html, LossName, Top
from headwise.cli.pages import require_writable_page, write_example_page
from headwise.cli.quantities import choice
from headwise.settings import IMPORTANCE_METHODS

EXAMPLES = """
headwise importance --data sentences.jsonl --method integrated --steps 8 --out importance
headwise importance --model smollm2 --data corpus.jsonl --documents truncate --context 256 --out smollm2-importance
headwise importance --data sentences.jsonl --out importance --json > importance.json
"""


@dataclass(frozen=True)
class MethodFlags:
    """Command-line options of `headwise importance` that apply to one method only: `steps` to the method "integrated",
    and `sparsity` and `epochs` to "hard_concrete". A field is None if its option is not used on the command line; the
    method then uses its own default value.

    Attributes:
        steps: number of gate values of the method integrated.
        sparsity: penalty of an open gate of the method hard_concrete.
        epochs: passes over the data of the method hard_concrete.
    """

    steps: Annotated[int | None, typer.Option(min=1, help="integrated: number of gate values between 0 and 1.")] = None
    sparsity: Annotated[
        float | None, typer.Option(min=0.0, help="hard_concrete: penalty of an open gate, in units of the loss.")
    ] = None
    epochs: Annotated[int | None, typer.Option(min=1, help="hard_concrete: passes over the data.")] = None


def importance(
    *,
    run: RunFlags,
    loss: LossName = None,
    method: Annotated[
        str | None,
        typer.Option(help="Default: gradient, or ablation with the embedding loss.", **choice(IMPORTANCE_METHODS)),
    ] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Divide the scores of a layer by their l2 norm.")
    ] = False,
    method_options: MethodFlags,
    top: Top = 20,
    html: Html = None,
) -> None:
    """Score how important each head is for the loss. Methods: gradients of the loss with respect to head gates (factors
    on head outputs), these gradients integrated over gate values from 0 to 1, removal of each head, or learned gates.
    Prints the heads with the largest scores, and saves all scores in --out. Processes started by torchrun share the
    work.
    """
    from headwise.analysis.importance.importance import create_method
    from headwise.analysis.losses import name_of_loss
    from headwise.show.results import print_importance

    require_writable_page(html)
    of_method: dict[str, Any] = {name: value for name, value in asdict(method_options).items() if value is not None}
    with run.open(shared=True) as opened:
        lm_head, loss_function = find_loss(opened.source, opened.dataset.tokenizer, loss)
        if method is None:  # the gradient of a distance is 0 at the unchanged model
            method = "ablation" if isinstance(loss_function, hw.EmbeddingDistance) else "gradient"
        chosen = create_method(method, of_method, loss_function, normalise=normalise)
        settings = {"method": {"name": method, **asdict(chosen)}, "normalise": normalise}
        model = opened.load(hw.Importance, lm_head, **settings, loss=name_of_loss(loss_function))
        options = {**of_method, **opened.options}
        result = hw.importance(model, opened.dataset, loss_function, method, normalise=normalise, **options)
        if opened.is_first:
            write_example_page(html, result, model, opened.dataset, opened.source.title)
        opened.show(result, print_importance, top, page=html)
