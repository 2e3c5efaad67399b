"""Derivatives of a loss with respect to the weights of output projections, for each sequence of a data set."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.losses import Loss, loss_per_example, require_loss
from headwise.compression.calibration.projection_inputs import padding_mask
from headwise.data.batches import count_sequences_and_tokens
from headwise.errors import InputError
from headwise.progress import progress_bar
from headwise.shapes import Bool, Float


@dataclass
class WeightGradients:
    """Derivatives of the loss of each sequence with respect to the weight and the bias of an output projection.

    Attributes:
        weight: derivatives with respect to the weight, `(sequences, out, width)`.
        bias: derivatives with respect to the bias, or to one that the projection could have, `(sequences, out)`.
    """

    weight: Float[Tensor, "sequences out width"]
    bias: Float[Tensor, "sequences out"]

    def __add__(self, other: "WeightGradients") -> "WeightGradients":
        return WeightGradients(self.weight + other.weight, self.bias + other.bias)

    def of_sequences(self, chosen: Bool[Tensor, " sequences"]) -> "WeightGradients":
        """Return the derivatives of some sequences."""
        return WeightGradients(self.weight[chosen], self.bias[chosen])

    def effects(
        self, left: Float[Tensor, "out block"], right: Float[Tensor, "block width"], centre: Float[Tensor, " width"]
    ) -> Float[Tensor, " sequences"]:
        """Return the change of each sequence's loss, to first order, if the weight changes by `left @ right`, and the
        bias such that outputs of the input `centre` stay the same.
        """
        left, right, centre = (each.to(self.weight) for each in (left, right, centre))
        weight = torch.einsum("sow,ob,bw->s", self.weight, left, right)
        return weight - torch.einsum("so,ob,b->s", self.bias, left, right @ centre)


def require_slope(loss: Any) -> None:
    """Raise `InputError` if a loss is no loss, or a distance from the unchanged model, where its derivatives are 0."""
    require_loss(loss)
    if hasattr(loss, "prepare"):
        expected = "a loss whose derivatives in the unchanged model are not 0, such as hw.next_token_loss"
        raise InputError("loss", expected=expected, got=f"the distance {type(loss).__name__}")


def weight_gradients(
    model: nn.Module, projections: Mapping[str, str], batches: Sequence[dict[str, Any]], loss: Loss
) -> dict[str, WeightGradients]:
    """Return the derivatives of the loss of each sequence with respect to output projections.

    Args:
        model: the model.
        projections: paths of the output projections, by name.
        batches: arguments of the model.
        loss: function of model and batch.

    Raises:
        InputError: the inputs of a projection are not `(sequences, tokens, width)`, or the loss does not depend on it.
    """
    with progress_bar("gradients", len(batches), "batches") as bar:
        parts = [_of_batch(model, projections, batch, loss) for batch in bar.track(batches, step=1)]
    return {
        name: WeightGradients(
            *(torch.cat([getattr(part[name], kind) for part in parts]) for kind in ("weight", "bias"))
        )
        for name in projections
    }


def _of_batch(
    model: nn.Module, projections: Mapping[str, str], batch: dict[str, Any], loss: Loss
) -> dict[str, WeightGradients]:
    """Return the derivatives of the loss of each sequence of one batch."""
    sums: dict[str, WeightGradients] = {}

    def recording_hook(name: str) -> Callable[..., Tensor]:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
            inputs, counted = _inputs_and_mask(projections[name], arguments[0].detach(), batch)

            def add(slopes: Tensor) -> None:
                slopes = slopes * counted
                added = WeightGradients(torch.einsum("sto,stw->sow", slopes, inputs), slopes.sum(1))
                sums[name] = sums[name] + added if name in sums else added

            output = output if output.requires_grad else output.detach().requires_grad_()
            output.register_hook(add)  # type: ignore[no-untyped-call]
            return output

        return hook

    with ExitStack() as stack, torch.enable_grad(), without_parameter_gradients(model):
        for name, path in projections.items():
            stack.callback(model.get_submodule(path).register_forward_hook(recording_hook(name)).remove)
        losses = loss_per_example(loss, model, batch)
        losses.nansum().backward()  # type: ignore[no-untyped-call]
    missing = [path for name, path in projections.items() if name not in sums]
    if missing:
        raise InputError("loss", expected="a loss that depends on all attention modules", got=f"none of {missing[0]}")
    return sums


def _inputs_and_mask(path: str, inputs: Tensor, batch: dict[str, Any]) -> tuple[Tensor, Tensor]:
    """Return the inputs of a projection, `(sequences, tokens, width)`, and 1 for tokens that count, 0 for padding."""
    sequences = count_sequences_and_tokens(batch)[0]
    if inputs.ndim != 3 or len(inputs) != sequences:
        expected = f"inputs of shape ({sequences}, tokens, width) for {path}"
        raise InputError("model", expected=expected, got=tuple(inputs.shape), remedy="leave out the loss")
    mask = padding_mask(inputs, batch)
    return inputs, inputs.new_ones(1) if mask is None else mask[..., None].to(inputs)


@contextmanager
def without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """Let no parameter of a model require a gradient while the context is open."""
    learned = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in learned:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in learned:
            parameter.requires_grad_(True)
