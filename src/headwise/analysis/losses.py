"""Losses of a model with one value per example: next token, masked token, distance of sentence embeddings.

A loss is any callable `(model, batch) -> tensor (batch,)`; the batch is a mapping of the model's arguments, on the
model's device. A loss that needs results of the unchanged model has a method `prepare(model, batch)`, which is called
once per batch before any head is gated.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.analysis.nonfinite import nonfinite_error
from headwise.analysis.token_cross_entropy import token_cross_entropy
from headwise.checks import LARGEST_INTEGER, probability, token_ids, whole_number
from headwise.data.batches import (
    POSITIONAL,
    call_model,
    copied,
    count_sequences_and_tokens,
    is_encoder_decoder,
    name_of_mask,
    real_tokens,
    with_cache_disabled,
)
from headwise.errors import InputError
from headwise.settings import LOSSES
from headwise.shapes import Bool, Float, Int

Loss = Callable[[nn.Module, dict[str, Any]], Tensor]
"""Function `(model, batch) -> (batch,)`."""


def require_loss(loss: Any) -> None:
    """Raise `InputError` if `loss` cannot be called with a model and a batch. A class such as `EmbeddingDistance` is
    not a loss either; an object of the class is one.
    """
    expected = "a function of model and batch, such as hw.next_token_loss or hw.EmbeddingDistance()"
    if isinstance(loss, type):
        got, remedy = f"the class {loss.__name__}", f"create an object of it: {loss.__name__}(...)"
        raise InputError("loss", expected=expected, got=got, remedy=remedy)
    if not callable(loss):
        raise InputError("loss", expected=expected, got=repr(loss))


def prepare_loss(loss: Any, model: nn.Module, batch: dict[str, Any]) -> None:
    """Call `loss.prepare(model, batch)` with a copy of the batch, if the loss has a method `prepare`. In this method, a
    loss computes what it needs from the unchanged model.
    """
    if hasattr(loss, "prepare"):
        loss.prepare(model, copied(batch))


def loss_per_example(loss: Loss, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
    """Compute `loss(model, batch)`, check that it is one floating-point number per example, and return it. The loss
    receives a copy of the batch, because a model may write to its inputs, for example to a cache of keys and values.
    The original batch can be used again.
    """
    losses, examples = loss(model, copied(batch)), count_sequences_and_tokens(batch)[0]
    if not isinstance(losses, Tensor) or losses.shape != (examples,) or not losses.is_floating_point():
        got = f"{losses.dtype} of shape {tuple(losses.shape)}" if isinstance(losses, Tensor) else type(losses).__name__
        expected = f"one number per example, a float tensor of shape {(examples,)}"
        raise InputError("loss", expected=expected, got=got)
    return losses


def finite_loss_per_example(loss: Loss, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
    """Return the loss of each example of a batch; NaN for an example without a loss, such as a text of one token. Raise
    `InputError` if a loss is infinite. If NaN or infinity comes from weights or activations of the model, the error
    names the first module that has such a number.
    """
    losses = loss_per_example(loss, model, batch)
    is_finite = losses.detach().isfinite()
    if not bool(is_finite.all()):
        error = nonfinite_error(model, lambda: loss(model, copied(batch)), batch, ~is_finite)
        if error is not None:
            raise error
        if bool(losses.isinf().any()):
            raise InputError("loss", expected="finite numbers, or NaN for examples without a loss", got="infinity")
    return losses


def require_some_loss(examples: int) -> None:
    """Raise `InputError` if `examples`, the number of examples that have a loss, is 0. Sequences of one token, for
    example, have no next-token loss.
    """
    if not examples:
        raise InputError("loss", expected="a number for at least one example", got="NaN for all of them")


def next_token_loss(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
    """Return the mean loss of each sequence under a causal model, in nats: -ln p(token | earlier tokens), averaged over
    all tokens after the first that are not padding.

    The logits of all positions are not kept in memory at once if they are the output embedding's product alone.

    Args:
        model: returns logits `(batch, length, vocabulary)`, or an object with `logits` of that shape.
        batch: arguments of the model: `input_ids` and, if some tokens are padding, `attention_mask`.

    Raises:
        InputError: a batch without tokens, a model without logits, or an encoder-decoder, whose logits are not those of
            `input_ids`.
    """
    if is_encoder_decoder(model):
        got, remedy = f"the encoder-decoder {type(model).__name__}", "use a loss function of your own"
        raise InputError("loss", expected="a decoder for next_token_loss", got=got, remedy=remedy)
    ids, is_real = _tokens(batch)
    is_counted = is_real[:, 1:] & is_real[:, :-1]
    losses = token_cross_entropy(model, with_cache_disabled(model, batch), slice(None, -1), ids[:, 1:])
    return losses.where(is_counted, 0.0).sum(1) / is_counted.sum(1)  # NaN for a sequence of one token


class MaskedTokenLoss:
    """Loss function for masked language models. It masks a share of the tokens of each sequence, chosen at random. For
    each sequence it returns the mean of -ln p(token | text with masked tokens) over the masked tokens, in nats.

    The same tokens of a sequence are masked each time it occurs (Devlin et al. 2019, section 3.1, without its random
    words).

    Args:
        mask_id: id of the tokenizer's mask token.
        special: ids that are never masked, such as `tokenizer.all_special_ids`.
        share: share of each sequence's tokens that are masked; at least one token.
        seed: seed of the choice.
    """

    def __init__(self, mask_id: int, *, special: Any = (), share: float = 0.15, seed: int = 0) -> None:
        self.mask_id = whole_number("mask_id", mask_id, least=0, most=LARGEST_INTEGER)
        self.special = torch.tensor(token_ids("special", special), dtype=torch.int64)
        self.share, self.seed = probability("share", share), seed

    def reseeded(self, seed: int) -> "MaskedTokenLoss":
        """Return a masked-token loss with the same options and another seed. The returned loss masks other tokens, for
        example in the next epoch of a training.
        """
        return MaskedTokenLoss(self.mask_id, special=self.special.tolist(), share=self.share, seed=seed)

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
        """Run the model on the batch with masked tokens, and return each sequence's mean loss over them, in nats.

        The loss is NaN for a sequence without tokens that can be masked.
        """
        ids, is_real = _tokens(batch)
        can_mask = is_real & ~torch.isin(ids, self.special.to(ids.device))
        draws = torch.empty(ids.shape)
        for row, tokens in enumerate(is_real.cpu()):
            sequence = ids[row].cpu()[tokens].tolist()
            # Seeded by the tokens that are not padding, so that the same sequence always gets the same mask.
            generator = torch.Generator().manual_seed(hash((self.seed, *sequence)) % 2**63)
            draws[row, tokens] = torch.rand(len(sequence), generator=generator)
        draws = draws.to(ids.device).masked_fill(~can_mask, 2.0)
        count = (can_mask.sum(1, keepdim=True) * self.share).ceil().long()
        is_masked = (draws.argsort(1).argsort(1) < count) & can_mask
        name = "input_ids" if "input_ids" in batch else POSITIONAL
        masked = {**batch, name: ids.masked_fill(is_masked, self.mask_id)}
        losses = token_cross_entropy(model, masked, slice(None), ids)
        return losses.where(is_masked, 0.0).sum(1) / is_masked.sum(1)


class EmbeddingDistance:
    """Loss function that measures how far sentence embeddings move when a model is changed, for example when a head is
    removed. The loss of a sentence is 1 - cosine, from 0 to 2, between its embedding now and its embedding in the
    unchanged model.

    The embedding is the mean of the last hidden state over tokens that are not padding (Reimers and Gurevych 2019,
    section 3). The unchanged model is the reference, so no labels are needed; its own distance is 0.
    """

    def __init__(self) -> None:
        self._reference: Tensor | None = None

    def prepare(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Run the unchanged model on a batch, and store its sentence embeddings as the reference from which distances
        are measured.
        """
        with torch.no_grad():
            self._reference = _sentence_embeddings(model, batch)

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
        """Return, for each sentence of a batch, 1 - cosine between its embedding now and its reference embedding. The
        batch is the one with which `prepare` was last called.
        """
        if self._reference is None:
            raise InputError("loss", expected="prepare(model, batch) before the first loss", got="none")
        return 1.0 - F.cosine_similarity(_sentence_embeddings(model, batch), self._reference, dim=-1)


