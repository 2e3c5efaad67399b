"""Attention written in many layouts of axes, against the weights and outputs that the module stores itself."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, require_gate
from test_watch import require_statistics
from torch import nn

import headwise as hw

LENGTH, WINDOW = 14, 7
WINDOWS = LENGTH // WINDOW

# Axes: b sequences, h heads, w windows, n positions in a window, q queries, k keys, d features of a head.
LAYOUTS = {
    "(b, h, q, k)": "b h q",
    "(b*h, q, k)": "bh q",
    "(h*b, q, k)": "hb q",
    "(h, b, q, k)": "h b q",
    "(b, h, windows, q, k)": "b h w n",
    "(b, windows, h, q, k)": "b w h n",
    "(b*h, windows, q, k)": "bh w n",
    "(h*b, windows, q, k)": "hb w n",
    "(b*windows, h, q, k)": "bw h n",
    "(h*windows*b, q, k)": "hwb n",
}


def rearranged(tensor: torch.Tensor, axes: str, order: str) -> torch.Tensor:
    """Return a tensor with axes named by letters in another order; letters without a space between are one axis."""
    letters = order.replace(" ", "")
    permuted = tensor.permute([axes.replace(" ", "").index(letter) for letter in letters])
    sizes = dict(zip(letters, permuted.shape, strict=True))
    return permuted.reshape([torch.Size([sizes[letter] for letter in axis]).numel() for axis in order.split()])


class Attention(nn.Module):
    """Self-attention in windows or over all positions, with tensors in one of the layouts.

    Its weights and outputs by head are stored, computed from the projections with axes named in an einsum.
    """

    def __init__(self, layout: str, route: str, batch: int = 2, heads: int = HEADS, windows: int = WINDOWS):
        super().__init__()
        self.order, self.route, self.sizes = LAYOUTS[layout], route, (batch, heads, windows if "w" in layout else 1)
        width = heads * DIM
        self.qkv, self.out_proj = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):
        batch, heads, windows = self.sizes
        length = x.shape[1] // windows
        parts = [part.reshape(batch, windows, length, heads, -1) for part in self.qkv(x).chunk(3, -1)]  # b w n h d
        q, k, v = parts
        with torch._C.DisableTorchFunction():  # otherwise it would be attention that is not used
            weights = (torch.einsum("bwnhd,bwmhd->bwhnm", q, k) * DIM**-0.5).exp()
            weights = weights / weights.sum(-1, keepdim=True)
            self.weights = weights.flatten(0, 1).detach()
            self.outputs = torch.einsum("bwhnm,bwmhd->bwhnd", weights, v).flatten(0, 1)
        order = self.order if windows > 1 or "w" in self.order else self.order.replace("q", "wn")
        q, k, v = (rearranged(part, "bwnhd", f"{order} d") for part in parts)
        if self.route == "sdpa":
            out = F.scaled_dot_product_attention(q, k, v)
        elif self.route == "einsum":
            out = torch.einsum(
                "...nm,...md->...nd", (torch.einsum("...nd,...md->...nm", q, k) * DIM**-0.5).softmax(-1), v
            )
        else:
            out = torch.softmax(q @ k.transpose(-1, -2) * DIM**-0.5, dim=-1) @ v
        return self.out_proj(self.merged(out, order))

    def merged(self, out, order):
        """Return the output with axes of sequences, positions and features, by a view and a permutation."""
        batch, heads, windows = self.sizes
        sizes = {"b": batch, "h": heads, "w": windows, "n": out.shape[-2] // (windows if "wn" in order else 1)}
        letters = order.replace(" ", "")
        out = out.reshape(*(sizes[letter] for letter in letters), DIM)
        return out.permute(*(letters.index(letter) for letter in "bwnh"), -1).reshape(batch, -1, heads * DIM)


def require_right(attention: Attention, batch: int) -> None:
    """Fail unless statistics and gates of a module are those of the weights and outputs that it stores."""
    torch.manual_seed(1)
    model, heads = nn.Sequential(attention).eval(), attention.sizes[1]
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.5)
    x = torch.randn(batch, LENGTH, heads * DIM)
    plain = model(x)
    with hw.watch(model) as watched:
        assert torch.equal(model(x), plain)
    require_statistics(watched, [attention.weights])
    norms = attention.outputs.norm(dim=-1).mean(-1).mean(0)
    assert [row["output_norm"] for row in watched.rows()] == pytest.approx(norms.tolist(), rel=1e-5)
    require_gate(model, x, head=heads - 1)


@torch.no_grad()
@pytest.mark.parametrize("route", ["softmax", "einsum", "sdpa"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_heads_are_found_in_any_layout(layout, route):
    require_right(Attention(layout, route), batch=2)


@torch.no_grad()
@pytest.mark.parametrize(("layout", "route"), list(itertools.product(LAYOUTS, ["softmax", "sdpa"])))
def test_equal_sizes_of_axes_are_not_confused(layout, route):
    """One sequence; as many heads as windows and sequences; as many heads as queries."""
    require_right(Attention(layout, route, batch=1), batch=1)
    require_right(Attention(layout, route, batch=2, heads=2, windows=2), batch=2)
    require_right(Attention(layout, route, batch=2, heads=WINDOW), batch=2)
    require_right(Attention(layout, route, heads=1), batch=2)
