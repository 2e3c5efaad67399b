"""Activation patching: heads that carry the difference between a model's answers to two similar prompts.

The prompts of a pair differ in what decides the answer. The output of a head in one run is put into the other run, one
head at a time (Vig et al. 2020; Meng et al. 2022; Wang et al. 2022). Patching from the clean run into the corrupted one
("denoise") finds heads that are sufficient to restore the answer. Patching the other way ("noise") finds heads that are
necessary for it. The two differ: of two heads with the same function, each is sufficient and neither is necessary
(Heimersheim and Nanda 2024, section 3).
"""

import warnings
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from headwise.analysis.gate import GateInterceptor, HeadGate
from headwise.analysis.patching.prompt_pair import LayerHead, PromptPairs, SiteHead, prompt_pairs
from headwise.analysis.patching.table import Patching
from headwise.analysis.prompts import AnswerTokens
from headwise.analysis.repeated_runs import RepeatedRuns
from headwise.analysis.replacements import patch
from headwise.intercept.install import intercepted
from headwise.progress import progress_bar
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import HeadRow, MeanEstimate


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
    with _activation_patches(model, clean, corrupted, tokens, direction, reuse=heads is None) as patches:
        patched_heads, rows = patches.pairs.heads(heads), []
        with progress_bar("patching", len(patched_heads), "heads", shown=progress) as bar:
            for head in bar.track(patched_heads):
                rows.append(HeadRow(**head[1], statistics=patches.measure([head])))
        patches.warn_of_note(stacklevel=3)
        settings = run_settings(model, None, None, direction=direction, heads=len(rows))
        return Patching(tuple(rows), {**settings, "measured": patches.measured})


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
    with _activation_patches(model, clean, corrupted, tokens, direction, reuse=False) as patches:
        return patches.measure(patches.pairs.heads(heads))


@contextmanager
def _activation_patches(
    model: Any, clean: Any, corrupted: Any, tokens: AnswerTokens, direction: str, *, reuse: bool
) -> Iterator["_ActivationPatches"]:
    """Run the model on the clean and on the corrupted prompts, and yield an object that can run it on one batch with
    head outputs from the run on the other batch, while the context is active. With `reuse`, these runs reuse layer
    outputs.

    In the context the model is in evaluation mode, without gradients.
    """
    with prompt_pairs(model, clean, corrupted, tokens, direction) as pairs:
        patches = _ActivationPatches(pairs, reuse=reuse)
        with intercepted(model, patches.gate_interceptor):
            yield patches


class _ActivationPatches:
    """Runs of a model on one batch of prompts, with the outputs of some heads taken from its run on another batch.

    The model runs on the patched batch at creation, without patches.

    Attributes:
        pairs: the two batches, and the run that outputs are taken from.
        gate_interceptor: puts the recorded head outputs into a run.
    """

    def __init__(self, pairs: PromptPairs, *, reuse: bool) -> None:
        self.pairs, self.gate_interceptor = pairs, GateInterceptor({})
        sites = {record.site.path for record in pairs.source_run.records}
        self._runs = RepeatedRuns(pairs.model, sites, reuse=reuse)
        with intercepted(pairs.model, self.gate_interceptor):
            pairs.set_unpatched(self._runs.run_unchanged(pairs.difference))

    def measure(self, heads: Iterable[SiteHead]) -> dict[str, MeanEstimate]:
        """Run the model on one batch of the pair, with the outputs of `heads` from the run on the other batch. Return
        two means over prompt pairs. `difference` is the logit of the right answer minus that of the wrong one in this
        patched run. `recovered` is the place of `difference` on a scale from 0 (corrupted run) to 1 (clean run).
        """
        gates: dict[str, list[HeadGate]] = {}
        paths = set()
        for site, labels in heads:
            gates.setdefault(site.label, []).append(HeadGate(labels["head"], patch(self.pairs.source_run)))
            paths.add(site.path)
        self.gate_interceptor.gates = gates
        return self.pairs.estimates(self._runs.run_gated(self.pairs.difference, paths))

    def warn_of_note(self, stacklevel: int) -> None:
        """Warn, if all layers were computed in each run, that reuse of their outputs would change results."""
        if self._runs.note is not None:
            warnings.warn(self._runs.note, stacklevel=stacklevel)

    @property
    def measured(self) -> dict[str, Any]:
        """Summary of the two runs without patches, as `PromptPairs.measured`. With a note, if all runs computed all
        layers because reuse of layer outputs would change results.
        """
        note = {} if self._runs.note is None else {"note": self._runs.note}
        return {**self.pairs.measured, **note}
