"""Activation patching: heads that carry the difference between a model's answers to two similar prompts.

The prompts of a pair differ in what decides the answer. The output of a head in one run is put into the other run, one
head at a time (Vig et al. 2020; Meng et al. 2022; Wang et al. 2022). Patching from the clean run into the corrupted one
("denoise") finds heads that are sufficient to restore the answer. Patching the other way ("noise") finds heads that are
necessary for it. The two differ: of two heads with the same function, each is sufficient and neither is necessary
(Heimersheim and Nanda 2024, section 3).
"""

import math
import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.gate_interceptor import GateInterceptor, HeadGate
from headwise.analysis.prompts import AnswerTokens, one_batch
from headwise.analysis.recording import RecordedRun
from headwise.analysis.repeated_runs import RepeatedRuns, restored_state
from headwise.analysis.replacements import patch
from headwise.checks import collection_of, pair_of, require_module
from headwise.data.batches import copied, evaluation_mode
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.runs.fingerprint import run_settings
from headwise.runs.head_table import HeadTable
from headwise.runs.progress import progress_bar
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.shapes import Float

DIRECTIONS = ("denoise", "noise")

LayerHead = tuple[int | str, int]
"""A head: its layer's number, or the path of its attention module, and its index in the layer."""


class Patching(HeadTable[HeadRow]):
    """Table of the effect of patching each head, one row per head, as means over prompt pairs. `difference` is the
    logit of the right answer minus that of the wrong one in the patched run. `recovered` is the place of `difference`
    on a scale from 0 (`difference` in the corrupted run) to 1 (`difference` in the clean run).
    """

    NAME = "patching"
    ROW_TYPE = HeadRow
    SIGNED = ("recovered", "difference")
    SAMPLES = "prompt pair"


def activation_patching(
    model: nn.Module,
    clean: Tensor | Mapping[str, Any],
    corrupted: Tensor | Mapping[str, Any],
    *,
    answer: Any,
    wrong: Any,
    heads: Collection[LayerHead] | None = None,
    at: Any = -1,
    direction: str = "denoise",
    progress: bool = False,
) -> Patching:
    """Replace the output of one head at a time, in the run on the corrupted prompts, by its output in the run on the
    clean prompts (or the other way round, depending on `direction`). Measure for each head how much of the logit
    difference between the right and the wrong answer is recovered.

    With d the logit of the right answer minus that of the wrong one, each pair of prompts has

        difference  d_patched
        recovered   (d_patched - d_corrupted) / (d_clean - d_corrupted)

    and the table has their means and standard errors over pairs (Wang et al. 2022; Heimersheim and Nanda 2024).
    `recovered` is 0 if the model answers as in the corrupted run and 1 if it answers as in the clean run, in both
    directions. The mean leaves out pairs whose runs have the same difference. `difference` is in nats of log-odds.

        table = hw.activation_patching(model, clean, corrupted, answer=mary, wrong=john)
        table.head(9, 9).statistics["recovered"]        # value, sem, n

    The model runs in evaluation mode, without gradients: once per prompt batch, and once per head. The head outputs of
    one run and the layer outputs of the other are kept in memory.

    Args:
        model: any module that `watch` supports and that returns logits `(batch, length, vocabulary)`.
        clean: prompts that the model answers correctly: a tensor or a mapping of the model's arguments.
        corrupted: as many prompts, with the same shapes and the same padding.
        answer: token ids of the right answers, `(batch,)`, or one for all.
        wrong: token ids of the answers that the corrupted prompts ask for, in the same form.
        heads: heads to patch, `(layer, head)`, zero-based; all by default. A layer is its number or the path of its
            attention module.
        at: index of the prompt's token that the answer follows, without padding (by `attention_mask`): one number, or
            one per prompt. The last token by default.
        direction: "denoise" patches from the clean run into the corrupted one; "noise" patches the other way.
        progress: show a progress bar on standard error.

    Raises:
        InputError: a head, token or direction does not exist; the prompts differ in shape or padding; the model returns
            no logits, or is not supported by `watch`.
        MissingExtra: rich is not installed and `progress` is set.
    """
    tokens = AnswerTokens.from_arguments(answer, wrong, at)
    with _prompt_pair(model, clean, corrupted, tokens, direction, reuse=heads is None) as pair:
        labels = pair.labels_of(heads)
        rows = []
        with progress_bar("patching", len(labels), "heads", shown=progress) as advance:
            for head_labels in labels:
                rows.append(HeadRow(**head_labels, statistics=pair.measure_patched([head_labels])))
                advance(1, False)
        pair.warn_of_note(stacklevel=3)
        settings = run_settings(model, None, None, direction=direction, heads=len(labels))
        return Patching(tuple(rows), {**settings, "measured": pair.measured})


def patch_together(
    model: nn.Module,
    clean: Tensor | Mapping[str, Any],
    corrupted: Tensor | Mapping[str, Any],
    heads: Collection[LayerHead],
    *,
    answer: Any,
    wrong: Any,
    at: Any = -1,
    direction: str = "denoise",
) -> dict[str, MeanEstimate]:
    """Replace the outputs of several heads at once, in the run on the corrupted prompts, by their outputs in the run on
    the clean prompts (or the other way round, depending on `direction`). Return two means over prompt pairs.
    `difference` is the logit of the right answer minus that of the wrong one in this patched run. `recovered` is the
    place of `difference` on a scale from 0 (corrupted run) to 1 (clean run).

    Definitions, arguments and errors are those of `activation_patching`.

        hw.patch_together(model, clean, corrupted, [(9, 9), (9, 6)], answer=mary, wrong=john)["recovered"].value
    """
    tokens = AnswerTokens.from_arguments(answer, wrong, at)
    with _prompt_pair(model, clean, corrupted, tokens, direction, reuse=False) as pair:
        return pair.measure_patched(pair.labels_of(heads))


