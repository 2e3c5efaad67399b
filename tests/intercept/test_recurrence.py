"""Models that attend to one block of tokens after the other, with keys of the block before, in one call."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")

HEADS, DIM, BLOCK, LENGTH = 3, 5, 4, 11
WIDTH = HEADS * DIM


class Attention(nn.Module):
    """Attention to the tokens of a block and to the keys and values before it.

    Args:
        route: "SDPA"; "softmax"; or "shared", softmax with values that all heads share.
    """

    def __init__(self, route):
        super().__init__()
        self.route = route
        self.q, self.k, self.v = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.out_proj = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, before, visible):
        q = self.q(x).unflatten(-1, (HEADS, DIM)).transpose(1, 2)
        k, v = (project(x) for project in (self.k, self.v))
        if before is not None:
            k, v = torch.cat([before[0], k], 1), torch.cat([before[1], v], 1)
        kept = k, v
        k, v = (part.unflatten(-1, (HEADS, DIM)).transpose(1, 2) for part in (k, v))
        if self.route == "SDPA":
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=visible)
        else:
            weights = (q @ k.mT * DIM**-0.5).masked_fill(~visible, -torch.inf).softmax(-1)
            out = torch.einsum("bhqk,bkd->bhqd", weights, v[:, 0]) if self.route == "shared" else weights @ v
        return x + self.out_proj(out.transpose(1, 2).flatten(2)), kept


class Recurrent(nn.Module):
    """Two layers that attend to the tokens of a block and of the block before it: at once, or block by block."""

    def __init__(self, route, is_whole):
        super().__init__()
        self.is_whole, self.embed = is_whole, nn.Linear(7, WIDTH)
        self.layers = nn.ModuleList(Attention(route) for _ in range(2))

    def forward(self, x, memories=(None, None)):
        x, out = self.embed(x), []
        blocks = torch.arange(LENGTH) // BLOCK
        distance = blocks[:, None] - blocks
        visible = ((distance == 0) | (distance == 1)) & (torch.arange(LENGTH)[:, None] >= torch.arange(LENGTH))
        for start in range(0, LENGTH, LENGTH if self.is_whole else BLOCK):
            part = slice(start, LENGTH if self.is_whole else start + BLOCK)
            y, kept = x[:, part], []
            for layer, memory in zip(self.layers, memories, strict=True):
                keys = part if memory is None else slice(start - memory[0].shape[1], part.stop)
                y, pair = layer(y, memory, visible[part, keys])
                kept.append([each[:, -BLOCK:] for each in pair])
            out.append(y)
            memories = kept
        return torch.cat(out, 1)


@pytest.mark.parametrize("route", ["SDPA", "softmax", "shared"])
def test_blocks_with_the_keys_of_the_block_before_are_one_sequence(route):
    torch.manual_seed(0)
    whole, parts, x = Recurrent(route, True), Recurrent(route, False), torch.randn(2, LENGTH, 7)
    parts.load_state_dict(whole.state_dict())
    torch.testing.assert_close(parts(x), whole(x))
    with hw.watch(whole) as expected:
        whole(x)
    with hw.watch(parts) as heads:
        parts(x)
    assert len(heads.rows()) == 2 * HEADS
    for row, other in zip(heads.rows(), expected.rows(), strict=True):
        assert row.keys() == other.keys()
        for name, value in other.items():
            assert row[name] == (pytest.approx(value, rel=1e-4) if isinstance(value, float) else value), name


class WithContext(Recurrent):
    """The memory of the first block is another text, which the same weights project."""

    def forward(self, x, context):
        pairs = [(layer.k(context), layer.v(context)) for layer in self.layers]
        first, _ = self.layers[0](self.embed(x), None, torch.ones(LENGTH, LENGTH, dtype=torch.bool))
        second, _ = self.layers[0](first, pairs[0], torch.ones(LENGTH, LENGTH + 3, dtype=torch.bool))
        return second


def test_keys_of_other_tokens_are_no_recurrence():
    model = WithContext("SDPA", False)
    with hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, 7), torch.randn(2, 3, WIDTH))
    assert [row["kind"] for row in heads.rows()] == ["self"] * HEADS + ["cross"] * HEADS


class Deepened(Recurrent):
    """The second call of the same layer attends to its own keys and to those of the first call, of the same tokens."""

    def forward(self, x):
        visible = torch.ones(LENGTH, 2 * LENGTH, dtype=torch.bool)
        first, kept = self.layers[0](self.embed(x), None, visible[:, :LENGTH])
        return self.layers[0](first, kept, visible)[0]


def test_keys_of_the_same_tokens_in_a_layer_before_are_no_recurrence():
    model = Deepened("SDPA", False)
    with hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, 7))
    assert [row["kind"] for row in heads.rows()] == ["self"] * HEADS + ["cross"] * HEADS
