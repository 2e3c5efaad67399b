"""The two models whose pruning is measured: their data, their losses, and the error of a pruned copy."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.data.models import load
from research.pruning.data import LENGTH, calibration, test

Batches = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class MeasuredModel:
    """Model with data and losses.

    Attributes:
        title: name of the model for display.
        model: the dense model.
        calibration: batches on which heads are scored and projections fitted.
        test: batches on which errors are measured.
        loss: loss by which measured ablation scores heads.
        slope_loss: loss whose derivatives gradient importance and least squares use.
        errors: function of a model and a batch that returns the error of each document, `(batch,)`.
        unit: name and unit of the error.
    """

    title: str
    model: nn.Module
    calibration: Batches
    test: Batches
    loss: Any
    slope_loss: Any
    errors: Callable[[nn.Module, dict[str, Any]], Tensor]
    unit: str

    def errors_of(self, model: nn.Module) -> list[float]:
        """Return the error of each test document."""
        with torch.no_grad():
            return torch.cat([self.errors(model, dict(batch)) for batch in self.test]).tolist()


def smollm2() -> MeasuredModel:
    """Return SmolLM2."""
    return decoder("smollm2")


def decoder(name: str, title: str | None = None) -> MeasuredModel:
    """Return a decoder, whose error is the next-token loss.

    Args:
        name: name or folder of the model.
        title: its name for display; by default the one that it was loaded with.
    """
    loaded = load(name, "causal")
    fitted_on, tested_on = (_batches(part, loaded.tokenizer, 4) for part in (calibration(), test()))
    loss = hw.next_token_loss
    model = loaded.model.eval()
    unit = "the next-token loss in nats"
    return MeasuredModel(title or loaded.title, model, fitted_on, tested_on, loss, loss, loss, unit)


def minilm() -> MeasuredModel:
    """Return MiniLM, whose error is the distance of text embeddings, 1 - cosine, from those of the dense model."""
    loaded = load("minilm")
    fitted_on, tested_on = (_batches(part, loaded.tokenizer, 8) for part in (calibration(), test()))
    dense = loaded.model.eval()

    with torch.no_grad():
        references = {_key(batch): embeddings(dense, batch) for batch in [*fitted_on, *tested_on]}

    def distance(model: nn.Module, batch: dict[str, Any]) -> Tensor:
        return 1.0 - F.cosine_similarity(embeddings(model, batch), references[_key(batch)], dim=-1)

    losses = distance, projected_embedding, distance
    return MeasuredModel(
        loaded.title, dense, fitted_on, tested_on, *losses, "1 - cosine to the dense model's embedding"
    )


def _batches(documents: Sequence[str], tokenizer: Any, size: int) -> Batches:
    """Return the beginnings of documents as batches."""
    return list(hw.Texts(documents, tokenizer, LENGTH, "truncate", batch=size))


def _key(batch: Mapping[str, Tensor]) -> bytes:
    """Return the tokens of a batch as bytes."""
    return batch["input_ids"].numpy().tobytes()


def embeddings(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the embedding of each text, the mean of the last hidden state over tokens: `(batch, width)`."""
    mask = batch["attention_mask"][..., None]
    hidden = model(**batch).last_hidden_state
    return (hidden * mask).sum(1) / mask.sum(1)


def projected_embedding(model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the product of each text's normalised embedding and a random vector of signs, drawn from the text:
    `(batch,)`.

    The distance from the dense model has derivatives of 0 there. The expected square of this product's derivative is
    the second derivative of half the squared distance of normalised embeddings (Gauss and Newton), which is 1 - cosine.
    """
    unit = F.normalize(embeddings(model, batch), dim=-1)
    signs = []
    for ids in batch["input_ids"]:
        generator = torch.Generator().manual_seed(int(ids.sum()))
        signs.append(torch.randint(2, unit.shape[1:], generator=generator) * 2.0 - 1.0)
    return (unit * torch.stack(signs)).sum(-1)


MODELS: dict[str, Callable[[], MeasuredModel]] = {"minilm": minilm, "smollm2": smollm2}
"""The models by name."""
