"""Losses of two models on the same examples, and the cosine of their outputs."""

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.analysis.losses import Loss, finite_loss_per_example, next_token_loss, prepare_loss, require_some_loss
from headwise.compression.report.data import SAME, ModelPair, ReportData
from headwise.data.batches import POSITIONAL, call_model, copied
from headwise.errors import InputError
from headwise.shapes import Float


@torch.no_grad()
def paired_losses(models: ModelPair, loss: Loss, data: ReportData) -> tuple[list[float], list[float]]:
    """Return the loss of each example under both models; NaN for an example without a loss.

    Raises:
        InputError: the loss is not one finite number per example, is one for causal models and the model is not causal,
            or is NaN for an example under one of the models alone.
    """
    if loss is next_token_loss:
        _require_causal(models[0], data.batches[0])
    of_models: tuple[list[float], list[float]] = ([], [])
    for batch in data.batches:
        prepare_loss(loss, models[0], batch)
        for index, model in enumerate(models):
            of_models[index].extend(finite_loss_per_example(loss, model, batch).double().tolist())
    if any(math.isnan(before) != math.isnan(after) for before, after in zip(*of_models, strict=True)):
        raise InputError("loss", expected="a number for the same examples under both models", got="NaN under one alone")
    require_some_loss(sum(not math.isnan(value) for value in of_models[0]))
    return of_models


def _require_causal(model: Any, batch: dict[str, Any]) -> None:
    """Raise `InputError` if a model is an encoder-decoder, or its logits depend on later tokens, so that its next-token
    loss has no meaning.
    """
    got = None
    if getattr(getattr(model, "config", None), "is_encoder_decoder", False):
        got = f"{type(model).__name__}, an encoder-decoder"
    elif _depends_on_last_token(model, batch):
        got = f"{type(model).__name__}, whose logits depend on later tokens"
    if got is not None:
        remedy = "pass another loss, such as hw.MaskedTokenLoss(...), or loss=None for the cosine of outputs"
        raise InputError("loss", expected="hw.next_token_loss for a causal model", got=got, remedy=remedy)


def _depends_on_last_token(model: nn.Module, batch: dict[str, Any]) -> bool:
    """Return True if logits of the first sequence of a batch depend on the last token, except those of the last token.
    A model without logits, or batches without token ids, are left to the loss, which names them.
    """
    name = POSITIONAL if POSITIONAL in batch else "input_ids"
    ids, mask = batch.get(name), batch.get("attention_mask")
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        return False
    positions = list(range(ids.shape[1])) if mask is None else mask[0].nonzero().flatten().tolist()
    if len(positions) < 2:
        return False
    other = copied(batch)
    last, first = ids[0, positions[-1]], ids[0, positions[0]]
    other[name][0, positions[-1]] = first if first != last else (last + 1) % (ids.max() + 1)
    outputs = [call_model(model, each) for each in (copied(batch), other)]
    logits = [getattr(output, "logits", output) for output in outputs]
    if not all(isinstance(each, Tensor) and each.ndim == 3 for each in logits):
        return False
    before, after = (each[0, positions[:-1]].float() for each in logits)
    return not bool((before - after).abs().max() <= SAME * before.abs().max())


@torch.no_grad()
def output_cosines(models: ModelPair, data: ReportData) -> list[float]:
    """Return the cosine of both models' outputs for each example: of their embeddings, the means of the last hidden
    state over tokens that are not padding (Reimers and Gurevych 2019, section 3), or of outputs `(batch, width)`.

    Raises:
        InputError: a model returns neither, or NaN.
    """
    cosines: list[float] = []
    for batch in data.batches:
        dense, compressed = (_embeddings(model, batch).double() for model in models)
        cosines += F.cosine_similarity(dense, compressed, dim=-1).tolist()
    if any(map(math.isnan, cosines)):
        raise InputError("model", expected="outputs that are numbers", got="NaN for an example")
    return cosines


def _embeddings(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, "batch width"]:
    """Return the embedding of each example."""
    output = call_model(model, copied(batch))
    hidden = getattr(output, "last_hidden_state", output)
    if not isinstance(hidden, Tensor) or hidden.ndim not in (2, 3) or not hidden.is_floating_point():
        remedy = "pass a loss"
        expected = "one that returns a last_hidden_state, or a tensor (batch, width) or (batch, tokens, width)"
        raise InputError("model", expected=expected, got=type(output).__name__, remedy=remedy)
    if hidden.ndim == 2:
        return hidden
    mask = batch.get("attention_mask")
    is_of_tokens = isinstance(mask, Tensor) and mask.shape == hidden.shape[:2]
    weights = mask if is_of_tokens and mask is not None else torch.ones(hidden.shape[:2], device=hidden.device)
    weights = weights[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)
