"""Calibration data: batches, the heads that attend on them, checks that their padding is stated, and folds.

Folds are parts of the calibration data, for cross-validation: a fit is judged on the fold that it was not made on.
Neighbouring tokens of a text have similar inputs. A projection that is fitted to few texts can learn what is peculiar
to each of them, so that its error on these texts is much smaller than that on others. Folds therefore consist of whole
documents, or of whole sequences if documents are unknown.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate, islice
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.compression.calibration.recording import stated_padding
from headwise.data.batches import (
    call_model,
    copied,
    count_sequences_and_tokens,
    device_of,
    is_encoder_decoder,
    iterate_batches,
    name_of_mask,
    to_device,
    with_cache_disabled,
)
from headwise.errors import InputError
from headwise.intercept.call_contexts import CallContexts
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, SiteKey
from headwise.intercept.sites import SiteRegistry
from headwise.intercept.survey import survey
from headwise.progress import progress_bar

FOLDS = 4
"""Largest number of folds."""


class ScoredHead(NamedTuple):
    """Location of an attention head in a model: layer, index, attention module and kind of attention ("self" or
    "cross"), with the index of its key/value head.

    Attributes:
        layer, head: zero-based numbers of the head.
        kv_head: the key/value head that it attends with.
        module: path of the attention module.
        kind: "self" or "cross" attention.
    """

    layer: int
    head: int
    kv_head: int
    module: str
    kind: str


def scored_heads(model: nn.Module, batch: Any) -> tuple[ScoredHead, ...]:
    """Return the heads that compute attention when a model runs on one batch, in the order of the model."""
    return _heads(survey(model, lambda: call_model(model, copied(batch))))


def calibration_batches(model: nn.Module, calibration: Any) -> list[dict[str, Any]]:
    """Return the batches of a calibration set, moved to the model's device, with arguments that disable the model's
    key/value cache. Raise `InputError` if there are no batches. For an encoder-decoder, also raise it if a batch has a
    padding mask for the source tokens but none for the target tokens.
    """
    batches = [to_device(batch, device_of(model)) for batch in iterate_batches(calibration)]
    if not batches:
        raise InputError("calibration", expected="at least one batch", got="none")
    if is_encoder_decoder(model):
        for batch in batches:
            mask = batch.get("attention_mask")
            if isinstance(mask, Tensor) and not bool(mask.all()) and "decoder_attention_mask" not in batch:
                expected = "a decoder_attention_mask with an attention_mask that hides padding"
                raise InputError("calibration", expected=expected, got="none")
    return [with_cache_disabled(model, batch) for batch in batches]


def heads_of_batches(model: nn.Module, batches: Sequence[dict[str, Any]]) -> tuple[ScoredHead, ...]:
    """Run a model on batches, and return the heads that compute attention on at least one batch, in the order of the
    model. Raise `InputError` if the model hides tokens as padding that no padding mask of the batch marks, because
    later sums over tokens would include these tokens.
    """
    needed = name_of_mask(model)
    for batch in batches:
        for name, labels in batch.items():  # -100 often stands for padding
            is_labels = name.endswith("labels") and isinstance(labels, Tensor) and labels.ndim == 2
            if is_labels and bool((labels == -100).any()):
                mask = batch.get(needed)
                if not isinstance(mask, Tensor) or mask.shape != labels.shape:
                    expected = f"the argument {needed} of shape {tuple(labels.shape)} with {name} of -100"
                    remedy = "state which tokens are padding"
                    raise InputError("calibration", expected=expected, got="none of this shape", remedy=remedy)
    registry = _PaddingSurvey(model)
    _run(model, batches, registry)
    return _heads(registry)


def heads_of_each_batch(model: nn.Module, batches: Sequence[dict[str, Any]]) -> tuple[ScoredHead, ...]:
    """Run a model on batches, and return its heads, in the order of the model. Raise `InputError` if an attention
    module runs on some batches only.
    """
    registry = _Survey(model)
    _run(model, batches, registry)
    for record in registry.records:
        if any(record.site not in sites for sites in registry.sites_of_batches):
            expected = "batches on which the same modules attend"
            raise InputError("calibration", expected=expected, got=f"some without attention in {record.site.label}")
    return _heads(registry)


def _run(model: nn.Module, batches: Sequence[dict[str, Any]], registry: "_Survey") -> None:
    """Run a model on batches, while the interceptor `registry` records which attention modules run on each batch."""
    bar = progress_bar("calibration", len(batches), "batches")
    with intercepted(model, registry), torch.no_grad(), bar as progress:
        for batch in progress.track(batches, step=1):
            registry.start(batch)
            call_model(model, copied(batch))
            if registry.problem is not None:
                raise registry.problem
    registry.require_attention()


def _heads(registry: SiteRegistry) -> tuple[ScoredHead, ...]:
    """Return the heads of all attention modules that an interceptor, the `registry`, has recorded."""
    return tuple(ScoredHead(**labels) for _, labels in registry.head_labels())


class _Survey(SiteRegistry):
    """Interceptor that records which attention modules run on each batch, separately for self- and cross-attention. The
    attribute `problem` is the error to be raised after a batch, if there is one.

    Attributes:
        sites_of_batches: the sites, by batch.
        problem: error to be raised after the batch; None without a problem.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.sites_of_batches: list[set[SiteKey]] = []
        self.problem: InputError | None = None

    def start(self, batch: dict[str, Any]) -> None:
        """Start the record of the next batch, before the model runs on it."""
        self.sites_of_batches.append(set())

    def observe(self, call: Call) -> None:
        """Record that an attention module runs on the current batch, and its kind of attention (self or cross)."""
        self.register(call)
        self.sites_of_batches[-1].add(call.site)


