"""`activation_patching`: which heads carry what makes a model answer one prompt and not another like it.

The prompts of a pair differ in what decides the answer. What a head gave in one run is put into the other, one head at
a time (Vig et al. 2020; Meng et al. 2022; Wang et al. 2022). Put from the clean run into the corrupted one
("denoise"), it shows the heads that are enough to bring the answer back; the other way ("noise"), those without which
it is lost. These are not the same heads: of two that do the same, both are enough and neither is needed (Heimersheim
and Nanda 2024, section 3).
"""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.gate import Gated, Gates
from headwise.analysis.prompts import Question, Recorded, one_batch
from headwise.analysis.recording import require_module
from headwise.analysis.replacements import patch
from headwise.data.batches import evaluation_mode
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.replay import Replay
from headwise.runs.fingerprint import run_settings
from headwise.runs.progress import progress_bar
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.table import HeadTable

DIRECTIONS = ("denoise", "noise")

Place = tuple[int | str, int]
"""A head: its layer, by number or by the path of the module that attends, and its number there."""


class Patching(HeadTable[HeadRow]):
    """What each head's output does to the answer in another run: `recovered`, a share, and `difference` of logits."""

    NAME = "patching"
    ROW_TYPE = HeadRow


def activation_patching(
    model: nn.Module,
    clean: Tensor | Mapping[str, Any],
    corrupted: Tensor | Mapping[str, Any],
    *,
    answer: Any,
    wrong: Any,
    heads: Collection[Place] | None = None,
    at: Any = -1,
    direction: str = "denoise",
    progress: bool = False,
) -> Patching:
    """Put the output of each head, one at a time, from one run into another, and see what becomes of the answer.

    With d the logit of the answer less that of the wrong token, a head has, of every pair of prompts,

        difference  d, patched
        recovered   (d_patched - d_corrupted) / (d_clean - d_corrupted)

    whose means and standard errors over the pairs are the table. `recovered` is 0 where the model answers as in the
    corrupted run and 1 where it answers as in the clean one, whichever the direction; a pair of equal differences has
    none. The model runs in evaluation mode, without gradients, once a head and twice more, and what both runs gave is
    in memory.

    Args:
        model: gives `logits (batch, length, vocabulary)`, and is one that `watch` can see into.
        clean: prompts that the model answers rightly, as it takes them.
        corrupted: the same number of others, of the same lengths and padding.
        answer: ids of the right tokens, `(batch,)`, or one for all.
        wrong: ids of the tokens that the corrupted prompts ask for, likewise.
        heads: which are put, `(layer, head)`, zero-based; all by default. A layer is its number, or the path of the
            module that attends.
        at: which of a prompt's tokens the answer follows, padding (by `attention_mask`) not counted: a number, or one
            a prompt. The last by default.
        direction: "denoise", from the clean run into the corrupted one, or "noise", the other way.
        progress: show a bar on standard error.

    Raises:
        InputError: no such head, token or direction; prompts that are not of one shape; a model without logits, or that
            `watch` refuses.
        MissingExtra: a bar, and rich is not installed.
    """
    with _paired(model, clean, corrupted, Question.of(answer, wrong, at), direction) as pair:
        chosen = pair.places(heads)
        rows = []
        with progress_bar("patching", len(chosen), "heads", shown=progress) as advance:
            for place in chosen:
                rows.append(HeadRow(**place, statistics=pair.patched([place])))
                advance(1, False)
        settings = run_settings(model, None, None, direction=direction, heads=len(chosen))
        return Patching(tuple(rows), {**settings, "measured": pair.measured})


def patch_together(
    model: nn.Module,
    clean: Tensor | Mapping[str, Any],
    corrupted: Tensor | Mapping[str, Any],
    heads: Collection[Place],
    *,
    answer: Any,
    wrong: Any,
    at: Any = -1,
    direction: str = "denoise",
) -> dict[str, MeanEstimate]:
    """What `activation_patching` measures, of some heads put at once: `recovered` and `difference`.

    The arguments, and what is refused, are those of `activation_patching`.
    """
    with _paired(model, clean, corrupted, Question.of(answer, wrong, at), direction) as pair:
        return pair.patched(pair.places(heads))


