"""Most attended words: for each head and word of a sentence, the other word that gets most of its attention."""

from collections.abc import Mapping

import torch
from torch import nn

from headwise.analysis.head_tests.weight_reader import WeightReader
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.errors import InputError
from headwise.intercept.interceptor import SiteKey
from headwise.shapes import Bool, Float, Int

NO_WORD = -1
"""In place of the index of a word, where a token is of no word or no other word is attended to."""


class MostAttendedWords(WeightReader):
    """Interceptor that finds for each head and word of one sentence the other word that gets most attention.

    The attention between two words is the sum over the tokens of the attended word and the mean over the tokens of the
    attending one (Clark et al. 2019, section 4.1). Tokens of no word, such as [CLS], do not compete. The row blocks of
    a head come in the order of the rows. Only the sums of the word whose rows are not complete are kept.

    Attributes:
        sees: True where some head attends from one word to another.

    Args:
        model: the intercepted model.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._word_of = torch.zeros(0, dtype=torch.int64)
        self._last_row: dict[int, int] = {}
        self._eligible: Bool[torch.Tensor, " words"] = torch.zeros(0, dtype=torch.bool)
        self._found: dict[SiteKey, Int[torch.Tensor, "heads words"]] = {}
        self._unfinished: dict[SiteKey, tuple[Int[torch.Tensor, " heads"], Float[torch.Tensor, "heads words"]]] = {}
        self.sees: Bool[torch.Tensor, "words words"] = torch.zeros(0, 0, dtype=torch.bool)

    def begin_sentence(self, word_of: Int[torch.Tensor, " tokens"], words: int) -> None:
        """Expect a run of the model over one sentence.

        Args:
            word_of: index of each token's word; -1 for tokens of no word.
            words: number of words.
        """
        self.begin(1, len(word_of))
        self._word_of, self._found, self._unfinished = word_of, {}, {}
        self._last_row = {word: row for row, word in enumerate(word_of.tolist()) if word != NO_WORD}
        self._eligible = torch.zeros(words, dtype=torch.bool)
        self._eligible[list(self._last_row)] = True
        self.sees = torch.zeros(words, words, dtype=torch.bool)

    def read(self, site: SiteKey, block: RowBlock) -> None:
        """Add the weights of some query rows, and find the most attended word of each word whose rows are complete."""
        heads, rows, words = block.tile.heads, block.rows, len(self._eligible)
        if site not in self._found:
            self._found[site] = torch.full((block.grid.heads, words), NO_WORD)
            sums_of_heads = block.weights.new_zeros(block.grid.heads, words, device="cpu")
            self._unfinished[site] = torch.full((block.grid.heads,), NO_WORD), sums_of_heads
        of_rows, of_columns = self._word_of[rows.start : rows.stop], self._word_of[block.visibility.key_indices.cpu()]
        is_row, is_column = of_rows != NO_WORD, of_columns != NO_WORD
        weights = block.weights[0].cpu()[:, is_row][..., is_column]
        if not bool(weights.isfinite().all()):
            raise InputError("model", expected="finite attention weights", got=f"NaN or infinity in {site.label}")
        to_words = weights.new_zeros(len(weights), weights.shape[1], words)
        to_words.index_add_(2, of_columns[is_column], weights)
        local, place = torch.unique(of_rows[is_row], return_inverse=True)
        sums = weights.new_zeros(len(weights), len(local), words).index_add_(1, place, to_words)
        unfinished_word, unfinished_sums = self._unfinished[site]  # of each head, since blocks may divide heads anew
        sums += (local == unfinished_word[heads, None])[..., None] * unfinished_sums[heads, None]
        is_complete = torch.tensor([self._last_row[word] < rows.stop for word in local.tolist()], dtype=torch.bool)
        if len(local):
            unfinished_word[heads], unfinished_sums[heads] = NO_WORD if is_complete[-1] else local[-1], sums[:, -1]
        self._finish(site, heads, local[is_complete], sums[:, is_complete])

    def _finish(
        self,
        site: SiteKey,
        heads: slice,
        words: Int[torch.Tensor, " complete"],
        sums: Float[torch.Tensor, "heads complete words"],
    ) -> None:
        """Store the most attended word of each word in `words`, from sums over the tokens of both words."""
        self.sees[words] |= (sums > 0).any(0)
        is_other = self._eligible & (torch.arange(len(self._eligible)) != words[:, None])
        best = sums.masked_fill(~is_other, -1.0).max(-1)
        self._found[site][heads, words] = best.indices.masked_fill(best.values <= 0, NO_WORD)

    def found(self) -> Mapping[SiteKey, Int[torch.Tensor, "heads words"]]:
        """Return the index of the most attended other word of each word, by site; -1 for words without tokens of their
        own, and for those that attend to no other word.
        """
        return self._found