def name_of_loss(loss: Any) -> str:
    """Return the name under which a loss is stored in the settings of a run: the function's name, or the name of its
    class.
    """
    name: str = getattr(loss, "__name__", type(loss).__name__)
    return name


def options_of_loss(loss: Any) -> dict[str, Any] | None:
    """Return the options of a masked-token loss, to be stored in the settings of a run. Return None for any other loss,
    which is stored by its name alone.
    """
    if not isinstance(loss, MaskedTokenLoss):
        return None
    return {"mask_id": loss.mask_id, "special": loss.special.tolist(), "share": loss.share, "seed": loss.seed}


def loss_by_name(name: str, tokenizer: Any) -> Any:
    """Return the loss function for a value of the command-line option --loss: "next-token", "masked-token" or
    "embedding". For "masked-token", the tokenizer determines the mask token and the tokens that are never masked.
    """
    if name == "next-token":
        return next_token_loss
    if name == "embedding":
        return EmbeddingDistance()
    if name not in LOSSES:
        raise InputError("loss", expected=f"one of {', '.join(LOSSES)}", got=repr(name))
    if tokenizer.mask_token_id is None:
        raise InputError("loss", expected="a tokenizer with a mask token", got="one without")
    return MaskedTokenLoss(tokenizer.mask_token_id, special=tokenizer.all_special_ids)


