"""Statistics of plain PyTorch models with caches, against causal attention over each whole sequence in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw
from sequences_alone import (
    COMMON_POSITIONS,
    HEADS,
    WIDTH,
    Attention,
    mean_statistics,
    require_statistics,
    weights_alone,
)

pytestmark = pytest.mark.usefixtures("no_grad")

LENGTH, SLOTS = 11, 17
UNKNOWN_SEQUENCES = "it is unknown which sequences some calls with cached keys continue"
CHUNKS = {"steps": (5, *range(6, LENGTH + 1)), "chunks": (3, 7, LENGTH), "at once": (LENGTH,)}


class Cached(nn.Module):
    """Causal attention of 3 heads with a cache of some kind, whose state is an argument."""

    def __init__(self, kind, fused):
        super().__init__()
        self.attention, self.kind, self.fused = Attention(), kind, fused

    def forward(self, x, state):
        q, k, v = self.attention.split(x, x)
        start = state.setdefault("length", 0)
        state["length"] = stop = start + x.shape[1]
        k, v = getattr(self, self.kind)(state, start, k, v)
        keys = torch.arange(k.shape[2])
        mask = keys <= torch.arange(start, stop)[:, None]
        if self.kind == "dropping":
            mask = keys + stop - len(keys) <= torch.arange(start, stop)[:, None]
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v, mask)
        else:
            out = (q @ k.mT * 7**-0.5).masked_fill(~mask, -torch.inf).softmax(-1) @ v
        return self.attention.out(out.transpose(1, 2).flatten(2))

    @staticmethod
    def appended(state, start, k, v):
        """Concatenate with tensors in a nested dict."""
        layer = state.setdefault("layers", [{}])[0]
        layer["k"] = k if not start else torch.cat([layer["k"], k], 2)
        layer["v"] = v if not start else torch.cat([layer["v"], v], 2)
        return layer["k"], layer["v"]

    @staticmethod
    def preallocated(state, start, k, v):
        """Write slots of a fixed number."""
        if not start:
            state["kv"] = torch.zeros(2, len(k), HEADS, SLOTS, 7, dtype=k.dtype)
        slots = torch.arange(start, start + k.shape[2])
        state["kv"][0].index_copy_(2, slots, k)
        state["kv"][1].index_copy_(2, slots, v)
        return state["kv"]

    @classmethod
    def cut(cls, state, start, k, v):
        """Write slots of a fixed number, and attend to those that are filled."""
        k, v = cls.preallocated(state, start, k, v)
        return k[:, :, : state["length"]], v[:, :, : state["length"]]

    @classmethod
    def computed_again(cls, state, start, k, v):
        """Concatenate with tensors whose last bits differ in each call."""
        for name, tensor in state.get("layers", [{}])[0].items():
            state["layers"][0][name] = tensor.nextafter(torch.zeros(()))
        return cls.appended(state, start, k, v)

    @classmethod
    def dropping(cls, state, start, k, v):
        """Keep the last 7 keys and those of this call."""
        k, v = cls.appended(state, start, k, v)
        kept = 7 + state["length"] - start - 1
        return k[:, :, -kept:], v[:, :, -kept:]


def run(model, x, chunks):
    state, start = {}, 0
    for stop in chunks:
        model(x[:, start:stop], state)
        start = stop


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("chunks", CHUNKS)
@pytest.mark.parametrize("kind", ["appended", "preallocated", "cut", "computed_again"])
def test_cached_calls_continue_their_sequences(kind, chunks, fused):
    torch.manual_seed(1)
    model, first, second = Cached(kind, fused), torch.randn(2, LENGTH, WIDTH), torch.randn(1, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        run(model, first, CHUNKS[chunks])
        run(model, second, CHUNKS[chunks])
    sequences = [*first, *second]
    expected = mean_statistics([weights_alone(model.attention, x, causal=True) for x in sequences])
    require_statistics(heads.rows(), expected)
    assert {record.statistics["entropy"].count[0].item() for record in heads.records} == {3}


@pytest.mark.parametrize("fused", [True, False])
def test_a_cache_that_drops_old_keys(fused):
    torch.manual_seed(1)
    model, x = Cached("dropping", fused), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        run(model, x, CHUNKS["steps"])
    lag = torch.arange(LENGTH)[:, None] - torch.arange(LENGTH)
    weights = []
    for each in x:
        whole = weights_alone(model.attention, each, causal=True).masked_fill(lag >= 7, 0.0)
        weights.append(whole / whole.sum(-1, keepdim=True))
    require_statistics(heads.rows(), mean_statistics(weights))


def test_sequences_that_move_in_the_batch_as_in_beam_search():
    torch.manual_seed(1)
    model, x = Cached("appended", True), torch.randn(3, LENGTH, WIDTH)
    order, state = torch.tensor([2, 0, 0]), {}
    with hw.watch(model) as heads:
        model(x[:, :7], state)
        state["layers"] = [{name: value[order] for name, value in state["layers"][0].items()}]
        for index in range(7, LENGTH):
            model(x[:, index : index + 1], state)
    # The rows of the prompt count for the sequence with the same index in the batch.
    moved = torch.cat([x[order, :7], x[:, 7:]], 1)
    before = [weights_alone(model.attention, each[:7], causal=True) for each in x]
    after = [weights_alone(model.attention, each, causal=True)[:, 7:] for each in moved]
    weights = [torch.cat([F.pad(a, (0, LENGTH - 7)), b], 1) for a, b in zip(before, after, strict=True)]
    require_statistics(heads.rows(), mean_statistics(weights))


def test_a_mask_that_starts_at_the_first_key_does_not_fit_appended_keys():
    """The flag `is_causal` of SDPA hides the cached keys from the first new token, so that positions are unclear."""
    torch.manual_seed(1)
    attention, x = Attention(), torch.randn(2, LENGTH, WIDTH)

    class Flagged(nn.Module):
        def forward(self, x, before):
            q, k, v = attention.split(x, x)
            k, v = (
                each if old is None else torch.cat([old, each], 2) for old, each in zip(before, (k, v), strict=True)
            )
            before[:] = k, v
            return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    model, before = Flagged(), [None, None]
    warning = pytest.warns(UserWarning, match="positions of queries among the keys could not")
    with warning, hw.watch(model, sites=[hw.Site("", kind="self")]) as heads:
        model(x[:, :7], before)
        model(x[:, 7:], before)
    assert not (COMMON_POSITIONS | {"first"}) & heads.rows()[0].keys()


@pytest.mark.parametrize("fused", [True, False])
def test_alternating_caches_are_named(fused):
    torch.manual_seed(1)
    model, first, second = Cached("appended", fused), torch.randn(2, LENGTH, WIDTH), torch.randn(2, LENGTH, WIDTH)
    of_first, of_second = {}, {}
    warnings = [pytest.warns(UserWarning, match=match) for match in (UNKNOWN_SEQUENCES, "positions of queries among")]
    with warnings[0], warnings[1], hw.watch(model) as heads:
        model(first[:, :5], of_first)
        model(second[:, :5], of_second)
        model(first[:, 5:6], of_first)
        model(second[:, 5:6], of_second)
    assert not {"entropy", "received", "distance", "first"} & heads.rows()[0].keys()


class Decoder(nn.Module):
    """Self-attention with a cache, and cross-attention whose keys are computed once."""

    def __init__(self):
        super().__init__()
        self.own, self.cross = Cached("appended", True), Attention()

    def forward(self, x, memory, state):
        x = x + self.own(x, state)
        q, *_ = self.cross.split(x, x)
        if "memory" not in state:
            state["memory"] = list(self.cross.split(x, memory))[1:]
        return self.cross.joined(q, *state["memory"])


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_cross_attention_with_cached_keys_continues_its_sequences():
    torch.manual_seed(1)
    model, x, memory, state = Decoder(), torch.randn(2, LENGTH, WIDTH), torch.randn(2, 5, WIDTH), {}
    with hw.watch(model) as heads:
        model(x[:, :7], memory, state)
        for index in range(7, LENGTH):
            model(x[:, index : index + 1], memory, state)
    after = x + model.own(x, {})
    weights = [weights_alone(model.cross, *each) for each in zip(after, memory, strict=True)]
    rows = [row for row in heads.rows() if row["kind"] == "cross"]
    require_statistics(rows, mean_statistics(weights), without=COMMON_POSITIONS)
