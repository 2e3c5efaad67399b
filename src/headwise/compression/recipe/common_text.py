"""Text that two data sets have in common, however they are cut into sequences."""

import torch
from torch import Tensor

from headwise.data.texts import Texts
from headwise.data.tokenization import SpecialTokens
from headwise.shapes import Bool, Int

WINDOW = 13
"""Number of consecutive tokens that two data sets do not share by chance (Brown et al. 2020, appendix C)."""

FACTOR = 6_364_136_223_846_793_005
"""Factor of the polynomial hash of windows, modulo 2^64 (Knuth 1997, section 3.3.4)."""


def count_common_sequences(texts: Texts, others: Texts) -> int:
    """Return the number of sequences in `others` that share text with `texts`: a token of theirs is in 13 consecutive
    tokens that both data sets have, or the sequence is also one of `texts`.

    Sequences are joined in the order of the data, without the special tokens around them. The same text is found in
    both, whatever their context and the option `documents`.

    Args:
        texts: a data set.
        others: another one, with the same tokenizer.
    """
    known, sequences = _without_special_tokens(texts), _without_special_tokens(others)
    whole = {tuple(sequence.tolist()) for sequence in known}
    is_common = torch.split(_is_common(torch.cat(sequences), torch.cat(known)), list(map(len, sequences)))
    return sum(
        bool(common.any()) or tuple(sequence.tolist()) in whole
        for sequence, common in zip(sequences, is_common, strict=True)
    )


def _without_special_tokens(texts: Texts) -> list[Int[Tensor, " tokens"]]:
    """Return the sequences of texts without the special tokens around them."""
    special = SpecialTokens.of(texts.tokenizer)
    return [sequence[len(special.before) : len(sequence) - len(special.after)].long() for sequence in texts.sequences]


def _is_common(tokens: Int[Tensor, " tokens"], known: Int[Tensor, " others"]) -> Bool[Tensor, " tokens"]:
    """Return a mask that is True at tokens in windows that another series of tokens contains too."""
    found = torch.isin(_hashes(tokens), _hashes(known))
    is_common = torch.zeros_like(tokens, dtype=torch.bool)
    for offset in range(WINDOW):
        is_common[offset : offset + len(found)] |= found
    return is_common


def _hashes(tokens: Int[Tensor, " tokens"]) -> Int[Tensor, " windows"]:
    """Return the hash of each window; none if there are too few tokens."""
    count = max(0, len(tokens) - WINDOW + 1)
    hashes = torch.zeros(count, dtype=torch.int64)
    for offset in range(WINDOW):
        hashes = hashes * FACTOR + tokens[offset : offset + count] + 1
    return hashes