def _sentence_embeddings(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, "batch width"]:
    """Run the model on a batch, and return the embedding of each sequence: the mean of the last hidden state over
    tokens that are not padding.
    """
    output = call_model(model, batch)
    hidden = getattr(output, "last_hidden_state", output)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise InputError("model", expected="one that returns a last_hidden_state", got=type(output).__name__)
    # In half precision a cosine of 1 would be rounded to other numbers.
    hidden = hidden.to(torch.promote_types(hidden.dtype, torch.float32))
    weights = _is_real(batch, hidden, name_of_mask(model))[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)


def _tokens(batch: dict[str, Any]) -> tuple[Int[Tensor, "batch length"], Bool[Tensor, "batch length"]]:
    """Return the token ids of a batch, and a mask of the same shape that is True at tokens that are not padding."""
    ids = batch.get("input_ids", batch.get(POSITIONAL))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise InputError("loss", expected="batches with input_ids (batch, length)", got=", ".join(batch) or "none")
    return ids.long(), _is_real(batch, ids)


def _is_real(batch: dict[str, Any], tokens: Tensor, name: str = "attention_mask") -> Bool[Tensor, "batch length"]:
    """Return a mask that is True at tokens that are not padding. It is read from the model argument `name` in the
    batch; without this argument, all tokens count. `tokens` is a tensor with the axes batch and length, and optionally
    further ones.
    """
    mask = batch.get(name)
    # A mask of another shape, such as one with four axes, does not state what is padding.
    if mask is not None and (not isinstance(mask, Tensor) or mask.shape != tokens.shape[:2]):
        got = f"one of shape {tuple(mask.shape)}" if isinstance(mask, Tensor) else type(mask).__name__
        expected = f"the argument {name} of shape {tuple(tokens.shape[:2])}, which states the padding"
        remedy = "use such a mask, or a loss function of your own"
        raise InputError("loss", expected=expected, got=got, remedy=remedy)
    return real_tokens(batch, tokens, name)
