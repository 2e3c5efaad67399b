"""Attention that a module computes in parts of its queries has the statistics of attention with all queries at once."""

import warnings

import pytest
import torch
import torch.nn.functional as F
from self_attention import einsum, merge, softmax, split
from torch import nn

import headwise as hw

OF_POSITIONS = {"distance", "self", "previous", "next", "first"}

ATTENTIONS = [F.scaled_dot_product_attention, softmax, einsum]


class Attention(nn.Module):
    """Attention with three heads, whose `core` calls `attend` as often as it likes."""

    def __init__(self, core, attend):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(15, 15) for _ in range(4))
        self.core, self.attend = core, attend

    def forward(self, x, context=None):
        context = x if context is None else context
        sides = ((self.q, x), (self.k, context), (self.v, context))
        return self.out(merge(self.core(self.attend, *(split(each(y)) for each, y in sides))))


def watched(core, attend, *calls):
    """Return the rows of `watch` after these calls, and the messages of its warnings."""
    torch.manual_seed(0)
    model = Attention(core, attend)
    nn.init.normal_(model.k.weight)
    with warnings.catch_warnings(record=True) as caught, torch.no_grad():
        warnings.simplefilter("always")
        with hw.watch(model) as heads:
            for arguments in calls:
                model(*arguments)
    return heads.rows(), " ".join(str(each.message) for each in caught)


def assert_equal(rows, wanted, left_out=frozenset()):
    """Compare the rows of two runs, the first of which does not have the statistics `left_out`."""
    for row, other in zip(rows, wanted, strict=True):
        assert row.keys() == other.keys() - left_out
        assert row["kind"] == other["kind"]
        for name in row.keys() - {"kind", "module"}:
            assert row[name] == pytest.approx(other[name], rel=1e-5), name


def causal(first, queries, keys):
    return torch.arange(first, first + queries)[:, None] >= torch.arange(keys)


def whole(attend, q, k, v):
    return attend(q, k, v)


def whole_causal(attend, q, k, v):
    return attend(q, k, v, causal(0, q.shape[2], k.shape[2]))


def in_parts(attend, q, k, v):
    return torch.cat([attend(part, k, v) for part in q.split(3, 2)], 2)


def in_parts_from_the_end(attend, q, k, v):
    return torch.cat([attend(part, k, v) for part in q.split(3, 2)[::-1]][::-1], 2)


def row_by_row(attend, q, k, v):
    return torch.cat([attend(q[:, :, i : i + 1], k, v) for i in range(q.shape[2])], 2)


def causal_parts(attend, q, k, v):
    return torch.cat([attend(q[:, :, i : i + 3], k, v, causal(i, min(3, 7 - i), 7)) for i in (0, 3, 6)], 2)


def causal_parts_of_visible_keys(attend, q, k, v):
    stops = [(i, min(i + 3, 7)) for i in (0, 3, 6)]
    parts = [attend(q[:, :, i:j], k[:, :, :j], v[:, :, :j], causal(i, j - i, j)) for i, j in stops]
    return torch.cat(parts, 2)


def causal_row_by_row(attend, q, k, v):
    slices = [(slice(i, i + 1), slice(i + 1)) for i in range(q.shape[2])]
    return torch.cat([attend(q[:, :, own], k[:, :, seen], v[:, :, seen]) for own, seen in slices], 2)


X, Y = torch.randn(2, 7, 15), torch.randn(2, 7, 15)


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("core", [in_parts, in_parts_from_the_end, row_by_row])
def test_parts_of_the_queries_are_rows_of_the_same_sequences(core, attend):
    rows, messages = watched(core, attend, (X,), (Y,))
    wanted, _ = watched(whole, attend, (X,), (Y,))
    assert "positions of queries among the keys could not be established" in messages
    assert_equal(rows, wanted, OF_POSITIONS)


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("core", [causal_parts, causal_parts_of_visible_keys, causal_row_by_row])
def test_causal_parts_have_positions(core, attend):
    rows, messages = watched(core, attend, (X,), (Y,), (X,))
    wanted, _ = watched(whole_causal, attend, (X,), (Y,), (X,))
    assert not messages
    for row in (*rows, *wanted):
        assert not row.pop("next") > 0  # rows have no next key, or none that they see
    assert_equal(rows, wanted)


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("core", [in_parts, row_by_row])
def test_parts_of_cross_attention_are_rows_of_the_same_sequences(core, attend):
    calls = (X, Y[:, :5]), (Y, X[:, :5])
    rows, messages = watched(core, attend, *calls)
    wanted, _ = watched(whole, attend, *calls)
    assert {row["kind"] for row in rows} == {"cross"}
    assert not messages
    assert_equal(rows, wanted)


