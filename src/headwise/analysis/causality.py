"""Check that a model is causal. Otherwise its next-token loss has no meaning, because the model sees the tokens that it
predicts.
"""

from collections.abc import Iterable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.losses import next_token_loss
from headwise.data.batches import (
    POSITIONAL,
    call_model,
    copied,
    evaluation_mode,
    is_encoder_decoder,
    real_tokens,
    with_cache_disabled,
)
from headwise.errors import InputError
from headwise.shapes import Float, Int

PLACES = 8
"""Number of parts into which the places divide the longest sequence."""

ROUNDING = 64.0
"""Difference of logits that counts as rounding, in units of the dtype's epsilon times the largest logit. BERT with its
default initialization, in float32, differs by more than 50,000 such units."""


def require_causal(
    loss: Any, model: nn.Module, batches: Iterable[Mapping[str, Any]], *, remedy: str | None = None
) -> None:
    """Raise `InputError` if `loss` is `next_token_loss` and a model is not causal (if some logit depends on a later
    token). The function `why_not_causal` checks the model on some batches. The error message ends with `remedy`, advice
    for the user. Models with any other loss are not checked.
    """
    if loss is next_token_loss and (got := why_not_causal(model, batches)) is not None:
        raise InputError("loss", expected="hw.next_token_loss for a causal model", got=got, remedy=remedy)


def require_causal_decoder(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> None:
    """Raise `InputError` if a model is an encoder-decoder, or if its logits on some batches depend on later tokens."""
    if (got := why_not_causal(model, batches)) is not None:
        raise InputError("model", expected="a causal decoder, whose tokens see no later ones", got=got)


def why_not_causal(model: nn.Module, batches: Iterable[Mapping[str, Any]]) -> str | None:
    """Check on some batches that a model is causal, so that no logit depends on a later token. Return None if it is
    causal. Otherwise return a description of the model for an error message, which states the dependence, or that the
    model is an encoder-decoder. `batches` are on the model's device.

    The check changes all tokens of the longest sequence after a place to others, and compares the logits of the tokens
    before, for a few places from its second to its last token. Where these differ by no more than the rounding of a
    dtype below float32, a copy of the model in float32 decides.
    """
    if is_encoder_decoder(model):
        return f"{type(model).__name__}, an encoder-decoder"
    pairs = []
    for batch in batches:
        ids = batch.get(_name_of_ids(batch))
        if isinstance(ids, Tensor) and ids.ndim == 2 and not ids.is_floating_point():
            pairs.append((batch, real_tokens(batch, ids)))
    if not pairs:
        return None
    batch, is_real = max(pairs, key=lambda pair: int(pair[1].sum(1).max()))
    row = int(is_real.sum(1).argmax())
    positions = is_real[row].nonzero().flatten()
    last = len(positions) - 1
    places = sorted({max(1, round(last * part / PLACES)) for part in range(PLACES + 1)}) if last > 0 else []
    if any(_depends_across(model, batch, row, positions[:place], positions[place:]) for place in places):
        return f"{type(model).__name__}, whose logits depend on later tokens"
    return None


def _depends_across(
    model: nn.Module,
    batch: Mapping[str, Any],
    row: int,
    first: Int[Tensor, " before"],
    second: Int[Tensor, " after"],
) -> bool:
    """Return True if, in sequence number `row` of a batch, logits at the positions `first` depend on the tokens at the
    later positions `second`. The model runs on the batch and on a copy in which these tokens are changed.
    """
    changed, name = copied(dict(batch)), _name_of_ids(batch)
    tokens = batch[name][row, torch.cat([first, second])]
    others = tokens[tokens != tokens[0]]
    # Tokens become the first token of the row. Its copies become another one of the row or, without one, another id.
    another = others[0] if len(others) else (tokens[0] - 1 if tokens[0] > 0 else tokens[0] + 1)
    changed[name][row, second] = torch.where(tokens == tokens[0], another, tokens[0])[len(first) :]
    logits = [_logits(model, each) for each in (batch, changed)]
    if any(each is None or each.shape[:2] != batch[name].shape for each in logits):
        return False
    before, after = (each[row, first] for each in logits if each is not None)
    if torch.equal(before, after):
        return False
    if _is_close(before, after) and torch.finfo(before.dtype).bits < 32:
        precise = deepcopy(model).float()
        before, after = (each[row, first] for case in (batch, changed) if (each := _logits(precise, case)) is not None)
    return not _is_close(before, after)


def _name_of_ids(batch: Mapping[str, Any]) -> str:
    """Return the key of the token ids in a batch: "input_ids", or the key of a positional argument if there is one."""
    return POSITIONAL if POSITIONAL in batch else "input_ids"


def _logits(model: nn.Module, batch: Mapping[str, Any]) -> Float[Tensor, "batch tokens vocabulary"] | None:
    """Run a model on a batch in evaluation mode and return its logits; None if its output has no floating-point logits
    with three axes.
    """
    inputs = with_cache_disabled(model, copied(dict(batch)))
    with evaluation_mode(model), torch.no_grad():
        output = call_model(model, inputs)
    logits = getattr(output, "logits", output)
    return logits if isinstance(logits, Tensor) and logits.ndim == 3 and logits.is_floating_point() else None


def _is_close(before: Tensor, after: Tensor) -> bool:
    """Return True if two tensors differ by no more than rounding. Elements that are NaN or infinite in `before` are not
    compared, since NaN is detected later, in the loss.
    """
    is_finite = before.isfinite()
    before, after = before[is_finite], after[is_finite]
    tolerance = ROUNDING * torch.finfo(before.dtype).eps * before.abs()
    return not before.numel() or bool((before - after).abs().max() <= tolerance.max())
