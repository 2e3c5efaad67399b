"""Scores and weights whose rows or columns a model moves: positions are right, or left out by name."""

import pytest
import torch
from self_attention import DIM, LENGTH, WIDTH, SelfAttention
from test_watch import require_statistics
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")

ORDER = torch.tensor([5, 0, 3, 6, 1, 2, 4])
BACK = ORDER.argsort()
OF_POSITIONS = {"distance", "self", "previous", "next", "first"}
CAUSAL = torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril()


def scores_of(q, k):
    return q @ k.mT * DIM**-0.5


def moved(move, back, of_weights=False):
    """Return attention whose rows of scores or of weights `move` puts into another order, and `back` the outputs."""

    def attend(q, k, v):
        scores = scores_of(q, k)
        return back((move(scores.softmax(-1)) if of_weights else move(scores).softmax(-1)) @ v)

    return attend


def columns_moved(q, k, v):
    return scores_of(q, k)[..., ORDER].softmax(-1) @ v[:, :, ORDER]


def both_moved(q, k, v):
    scores = scores_of(q, k)[:, :, ORDER][..., ORDER]
    return (scores.softmax(-1) @ v[:, :, ORDER])[:, :, BACK]


def placed(q, k, v):
    scores = scores_of(q, k)
    rows = torch.empty_like(scores)
    rows[:, :, ORDER] = scores
    return (rows.softmax(-1) @ v)[:, :, ORDER]


def copied(q, k, v):
    scores = scores_of(q, k)
    return (scores.copy_(scores.roll(3, 2).clone()).softmax(-1) @ v).roll(-3, 2)


def by_content(q, k, v):
    scores = scores_of(q, k)
    order = scores.amax(-1).argsort(-1)[..., None]
    out = torch.take_along_dim(scores, order, 2).softmax(-1) @ v
    return torch.take_along_dim(out, order.argsort(2), 2)


MOVED = {
    "index": moved(lambda rows: rows[:, :, ORDER], lambda out: out[:, :, BACK]),
    "list": moved(lambda rows: rows[:, :, ORDER.tolist()], lambda out: out[:, :, BACK]),
    "index_select": moved(lambda rows: rows.index_select(2, ORDER), lambda out: out[:, :, BACK]),
    "flip": moved(lambda rows: rows.flip(2), lambda out: out.flip(2)),
    "roll": moved(lambda rows: torch.roll(rows, 2, dims=2), lambda out: out.roll(-2, 2)),
    "halves": moved(
        lambda rows: torch.cat([rows[:, :, 3:], rows[:, :, :3]], 2),
        lambda out: torch.cat([out[:, :, 4:], out[:, :, :4]], 2),
    ),
    "stacked": moved(lambda rows: torch.stack(rows.unbind(2)[::-1], 2), lambda out: out.flip(2)),
    "index of weights": moved(lambda rows: rows[:, :, ORDER], lambda out: out[:, :, BACK], of_weights=True),
    "columns": columns_moved,
    "rows and columns": both_moved,
    "assignment": placed,
    "copy_": copied,
    "order by content": by_content,
}


@pytest.mark.parametrize("name", MOVED)
def test_positions_are_left_out_where_rows_or_columns_of_scores_are_moved(name):
    torch.manual_seed(3)
    model, x = nn.Sequential(SelfAttention(MOVED[name])), torch.randn(2, LENGTH, WIDTH)
    with pytest.warns(UserWarning, match="^positions of queries among the keys .*: 0$"), hw.watch(model) as heads:
        model(x)
    entropy = torch.special.entr(model[0].weights.double()).sum(-1).mean((0, 2)).tolist()
    for row, expected in zip(heads.rows(), entropy, strict=True):
        assert not OF_POSITIONS & row.keys()
        assert row["entropy"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    "mix", [lambda s: s.cumsum(2), lambda s: s + s.flip(2), lambda s: torch.where(CAUSAL, s, s.flip(2))]
)
def test_positions_are_left_out_where_rows_of_scores_are_mixed(mix):
    model = nn.Sequential(SelfAttention(lambda q, k, v: mix(scores_of(q, k)).softmax(-1) @ v))
    with pytest.warns(UserWarning, match="^positions of queries among the keys .*: 0$"), hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, WIDTH))
    assert not any(OF_POSITIONS & row.keys() for row in heads.rows())


