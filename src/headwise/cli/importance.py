"""The command `headwise importance`."""

from dataclasses import asdict, dataclass
from typing import Annotated, Any

import typer

from headwise.analysis.importance.importance import METHODS
from headwise.analysis.importance.importance import importance as score
from headwise.analysis.losses import EmbeddingDistance
from headwise.cli.loading import load_with_loss
from headwise.cli.options import Data, Device, Force, LossName, ModelName, Out, TextFlags, Top
from headwise.runs.distributed import LocalProcess
from headwise.show.scores import print_importance
from headwise.show.terminal import make_console


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
    data: Data,
    out: Out,
    model: ModelName = "minilm",
    loss: LossName = None,
    method: Annotated[
        str | None,
        typer.Option(help=f"One of {', '.join(METHODS)}. Default: gradient, or ablation with the embedding loss."),
    ] = None,
    normalise: Annotated[
        bool, typer.Option("--normalise", help="Divide the scores of a layer by their l2 norm.")
    ] = False,
    method_options: MethodFlags,
    texts: TextFlags,
    device: Device = None,
    top: Top = 20,
    force: Force = False,
) -> None:
    """Score how important each head is for the loss. Methods: gradients of the loss with respect to head gates (factors
    on head outputs), these gradients integrated over gate values from 0 to 1, removal of each head, or learned gates.
    Prints the heads with the largest scores, and saves all scores in --out.
    """
    loaded, loss_function = load_with_loss(model, loss)
    dataset = texts.texts(data, loaded.tokenizer)
    if method is None:  # the gradient of a distance is 0 at the unchanged model
        method = "ablation" if isinstance(loss_function, EmbeddingDistance) else "gradient"
    of_method: dict[str, Any] = {name: value for name, value in asdict(method_options).items() if value is not None}
    result = score(
        loaded.model.to(LocalProcess(True, 0).device(device)),
        dataset,
        loss_function,
        method,
        normalise=normalise,
        out=out,
        force=force,
        progress=True,
        title=loaded.title,
        **of_method,
    )
    print_importance(result, make_console(), top)
    typer.echo(f"\nwrote {out}")
