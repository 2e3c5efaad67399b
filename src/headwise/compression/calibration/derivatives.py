"""Derivatives with respect to output projections: of what a model returns, and of a loss.

Weights of tokens are the effect that a change of an attention module's output at a token has on what the model returns.
A sum of squares over tokens in which all count equally hides an error that everything depends on. In most decoders,
all later tokens attend to the first one, and its state is formed in the first layers: there a small error at the first
token of a text changes the outputs at all others. A token's weight in the fit of an output projection, and in scores by
least squares, is therefore the mean squared derivative of the model's output with respect to the module's output there:

    w_t = E |d (u . f) / d y_t|^2

y_t is the output of the projection at token t, and f is what the model returns, at all tokens except padding. The
expectation is over directions u of random signs; for logits, they are multiplied by a square root of the Fisher matrix
of the predicted distribution. To second order, the weighted squared error is then that of the model's output, or twice
the Kullback-Leibler divergence from the dense model, if errors at different tokens and in different directions of y do
not depend on each other.

One direction for each batch is drawn, with a fixed seed: the weights cost one backward pass for each batch. They need
no labels, and no loss.
"""

import warnings
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.losses import Loss, loss_per_example, require_loss
from headwise.compression.calibration.recording import padding_mask, projection_slopes, stated_padding, with_slopes
from headwise.data.batches import call_model, copied, count_sequences_and_tokens, floating_tensors, frozen_parameters
from headwise.errors import InputError
from headwise.intercept.module_calls import module_calls
from headwise.progress import progress_bar
from headwise.shapes import Float

TokenWeights = list[list[Tensor]]
"""Weights `(tokens,)` of the tokens of each sequence of each batch, in the order of `projection_inputs`."""


def token_weights(
    model: nn.Module, paths: Collection[str], batches: Sequence[dict[str, Any]]
) -> dict[str, TokenWeights | None]:
    """Return token weights for each output projection in `paths`, by path. The weight of a token estimates the mean
    squared derivative of the model's output with respect to the projection's output at that token. If the derivatives
    are missing, NaN, infinite or all 0, the entry of the projection is None: each token has the weight 1.

    Warns:
        UserWarning: the model's output has no derivatives, so that all tokens have the weight 1.
    """
    weights: dict[str, TokenWeights] = {path: [] for path in paths}
    with progress_bar("weights of tokens", len(batches), "batches") as bar:
        for batch in bar.track(batches, step=1):
            slopes_of_batch = projection_slopes(model, paths, batch)
            with torch.enable_grad(), frozen_parameters(model), slopes_of_batch as slopes:
                problem = _backward(call_model(model, copied(batch)), batch)
            if problem:
                reason = f"the output of {type(model).__name__} has no derivatives: {problem}"
                warnings.warn(f"all tokens have the same weight in scores and fits, because {reason}", stacklevel=2)
                return dict.fromkeys(paths)
            for path, calls in slopes.items():
                weights[path].append([x.double().square().sum(-1) for call in calls for _, x in call])
    flat = {path: [own for of_batch in weights[path] for own in of_batch] for path in paths}
    return {
        path: weights[path]
        if own and all(bool(each.isfinite().all()) for each in own) and any(bool(each.any()) for each in own)
        else None
        for path, own in flat.items()
    }


def weights_of(weights: TokenWeights | None, batch: int, sequence: int, x: Tensor) -> Tensor | None:
    """Return the token weights of one sequence in a batch, or None if `weights` is None, which stands for weights of 1.
    `x` has one vector per token of this sequence; if the number of weights differs, an error is raised.
    """
    if weights is None:
        return None
    own = weights[batch]
    if sequence >= len(own) or len(own[sequence]) != len(x):
        got = "another number with derivatives than without"
        raise InputError("model", expected="output projections with the same number of tokens", got=got)
    return own[sequence]


def _backward(output: Any, batch: Mapping[str, Any]) -> str:
    """Run the backward pass from a model's output, with a random tensor as the gradient of this output. Return an empty
    text or, if the output has no derivatives, the reason.
    """
    logits, hidden = (getattr(output, name, None) for name in ("logits", "last_hidden_state"))
    tensors = [tensor for tensor in floating_tensors([logits, hidden, output]) if tensor.requires_grad]
    if not tensors:
        return "no tensor of it requires a gradient"
    compared = tensors[0]
    direction = _direction(compared.detach(), is_logits=compared is logits and compared.ndim == 3)
    mask = stated_padding(compared.shape[:2], batch) if compared.ndim == 3 else None
    if mask is not None:
        direction = direction * mask[..., None].to(direction)
    try:
        compared.backward(direction.to(compared))  # type: ignore[no-untyped-call]
    except (RuntimeError, NotImplementedError) as error:
        return str(error).partition("\n")[0]
    return ""


