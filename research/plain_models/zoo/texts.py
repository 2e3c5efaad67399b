"""Random texts for language models."""

import torch

TOKENS = 29


def tokens(length: int = 11, batch: int = 2) -> torch.Tensor:
    """Return random token ids."""
    return torch.randint(1, TOKENS, (batch, length))


def padded_tokens() -> tuple[torch.Tensor, torch.Tensor, list[tuple[torch.Tensor]]]:
    """Return a batch padded on the right, its mask, True at tokens, and the arguments of each sequence alone."""
    ids = tokens()
    lengths = torch.tensor([11, 7])
    mask = torch.arange(11) < lengths[:, None]
    return ids, mask, [(ids[i : i + 1, :length],) for i, length in enumerate(lengths.tolist())]