@contextmanager
def _paired(model: Any, clean: Any, corrupted: Any, question: Question, direction: str) -> Iterator["_Pair"]:
    """Both runs. Within the context the model is in evaluation mode, and no gradients are kept."""
    require_module(model)
    if direction not in DIRECTIONS:
        raise InputError("direction", expected=" or ".join(map(repr, DIRECTIONS)), got=repr(direction))
    if question.wrong is None:
        raise InputError("wrong", expected="the ids that the answers are held against", got=None)
    clean, corrupted = one_batch(model, clean), one_batch(model, corrupted)
    _require_alike(clean, corrupted)
    with evaluation_mode(model), torch.no_grad():
        pair = _Pair(model, question, clean, corrupted, direction)
        with intercepted(model, pair.gates):
            yield pair


class _Pair:
    """A clean and a corrupted run, and what becomes of one that is given heads of the other.

    Attributes:
        gates: what gives them.
    """

    def __init__(
        self, model: nn.Module, question: Question, clean: dict[str, Any], corrupted: dict[str, Any], direction: str
    ) -> None:
        self._model, self._question, self.gates = model, question, Gates({})
        giver, self._taker = (clean, corrupted) if direction == "denoise" else (corrupted, clean)
        self._run = Recorded(model)
        with intercepted(model, self._run):
            given = question.difference(model, giver)
        self._run.require_attention()
        self._replay = Replay(model, [record.site.path for record in self._run.records])
        with self._replay.keeping():
            taken = question.difference(model, self._taker)
        self._clean, self._corrupted = (given, taken) if direction == "denoise" else (taken, given)

    def places(self, heads: Iterable[Place] | None) -> list[dict[str, Any]]:
        """What the heads are in words, in the order of the model. `InputError` where one is not there."""
        places = [place for _, place in self._run.head_labels()]
        if heads is None:
            return places
        names = [{(place["layer"], place["head"]), (place["module"], place["head"])} for place in places]
        wanted = [tuple(head) if isinstance(head, list) else head for head in heads]
        for head in wanted:
            if not any(head in each for each in names):
                raise InputError("heads", expected="each a (layer, head) of this model", got=head)
        return [place for place, each in zip(places, names, strict=True) if not each.isdisjoint(wanted)]

    def patched(self, places: Iterable[Mapping[str, Any]]) -> dict[str, MeanEstimate]:
        """The statistics where these heads are put."""
        self.gates.of = {}
        for place in places:
            self.gates.of.setdefault(place["module"], []).append(Gated(place["head"], patch(self._run)))
        with self._replay.until(self.gates.of):
            difference = self._question.difference(self._model, self._taker)
        gap = (self._clean - self._corrupted).double()
        recovered = ((difference - self._corrupted) / gap).masked_fill(gap == 0, math.nan)
        return {"recovered": MeanEstimate.of(recovered.tolist()), "difference": MeanEstimate.of(difference.tolist())}

    @property
    def measured(self) -> dict[str, Any]:
        """What both runs answer as they are."""
        clean, corrupted = self._clean.mean().item(), self._corrupted.mean().item()
        return {"sequences": len(self._clean), "clean": clean, "corrupted": corrupted}


def _require_alike(clean: Mapping[str, Any], corrupted: Mapping[str, Any]) -> None:
    """Refuse prompts whose tokens do not stand at the same places."""
    if clean.keys() != corrupted.keys():
        names = ", ".join(clean) or "a tensor"
        raise InputError("corrupted", expected=f"what clean has, {names}", got=", ".join(corrupted) or "a tensor")
    for name, one in clean.items():
        other = corrupted[name]
        if not isinstance(one, Tensor) or not isinstance(other, Tensor):
            continue
        if one.shape != other.shape:
            expected = f"{name or 'tokens'} of shape {tuple(one.shape)}, as in clean"
            raise InputError("corrupted", expected=expected, got=tuple(other.shape))
        if name.endswith("attention_mask") and not torch.equal(one.bool(), other.bool()):
            remedy = "pair prompts of as many tokens"
            raise InputError("corrupted", expected="the padding of clean", got=f"another {name}", remedy=remedy)
