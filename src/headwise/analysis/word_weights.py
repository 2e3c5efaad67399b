"""Attention weights between the words of a text, or from the words of one text to those of another."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.analysis.head_view import Link, link_strength
from headwise.analysis.visible_weights import VisibleWeights
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
        to_words = torch.zeros(len(weights), len(word_of_rows), words).index_add_(2, word_of_columns, weights)
        sums = torch.zeros(len(weights), last - first + 1, words).index_add_(1, word_of_rows - first, to_words)
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
        pooled = torch.zeros(len(weights), len(words), self.picture.shape[2]).index_add_(2, columns, weights)
        row_of_words = rows[queries]
        self.picture[part].index_add_(1, row_of_words, pooled / torch.bincount(rows)[row_of_words, None])
        top = weights.topk(min(TOP, shown))
        self.top_weights[part, selected, : top.values.shape[-1]] = top.values
        self.top_keys[part, selected, : top.values.shape[-1]] = top.indices
        is_eligible = self.queries.is_lexical[queries, None] & self.keys.is_lexical[:shown]
        if self.is_self_attention:
            is_itself = torch.arange(shown) == queries[:, None]
            is_eligible &= ~is_itself  # a link joins two words
            is_eligible[:, 0] &= not self.leaves_out_first
        best = weights.masked_fill(~is_eligible, -1.0).max(-1)
        self.best_weight[part, selected], self.best_key[part, selected] = best

    def links(self, head: int) -> tuple[Link, ...]:
        """Return the links of one head, strongest first. A link joins a word to the other word that it attends to most,
        special tokens and punctuation aside. Two words that attend most to each other, both with more than uniform
        weight (1 / number of words), share one link.
        """
        weights, keys = self.best_weight[head].tolist(), self.best_key[head].tolist()
        uniform_weight = 1 / self.keys.count
        links = []
        for query, (key, weight) in enumerate(zip(keys, weights, strict=True)):
            if weight < 0:
                continue  # no other word is eligible
            is_mutual = self.is_self_attention and keys[key] == query and min(weight, weights[key]) > uniform_weight
            back = weights[key] if is_mutual else None
            if back is not None and (back, query) > (weight, key):
                continue  # the link is listed from the word with the larger weight
            links.append(Link(query, key, weight, back))
        return tuple(sorted(links, key=link_strength))
