"""Pairs of prompts whose answers differ: the model's run on each, and the scale between their logit differences."""

import math
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.nonfinite import nonfinite_error
from headwise.analysis.patching.table import require_direction
from headwise.analysis.prompts import AnswerTokens, one_batch
from headwise.analysis.recording import RecordedRun
from headwise.analysis.repeated_runs import restored_state
from headwise.checks import collection_of, head_pair, require_module
from headwise.data.batches import call_model, copied, evaluation_mode
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import SiteKey
from headwise.runs.rows import MeanEstimate
from headwise.shapes import Float, Int

LayerHead = tuple[int | str, int]
"""A head: its layer's number, or the path of its attention module, and its index in the layer."""

SiteHead = tuple[SiteKey, dict[str, Any]]
"""A head: its site (a module's self- or cross-attention), and its labels in result tables."""


class PromptPairs:
    """A clean and a corrupted batch of prompts, of which one is the source of patched values and the other is the
    destination, whose run is patched. The model runs on the source batch at creation.

    Attributes:
        model: the model.
        source_run: head outputs in the run on the source batch.

    Args:
        model: the model, in evaluation mode.
        clean: prompts that the model answers correctly, by the names of the model's arguments.
        corrupted: as many prompts, with the same shapes and the same padding.
        tokens: right and wrong answers.
        direction: "denoise" if the clean batch is the source; "noise" if the corrupted batch is.
    """

    def __init__(
        self, model: nn.Module, clean: dict[str, Any], corrupted: dict[str, Any], tokens: AnswerTokens, direction: str
    ) -> None:
        self.model, self._tokens, self._direction = model, tokens, direction
        both = (clean, corrupted)
        self._source, self._destination = both if direction == "denoise" else both[::-1]
        self.source_run = RecordedRun(model)
        with restored_state(model), intercepted(model, self.source_run):
            self._source_difference = tokens.logit_difference(model, copied(self._source))
        self.source_run.require_attention()
        self._require_finite(self._source_difference, self._source)
        self._destination_difference = torch.full_like(self._source_difference, math.nan)

    def difference(self) -> Float[Tensor, " pairs"]:
        """Run the model on the destination batch, and return for each prompt pair the logit of the right answer minus
        that of the wrong one.
        """
        return self._tokens.logit_difference(self.model, copied(self._destination))

    def difference_in_other_context(self) -> Float[Tensor, " pairs"]:
        """Run the model on the destination batch, in which all tokens but those that the answers follow are those of
        the source batch. Return the differences of logits.
        """
        batch = dict(self._destination)
        for name, own in self._destination.items():
            other = self._source[name]
            if not isinstance(own, Tensor) or not isinstance(other, Tensor) or own.ndim < 2:
                continue
            try:
                positions = self._tokens.positions(self._destination, own.new_zeros(*own.shape[:2], 1))
            except InputError:  # an argument of another length than the prompts
                continue
            is_kept = torch.zeros(own.shape[:2], dtype=torch.bool, device=own.device)
            is_kept[torch.arange(len(own), device=own.device), positions] = True
            batch[name] = torch.where(is_kept.view(*own.shape[:2], *(1,) * (own.ndim - 2)), own, other)
        return self._tokens.logit_difference(self.model, copied(batch))

    def set_unpatched(self, difference: Float[Tensor, " pairs"]) -> None:
        """Store the differences of logits in the unpatched run on the destination batch.

        Raises:
            InputError: one of them is NaN or infinite.
        """
        self._require_finite(difference.detach(), self._destination)
        self._destination_difference = difference.detach()

    @property
    def unpatched(self) -> Float[Tensor, " pairs"]:
        """Difference of logits of each prompt pair in the unpatched run on the destination batch."""
        return self._destination_difference

    @property
    def _clean_and_corrupted(self) -> tuple[Tensor, Tensor]:
        """Differences of logits in the clean and in the corrupted run."""
        both = (self._source_difference, self._destination_difference)
        return both if self._direction == "denoise" else both[::-1]

    def estimates(self, difference: Float[Tensor, " pairs"]) -> dict[str, MeanEstimate]:
        """Return two means over prompt pairs: `difference`, the argument, and `recovered`, its place on a scale from 0
        (corrupted run) to 1 (clean run). Pairs whose two runs have the same difference have no `recovered`.

        Raises:
            InputError: a difference is NaN or infinite, which a mean would leave out.
        """
        if not bool(difference.isfinite().all()):
            raise InputError("model", expected="finite logits in each patched run", got="NaN or infinity")
        clean, corrupted = self._clean_and_corrupted
        gap = (clean - corrupted).double()
        recovered = ((difference - corrupted) / gap).masked_fill(gap == 0, math.nan)
        return {"recovered": MeanEstimate.of(recovered.tolist()), "difference": MeanEstimate.of(difference.tolist())}

    def heads(self, heads: Iterable[LayerHead] | None, argument: str = "heads") -> list[SiteHead]:
        """Return the site and the labels (layer, head, kv_head, module, kind) of the heads in `heads`, each head once,
        in the order of the model; those of all heads if `heads` is None.

        Raises:
            InputError: a head does not exist. `argument` is its name in the message.
        """
        all_heads = [(record.site, labels) for record, labels in self.source_run.head_labels()]
        if heads is None:
            return all_heads
        expected = "each a (layer, head) of this model"
        names = [{(labels["layer"], labels["head"]), (labels["module"], labels["head"])} for _, labels in all_heads]
        wanted = [
            head_pair(argument, head, of=expected) for head in collection_of(argument, heads, of="heads (layer, head)")
        ]
        for head in wanted:
            if not any(head in names_of_head for names_of_head in names):
                raise InputError(argument, expected=expected, got=head)
        pairs = zip(all_heads, names, strict=True)
        return [head for head, names_of_head in pairs if not names_of_head.isdisjoint(wanted)]

    def _require_finite(self, difference: Float[Tensor, " pairs"], batch: dict[str, Any]) -> None:
        """Raise `InputError` if a difference of logits in a run on a batch is NaN or infinite. The error names the
        first module in which a number is.
        """
        is_finite = difference.isfinite()
        if not bool(is_finite.all()):
            error = nonfinite_error(self.model, lambda: call_model(self.model, copied(batch)), batch, ~is_finite)
            raise error or InputError("model", expected="finite logits", got="NaN or infinity")

    @property
    def measured(self) -> dict[str, Any]:
        """Summary of the two runs without patches: the number of prompt pairs, and the mean over pairs of the logit
        difference between the right and the wrong answer in the clean run and in the corrupted run.
        """
        clean, corrupted = self._clean_and_corrupted
        return {"sequences": len(clean), "clean": clean.mean().item(), "corrupted": corrupted.mean().item()}