def masked_by_index(q, k, v):
    scores = scores_of(q, k)
    scores[:, :, ~CAUSAL] = -torch.inf
    return scores.softmax(-1) @ v


IN_ORDER = {
    "parts": moved(lambda rows: torch.cat([rows[:, :, :3], rows[:, :, 3:]], 2), lambda out: out),
    "twice": moved(lambda rows: rows.flip(2).flip(2), lambda out: out),
    "sum": moved(lambda rows: rows * 0.5 + rows.mT.mT * 0.5, lambda out: out),
    "heads in one axis": moved(lambda rows: rows.flatten(0, 1).view(rows.shape), lambda out: out),
    "mask by an index": masked_by_index,
    "mask by where": moved(lambda rows: torch.where(CAUSAL, rows, -torch.inf), lambda out: out),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("name", IN_ORDER)
def test_positions_are_right_where_scores_stay_at_their_places(name):
    torch.manual_seed(4)
    model, x = nn.Sequential(SelfAttention(IN_ORDER[name])), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    weights = model[0].weights
    if name.startswith("mask"):
        weights = weights * CAUSAL / (weights * CAUSAL).sum(-1, keepdim=True)
    require_statistics(heads, [weights])


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("padding", [0, 1, 3])
def test_convolutions_of_other_products_change_nothing(padding):
    class Products(nn.Module):
        """Products of features with each other, which a convolution with another length reads."""

        def __init__(self):
            super().__init__()
            self.kernels, self.back = nn.Conv1d(LENGTH, LENGTH, 3, padding=padding), nn.LazyLinear(WIDTH)

        def forward(self, x):
            return self.back(self.kernels(x @ x.mT))

    x, model = torch.randn(2, LENGTH, WIDTH), nn.Sequential(Products(), SelfAttention())
    plain = model(x)
    with hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    require_statistics(heads, [model[1].weights])


def ranked(rank):
    """Return attention over keys in the order of their scores, another one for each query."""

    def attend(q, k, v):
        scores, order = rank(scores_of(q, k))
        values = v[:, :, None].expand(-1, -1, LENGTH, -1, -1).gather(3, order[..., None].expand(*order.shape, DIM))
        return (scores.softmax(-1)[..., None, :] @ values)[..., 0, :]

    return attend


@pytest.mark.parametrize(
    "rank",
    [
        lambda s: s.sort(-1),
        lambda s: torch.sort(s, dim=-1, descending=True),
        lambda s: s.topk(LENGTH),
        lambda s: (s.gather(-1, order := s.argsort(-1)), order),
    ],
)
def test_keys_in_the_order_of_their_scores_are_left_out_by_name(rank):
    model, x = nn.Sequential(SelfAttention(ranked(rank)), SelfAttention()), torch.randn(2, LENGTH, WIDTH)
    match = "since each query has its keys in another order, as after a sort of scores: 0$"
    with pytest.warns(UserWarning, match=match), hw.watch(model) as heads:
        plain = model(x)
    assert {row["module"] for row in heads.rows()} == {"1"}
    with hw.gate(model, {("0", 2): 0.0}):  # the output of a head is known nevertheless
        gated = model(x)
    model[0].out_proj.weight[:, 2 * DIM :] = 0
    torch.testing.assert_close(gated, model(x))
    assert not torch.equal(gated, plain)


def test_a_gate_of_positions_refuses_moved_queries():
    model = nn.Sequential(SelfAttention(MOVED["flip"]))
    with (
        pytest.raises(hw.InputError, match="^positions: expected attention calls with all queries in the order"),
        hw.gate(model, {("0", 1): 0.0}, positions=[0]),
    ):
        model(torch.randn(2, LENGTH, WIDTH))