def _direction(output: Float[Tensor, "..."], *, is_logits: bool) -> Float[Tensor, "..."]:
    """Return a tensor of random signs in the shape of an output, as the gradient for a backward pass. For the logits of
    a distribution p, the signs are multiplied by `B = diag(sqrt p) - p sqrt(p)^T`. The product `B B^T` is the Fisher
    matrix of the logits, `diag(p) - p p^T`.
    """
    signs = torch.randint(2, output.shape, generator=torch.Generator().manual_seed(0), dtype=torch.int8)
    direction = signs.to(output).mul_(2).sub_(1)
    if not is_logits or output.shape[-1] == 1:
        return direction
    probabilities = output.softmax(-1)
    rooted = probabilities.sqrt() * direction
    return rooted - probabilities * rooted.sum(-1, keepdim=True)


WeightGradients = tuple[Float[Tensor, "_ _ _"], Float[Tensor, "_ _"]]
"""Derivatives of the loss of each sequence with respect to weight and bias of an output projection (the bias it has, or
one that it could have): `(sequences, out, width)` and `(sequences, out)`."""


def effects_on_loss(
    gradients: WeightGradients,
    left: Float[Tensor, "out block"],
    right: Float[Tensor, "block width"],
    centre: Float[Tensor, " width"],
) -> Float[Tensor, " sequences"]:
    """Return the first-order change of the loss of each sequence if `left @ right` is added to the weight of the
    projection. The bias is changed too, such that the projection's output for the input `centre` stays the same.
    """
    of_weight, of_bias = gradients
    left, right, centre = (each.to(of_weight) for each in (left, right, centre))
    weight = torch.einsum("sow,ob,bw->s", of_weight, left, right)
    return weight - torch.einsum("so,ob,b->s", of_bias, left, right @ centre)


def require_slope(loss: Any) -> None:
    """Raise `InputError` if `loss` is not a loss function. Also raise it if `loss` is a distance from the outputs of
    the unchanged model: in that model, the derivatives of this distance are 0.
    """
    require_loss(loss)
    if hasattr(loss, "prepare"):
        expected = "a loss whose derivatives in the unchanged model are not 0, such as hw.next_token_loss"
        raise InputError("loss", expected=expected, got=f"the distance {type(loss).__name__}")


def weight_gradients(
    model: nn.Module, paths: Collection[str], batches: Sequence[dict[str, Any]], loss: Loss
) -> dict[str, WeightGradients]:
    """Return the derivatives of the loss of each sequence with respect to weight and bias of output projections, by the
    path of the projection.
    """
    with progress_bar("gradients", len(batches), "batches") as bar:
        parts = [_of_batch(model, paths, batch, loss) for batch in bar.track(batches, step=1)]
    return {
        path: (torch.cat([part[path][0] for part in parts]), torch.cat([part[path][1] for part in parts]))
        for path in paths
    }


def _of_batch(
    model: nn.Module, paths: Collection[str], batch: dict[str, Any], loss: Loss
) -> dict[str, WeightGradients]:
    """Return the derivatives of the loss of each sequence of one batch with respect to weight and bias of output
    projections, by the path of the projection.
    """
    sums: dict[str, WeightGradients] = {}
    sequences = count_sequences_and_tokens(batch)[0]

    def record(path: str, arguments: tuple[Any, ...], output: Tensor) -> Tensor:
        inputs = arguments[0].detach()
        if inputs.ndim != 3 or len(inputs) != sequences:
            expected = f"inputs of shape ({sequences}, tokens, width) for {path}"
            raise InputError("model", expected=expected, got=tuple(inputs.shape), remedy="leave out the loss")
        mask = padding_mask(inputs, batch)
        counted = inputs.new_ones(1) if mask is None else mask[..., None].to(inputs)

        def add(slopes: Tensor) -> None:
            slopes = slopes * counted
            weight, bias = torch.einsum("sto,stw->sow", slopes, inputs), slopes.sum(1)
            sums[path] = (sums[path][0] + weight, sums[path][1] + bias) if path in sums else (weight, bias)

        return with_slopes(output, add)

    calls = module_calls({path: model.get_submodule(path) for path in paths}, record)
    with torch.enable_grad(), frozen_parameters(model), calls:
        losses = loss_per_example(loss, model, batch)
        losses.nansum().backward()  # type: ignore[no-untyped-call]
    missing = [path for path in paths if path not in sums]
    if missing:
        raise InputError("loss", expected="a loss that depends on all attention modules", got=f"none of {missing[0]}")
    return sums
