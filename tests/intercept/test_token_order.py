"""Positions where keys are other tokens than the queries of the same number, or are in another order."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import merge, softmax, split
from torch import nn

import headwise as hw

pytestmark = pytest.mark.usefixtures("no_grad")

OF_POSITIONS = {"distance", "self", "previous", "next", "first"}
ORDER = torch.tensor([3, 1, 0, 2, 6, 5, 4])


def with_einsum(q, k, v):
    weights = torch.einsum("bhqd,bhkd->bhqk", q / 5**0.5, k).softmax(-1)
    return torch.einsum("bhqk,bhkd->bhqd", weights, v)


def with_kept_heads(q, k, v):
    """Attention with batch and heads in one axis."""
    q, k, v = (x.reshape(-1, *x.shape[-2:]) for x in (q, k, v))
    return softmax(q, k, v).view(2, 3, -1, 5)


ATTENTIONS = [F.scaled_dot_product_attention, softmax, with_einsum, with_kept_heads]


class Attention(nn.Module):
    """Attention with three heads whose queries, keys and values `change` rearranges after their projections."""

    def __init__(self, attend, change):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(15, 15) for _ in range(4))
        self.attend, self.change = attend, change

    def forward(self, x):
        return self.out(merge(self.attend(*self.change(*(split(each(x)) for each in (self.q, self.k, self.v))))))


class WithNullKey(Attention):
    """Cross-attention with a learned key and value in front of those of the context, or at their end."""

    def __init__(self, attend, is_first):
        super().__init__(attend, None)
        self.null, self.is_first = nn.Parameter(torch.randn(2, 3, 1, 5)), is_first

    def forward(self, x, context):
        q, k, v = split(self.q(x)), split(self.k(context)), split(self.v(context))
        pairs = [[null.expand(2, -1, -1, -1), part] for null, part in zip(self.null, (k, v), strict=True)]
        k, v = (torch.cat(pair if self.is_first else pair[::-1], 2) for pair in pairs)
        self.weights = (q @ k.mT / 5**0.5).softmax(-1)
        return self.out(merge(self.attend(q, k, v)))


@pytest.mark.parametrize("attend", ATTENTIONS[:3])
def test_first_is_left_out_if_a_learned_key_is_in_front_of_the_context(attend):
    torch.manual_seed(0)
    x, context = torch.randn(2, 7, 15), torch.randn(2, 11, 15)
    model = WithNullKey(attend, is_first=True)
    match = "the first keys of these modules are not known to be tokens.*: WithNullKey$"
    with pytest.warns(UserWarning, match=match), hw.watch(model) as heads:
        model(x, context)
    assert all("first" not in row and row["kind"] == "cross" for row in heads.rows())
    assert [row["confidence"] for row in heads.rows()] == pytest.approx(
        model.weights.amax(-1).mean((0, 2)).tolist(), rel=1e-5
    )
    model = WithNullKey(attend, is_first=False)
    with hw.watch(model) as heads:
        model(x, context)
    assert [row["first"] for row in heads.rows()] == pytest.approx(
        model.weights[..., 0].mean((0, 2)).tolist(), rel=1e-5
    )


def index_like(x):
    return ORDER[None, None, :, None].expand(x.shape)


def of_keys(reorder):
    return lambda q, k, v: (q, reorder(k), reorder(v))


def scattered(x):
    return torch.zeros_like(x).scatter(2, index_like(x), x)


def written(x):
    result = torch.empty_like(x)
    result[:, :, ORDER] = x
    return result


def looked_up(x):
    """Return the tokens by a table of all sequences and heads."""
    rows = F.embedding(ORDER, x.permute(2, 0, 1, 3).flatten(1))
    return rows.unflatten(1, (*x.shape[:2], -1)).permute(1, 2, 0, 3)


REORDERINGS = {
    "flip": of_keys(lambda x: x.flip(2)),
    "roll": of_keys(lambda x: torch.roll(x, 1, dims=2)),
    "index": of_keys(lambda x: x[:, :, ORDER]),
    "list": of_keys(lambda x: x[:, :, [3, 1, 0, 2, 6, 5, 4]]),
    "index_select": of_keys(lambda x: x.index_select(2, ORDER)),
    "gather": of_keys(lambda x: x.gather(2, index_like(x))),
    "take_along_dim": of_keys(lambda x: torch.take_along_dim(x, ORDER[None, None, :, None], dim=2)),
    "argsort of norms": of_keys(lambda x: x.gather(2, x[..., :1].argsort(2).expand(x.shape))),
    "sort": lambda q, k, v: (q, k.sort(2).values, v),
    "scatter": of_keys(scattered),
    "index_copy": of_keys(lambda x: torch.empty_like(x).index_copy(2, ORDER, x)),
    "setitem": of_keys(written),
    "embedding": of_keys(looked_up),
    "matrix product": of_keys(lambda x: torch.eye(7).roll(1, 0) @ x),
    "matrix product on the right": of_keys(lambda x: (x.mT @ torch.eye(7).roll(1, 0).mT).mT),
    "einsum": of_keys(lambda x: torch.einsum("ij,bhjd->bhid", torch.eye(7).roll(1, 0), x)),
    "concatenated parts": of_keys(lambda x: torch.cat([x[:, :, 3:], x[:, :, :3]], 2)),
    "stacked tokens": of_keys(lambda x: torch.stack(x.unbind(2)[::-1], 2)),
    "shifted by a pad": of_keys(lambda x: F.pad(x, (0, 0, 1, -1))),
    "queries": lambda q, k, v: (q.flip(2), k, v),
    "all": lambda q, k, v: (q.flip(2), k.flip(2), v.flip(2)),
    "values alone": lambda q, k, v: (q, k, v.flip(2)),
    "other tokens": lambda q, k, v: (q[:, :, :-1], k[:, :, 1:], v[:, :, 1:]),
    "keys of other sequences": of_keys(lambda x: x.roll(1, 0)),
    "values of other sequences": lambda q, k, v: (q, k, v[[1, 0]]),
}


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("name", REORDERINGS)
def test_positions_are_left_out_where_keys_are_other_tokens(name, attend):
    model = Attention(attend, REORDERINGS[name])
    with pytest.warns(UserWarning, match="positions of queries among the keys .*: Attention"), hw.watch(model) as heads:
        model(torch.randn(2, 7, 15))
    for row in heads.rows():
        assert row["kind"] == "self"
        assert not OF_POSITIONS & row.keys()
        assert {"entropy", "received"} <= row.keys()


def rotated(x):
    """Rotary positions with halves of the features."""
    angles = torch.arange(x.shape[2])[:, None] / 7.0
    left, right = x[..., :4].chunk(2, -1)
    turned = torch.cat([left * angles.cos() - right * angles.sin(), right * angles.cos() + left * angles.sin()], -1)
    return torch.cat([turned, x[..., 4:]], -1)


def rotated_as_complex(x):
    pairs = torch.view_as_complex(x[..., :4].unflatten(-1, (2, 2)).contiguous())
    return torch.cat([torch.view_as_real(pairs * 1j).flatten(-2), x[..., 4:]], -1)


SAME_ORDER = {
    "unchanged": lambda q, k, v: (q, k, v),
    "rotary": lambda q, k, v: (rotated(q), rotated(k), v),
    "complex rotary": lambda q, k, v: (rotated_as_complex(q), rotated_as_complex(k), v),
    "reordered heads": lambda q, k, v: (q, k.flip(1), v.flip(1)),
    "reordered features": lambda q, k, v: (q, k.flip(-1), v),
    "repeated heads": of_keys(lambda x: x[:, :1].repeat_interleave(3, 1)),
    "normalised": lambda q, k, v: (F.normalize(q, dim=-1), F.layer_norm(k, (5,)), v),
    "twice flipped": of_keys(lambda x: x.flip(2).flip(2)),
    "the last tokens": lambda q, k, v: (q[:, :, 2:], k[:, :, 2:], v[:, :, 2:]),
    "an axis moved by einsum": of_keys(lambda x: torch.einsum("bhnd->bnhd", x).transpose(1, 2)),
    "features of heads mapped": of_keys(lambda x: torch.einsum("bhnd,hde->bhne", x, torch.ones(3, 5, 5))),
    "a copy": of_keys(lambda x: torch.empty_like(x).copy_(x)),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("name", SAME_ORDER)
def test_positions_are_reported_where_queries_and_keys_have_one_order(name, attend):
    model = Attention(attend, SAME_ORDER[name])
    with hw.watch(model) as heads:
        model(torch.randn(2, 7, 15))
    assert all(row.keys() >= OF_POSITIONS for row in heads.rows())


class OfTwoInputs(nn.Module):
    """Attention over tokens whose features are those of a linear map, and those that the model was called with."""

    def __init__(self, attend):
        super().__init__()
        self.first, self.out, self.attend = nn.Linear(15, 15), nn.Linear(15, 15), attend
        self.q, self.k, self.v = (nn.Linear(30, 15) for _ in range(3))

    def forward(self, x):
        joined = torch.cat([self.first(x), x], -1)
        return self.out(merge(self.attend(*(split(each(joined)) for each in (self.q, self.k, self.v)))))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("attend", ATTENTIONS)
def test_positions_are_reported_where_features_of_two_tensors_are_joined(attend):
    model = OfTwoInputs(attend)
    with hw.watch(model) as heads:
        model(torch.randn(2, 7, 15))
    assert all(row.keys() >= OF_POSITIONS for row in heads.rows())


class Joint(nn.Module):
    """Attention over two streams of tokens, each of which has projections of its own.

    Args:
        attend: function that computes the outputs of the heads.
        change: function that rearranges the joined queries, keys and values.
    """

    def __init__(self, attend, change=lambda q, k, v: (q, k, v)):
        super().__init__()
        self.first, self.second = (nn.ModuleList(nn.Linear(15, 15) for _ in range(3)) for _ in range(2))
        self.out, self.attend, self.change = nn.Linear(15, 15), attend, change

    def forward(self, x, other):
        pairs = zip(self.first, self.second, strict=True)
        joined = (torch.cat([split(first(x)), split(second(other))], 2) for first, second in pairs)
        q, k, v = self.change(*joined)
        self.weights = (q @ k.mT / 5**0.5).exp()  # a softmax would be one more, without a product
        self.weights = self.weights / self.weights.sum(-1, keepdim=True)
        return self.out(merge(self.attend(q, k, v)))


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("lengths", [(7, 4), (4, 4), (1, 1), (1, 6), (0, 5), (5, 0)])
@pytest.mark.parametrize("attend", ATTENTIONS[:3])
def test_joined_streams_keep_their_order(attend, lengths):
    torch.manual_seed(0)
    model = Joint(attend)
    with hw.watch(model, sites=[hw.Site("", kind="self")]) as heads:
        model(*(torch.randn(2, length, 15) for length in lengths))
    expected = model.weights.diagonal(-1, -2, -1).mean((0, 2)).tolist()
    assert [row["previous"] for row in heads.rows()] == pytest.approx(expected, abs=1e-5)


OTHER_ORDERS = {
    "keys": lambda q, k, v: (q, k.roll(4, 2), v.roll(4, 2)),
    "values": lambda q, k, v: (q, k, v.flip(2)),
    "all": lambda q, k, v: (q.flip(2), k.flip(2), v.flip(2)),
    "second first": lambda q, k, v: tuple(torch.cat([x[:, :, 4:], x[:, :, :4]], 2) for x in (q, k, v)),
}


@pytest.mark.parametrize("order", OTHER_ORDERS)
@pytest.mark.parametrize("attend", ATTENTIONS[:3])
def test_joined_streams_in_another_order_have_no_positions(attend, order):
    model = Joint(attend, OTHER_ORDERS[order])
    warning = pytest.warns(UserWarning, match="positions of queries among the keys could not")
    with warning, hw.watch(model, sites=[hw.Site("", kind="self")]) as heads:
        model(torch.randn(2, 4, 15), torch.randn(2, 4, 15))
    assert not OF_POSITIONS & heads.rows()[0].keys()


# -- tokens that are mixed by a matrix --------------------------------------------------------------------------------

ORDERS = {"permutation": torch.eye(7)[ORDER], "mixture": torch.rand(7, 7, generator=torch.Generator().manual_seed(0))}

WAYS_TO_MIX = {
    "matmul": lambda p, x: p @ x,
    "on the right": lambda p, x: (x.mT @ p.mT).mT,
    "einsum": lambda p, x: torch.einsum("...jd,ij->...id", x, p),
    "linear": lambda p, x: F.linear(x.mT, p).mT,
    "tensordot": lambda p, x: torch.tensordot(p, x, ([1], [x.ndim - 2])).movedim(0, -2),
    "product and sum": lambda p, x: (p[:, :, None] * x.unsqueeze(-3)).sum(-2),
}

MIXED = [(names, is_before) for names in ("q", "k", "v", "kv") for is_before in (True, False)] + [("qkv", False)]
"""Tensors that are mixed (queries, keys or values), and if this is done before their projections. Tokens in another
order before all projections have the positions of this order.
"""


class Mixed(nn.Module):
    """Attention whose queries, keys or values a matrix mixes, before or after their projection.

    Args:
        attend: function that computes the outputs of the heads.
        mix: function of the matrix and a tensor.
        names: those that are mixed, among "qkv".
        is_before: True to mix the inputs of the projections.
    """

    def __init__(self, attend, mix, names, is_before):
        super().__init__()
        self.projections = nn.ModuleDict({name: nn.Linear(15, 15) for name in "qkv"})
        self.out, self.attend, self.mix, self.names, self.is_before = nn.Linear(15, 15), attend, mix, names, is_before
        self.outside = []

    def forward(self, x, *matrices):
        matrix = [*matrices, *self.outside, getattr(self, "matrix", None)][0]
        parts = []
        for name, projection in self.projections.items():
            is_mixed = name in self.names
            part = self.mix(matrix, x) if is_mixed and self.is_before else x
            part = projection(part)
            parts.append(split(self.mix(matrix, part) if is_mixed and not self.is_before else part))
        self.weights = (parts[0] @ parts[1].mT / 5**0.5).exp()  # a softmax would be one more, without a product
        self.weights = self.weights / self.weights.sum(-1, keepdim=True)
        return self.out(merge(self.attend(*parts)))


def with_matrix(model, matrix, owner):
    """Return the model with its matrix, and further arguments of its calls."""
    if owner == "plain":
        model.outside.append(matrix)
    elif owner == "buffer":
        model.register_buffer("matrix", matrix)
    elif owner == "parameter":
        model.matrix = nn.Parameter(matrix)
    return model, [matrix] if owner == "argument" else []


@pytest.mark.parametrize(("names", "is_before"), MIXED)
@pytest.mark.parametrize("owner", ["plain", "buffer", "parameter", "argument"])
@pytest.mark.parametrize("way", WAYS_TO_MIX)
def test_positions_of_tokens_that_a_matrix_mixes_are_left_out(way, owner, names, is_before):
    for attend, matrix in zip(ATTENTIONS, ORDERS.values(), strict=False):
        model, arguments = with_matrix(Mixed(attend, WAYS_TO_MIX[way], names, is_before), matrix, owner)
        match = "positions of queries among the keys could not|it is unknown if queries and keys of these modules"
        for _ in range(3):  # also if a call follows a plan
            with pytest.warns(UserWarning, match=f"({match}).*: Mixed"), hw.watch(model) as heads:
                model(torch.randn(2, 7, 15), *arguments)
            is_unknown = (owner, names, is_before) == ("argument", "kv", True)  # keys and values have a further source
            assert {row["kind"] for row in heads.rows()} == {"cross" if is_unknown else "self"}
            for row in heads.rows():
                assert not OF_POSITIONS - {"first"} & row.keys()
            confidence = model.weights.amax(-1).mean((0, 2)).tolist()
            assert [row["confidence"] for row in heads.rows()] == pytest.approx(confidence, rel=1e-5)


WAYS_TO_ROTATE = {
    "on the right": lambda p, x: x @ p,
    "on the left": lambda p, x: (p @ x.mT).mT,
    "einsum": lambda p, x: torch.einsum("de,...d->...e", p, x),
    "tensordot": lambda p, x: torch.tensordot(x, p, 1),
}


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("names", ["k", "qk", "qkv"])
@pytest.mark.parametrize("owner", ["plain", "buffer"])
@pytest.mark.parametrize("is_before", [True, False])
@pytest.mark.parametrize("way", WAYS_TO_ROTATE)
def test_a_matrix_of_features_keeps_the_positions(way, owner, names, is_before):
    is_before &= way != "on the left"  # the axis of the features is known after a projection
    matrix = torch.linalg.qr(torch.randn(15, 15))[0]
    for attend in ATTENTIONS[:2]:
        model, _ = with_matrix(Mixed(attend, WAYS_TO_ROTATE[way], names, is_before), matrix, owner)
        for _ in range(3):
            with hw.watch(model) as heads:
                model(torch.randn(2, 7, 15))
            expected = model.weights.diagonal(-1, -2, -1).sum(-1).mean(0).div(6).tolist()
            assert [row["previous"] for row in heads.rows()] == pytest.approx(expected, rel=1e-5)


class PlainWeights(nn.Module):
    """Self-attention whose weights are tensors, but no parameters, and which attends to a context, if there is one."""

    def __init__(self):
        super().__init__()
        self.tensors = [torch.randn(15, 15) / 4 for _ in range(4)]

    def forward(self, x, context=None):
        tokens = (x, *2 * [x if context is None else context])
        q, k, v = (split(each @ w) for each, w in zip(tokens, self.tensors, strict=False))
        return merge(softmax(q, k, v)) @ self.tensors[3]


@pytest.mark.parametrize(("context", "kind"), [((), "self"), ((torch.randn(2, 7, 15),), "cross")])
def test_weights_that_are_no_parameters_do_not_decide_the_kind(context, kind):
    model = PlainWeights()
    for _ in range(2):
        with hw.watch(model) as heads:
            model(torch.randn(2, 7, 15), *context)
        assert {row["kind"] for row in heads.rows()} == {kind}
        assert all(("previous" in row) == (kind == "self") for row in heads.rows())
