"""Packed sequences of an attention call, and their places in a padded batch."""

from dataclasses import dataclass

import torch
from torch import Tensor

from headwise.intercept.sequences import NO_TOKEN
from headwise.shapes import Bool, Int


@dataclass(frozen=True, eq=False)
class PackedSequences:
    """Places of the tokens of packed sequences: a padded batch `(sequences, longest)` with the index of each token
    among the packed tokens.

    Attributes:
        index: index of each token among the packed ones; that of another token at padding.
        is_real: True at tokens, False at padding.
        total: number of packed tokens, with those that are in no sequence.
        real_keys: for the queries of a call, True at the keys that are tokens; None if they are unknown.
    """

    index: Int[Tensor, "sequences longest"]
    is_real: Bool[Tensor, "sequences longest"]
    total: int
    real_keys: Bool[Tensor, "sequences keys"] | None = None

    @staticmethod
    def of(
        starts: Int[Tensor, " sequences"],
        lengths: Int[Tensor, " sequences"],
        total: int,
        *,
        is_padded_left: bool = False,
    ) -> "PackedSequences":
        """Return the places of sequences that start at `starts` among `total` packed tokens, and have these lengths.
        The padding follows the tokens, unless `is_padded_left` is True.
        """
        starts, lengths = starts.long(), lengths.long()
        longest = int(lengths.amax()) if len(lengths) else 0
        place = torch.arange(longest, device=lengths.device).expand(len(lengths), -1)
        if is_padded_left:
            place = place - (longest - lengths)[:, None]
        is_real = (place >= 0) & (place < lengths[:, None])
        # Padding repeats the first or last token, so that the order of the tokens is not disturbed.
        place = torch.minimum(place.clamp(min=0), (lengths[:, None] - 1).clamp(min=0))
        return PackedSequences((starts[:, None] + place).clamp(max=max(total - 1, 0)), is_real, total)

    @property
    def is_full(self) -> bool:
        """True if no sequence is padded."""
        return bool(self.is_real.all())

    def padded(self, packed: Tensor) -> Tensor:
        """Return packed tokens `(tokens, ...)` as a padded batch `(sequences, longest, ...)`, with any token at
        padding.
        """
        return packed[self.index.to(packed.device)]

    def written(self, padded: Tensor, packed: Tensor) -> Tensor:
        """Return a copy of the packed tokens `(tokens, ...)` in which those of the sequences are replaced by the tokens
        of a padded batch `(sequences, longest, ...)`.
        """
        return packed.index_copy(0, self.index[self.is_real], padded[self.is_real])

    def token_ids(self, ids: Int[Tensor, "batch length"] | None) -> Int[Tensor, "sequences longest"] | None:
        """Return the token ids of the sequences. `ids` are those that the model received. Return None unless there is
        one for each packed token.
        """
        if ids is None or ids.numel() != self.total:
            return None
        return self.padded(ids.reshape(-1)).masked_fill(~self.is_real, NO_TOKEN)
