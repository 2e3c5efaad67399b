"""Activation patching: heads that carry the difference between a model's answers to two similar prompts.

The prompts of a pair differ in what decides the answer. The output of a head in one run is put into the other run, one
head at a time (Vig et al. 2020; Meng et al. 2022; Wang et al. 2022). Patching from the clean run into the corrupted one
("denoise") finds heads that are sufficient to restore the answer. Patching the other way ("noise") finds heads that are
necessary for it. The two differ: of two heads with the same function, each is sufficient and neither is necessary
(Heimersheim and Nanda 2024, section 3).
"""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from headwise.analysis.gate import GateInterceptor, HeadGate
from headwise.analysis.patching.prompt_pairs import LayerHead, PromptPairs, SiteHead, prompt_pairs
from headwise.analysis.repeated_runs import RepeatedRuns
from headwise.analysis.replacements import patch
from headwise.intercept.install import intercepted
from headwise.progress import progress_bar
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.statistics.columns import Column


class Patching(HeadTable[HeadRow]):
    """Table of the effect of patching each head, one row per head. Patching replaces the head's output by its output in
    a run on other prompts. `difference` is the logit of the right answer minus that of the wrong one in the patched
    run. `recovered` is this difference on a scale from 0 (its value in the unpatched corrupted run) to 1 (its value in
    the unpatched clean run). Both columns are means over prompt pairs.
    """

    NAME = "patching"
    COLUMNS = (
        Column("recovered", "Place of the difference between its values in both runs.", is_signed=True, is_tested=True),
        Column("difference", "Logit of the right answer minus that of the wrong one.", "logit", is_signed=True),
    )
    SAMPLES = "prompt pair"

    def column(self, name: str) -> Column:
        """Return the description of the column `name`. It includes the value that the column has if a patch changes
        nothing. For the direction "denoise", this is the value in the corrupted run (0 for `recovered`). For "noise",
        it is the value in the clean run (1 for `recovered`).
        """
        is_noise = self.metadata.get("settings", {}).get("direction") == "noise"
        null = float(is_noise)
        if name == "difference":
            null = float(self.metadata["measured"]["clean" if is_noise else "corrupted"])
        return replace(super().column(name), null=null)


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
    """Patch one head at a time: replace its output in the run on the corrupted prompts by its output in the run on the
    clean prompts. With the direction "noise", the two runs change places. The table states how much of the logit
    difference between the right and the wrong answer each patch recovers.

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
    with prompt_pairs(model, clean, corrupted, direction, answer=answer, wrong=wrong, at=at) as pairs:
        patched_heads, rows = pairs.heads(heads), []
        with (
            _patched_runs(pairs, reuse=heads is None) as (runs, measure),
            progress_bar("patching", len(patched_heads), "heads", shown=progress) as bar,
        ):
            for head in bar.track(patched_heads):
                rows.append(HeadRow(**head[1], statistics=measure([head])))
        if runs.note is not None:
            warnings.warn(runs.note, stacklevel=2)
        note = {} if runs.note is None else {"note": runs.note}
        return pairs.table(Patching, rows, note, heads=len(rows))


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
    """Patch several heads at once: replace their outputs in the run on the corrupted prompts by their outputs in the
    run on the clean prompts. With the direction "noise", the two runs change places. Return two means over prompt
    pairs. `difference` is the logit of the right answer minus that of the wrong one in the patched run. `recovered` is
    this difference on a scale from 0 (its value in the unpatched corrupted run) to 1 (its value in the unpatched clean
    run).

    Definitions, arguments and errors are those of `activation_patching`.

        hw.patch_together(model, clean, corrupted, [(9, 9), (9, 6)], answer=mary, wrong=john)["recovered"].value
    """
    with prompt_pairs(model, clean, corrupted, direction, answer=answer, wrong=wrong, at=at) as pairs:
        patched_heads = pairs.heads(heads)
        with _patched_runs(pairs, reuse=False) as (_, measure):
            return measure(patched_heads)


@contextmanager
def _patched_runs(
    pairs: PromptPairs, *, reuse: bool
) -> Iterator[tuple[RepeatedRuns, Callable[[Collection[SiteHead]], dict[str, MeanEstimate]]]]:
    """Run the model without patches on the destination batch (the one that is patched), and yield two things. The first
    is a `RepeatedRuns`, which repeats this run with patches. The second is a function that replaces the outputs of the
    given heads by those in the source run, and returns the means `difference` and `recovered`.
    """
    gates = GateInterceptor({})
    runs = RepeatedRuns(pairs.model, pairs.paths, reuse=reuse)

    def measure(heads: Collection[SiteHead]) -> dict[str, MeanEstimate]:
        gates_of: dict[str, list[HeadGate]] = {}
        for site, labels in heads:
            gates_of.setdefault(site.label, []).append(HeadGate(labels["head"], patch(pairs.source_run)))
        gates.gates = gates_of
        return pairs.estimates(runs.run_gated(pairs.difference, {site.path for site, _ in heads}))

    with intercepted(pairs.model, gates):
        pairs.set_unpatched(runs.run_unchanged(pairs.difference))
        yield runs, measure
