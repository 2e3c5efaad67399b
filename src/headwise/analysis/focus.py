"""Heads by focus: how much more attention given words receive, or exchange, than under uniform attention.

F are the words of the focus, A the attention weights between words (sums over the tokens of a key word, means over the
tokens of a query word that see a key), and U the same under uniform attention over the tokens that each query token
sees.

    received    mean over query words i outside F of sum_{j in F} A_ij
    exchanged   mean over query words i in F of sum_{j in F, j != i} A_ij

Query words that are special tokens do not count, nor do words of F that see no other word of F. The *excess* of a head
is its share minus the share of U. A head *has* a focus if its share is at least one half, as for roles, and its excess
is positive; over at least five texts, the excess must be positive by a t-test over texts, one-sided, at 5 %, corrected
for the number of heads of the model (Bonferroni). Fewer texts are not tested: nearly equal excesses on two texts would
be significant by chance, whatever caused them.
"""

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.head_view import HeadView, ViewedText
from headwise.analysis.roles import HALF
from headwise.analysis.view_contents import Viewed
from headwise.errors import InputError, require
from headwise.page.columns import ModelIdentity
from headwise.page.contents import AllWeights, VisibleKeys
from headwise.runs.rows import MeanEstimate
from headwise.settings import FOCUS_KINDS
from headwise.shapes import Bool, Float
from headwise.wording import counted

LEAST_EXCESS = 1e-4
"""Excess from which on attention is more than uniform; rounding stays below it."""

NAMED = 8
"""Largest number of heads that a verdict names."""

MIN_TESTED_TEXTS = 5
"""Least number of texts that are tested."""

SIGNIFICANCE = 0.05
"""Probability of a false finding among all heads."""


@dataclass(frozen=True)
class HeadFocus:
    """Attention that one head pays to the words of a focus.

    Attributes:
        head: the head, of the first text.
        index: index of the head in the view.
        share: mean share of attention on the words, over texts.
        uniform: the same under uniform attention over the same keys.
        excess: `share - uniform`: mean over texts, standard error and number of texts.
        p: p-value of the test that the excess is not positive, corrected for the number of heads; NaN for fewer than
            five texts.
        other: word or special token outside of the focus that gets most attention from the same words.
        other_share: mean share of attention on it, over texts.
    """

    head: HeadView
    index: int
    share: float
    uniform: float
    excess: MeanEstimate
    p: float
    other: str
    other_share: float

    @property
    def has_focus(self) -> bool:
        """True if half of the attention is on the words, more than under uniform attention, and the excess is
        significant if it was tested.
        """
        return self.share >= HALF and self.excess.value > LEAST_EXCESS and not self.p > SIGNIFICANCE


