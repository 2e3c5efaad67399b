"""Token ids of several sequences, alone and padded."""

import torch


def sequences(*lengths):
    """Return token ids of these lengths, in which tokens repeat."""
    generator = torch.Generator().manual_seed(11)
    return [torch.randint(4, 17, (length,), generator=generator) for length in lengths]


def padded(rows, side):
    """Return the arguments of a model for sequences of token ids: padded on a side, with the positions of tokens."""
    length = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), length, dtype=torch.long), torch.zeros(len(rows), length, dtype=torch.long)
    for row, tokens in enumerate(rows):
        start = length - len(tokens) if side == "left" else 0
        ids[row, start : start + len(tokens)], mask[row, start : start + len(tokens)] = tokens, 1
    return {"input_ids": ids, "attention_mask": mask, "position_ids": (mask.cumsum(1) - 1).clamp(min=0)}
