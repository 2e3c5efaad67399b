"""Cross-entropy of tokens under a model, without all of its logits in memory at once."""

from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.data.batches import call_model
from headwise.errors import InputError
from headwise.intercept.module_calls import swap_forward
from headwise.intercept.module_hooks import has_foreign_hooks
from headwise.shapes import Float, Int

POSITIONS_PER_TILE, TOKENS_PER_TILE = 1024, 512
"""Size of the logits that are in memory at a time; they stay in cache."""


def token_cross_entropy(
    model: nn.Module,
    batch: dict[str, Any],
    positions: slice | Int[Tensor, " length"],
    targets: Int[Tensor, "batch length"],
) -> Float[Tensor, "batch length"]:
    """Run a model, and return -ln p(target), in nats, for each token id in `targets`. Target number i of a sequence is
    predicted by the logits at output position number i of `positions`.

    If the logits are exactly the output of the model's output embedding, they are computed tile by tile from its input,
    and never all in memory.
    """
    embedding = _linear_output_embedding(model)
    if embedding is not None:
        skipped: list[Tensor] = []  # the input of the output embedding, and an empty tensor in place of its output

        def skip(hidden: Tensor) -> Tensor:
            shape = (*hidden.shape[:-1], embedding.out_features)
            skipped[:] = [hidden, torch.empty(*shape, device="meta", dtype=hidden.dtype)]
            return skipped[1]

        with swap_forward(embedding, skip):
            logits = _logits(call_model(model, batch))
        if skipped and logits is skipped[1]:  # the model did nothing to the output of its output embedding
            hidden = skipped[0][:, positions]
            return _tiled_cross_entropy(hidden.flatten(0, 1), embedding, targets.flatten()).view(targets.shape)
        _models_with_processed_logits.add(model)
    logits = _logits(call_model(model, batch))[:, positions]
    losses = F.cross_entropy(_at_least_float32(logits.flatten(0, 1)), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


_models_with_processed_logits: "WeakSet[nn.Module]" = WeakSet()
"""Models that process the output of their output embedding, such as by capping it; its computation is not skipped."""


def _linear_output_embedding(model: Any) -> nn.Linear | None:
    """Return the output embedding of a `transformers` model if the model can run without computing all logits at once;
    otherwise None. The embedding must be a plain linear layer without hooks of other packages. The model must return
    the layer's output as logits unchanged. A model is excluded if an earlier run showed that it changes this output.
    """
    if model in _models_with_processed_logits or not hasattr(model, "get_output_embeddings"):
        return None
    embedding = model.get_output_embeddings()
    is_plain = type(embedding) is nn.Linear and not has_foreign_hooks(embedding)
    # A model with `_hf_hook` moves weights between devices while it runs.
    return embedding if is_plain and not hasattr(embedding, "_hf_hook") else None


def _tiled_cross_entropy(
    hidden: Float[Tensor, "rows width"], embedding: nn.Linear, targets: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """Return -ln softmax(hidden W^T + b)[target] for each row of `hidden` (the last hidden state of a token). W and b
    are the weight and the bias of the output embedding. Logits are computed for a block of rows and vocabulary tokens
    at a time, and combined by log-sum-exp.
    """
    weights = torch.split(embedding.weight, TOKENS_PER_TILE)
    biases = [None] * len(weights) if embedding.bias is None else torch.split(embedding.bias, TOKENS_PER_TILE)
    token_tiles = list(zip(weights, biases, strict=True))
    losses = []
    row_tiles = zip(torch.split(hidden, POSITIONS_PER_TILE), torch.split(targets, POSITIONS_PER_TILE), strict=True)
    for rows, row_targets in row_tiles:
        parts = [_at_least_float32(F.linear(rows, weight, bias)).logsumexp(-1) for weight, bias in token_tiles]
        target_logits = _at_least_float32(rows * embedding.weight[row_targets]).sum(-1)
        if embedding.bias is not None:
            target_logits = target_logits + _at_least_float32(embedding.bias[row_targets])
        losses.append(torch.stack(parts).logsumexp(0) - target_logits)
    return torch.cat(losses)


def _at_least_float32(logits: Tensor) -> Tensor:
    """Return the logits in float32, or in float64 if they are in float64."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _logits(output: Any) -> Float[Tensor, "batch length vocabulary"]:
    """Return the logits in a model's output; raise `InputError` if there are none."""
    logits = getattr(output, "logits", output)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        remedy = "load it with AutoModelForCausalLM or AutoModelForMaskedLM"
        raise InputError("model", expected="one that returns logits", got=type(output).__name__, remedy=remedy)
    return logits
