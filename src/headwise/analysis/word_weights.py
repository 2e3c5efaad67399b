"""Attention weights between the words of a text, or from the words of one text to those of another."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.head_view import Link
from headwise.analysis.visible_weights import VisibleWeights, largest
from headwise.shapes import Bool, Float, Int

TOP = 8
"""Number of keys that are kept for each word."""

PICTURE = 64
"""Largest number of rows and columns of a head's picture; longer texts are pooled."""


@dataclass(frozen=True, eq=False)
class TokensOfWords:
    """Words of one side of attention, the queries or the keys.

    Attributes:
        word_of: index of each token's word.
        is_lexical: True for the words that a link may join.
    """

    word_of: Int[Tensor, " tokens"]
    is_lexical: Bool[Tensor, " words"]

    @property
    def count(self) -> int:
        """Number of words."""
        return len(self.is_lexical)

    @property
    def cell_of(self) -> Int[Tensor, " words"]:
        """Row or column of each word in a head's picture."""
        return torch.arange(self.count) * min(self.count, PICTURE) // self.count


class WordWeights:
    """Attention weights between words for each head, added up from blocks of token rows. They are reduced to the
    strongest link of each word to another word, the words that each word attends to most, and a small picture of the
    weight matrix.

    Weights to the tokens of a word are summed, and those from its tokens averaged, so that each word's weights still
    add up to 1 (Clark et al. 2019, section 4.1). The row blocks of a head come in the order of the rows; a word may
    begin in one block and end in another.

    Args:
        heads: number of heads.
        queries: words of the queries.
        keys: words of the keys; the same object in self-attention.

    Attributes:
        leaves_out_first: True if no link goes to the first word, because the first token sees no other token. Such a
            token is the attention sink of most decoders (Xiao et al. 2023), and would be the end of nearly all links.
    """

    def __init__(self, heads: int, queries: TokensOfWords, keys: TokensOfWords) -> None:
        self.queries, self.keys = queries, keys
        self.token_counts = torch.bincount(queries.word_of, minlength=queries.count)
        top = min(TOP, keys.count)
        self.picture = torch.zeros(heads, min(queries.count, PICTURE), min(keys.count, PICTURE))
        self.top_keys = torch.zeros(heads, queries.count, top, dtype=torch.int64)
        self.top_weights = torch.zeros(heads, queries.count, top)
        self.best_key = torch.zeros(heads, queries.count, dtype=torch.int64)
        self.best_weight = torch.full((heads, queries.count), -1.0)
        self.leaves_out_first = False
        self._unfinished = torch.zeros(heads, keys.count)  # weights of the word whose last rows are still to come
        self._has_unfinished = torch.zeros(heads, dtype=torch.bool)

    @property
    def is_self_attention(self) -> bool:
        """True if queries and keys are the same words."""
        return self.queries is self.keys

    def add(self, block: VisibleWeights) -> None:
        """Add the attention weights of one block of token rows. The weights of a word enter the strongest links, the
        lists of most attended words and the picture once the rows of all tokens of the word have been added.
        """
        weights, part, rows, word_of = block.weights, block.heads, block.rows, self.queries.word_of
        if self.is_self_attention and rows.start == 0 and len(word_of) > 1:
            self.leaves_out_first = block.most_visible_to_first_row == 1
        word_of_rows = word_of[rows.start : rows.stop]
        word_of_columns = self.keys.word_of[block.keys]
        first, last = int(word_of_rows[0]), int(word_of_rows[-1])
        # Words after the last visible key have no weight, except in rows of a word that began in the block before.
        words = self.keys.count if self._has_unfinished[part].any() else int(word_of_columns[-1]) + 1
        sums = _sums_of_words(weights, word_of_rows - first, word_of_columns, words)
        if self._has_unfinished[part].any():
            sums[:, 0] += self._unfinished[part]
        self._unfinished[part], self._has_unfinished[part] = 0.0, False
        if rows.stop < len(word_of) and int(word_of[rows.stop]) == last:
            self._unfinished[part, :words], self._has_unfinished[part] = sums[:, -1], True
            sums, last = sums[:, :-1], last - 1
        if last >= first:
            self._add_words(part, range(first, last + 1), sums / self.token_counts[first : last + 1, None])

    def _add_words(self, part: slice, words: range, weights: Float[Tensor, "heads queries words"]) -> None:
        """Update the pictures, the most attended words (top keys) and the strongest links of the heads in `part`.
        `weights` are the attention weights of the words `words`, whose token rows have all been added.

        Args:
            part: the heads.
            words: indices of the words.
            weights: their weights.
        """
        queries = torch.arange(words.start, words.stop)
        selected = slice(words.start, words.stop)
        shown = weights.shape[-1]  # the words that are not after all visible keys
        rows, columns = self.queries.cell_of, self.keys.cell_of[:shown]
        first, last = int(rows[words.start]), int(rows[words.stop - 1])
        pooled = torch.zeros(len(weights), last + 1 - first, shown).index_add_(1, rows[queries] - first, weights)
        pooled /= torch.bincount(rows)[first : last + 1, None]
        self.picture[part, first : last + 1] += torch.zeros(*pooled.shape[:2], self.picture.shape[2]).index_add_(
            2, columns, pooled
        )
        top_weights, top_keys = largest(weights, min(TOP, shown))
        self.top_weights[part, selected, : top_keys.shape[-1]] = top_weights
        self.top_keys[part, selected, : top_keys.shape[-1]] = top_keys
        is_eligible = self._is_eligible(queries[:, None], top_keys)
        best = top_weights.masked_fill(~is_eligible, -1.0).max(-1)
        best_weight, best_key = best.values, top_keys.gather(-1, best.indices[..., None])[..., 0]
        # Rarely none of a word's most attended words may be linked.
        head, row = (best_weight < 0).logical_and_(self.queries.is_lexical[queries]).nonzero().unbind(-1)
        if shown > TOP and len(row):
            is_eligible = self._is_eligible(queries[row, None], torch.arange(shown))
            best_weight[head, row], best_key[head, row] = weights[head, row].masked_fill(~is_eligible, -1.0).max(-1)
        self.best_weight[part, selected], self.best_key[part, selected] = best_weight, best_key

    def _is_eligible(self, queries: Int[Tensor, "*#pairs"], keys: Int[Tensor, "*#pairs"]) -> Bool[Tensor, "*pairs"]:
        """Return True for each pair of words that a link may join."""
        is_eligible = self.queries.is_lexical[queries] & self.keys.is_lexical[keys]
        if self.is_self_attention:
            is_eligible &= keys != queries  # a link joins two words
            if self.leaves_out_first:
                is_eligible &= keys != 0
        return is_eligible

    def links(self, head: int) -> tuple[Link, ...]:
        """Return the links of one head, strongest first. A link joins a word to the other word that it attends to most,
        special tokens and punctuation aside. Two words that attend most to each other, both with more than uniform
        weight (1 / number of words), share one link.
        """
        weights, keys = self.best_weight[head], self.best_key[head]
        queries = torch.arange(len(weights))
        is_listed, back = weights >= 0, torch.full_like(weights, torch.nan)  # no other word is eligible for the others
        if self.is_self_attention:
            is_mutual = (keys[keys] == queries) & (torch.minimum(weights, weights[keys]) > 1 / self.keys.count)
            back = weights[keys].where(is_mutual, torch.nan)
            # A mutual link is listed from the word with the larger weight.
            is_weaker = (back > weights) | ((back == weights) & (queries > keys))
            is_listed &= ~is_weaker
        strength = (weights.double() * 1e4).round()  # links of equal rounded weight are in the order of the text
        order = strength.masked_fill(~is_listed, -1.0).sort(descending=True, stable=True).indices
        order = order[: int(is_listed.sum())]
        columns = [each[order].tolist() for each in (queries, keys, weights, back)]
        columns[-1] = [None if math.isnan(weight) else weight for weight in columns[-1]]
        return tuple(map(Link, *columns))