@contextmanager
def _prompt_pair(
    model: Any, clean: Any, corrupted: Any, tokens: AnswerTokens, direction: str, *, reuse: bool
) -> Iterator["_PromptPair"]:
    """Run the model on the clean and on the corrupted prompts, and yield an object for this pair of batches. While the
    context is active, the object can run the model on one batch with head outputs from the run on the other batch. With
    `reuse`, these runs reuse layer outputs.

    In the context the model is in evaluation mode, without gradients.
    """
    require_module(model)
    if direction not in DIRECTIONS:
        raise InputError("direction", expected=" or ".join(map(repr, DIRECTIONS)), got=repr(direction))
    if tokens.wrong is None:
        raise InputError("wrong", expected="the ids that the answers are compared with", got=None)
    clean, corrupted = one_batch(model, clean), one_batch(model, corrupted)
    _require_same_layout(clean, corrupted)
    with evaluation_mode(model), torch.inference_mode(False), torch.no_grad():
        pair = _PromptPair(model, tokens, clean, corrupted, direction, reuse=reuse)
        with intercepted(model, pair.gate_interceptor):
            yield pair


class _PromptPair:
    """A clean and a corrupted batch of prompts, with the model's runs on both. The model can be run again on one of
    them with the outputs of some heads taken from its run on the other.

    The model runs on both batches at creation; `direction` decides from which batch head outputs are patched.

    Attributes:
        gate_interceptor: puts the recorded head outputs into a run.
    """

    def __init__(
        self,
        model: nn.Module,
        tokens: AnswerTokens,
        clean: dict[str, Any],
        corrupted: dict[str, Any],
        direction: str,
        *,
        reuse: bool,
    ) -> None:
        self._model, self._tokens, self.gate_interceptor = model, tokens, GateInterceptor({})
        source, self._destination = (clean, corrupted) if direction == "denoise" else (corrupted, clean)
        self._source_run = RecordedRun(model)
        with restored_state(model), intercepted(model, self._source_run):
            source_difference = tokens.logit_difference(model, copied(source))
        self._source_run.require_attention()
        self._runs = RepeatedRuns(model, {record.site.path for record in self._source_run.records}, reuse=reuse)
        with intercepted(model, self.gate_interceptor):
            difference = self._runs.run_unchanged(self._difference)
        differences = (source_difference, difference)
        self._clean, self._corrupted = differences if direction == "denoise" else differences[::-1]

    def labels_of(self, heads: Iterable[LayerHead] | None) -> list[dict[str, Any]]:
        """Return the labels (layer, head, kv_head, module, kind) of the heads in `heads`, each head once, in the order
        of the model; the labels of all heads if `heads` is None.

        Raises:
            InputError: a head does not exist.
        """
        all_labels = [labels for _, labels in self._source_run.head_labels()]
        if heads is None:
            return all_labels
        expected = "each a (layer, head) of this model"
        names = [{(labels["layer"], labels["head"]), (labels["module"], labels["head"])} for labels in all_labels]
        heads = collection_of("heads", heads, of="heads (layer, head)")
        wanted = [pair_of("heads", head, of=expected) for head in heads]
        for head in wanted:
            if not any(head in names_of_head for names_of_head in names):
                raise InputError("heads", expected=expected, got=head)
        pairs = zip(all_labels, names, strict=True)
        return [labels for labels, names_of_head in pairs if not names_of_head.isdisjoint(wanted)]

    def measure_patched(self, labels: Iterable[Mapping[str, Any]]) -> dict[str, MeanEstimate]:
        """Run the model on one batch of the pair, with the outputs of the heads in `labels` from the run on the other
        batch. Return two means over prompt pairs. `difference` is the logit of the right answer minus that of the wrong
        one in this patched run. `recovered` is the place of `difference` on a scale from 0 (corrupted run) to 1 (clean
        run).
        """
        gates: dict[str, list[HeadGate]] = {}
        for head_labels in labels:
            gates.setdefault(head_labels["module"], []).append(HeadGate(head_labels["head"], patch(self._source_run)))
        self.gate_interceptor.gates = gates
        difference = self._runs.run_gated(self._difference, gates)
        gap = (self._clean - self._corrupted).double()
        recovered = ((difference - self._corrupted) / gap).masked_fill(gap == 0, math.nan)
        return {"recovered": MeanEstimate.of(recovered.tolist()), "difference": MeanEstimate.of(difference.tolist())}

    def _difference(self) -> Float[Tensor, " pairs"]:
        """Run the model on the batch that outputs are patched into, and return for each prompt pair the logit of the
        right answer minus that of the wrong one.
        """
        return self._tokens.logit_difference(self._model, copied(self._destination))

    def warn_of_note(self, stacklevel: int) -> None:
        """Warn, if all layers were computed in each run, that reuse of their outputs would change results."""
        if self._runs.note is not None:
            warnings.warn(self._runs.note, stacklevel=stacklevel)

    @property
    def measured(self) -> dict[str, Any]:
        """Summary of the two runs without patches: the number of prompt pairs, and the mean over pairs of the logit
        difference between the right and the wrong answer in the clean run and in the corrupted run. With a note, if all
        runs computed all layers because reuse of layer outputs would change results.
        """
        clean, corrupted = self._clean.mean().item(), self._corrupted.mean().item()
        note = {} if self._runs.note is None else {"note": self._runs.note}
        return {"sequences": len(self._clean), "clean": clean, "corrupted": corrupted, **note}


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