@dataclass(frozen=True)
class Focus:
    """Words of one or more texts, and the heads by the attention that these words receive or exchange.

    Attributes:
        name: name of the focus, for display.
        kind: "received" or "exchanged".
        words: for each text, the indices of the words.
        heads: all heads, the one with the largest excess first.
        texts: the texts.
        identities: identity of the model that read each text; None if it is unknown.
    """

    name: str
    kind: str
    words: tuple[tuple[int, ...], ...]
    heads: tuple[HeadFocus, ...]
    texts: tuple[ViewedText, ...]
    identities: tuple[ModelIdentity | None, ...]

    def __repr__(self) -> str:
        best = self.heads[0]
        shares = f"{best.share:.2f}, uniform {best.uniform:.2f}"
        return f"Focus({self.name!r} {self.kind} in {counted(len(self.words), 'text')}: head {best.head.name} {shares})"

    @property
    def verdict(self) -> str:
        """Sentences that state which heads have the focus."""
        texts, largest = len(self.words), max(self.heads, key=lambda each: each.share)
        is_tested = texts >= MIN_TESTED_TEXTS
        names = [each.head.name for each in self.heads if each.has_focus]
        on = "on" if self.kind == "received" else "among"
        more = "significantly more" if is_tested else "more"
        if names:
            subject, verb, their = ("Heads", "have", "their") if len(names) > 1 else ("Head", "has", "its")
            verdict = (
                f"{subject} {_listed(names)} {verb} this focus: at least half of {their} attention "
                f"is {on} these words, {more} than under uniform attention."
            )
        elif largest.share < HALF:
            verdict = (
                f"No head puts at least half of its attention {on} these words. Head {largest.head.name} comes "
                f"closest: {100 * largest.share:.0f} % (uniform attention: {100 * largest.uniform:.0f} %)."
            )
        else:
            verdict = (
                f"No head has this focus: where at least half of the attention is {on} these words, it is not {more} "
                f"than under uniform attention."
            )
        if texts == 1:
            return verdict
        if not is_tested:
            return f"{verdict} This is not tested: {texts} texts are fewer than {MIN_TESTED_TEXTS}."
        significant = [
            each.head.name for each in self.heads if each.excess.value > LEAST_EXCESS and each.p <= SIGNIFICANCE
        ]
        return (
            f"{verdict} In {len(significant)} of {len(self.heads)} heads{_in_brackets(significant)}, the words get "
            f"significantly more attention than under uniform attention ({texts} texts, one-sided t-test at 5 %, "
            f"Bonferroni-corrected)."
        )

    @property
    def note(self) -> str:
        """Sentence that names what the head with the largest excess attends to more than to the focus; otherwise ""."""
        best = self.heads[0]
        if best.other_share <= best.share + LEAST_EXCESS:
            return ""
        return f"Head {best.head.name} puts more on {best.other}: {100 * best.other_share:.0f} %."

    def rows(self) -> list[dict[str, Any]]:
        """Return one dictionary per head, the one with the largest excess first: layer, head, module, kind, role,
        share, uniform, excess, its standard error `excess_sem`, number of texts `excess_n` and degrees of freedom
        `excess_df`, p and has_focus.
        """
        return [
            {
                "layer": each.head.layer,
                "head": each.head.head,
                "module": each.head.module,
                "kind": each.head.kind,
                "role": each.head.role.name,
                "share": each.share,
                "uniform": each.uniform,
                **each.excess.columns("excess"),
                "p": each.p,
                "has_focus": each.has_focus,
            }
            for each in self.heads
        ]

    def table(self) -> Any:
        """Return the rows as a pandas DataFrame.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return require("pandas", purpose="a table", extra="tables").DataFrame(self.rows())


def _listed(names: Sequence[str]) -> str:
    """Return the first names of heads, separated by commas, and the number of others."""
    others = f" and {counted(len(names) - NAMED, 'other')}" if len(names) > NAMED else ""
    return ", ".join(names[:NAMED]) + others


def _in_brackets(names: Sequence[str]) -> str:
    """Return names of heads in brackets after a blank; empty without names."""
    return f" ({_listed(names)})" if names else ""


def find_heads(views: Sequence[Viewed], focus: Sequence[Any], kind: str, name: str | None) -> Focus:
    """Rank the heads of views of one or more texts, for `View.find` and `ViewSet.find`, whose docstrings describe the
    arguments.
    """
    if kind not in FOCUS_KINDS:
        raise InputError("kind", expected='"received" or "exchanged"', got=repr(kind))
    by_text = _words_by_text(views, focus)
    _require_different(views)
    if name is None:
        words = [
            view.texts[0].words[index].text for view, chosen in zip(views, by_text, strict=True) for index in chosen
        ]
        name = ", ".join(dict.fromkeys(words))
    indices = [index for index, head in enumerate(views[0].heads) if head.attention.keys == 0]
    if kind == "exchanged":
        indices = [index for index in indices if views[0].heads[index].attention.queries == 0]
    shares = [
        [_shares(view, view.heads[index], words, kind) for view, words in zip(views, by_text, strict=True)]
        for index in indices
    ]
    heads = [
        _head_focus(views[0].heads[index], index, of_texts, views[0].head_count)
        for index, of_texts in zip(indices, shares, strict=True)
    ]
    heads.sort(key=lambda each: each.excess.value, reverse=True)
    identities = tuple(view.identity for view in views)
    return Focus(name, kind, tuple(by_text), tuple(heads), tuple(view.texts[0] for view in views), identities)


def _words_by_text(views: Sequence[Viewed], focus: Any) -> list[tuple[int, ...]]:
    """Return the indices of the words of a focus in the first text of each view."""
    if isinstance(focus, str) or not isinstance(focus, Sequence) or not focus:
        raise InputError("focus", expected='a list of words, such as ["coffee", "tea"]', got=repr(focus))
    by_text = list(focus)
    if not all(isinstance(each, Sequence) and not isinstance(each, str) for each in focus):
        by_text = [focus] * len(views)
    if len(by_text) != len(views):
        raise InputError("focus", expected=f"{len(views)} lists of words, one per text", got=len(by_text))
    return [_word_indices(view.texts[0], words) for view, words in zip(views, by_text, strict=True)]


def _require_different(views: Sequence[Viewed]) -> None:
    """Raise `InputError` if a model read the same tokens in two of several texts: the test would count one text as
    two.
    """
    texts = [_content(view.texts[0]) for view in views]
    repeated = [view.texts[0].text for view, tokens in zip(views, texts, strict=True) if texts.count(tokens) > 1]
    if repeated:
        remedy = "view each text once"
        raise InputError("texts", expected="different texts", got=f"{repeated[0][:60]!r} twice", remedy=remedy)


def _content(text: ViewedText) -> Any:
    """Return what the model read, in a form that can be compared: token ids, or an image."""
    return text.picture if text.ids is None else tuple(text.ids[0].tolist())


def _word_indices(text: ViewedText, words: Sequence[Any]) -> tuple[int, ...]:
    """Return the indices of words in a text, in the order of the text: all occurrences of words stated as strings."""
    chosen: set[int] = set()
    for word in words:
        if isinstance(word, int) and not isinstance(word, bool):
            if not 0 <= word < len(text.words):
                raise InputError("focus", expected=f"indices of words from 0 to {len(text.words) - 1}", got=word)
            chosen.add(word)
            continue
        found = [index for index, each in enumerate(text.words) if each.text.casefold() == str(word).strip().casefold()]
        if not found:
            shown = ", ".join(dict.fromkeys(each.text for each in text.words[:40]))
            raise InputError("focus", expected=f"words of the text ({shown})", got=repr(word))
        chosen.update(found)
    if not chosen:
        raise InputError("focus", expected="at least one word for each text", got="none")
    return tuple(sorted(chosen))


def _shares(view: Viewed, head: HeadView, words: tuple[int, ...], kind: str) -> tuple[float, float, dict[str, float]]:
    """Return the mean share of attention on the words of a focus in one head and text, the same under uniform
    attention, and the mean share on each other word.
    """
    attention, queries, keys = head.attention, view.texts[head.attention.queries], view.texts[head.attention.keys]
    if not isinstance(attention.weights, AllWeights):
        remedy = f"pass keep_all={len(keys.tokens)} to view, which then keeps all weights in memory"
        raise InputError("focus", expected="a text whose weights were all kept", got="a longer text", remedy=remedy)
    is_visible = _as_matrix(attention.visible, len(keys.tokens))
    uniform = is_visible / is_visible.sum(-1, keepdim=True).clamp(min=1)
    has_key = is_visible.any(-1)
    weights, uniform = (
        _between_words(matrix, queries, keys, has_key) for matrix in (attention.weights.weights, uniform)
    )
    in_focus = torch.zeros(len(keys.words), dtype=torch.bool)
    in_focus[list(words)] = True
    is_row = torch.tensor([not word.special for word in queries.words])
    is_self = attention.queries == attention.keys
    columns = in_focus.expand(len(queries.words), -1).clone()
    if kind == "exchanged":
        columns.fill_diagonal_(False)
        is_row &= in_focus & ((uniform * columns).sum(-1) > 0)
    else:
        is_row &= uniform.sum(-1) > 0
        if is_self:
            is_row &= ~in_focus
    if not is_row.any():
        needed = "a word outside of the focus" if kind == "received" else "two words that can attend to each other"
        raise InputError("focus", expected=needed, got=", ".join(keys.words[index].text for index in words))
    share, of_uniform = (float((matrix * columns).sum(-1)[is_row].double().mean()) for matrix in (weights, uniform))
    others: dict[str, float] = {}
    for word, own in zip(keys.words, weights[is_row].double().mean(0).masked_fill(in_focus, 0.0).tolist(), strict=True):
        name = word.text if word.special else repr(word.text)
        others[name] = others.get(name, 0.0) + own
    return share, of_uniform, others


def _between_words(
    weights: Float[Tensor, "queries keys"], queries: ViewedText, keys: ViewedText, has_key: Bool[Tensor, " queries"]
) -> Float[Tensor, "query_words key_words"]:
    """Return weights between words: sums over the tokens of a key word, means over those tokens of a query word that
    see a key.
    """
    to_words = torch.zeros(len(weights), len(keys.words)).index_add_(1, keys.word_of, weights.float())
    sums = torch.zeros(len(queries.words), len(keys.words)).index_add_(0, queries.word_of, to_words)
    rows = torch.zeros(len(queries.words)).index_add_(0, queries.word_of, has_key.float())
    return sums / rows.clamp(min=1)[:, None]


def _as_matrix(visible: VisibleKeys, keys: int) -> Bool[Tensor, "queries keys"]:
    """Return True where a query may attend to a key."""
    edges = torch.zeros(len(visible.runs), keys + 1, dtype=torch.int32)
    rows = torch.arange(len(visible.runs)).repeat_interleave(visible.runs)
    ones = torch.ones(len(rows), dtype=torch.int32)
    edges.index_put_((rows, visible.starts), ones, accumulate=True)
    edges.index_put_((rows, visible.stops), -ones, accumulate=True)
    return edges.cumsum(1)[:, :keys] > 0


def _head_focus(
    head: HeadView, index: int, shares: Sequence[tuple[float, float, dict[str, float]]], heads: int
) -> HeadFocus:
    """Return the focus of one head from its share, the share under uniform attention, and those of other words, on each
    text.
    """
    excesses = [share - uniform for share, uniform, _ in shares]
    share, uniform = (math.fsum(part) / len(shares) for part in zip(*(each[:2] for each in shares), strict=True))
    sums: Counter[str] = Counter()
    for *_, others in shares:
        sums.update(others)
    other, other_sum = sums.most_common(1)[0]
    p = math.nan
    if len(shares) >= MIN_TESTED_TEXTS:
        stats = require("scipy.stats", purpose="testing several texts", extra="tables")
        is_constant = len(set(excesses)) == 1  # as for equal texts, which are no evidence
        p = 1.0 if is_constant else float(stats.ttest_1samp(excesses, 0.0, alternative="greater").pvalue)
        p = min(1.0, p * heads)
    return HeadFocus(head, index, share, uniform, MeanEstimate.of(excesses), p, other, other_sum / len(shares))