@contextmanager
def prompt_pairs(model: Any, clean: Any, corrupted: Any, tokens: AnswerTokens, direction: str) -> Iterator[PromptPairs]:
    """Check two batches of prompts, run the model on the one that patched values come from, and yield an object for
    both. While the context is active, the model is in evaluation mode, without gradients.

    Raises:
        InputError: an argument cannot be used, the batches do not correspond, or the model is not supported by `watch`.
    """
    require_module(model)
    require_direction(direction)
    if tokens.wrong is None:
        raise InputError("wrong", expected="the ids that the answers are compared with", got=None)
    _require_different_answers(tokens.answer, tokens.wrong)
    clean, corrupted = one_batch(model, clean, "clean"), one_batch(model, corrupted, "corrupted")
    _require_same_layout(clean, corrupted)
    with evaluation_mode(model), torch.inference_mode(False), torch.no_grad():
        yield PromptPairs(model, clean, corrupted, tokens, direction)


def _require_different_answers(answer: Int[Tensor, "*prompts"], wrong: Int[Tensor, "*prompts"]) -> None:
    """Raise `InputError` if a right answer is the wrong one, too: the difference of their logits is 0 in every run."""
    if answer.ndim and wrong.ndim and answer.shape != wrong.shape:
        return  # refused with the number of prompts
    if bool((answer == wrong).any()):
        raise InputError("wrong", expected="other tokens than the right answers", got=wrong.tolist())


def _require_same_layout(clean: Mapping[str, Any], corrupted: Mapping[str, Any]) -> None:
    """Raise `InputError` unless the clean and the corrupted batch have the same arguments of the model, with tensors of
    the same shapes and with the same padding.
    """
    if clean.keys() != corrupted.keys():
        names = ", ".join(clean) or "a tensor"
        expected = f"the arguments of clean, {names}"
        raise InputError("corrupted", expected=expected, got=", ".join(corrupted) or "a tensor")
    for name, clean_value in clean.items():
        corrupted_value = corrupted[name]
        if not isinstance(clean_value, Tensor) or not isinstance(corrupted_value, Tensor):
            continue
        if clean_value.shape != corrupted_value.shape:
            expected = f"{name or 'tokens'} of shape {tuple(clean_value.shape)}, as in clean"
            raise InputError("corrupted", expected=expected, got=tuple(corrupted_value.shape))
        if name.endswith("attention_mask") and not torch.equal(clean_value.bool(), corrupted_value.bool()):
            remedy = "pair prompts with the same number of tokens"
            raise InputError("corrupted", expected="the padding of clean", got=f"another {name}", remedy=remedy)
