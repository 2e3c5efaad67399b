"""Losses of a model, one number an example: next token, masked token, distance of sentence embeddings.

A loss is any callable `(model, batch) -> tensor (batch,)`, the batch a mapping of the model's arguments on its device.
One that first wants to see the whole model, before any head of it is gated, has a method `starts(model, batch)`, which
is called once a batch.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.checks import probability
from headwise.data.batches import call_model, count_sequences_and_tokens
from headwise.errors import InputError
from headwise.intercept.install import has_foreign_hooks
from headwise.intercept.swap_forward import swap_forward
from headwise.shapes import Bool, Float, Int

Loss = Callable[[nn.Module, dict[str, Any]], Tensor]
"""`(model, batch) -> (batch,)`."""

ROWS, WORDS = 1024, 512
"""Positions and words whose logits are in memory at a time: a tile that stays in cache."""


def prepare_loss(loss: Any, model: nn.Module, batch: dict[str, Any]) -> None:
    """Let a loss see the whole model, if it wants to."""
    if hasattr(loss, "starts"):
        loss.starts(model, batch)


def losses_of(loss: Loss, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
    """The loss of each example. `InputError` where it gives something else."""
    found, examples = loss(model, batch), count_sequences_and_tokens(batch)[0]
    if not isinstance(found, Tensor) or found.shape != (examples,) or not found.is_floating_point():
        got = f"{found.dtype} of shape {tuple(found.shape)}" if isinstance(found, Tensor) else type(found).__name__
        expected = f"one number an example, a float tensor of shape {(examples,)}"
        raise InputError("loss", expected=expected, got=got)
    return found


def next_token_loss(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
    """The mean over tokens of -ln p(token given those before it), nats, of a causal model.

    Where the logits are just what the output embedding gives, they are never all in memory.

    Args:
        model: gives `logits (batch, length, vocabulary)`, or is such a tensor's function.
        batch: with `input_ids`, and `attention_mask` where some of it is padding.

    Raises:
        InputError: a batch without tokens, or a model without logits.
    """
    ids, real = _tokens(batch)
    counted = real[:, 1:] & real[:, :-1]
    losses = _losses(model, _without_cache(model, batch), (slice(None), slice(None, -1)), ids[:, 1:])
    return _mean(losses, counted)


class MaskedTokenLoss:
    """The mean over some tokens of -ln p(token given the text with these masked), nats, of a masked language model.

    The same tokens are masked whenever the same batch comes (Devlin et al. 2019, section 3.1, without its random
    words).

    Args:
        mask_id: the id of the tokenizer's mask token.
        special: ids that are not masked, such as `tokenizer.all_special_ids`.
        share: of the tokens of each sequence that are masked, at least one.
        seed: of the choice.
    """

    def __init__(self, mask_id: int, *, special: Any = (), share: float = 0.15, seed: int = 0) -> None:
        self.mask_id, self.special = mask_id, torch.tensor(sorted(set(special)), dtype=torch.int64)
        self.share, self.seed = probability("share", share), seed

    def reseeded(self, seed: int) -> "MaskedTokenLoss":
        """The same with other tokens masked: in training, others each time that a sequence comes."""
        return MaskedTokenLoss(self.mask_id, special=self.special.tolist(), share=self.share, seed=seed)

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
        """One loss a sequence; NaN where it has no token that may be masked."""
        ids, real = _tokens(batch)
        chosen = self._chosen(ids, real)
        masked = {**batch, "input_ids": ids.masked_fill(chosen, self.mask_id)}
        return _mean(_losses(model, masked, (slice(None), slice(None)), ids), chosen)

    def _chosen(
        self, ids: Int[Tensor, "batch length"], real: Bool[Tensor, "batch length"]
    ) -> Bool[Tensor, "batch length"]:
        """Which tokens are masked: those of least chance, drawn from the tokens themselves."""
        may = real & ~torch.isin(ids, self.special.to(ids.device))
        chance = torch.empty(ids.shape)
        for row, sequence in enumerate(ids.tolist()):
            generator = torch.Generator().manual_seed(hash((self.seed, *sequence)) % 2**63)
            chance[row] = torch.rand(ids.shape[1], generator=generator)
        chance = chance.to(ids.device).masked_fill(~may, 2.0)
        number = (may.sum(1, keepdim=True) * self.share).ceil().long()
        rank = chance.argsort(1).argsort(1)
        return (rank < number) & may


class EmbeddingDistance:
    """How far the embedding of each sentence is from the one of the whole model: 1 - cosine, 0 to 2.

    The embedding is the mean of the last hidden state over tokens that are no padding (Reimers and Gurevych 2019,
    section 3). Nothing but the model says what is right, so it needs no labels; at the whole model it is 0.
    """

    def __init__(self) -> None:
        self._whole: Tensor | None = None

    def starts(self, model: nn.Module, batch: dict[str, Any]) -> None:
        """Keep the embeddings of the whole model."""
        with torch.no_grad():
            self._whole = _embeddings(model, batch)

    def __call__(self, model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
        """One distance a sentence."""
        if self._whole is None:
            raise InputError("loss", expected="starts(model, batch) before the first loss", got="none")
        return 1.0 - F.cosine_similarity(_embeddings(model, batch), self._whole, dim=-1)


LOSSES = {"next-token": "causal", "masked-token": "masked", "embedding": None}
"""The losses of the command line, and what must stand on top of a model for each."""


def loss_named(name: str, tokenizer: Any) -> Any:
    """A loss by its name in `LOSSES`, with what it needs of a tokenizer."""
    if name == "next-token":
        return next_token_loss
    if name == "embedding":
        return EmbeddingDistance()
    if name not in LOSSES:
        raise InputError("loss", expected=f"one of {', '.join(LOSSES)}", got=repr(name))
    if tokenizer.mask_token_id is None:
        raise InputError("loss", expected="a tokenizer with a mask token", got="one without")
    return MaskedTokenLoss(tokenizer.mask_token_id, special=tokenizer.all_special_ids)


def _embeddings(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, "batch width"]:
    given = call_model(model, batch)
    hidden = getattr(given, "last_hidden_state", given)
    if not isinstance(hidden, Tensor) or hidden.ndim != 3:
        raise InputError("model", expected="one that gives a last_hidden_state", got=type(given).__name__)
    real = batch.get("attention_mask")
    weights = torch.ones(hidden.shape[:2], device=hidden.device) if real is None else real
    weights = weights[..., None].to(hidden.dtype)
    return (hidden * weights).sum(1) / weights.sum(1).clamp(min=1.0)


def _tokens(batch: dict[str, Any]) -> tuple[Int[Tensor, "batch length"], Bool[Tensor, "batch length"]]:
    """Ids, and which of them are no padding."""
    ids = batch.get("input_ids", batch.get(""))
    if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
        raise InputError("loss", expected="batches with input_ids (batch, length)", got=", ".join(batch) or "none")
    real = batch.get("attention_mask")
    return ids.long(), torch.ones_like(ids, dtype=torch.bool) if real is None else real.bool()


def _without_cache(model: nn.Module, batch: dict[str, Any]) -> dict[str, Any]:
    """The batch, and where a model may keep keys and values for a next call, that there is none."""
    may = "use_cache" in inspect.signature(model.forward).parameters
    return {"use_cache": False, **batch} if may else batch


def _mean(losses: Float[Tensor, "batch length"], counted: Bool[Tensor, "batch length"]) -> Float[Tensor, " batch"]:
    """Over the tokens that count; NaN of none."""
    return losses.where(counted, 0.0).sum(1) / counted.sum(1)


# -- logits that need not all be there --------------------------------------------------------------------------------


def _losses(
    model: nn.Module, batch: dict[str, Any], which: tuple[slice, slice], targets: Int[Tensor, "batch length"]
) -> Float[Tensor, "batch length"]:
    """-ln p of each target, by the logits at the positions `which`."""
    head = _output_embedding(model)
    if head is not None:
        with _left_to_us(head) as given:
            logits = _logits(call_model(model, batch))
        if given and logits is given[1]:  # nothing came after the output embedding
            hidden = given[0][which]
            return _tiled(hidden.flatten(0, 1), head, targets.flatten()).view(targets.shape)
        _more_follows.add(model)
    logits = _logits(call_model(model, batch))[which]
    losses = F.cross_entropy(_wide(logits.flatten(0, 1)), targets.flatten(), reduction="none")
    return losses.view(targets.shape)


_more_follows: "WeakSet[nn.Module]" = WeakSet()
"""Models that do more to their logits, such as capping them: their heads are not left to us again."""


def _output_embedding(model: Any) -> nn.Linear | None:
    """The linear layer that gives a model of `transformers` its logits."""
    if model in _more_follows or not hasattr(model, "get_output_embeddings"):
        return None
    head = model.get_output_embeddings()
    plain = type(head) is nn.Linear and not has_foreign_hooks(head)
    return head if plain and not hasattr(head, "_hf_hook") else None  # by which it is moved between devices


@contextmanager
def _left_to_us(head: nn.Linear) -> Iterator[list[Tensor]]:
    """Within the context the layer computes nothing: it keeps what it was given, and gives something of that shape."""
    given: list[Tensor] = []

    def forward(hidden: Tensor) -> Tensor:
        given[:] = [hidden, torch.empty(*hidden.shape[:-1], head.out_features, device="meta", dtype=hidden.dtype)]
        return given[1]

    with swap_forward(head, forward):
        yield given


def _tiled(
    hidden: Float[Tensor, "rows width"], head: nn.Linear, targets: Int[Tensor, " rows"]
) -> Float[Tensor, " rows"]:
    """-ln softmax(hidden W^T + b)[target] of each row, some words at a time: their log-sum-exps add up to the whole."""
    weights = torch.split(head.weight, WORDS)
    biases = [None] * len(weights) if head.bias is None else torch.split(head.bias, WORDS)
    words = list(zip(weights, biases, strict=True))
    found = []
    for rows, wanted in zip(torch.split(hidden, ROWS), torch.split(targets, ROWS), strict=True):
        parts = [_wide(F.linear(rows, weight, bias)).logsumexp(-1) for weight, bias in words]
        of_target = _wide(rows * head.weight[wanted]).sum(-1)
        if head.bias is not None:
            of_target = of_target + _wide(head.bias[wanted])
        found.append(torch.stack(parts).logsumexp(0) - of_target)
    return torch.cat(found)


def _wide(logits: Tensor) -> Tensor:
    """In float32 at least."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def _logits(given: Any) -> Float[Tensor, "batch length vocabulary"]:
    """Of what a model gave."""
    logits = getattr(given, "logits", given)
    if not isinstance(logits, Tensor) or logits.ndim != 3:
        remedy = "AutoModelForCausalLM gives them"
        raise InputError("model", expected="one that gives logits", got=type(given).__name__, remedy=remedy)
    return logits