def _sums_of_words(
    weights: Float[Tensor, "heads rows columns"],
    word_of_rows: Int[Tensor, " rows"],
    word_of_columns: Int[Tensor, " columns"],
    words: int,
) -> Float[Tensor, "heads row_words words"]:
    """Return the sums of weights over the rows and columns of each pair of words. The words of the rows are counted
    from 0, and `words` is the number of words of the columns. A word's rows, and its columns, are neighbours.

    Sums over columns cost many times as much as sums over rows, which are contiguous in memory, so the rows come first,
    and the first column of each word is copied instead of added.
    """
    row_words = int(word_of_rows[-1]) + 1
    if row_words < len(word_of_rows):
        weights = weights.new_zeros(len(weights), row_words, weights.shape[-1]).index_add_(1, word_of_rows, weights)
    is_first = word_of_columns.diff(prepend=word_of_columns.new_full((1,), -1)) != 0
    first, further = is_first.nonzero()[:, 0], (~is_first).nonzero()[:, 0]
    # `gather` takes a third of the time of `index_select`.
    sums = weights.gather(2, first.expand(*weights.shape[:2], -1))
    if len(first) < words:
        sums = weights.new_zeros(*weights.shape[:2], words).index_copy_(2, word_of_columns[first], sums)
    if len(further):
        added = weights.gather(2, further.expand(*weights.shape[:2], -1))
        sums.index_add_(2, word_of_columns[further], added)
    return sums
