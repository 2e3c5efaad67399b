"""A task of several relations: at each position, name the tokens 1, 2, 3 and 4 positions before, each in its own slot.

The model is one attention layer without a residual path and one linear map for each slot. There are three kinds:

- "places": queries and keys depend on the position alone. A single head cannot serve more than one slot then; the
  proof is in docs/reports/claims.md.
- "tokens": ordinary attention, in which queries and keys are computed from the tokens.
- "mlp": ordinary attention followed by an MLP, which can distinguish mixtures that a linear map cannot.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.studies.space import Setting
from research.claims.corpora import Batches
from research.claims.generated_tasks import OFFSETS, SYMBOLS, WINDOW
from research.claims.positions import embedding_of, rotary_of

WIDTH = 64
KINDS = ("places", "tokens", "mlp")


class Relations(nn.Module):
    """Embedding, one attention layer, and a linear map for each slot.

    Args:
        setting: number and size of the heads.
        kind: one of `KINDS`.
        scheme: of the positions, see `research.claims.positions`.
    """

    def __init__(self, setting: Setting, kind: str, scheme: str) -> None:
        super().__init__()
        self.embed_tokens = embedding_of(scheme, SYMBOLS, WIDTH, WINDOW)
        self.place = nn.Parameter(torch.randn(WIDTH)) if kind == "places" else None
        self.self_attn = hw.MultiHeadAttention(
            WIDTH, setting.num_heads, head_dim=setting.head_dim, bias=False, rotary=rotary_of(scheme), mask=hw.causal()
        )
        self.mlp = None
        if kind == "mlp":
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.slots = nn.Linear(WIDTH, OFFSETS * SYMBOLS)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Return logits, `(batch, length, slots, symbols)`."""
        x = self.embed_tokens(input_ids)
        if self.place is None:
            y = self.self_attn(x)
        else:
            same = self.place.expand_as(x)  # only the rotation distinguishes positions
            y = self.self_attn(same, same, x)
        if self.mlp is not None:
            y = y + self.mlp(y)
        return self.slots(y).unflatten(-1, (OFFSETS, SYMBOLS))


def answers(ids: Tensor) -> Tensor:
    """Return the right symbol of each slot, for positions from `OFFSETS` on: `(batch, positions, slots)`."""
    length = ids.shape[1]
    return torch.stack([ids[:, OFFSETS - offset : length - offset] for offset in range(1, OFFSETS + 1)], -1)


def relations_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Return the cross-entropy of each sequence in nats, averaged over positions and slots: `(batch,)`."""
    ids = batch["input_ids"]
    logits = model(ids)[:, OFFSETS:]
    losses = F.cross_entropy(logits.flatten(0, 2), answers(ids).flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> list[float]:
    """Return the share of right answers in each slot."""
    right = [
        (model(batch["input_ids"])[:, OFFSETS:].argmax(-1) == answers(batch["input_ids"])).double().mean((0, 1))
        for batch in batches
    ]
    return torch.stack(right).mean(0).tolist()


@torch.no_grad()
def weights(model: Relations, ids: Tensor) -> list[list[float]]:
    """Return the mean attention weight of each head on the tokens 1 to `OFFSETS` positions before: one list a head."""
    x = model.embed_tokens(ids)
    inputs = (x,) if model.place is None else (model.place.expand_as(x), model.place.expand_as(x), x)
    _, attention = model.self_attn(*inputs, return_weights=True)
    length = ids.shape[1]
    rows = torch.arange(OFFSETS, length)
    means = [attention[:, :, rows, rows - offset].double().mean((0, 2)) for offset in range(1, OFFSETS + 1)]
    return torch.stack(means, -1).tolist()
