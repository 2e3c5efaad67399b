"""Heads whose outputs are independent noise: no two of them are similar, so that their CKA shows its bias alone."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from research.findings.raw_results import pairs_of_layers, plain_cka, rounded

HEADS, FEATURES, SEED = 12, 32, 0
"""Sizes of a layer of MiniLM, and the seed of the noise."""

TOKENS = (64, 1024)


class NoiseHeads(nn.Module):
    """Attention whose heads attend to their own token alone, and whose values are independent normal numbers.

    Args:
        tokens: number of tokens.
    """

    def __init__(self, tokens: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(SEED)
        self.values = nn.Parameter(torch.randn(1, HEADS, tokens, FEATURES, generator=generator))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs of all heads: the values. `x (1, tokens)` is not used."""
        tokens = x.shape[1]
        own = 1000.0 * torch.eye(tokens).expand(1, HEADS, tokens, tokens)
        return F.scaled_dot_product_attention(own, own, self.values)


def noise_similarities() -> dict[str, Any]:
    """Return the debiased and the plain CKA of every two heads, for each number of tokens."""
    found = {}
    for tokens in TOKENS:
        model = NoiseHeads(tokens)
        outputs = model.values.detach()[0].double()
        outputs = outputs - outputs.mean(1, keepdim=True)
        plain = [plain_cka(outputs[a], outputs[b]) for a in range(HEADS) for b in range(a + 1, HEADS)]
        with torch.no_grad():
            debiased = pairs_of_layers(hw.redundancy(model, [torch.zeros(1, tokens)]))
        found[str(tokens)] = {"tokens": tokens, "debiased": debiased, "plain": [rounded(value) for value in plain]}
    return found