class _PaddingSurvey(_Survey):
    """Interceptor that records which attention modules run on each batch. It also checks that the padding masks of the
    batch mark every token that an attention call hides as padding.
    """

    def start(self, batch: dict[str, Any]) -> None:
        """Start the record of the next batch. Its sequences are independent of the sequences in the previous batch."""
        super().start(batch)
        self._batch, self._contexts = batch, CallContexts()

    def on_model_call(self) -> None:
        """Discard the mask data that are cached from the previous forward pass of the model."""
        self._contexts.on_model_call()

    def observe(self, call: Call) -> None:
        """Record the attention module of an attention call. If the call hides tokens as padding that no padding mask of
        the batch marks, store an error in the attribute `problem`.
        """
        super().observe(call)
        try:
            observed = self._contexts.read(call)
        except InputError as error:  # a mask that is not a tensor, as with FlexAttention
            masks = [value for name, value in self._batch.items() if "mask" in name and value is not None]
            if any(not isinstance(mask, Tensor) or mask.ndim != 2 for mask in masks):
                self.problem = self.problem or error
            return
        stated = stated_padding((call.grid.batch, call.grid.queries), self._batch)
        real, hides = observed.context.real_queries, ""
        if observed.lacks_rows and stated is None:
            hides = "an unknown number of tokens"
        elif real is not None:
            hidden = ~real if stated is None else ~real & stated
            hides = f"{int(hidden.sum())} of {hidden.numel()} tokens" if hidden.any() else ""
        if hides and self.problem is None:
            self.problem = InputError(
                "calibration",
                expected="padding that an attention_mask of shape (sequences, tokens) states",
                got=f"a mask that hides {hides} in {self._names([call.site.label])}",
                remedy="give such a mask (decoder_attention_mask for targets), or use batches without padding",
            )


def folds_of(batches: Sequence[Mapping[str, Any]], documents: Sequence[int] | None = None) -> list[list[int]]:
    """Return the fold number, for cross-validation, of each sequence of each batch. Folds have similar numbers of
    tokens, and all sequences of a document are in the same fold. If `documents` is None, or one document has more than
    half of the tokens, folds are runs of consecutive sequences instead.
    """
    numbers = [count_sequences_and_tokens(batch)[0] for batch in batches]
    lengths = [length for batch in batches for length in _lengths(batch)]
    if len(lengths) < 2:
        remedy = "use several texts, or parts of a text"
        raise InputError("calibration", expected="at least 2 sequences", got=len(lengths), remedy=remedy)
    tokens_of: Counter[int] = Counter()
    for document, length in zip(documents or [], lengths, strict=False):
        tokens_of[document] += length
    if documents is None or max(tokens_of.values()) > sum(lengths) / 2:
        number = min(FOLDS, len(lengths))
        middles = [start + length / 2 for start, length in zip(accumulate(lengths, initial=0), lengths, strict=False)]
        of_sequences = [int(number * middle / sum(lengths)) for middle in middles]
        if len(set(of_sequences)) == 1:
            of_sequences = [0] + [1] * (len(lengths) - 1)
    else:
        sizes = [0] * min(FOLDS, len(tokens_of))
        fold_of: dict[int, int] = {}
        for document in sorted(tokens_of, key=lambda each: (-tokens_of[each], each)):  # the longest one first
            fold_of[document] = sizes.index(min(sizes))
            sizes[fold_of[document]] += tokens_of[document]
        of_sequences = [fold_of[document] for document in documents]
    folds = iter(of_sequences)
    return [list(islice(folds, number)) for number in numbers]


def _lengths(batch: Mapping[str, Any]) -> list[int]:
    """Return the number of tokens that are not padding in each sequence of a batch, at least 1."""
    sequences, tokens = count_sequences_and_tokens(batch)
    mask = batch.get("attention_mask")
    if isinstance(mask, Tensor) and mask.ndim == 2:
        return [max(1, number) for number in mask.sum(1).tolist()]
    return [max(1, tokens // max(1, sequences))] * sequences
