"""Attention weights between the words of a text."""

import torch
from torch import Tensor

from headwise.analysis.view_result import Link, link_strength
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.shapes import Bool, Float, Int

TOP = 8
"""Number of keys that are kept for each word."""

PICTURE = 64
"""Largest number of rows and columns of a head's picture; longer texts are pooled."""


class WordWeights:
    """Attention weights between the words of a text for each head, added up from blocks of token rows. They are reduced
    to the strongest link of each word to another word, the words that each word attends to most, and a small picture of
    the weight matrix.

    Weights to the tokens of a word are summed, and those from its tokens averaged, so that each word's weights still
    add up to 1 (Clark et al. 2019, section 4.1). The row blocks of a head come in the order of the rows; a word may
    begin in one block and end in another.

    Args:
        heads: number of heads.
        word_of: index of each token's word.
        is_lexical: True for the words that a link may join.
    """

    def __init__(self, heads: int, word_of: Int[Tensor, " tokens"], is_lexical: Bool[Tensor, " words"]) -> None:
        words = len(is_lexical)
        self.word_of, self.is_lexical, self.words = word_of, is_lexical, words
        self.token_counts = torch.bincount(word_of, minlength=words)
        self.side = min(words, PICTURE)
        self.cell_of = torch.arange(words) * self.side // words  # the picture's row and column of each word
        self.picture = torch.zeros(heads, self.side, self.side)
        self.top_keys = torch.zeros(heads, words, min(TOP, words), dtype=torch.int64)
        self.top_weights = torch.zeros(heads, words, min(TOP, words))
        self.best_key = torch.zeros(heads, words, dtype=torch.int64)
        self.best_weight = torch.full((heads, words), -1.0)
        self._unfinished = torch.zeros(heads, words)  # weights of the word whose last rows are still to come

    def add(self, row_block: RowBlock) -> None:
        """Add the attention weights of one block of token rows. The weights of a word enter the strongest links, the
        lists of most attended words and the picture once the rows of all tokens of the word have been added.
        """
        weights = row_block.weights[0].float().cpu()  # (heads, rows, columns)
        part, rows = row_block.sequences_and_heads[1], row_block.rows
        word_of_rows = self.word_of[rows.start : rows.stop]
        word_of_columns = self.word_of[row_block.visibility.key_indices.cpu()]
        first, last = int(word_of_rows[0]), int(word_of_rows[-1])
        to_words = torch.zeros(len(weights), len(word_of_rows), self.words).index_add_(2, word_of_columns, weights)
        sums = torch.zeros(len(weights), last - first + 1, self.words).index_add_(1, word_of_rows - first, to_words)
        sums[:, 0] += self._unfinished[part]
        self._unfinished[part] = 0.0
        if rows.stop < len(self.word_of) and int(self.word_of[rows.stop]) == last:
            self._unfinished[part] = sums[:, -1]
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
        cells = self.cell_of[queries]
        pooled = torch.zeros(len(weights), len(words), self.side).index_add_(2, self.cell_of, weights)
        self.picture[part].index_add_(1, cells, pooled / torch.bincount(self.cell_of)[cells, None])
        self.top_weights[part, selected], self.top_keys[part, selected] = weights.topk(min(TOP, self.words), dim=-1)
        is_eligible = self.is_lexical[queries, None] & self.is_lexical
        is_eligible[torch.arange(len(words)), queries] = False  # a link joins two words
        best = weights.masked_fill(~is_eligible, -1.0).max(-1)
        self.best_weight[part, selected], self.best_key[part, selected] = best

    def links(self, head: int) -> tuple[Link, ...]:
        """Return the links of one head, strongest first. A link joins a word to the other word that it attends to most,
        special tokens and punctuation aside. Two words that attend most to each other, both with more than uniform
        weight (1 / number of words), share one link.
        """
        weights, keys = self.best_weight[head].tolist(), self.best_key[head].tolist()
        uniform_weight = 1 / self.words
        links = []
        for query, (key, weight) in enumerate(zip(keys, weights, strict=True)):
            if weight < 0:
                continue  # no other word is eligible
            is_mutual = keys[key] == query and min(weight, weights[key]) > uniform_weight
            back = weights[key] if is_mutual else None
            if back is not None and (back, query) > (weight, key):
                continue  # the link is listed from the word with the larger weight
            links.append(Link(query, key, weight, back))
        return tuple(sorted(links, key=link_strength))
