"""The task of several relations: at each place, name the token 1, 2, 3 and 4 places before, each in a slot of its own.

One layer of attention without a residual path; then one linear map a slot, or an MLP and these maps. Why a single head
cannot do more than one slot with linear maps is written down in docs/reports/claims.md, and holds exactly where
queries and keys know the place of a token alone ("places"); "tokens" is ordinary attention, whose queries and keys
are made of the tokens; "mlp" is that with an MLP, which may tell unequal mixtures apart.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from headwise.studies.space import Setting
from research.claims.corpora import OFFSETS, SYMBOLS, Batches

WIDTH = 64
KINDS = ("places", "tokens", "mlp")


class Relations(nn.Module):
    """Embedding, attention with rotary positions, and the read-out of each slot.

    Args:
        setting: the heads.
        kind: one of `KINDS`.
    """

    def __init__(self, setting: Setting, kind: str) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(SYMBOLS, WIDTH)
        self.place = nn.Parameter(torch.randn(WIDTH)) if kind == "places" else None
        self.self_attn = hw.MultiHeadAttention(
            WIDTH, setting.num_heads, head_dim=setting.head_dim, bias=False, rotary=hw.Rotary(), mask=hw.causal()
        )
        self.mlp = None
        if kind == "mlp":
            self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        self.slots = nn.Linear(WIDTH, OFFSETS * SYMBOLS)

    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits, `(batch, length, slots, symbols)`."""
        x = self.embed_tokens(input_ids)
        if self.place is None:
            y = self.self_attn(x)
        else:
            same = self.place.expand_as(x)  # what turns it is the place
            y = self.self_attn(same, same, x)
        if self.mlp is not None:
            y = y + self.mlp(y)
        return self.slots(y).unflatten(-1, (OFFSETS, SYMBOLS))


def answers(ids: Tensor) -> Tensor:
    """What is to be said from place `OFFSETS` on: `(batch, places, slots)`."""
    length = ids.shape[1]
    return torch.stack([ids[:, OFFSETS - offset : length - offset] for offset in range(1, OFFSETS + 1)], -1)


def relations_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """-ln p of the tokens asked for, the mean over places and slots: `(batch,)`."""
    ids = batch["input_ids"]
    logits = model(ids)[:, OFFSETS:]
    losses = F.cross_entropy(logits.flatten(0, 2), answers(ids).flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


@torch.no_grad()
def accuracy(model: nn.Module, batches: Batches) -> list[float]:
    """The share of right answers in each slot."""
    right = [
        (model(batch["input_ids"])[:, OFFSETS:].argmax(-1) == answers(batch["input_ids"])).double().mean((0, 1))
        for batch in batches
    ]
    return torch.stack(right).mean(0).tolist()


@torch.no_grad()
def weights(model: Relations, ids: Tensor) -> list[list[float]]:
    """The mean weight of each head on each of the offsets: `heads` lists of one number an offset."""
    x = model.embed_tokens(ids)
    given = (x,) if model.place is None else (model.place.expand_as(x), model.place.expand_as(x), x)
    _, found = model.self_attn(*given, return_weights=True)
    length = ids.shape[1]
    rows = torch.arange(OFFSETS, length)
    means = [found[:, :, rows, rows - offset].double().mean((0, 2)) for offset in range(1, OFFSETS + 1)]
    return torch.stack(means, -1).tolist()