def in_windows(attend, q, k, v):
    windows = zip(*(each.split(4, 2) for each in (q, k, v)), strict=True)
    return torch.cat([attend(*window) for window in windows], 2)


def by_sequence(attend, q, k, v):
    return torch.cat([attend(q[i : i + 1], k[i : i + 1], v[i : i + 1]) for i in range(len(q))])


@pytest.mark.parametrize("attend", ATTENTIONS)
def test_windows_and_sequences_in_a_loop_are_sequences_of_their_own(attend):
    rows, _ = watched(in_windows, attend, (X,))
    wanted = [watched(whole, attend, (x,))[0] for x in (X[:, :4], X[:, 4:])]
    for row, *of_windows in zip(rows, *wanted, strict=True):
        for name in ("entropy", "received", "output_norm"):
            assert row[name] == pytest.approx(sum(each[name] for each in of_windows) / 2, rel=1e-5)
    rows, _ = watched(by_sequence, attend, (X,))
    wanted, _ = watched(whole, attend, (X,))
    assert_equal(rows, wanted)


def added(attend, q, k, v):
    """Local and global attention of the same queries, each with a projection of its own."""
    return attend(q, k, v), attend(0.5 * q, k, v, causal(0, q.shape[2], k.shape[2]))


def to_two_contexts(attend, q, k, v):
    """Attention to two parts of the context, as to a text and a picture."""
    return attend(q, k[:, :, :3], v[:, :, :3]), attend(q, k[:, :, 3:], v[:, :, 3:])


def part_again(attend, q, k, v):
    return attend(q, k, v), F.pad(attend(q[:, :, 2:4], k, v), (0, 0, 0, q.shape[2] - 2))


class Twice(Attention):
    def forward(self, x, context=None):
        context = x if context is None else context
        sides = ((self.q, x), (self.k, context), (self.v, context))
        return sum(self.out(merge(out)) for out in self.core(self.attend, *(split(each(y)) for each, y in sides)))


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("core", [added, to_two_contexts, part_again])
def test_queries_that_attend_twice_in_one_call_are_named(core, attend):
    model = Twice(core, attend)
    context = torch.randn(2, 7, 15) if core is to_two_contexts else None
    match = "queries of the same tokens attend several times in one call.*: Twice"
    with torch.no_grad(), pytest.warns(UserWarning, match=match), hw.watch(model) as heads:
        model(torch.randn(2, 7, 15), context)
    assert all(row.keys() == {"layer", "head", "kv_head", "module", "kind"} for row in heads.rows())


@pytest.mark.parametrize("measure", [hw.attention_distances, hw.position_curves])
def test_further_statistics_of_queries_that_attend_twice_are_left_out(measure):
    match = "queries of the same tokens attend several times in one call.*: Twice"
    with pytest.warns(UserWarning, match=match), pytest.raises(hw.InputError, match="none; warnings name the reasons"):
        measure(Twice(added, softmax), [{"x": torch.randn(2, 7, 15)}])


def reversed_rows(attend, q, k, v):
    return attend(q.flip(2), k, v).flip(2)


@pytest.mark.parametrize("attend", ATTENTIONS)
@pytest.mark.parametrize("core", [in_parts, reversed_rows])
def test_gates_at_positions_of_parts_or_reordered_queries_are_refused(core, attend):
    model, x = Attention(core, attend), torch.randn(2, 7, 15)
    match = "positions: expected attention calls with all queries in the order of tokens"
    with torch.no_grad(), pytest.raises(hw.InputError, match=match), hw.gate(model, {("", 0): 0.0}, positions=[0]):
        model(x)


@torch.no_grad()
def test_gates_at_positions_of_all_queries_act_in_each_call():
    torch.manual_seed(0)
    model, x = Attention(whole, softmax), torch.randn(2, 7, 15)
    plain = model(x)
    with hw.gate(model, {("", 0): 0.0}, positions=[0]):
        gated = [model(x), model(x)]
    model.out.weight[:, :5] = 0.0
    for each in gated:
        torch.testing.assert_close(each[:, :1], model(x)[:, :1])
        torch.testing.assert_close(each[:, 1:], plain[:, 1:])
