"""Path patching: effect of the direct paths from one head to the inputs of other heads, or to the logits.

Wang et al. (2022, arXiv 2211.00593, section 3 and appendix B, algorithm 1) measure the direct effect of a sender head h
on receivers R, "through residual connections and MLPs (but not through other attention heads)", with four runs of the
model. Goldowsky-Dill et al. (2023, arXiv 2304.05969) define path patching for any set of paths.
"""

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor, nn

from headwise.analysis.patching.path_runs import PathRuns
from headwise.analysis.patching.prompt_pair import LayerHead, prompt_pairs
from headwise.analysis.patching.receivers import INPUT_NAMES
from headwise.analysis.patching.table import PathPatching
from headwise.analysis.prompts import AnswerTokens
from headwise.errors import InputError
from headwise.progress import progress_bar
from headwise.runs.fingerprint import run_settings
from headwise.runs.rows import HeadRow
from headwise.settings import MLP_MODES

LOGITS = "logits"


def path_patching(
    model: nn.Module,
    clean: Tensor | Mapping[str, Any],
    corrupted: Tensor | Mapping[str, Any],
    *,
    answer: Any,
    wrong: Any,
    receivers: str | Collection[LayerHead] = LOGITS,
    input: str | None = None,  # noqa: A002
    senders: Collection[LayerHead] | None = None,
    at: Any = -1,
    direction: str = "denoise",
    mlps: str = "recompute",
    progress: bool = False,
) -> PathPatching:
    """Measure the effect of the direct paths from one sender head at a time to `receivers`: the final logits, or the
    queries, keys or values of other heads, all patched together. Paths through any third head are left out. For each
    sender, measure how much of the logit difference is recovered if the run on the corrupted prompts has these paths
    from the run on the clean prompts (or the other way round). `PathPatching` has the steps (Wang et al. 2022).

        through = hw.path_patching(model, clean, corrupted, answer=mary, wrong=john, receivers=[(9, 9)], input="q")

    Keys and values that several query heads share are patched for the receivers alone. Receivers' outputs are computed
    by the definition of attention, which must reproduce the model's own. Heads must be all that mixes tokens: with all
    heads frozen, logits must not depend on other tokens than the one that the answer follows (checked on the prompts).

    Args:
        model: any module that `watch` supports and that returns logits `(batch, length, vocabulary)`.
        clean: prompts that the model answers correctly, as for `activation_patching`.
        corrupted: as many prompts, with the same shapes and the same padding.
        answer: token ids of the right answers, `(batch,)`, or one for all.
        wrong: token ids of the answers that the corrupted prompts ask for, in the same form.
        receivers: "logits", or heads `(layer, head)`, zero-based.
        input: inputs of the receiving heads that are patched: "q", "k" or "v", or several of these letters.
        senders: heads whose paths are patched, one row of the table each; all by default.
        at: index of the token that the answer follows, as for `activation_patching`.
        direction: "denoise" patches from the clean run into the corrupted one; "noise" patches the other way.
        mlps: "recompute" or "freeze", in the run in which all heads but the sender are frozen.
        progress: show a progress bar on standard error.

    Raises:
        InputError: as for `activation_patching`; attention cannot be frozen, or something else mixes tokens; queries,
            keys and values of a receiver are unknown or do not reproduce its output; MLPs cannot be frozen.
        MissingExtra: rich is not installed and `progress` is set.
    """
    names = _checked_names(receivers, input)
    _require_mode(mlps)
    tokens = AnswerTokens.from_arguments(answer, wrong, at)
    with prompt_pairs(model, clean, corrupted, tokens, direction) as pairs:
        table_heads = pairs.heads(senders, "senders")
        receiving = [] if isinstance(receivers, str) else pairs.heads(receivers, "receivers")
        paths, rows = PathRuns(pairs, receiving, names, freeze_mlps=mlps == "freeze"), []
        with paths.intercepted(), progress_bar("paths", len(table_heads), "heads", shown=progress) as bar:
            for site, labels in bar.track(table_heads):
                rows.append(HeadRow(**labels, statistics=pairs.estimates(paths.difference([(site, labels["head"])]))))
        named = [[labels["module"], labels["head"]] for _, labels in receiving] or LOGITS
        options = {"direction": direction, "receivers": named, "input": input, "mlps": mlps, "heads": len(rows)}
        measured = {**pairs.measured, **paths.note}
        return PathPatching(tuple(rows), {**run_settings(model, None, None, **options), "measured": measured})


def _checked_names(receivers: Any, names: Any) -> tuple[str, ...]:
    """Return the names of the inputs of receivers that are patched, from the argument `input`; none for the logits.

    Raises:
        InputError: other receivers or inputs, or inputs of the logits.
    """
    if isinstance(receivers, str):
        if receivers != LOGITS:
            raise InputError("receivers", expected="'logits' or heads (layer, head)", got=repr(receivers))
        if names is not None:
            raise InputError("input", expected='None for receivers="logits"', got=repr(names))
        return ()
    is_valid = isinstance(names, str) and names and set(names) <= set(INPUT_NAMES) and len(set(names)) == len(names)
    if not is_valid:
        expected = "the inputs of the receivers to patch: 'q', 'k' or 'v', or several letters"
        raise InputError("input", expected=expected, got=repr(names))
    return tuple(names)


def _require_mode(mlps: Any) -> None:
    """Raise `InputError` unless the argument `mlps` is "recompute" or "freeze"."""
    if mlps not in MLP_MODES:
        raise InputError("mlps", expected=" or ".join(map(repr, MLP_MODES)), got=repr(mlps))
