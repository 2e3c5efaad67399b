"""Loss on held-out documents, with standard errors clustered by document."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.losses import Loss, finite_loss_per_example, prepare_loss, require_some_loss
from headwise.data.batches import device_of, digest_of, evaluation_mode, to_device
from headwise.data.documents import read_documents
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.runs.rows import NO_ESTIMATE, MeanEstimate
from headwise.shapes import Int


def clustered_mean(values: Sequence[float], clusters: Sequence[int]) -> MeanEstimate:
    """Return the mean of the values that are not NaN, with the standard error for values that depend on each other
    within a cluster: `sqrt(D / (D - 1) * sum_d (sum of the deviations in cluster d)^2) / n` for D clusters and n
    values. It is NaN for a single cluster.

    Source: Liang and Zeger 1986, equation 7, for a mean.

    Args:
        values: the values.
        clusters: number of the cluster of each value.
    """
    valid = [(value, cluster) for value, cluster in zip(values, clusters, strict=True) if not math.isnan(value)]
    if not valid:
        return NO_ESTIMATE
    mean = math.fsum(value for value, _ in valid) / len(valid)
    deviations: dict[int, list[float]] = {}
    for value, cluster in valid:
        deviations.setdefault(cluster, []).append(value - mean)
    number = len(deviations)
    squares = math.fsum(math.fsum(each) ** 2 for each in deviations.values())
    sem = math.sqrt(number / (number - 1) * squares) / len(valid) if number > 1 else math.nan
    return MeanEstimate(mean, sem, len(valid))


@dataclass(frozen=True)
class HeldOutText:
    """Sequences of held-out documents.

    Attributes:
        sequences: token ids, the longest sequences first.
        documents: number of the document of each sequence.
        batch: largest number of sequences in a batch.
    """

    sequences: Sequence[Int[Tensor, "_"]]
    documents: Sequence[int]
    batch: int

    @staticmethod
    def of(texts: Texts) -> "HeldOutText":
        """Return the sequences of texts in a file or folder, of which each belongs to one document.

        Raises:
            InputError: the data is empty or cannot be read, or a document is longer than the context.
        """
        pairs: list[tuple[int, Any]] = []
        for number, document in enumerate(read_documents(str(texts.source), texts.column)):
            if document.text.strip():
                pairs += [(number, sequence) for sequence in _sequences(texts, document.text)]
            if texts.limit is not None and len(pairs) >= texts.limit:
                break
        pairs = sorted(pairs[: texts.limit], key=lambda pair: -len(pair[1]))
        if not pairs:
            raise InputError("data", expected="at least one document", got=f"no text in {texts.name}")
        return HeldOutText([sequence for _, sequence in pairs], [number for number, _ in pairs], texts.batch)

    @property
    def digest(self) -> str:
        """Hash of the sequences."""
        return digest_of([*self.sequences, list(self.documents)])

    def batches(self) -> Iterator[dict[str, Tensor]]:
        """Yield batches of sequences of one length, in order."""
        for _, same_length in groupby(self.sequences, key=len):
            while sequences := list(islice(same_length, self.batch)):
                ids = torch.stack(sequences).long()
                yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def losses(self, model: nn.Module, dense: nn.Module, loss: Loss) -> list[float]:
        """Return the loss of a model on each sequence; NaN for a sequence without one. A loss that compares with the
        unchanged model is compared with `dense`.

        Raises:
            InputError: a loss is not finite, or no sequence has one.
        """
        losses: list[float] = []
        with evaluation_mode(model), evaluation_mode(dense), torch.no_grad():
            for batch in self.batches():
                prepare_loss(loss, dense, to_device(batch, device_of(dense)))
                losses += finite_loss_per_example(loss, model, to_device(batch, device_of(model))).double().tolist()
        require_some_loss(sum(not math.isnan(value) for value in losses))
        return losses

    def mean(self, losses: Sequence[float]) -> MeanEstimate:
        """Return the mean of the losses of all sequences, with its standard error clustered by document."""
        return clustered_mean(losses, self.documents)


def _sequences(texts: Texts, text: str) -> Sequence[Int[Tensor, "_"]]:
    """Return the sequences of one document; none for a document without tokens."""
    options = (texts.tokenizer, texts.context, texts.documents, texts.batch)
    if not texts.tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]:
        return []
    return Texts([text], *options).sequences
