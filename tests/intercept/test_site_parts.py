"""Attention layers that a module computes in a loop, without modules of their own."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw
from oracles import statistics_of

pytestmark = pytest.mark.usefixtures("no_grad")


class Loop(nn.Module):
    """Three layers of 3 heads, computed in one `forward` from stacked or listed weights, in two chunks of queries."""

    def __init__(self, stacked):
        super().__init__()
        weights, out = torch.randn(3, 72, 24) * 0.3, torch.randn(3, 24, 24) * 0.3
        self.weights = nn.Parameter(weights) if stacked else nn.ParameterList(weights.unbind())
        self.out = nn.Parameter(out) if stacked else nn.ParameterList(out.unbind())

    def forward(self, x):
        self.kept = []
        for index in range(3):
            q, k, v = (
                part.unflatten(-1, (3, 8)).transpose(1, 2) for part in F.linear(x, self.weights[index]).chunk(3, -1)
            )
            heads = torch.cat([F.scaled_dot_product_attention(chunk, k, v) for chunk in q.chunk(2, 2)], 2)
            self.kept.append((q @ k.mT * 8**-0.5).softmax(-1).detach())
            x = x + F.linear(heads.transpose(1, 2).flatten(2), self.out[index])
        return x


UNKNOWN_POSITIONS = "^positions of queries among the keys could not be established"
"""Warning about chunks of queries that attend to all keys without a mask."""


@pytest.mark.parametrize("stacked", [True, False])
def test_layers_of_one_module_have_rows_of_their_own(stacked):
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": Loop(stacked)})
    model.forward = model["blocks"].__call__
    warns = pytest.warns(UserWarning, match=UNKNOWN_POSITIONS)
    with warns, hw.watch(model, detail=hw.WeightCapture(rows=[0])) as heads:
        for _ in range(2):
            model(torch.randn(2, 14, 24))
    rows = heads.rows()
    assert [row["module"] for row in rows[::3]] == ["blocks", "blocks[1]", "blocks[2]"]
    assert [row["layer"] for row in rows[::3]] == [0, 1, 2]
    assert list(heads.details) == ["blocks", "blocks[1]", "blocks[2]"]


def test_statistics_of_layers_of_one_module_are_not_merged():
    torch.manual_seed(0)
    model, x = nn.Sequential(Loop(True)), torch.randn(2, 14, 24)
    with pytest.warns(UserWarning, match=UNKNOWN_POSITIONS), hw.watch(model) as heads:
        model(x)
    for row in heads.rows():
        weights = model[0].kept[row["layer"]][:, row["head"]]
        entropy = sum(statistics_of(each)["entropy"] for each in weights) / 2
        assert row["entropy"] == pytest.approx(entropy, rel=1e-5)


def test_a_gate_changes_one_layer_of_a_module():
    torch.manual_seed(0)
    model, x = nn.Sequential(Loop(True)), torch.randn(2, 14, 24)
    with hw.gate(model, {("0[1]", 2): 0.0}):
        gated = model(x)
    model[0].out[1, :, 16:] = 0.0
    torch.testing.assert_close(gated, model(x))


class Streams(nn.Module):
    """Attention over two streams; `Projections` maps the second result first, as the text model LiLT does."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList([nn.Linear(24, 72), nn.Linear(24, 72)])

    def forward(self, x, y):
        results = []
        for layer, stream in zip(self.qkv, (x, y), strict=True):
            q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in layer(stream).chunk(3, -1))
            results.append(((q @ k.mT).softmax(-1) @ v).transpose(1, 2).flatten(2))
        return results[::-1]


class Projections(nn.Module):
    """Output projections of both streams."""

    def __init__(self):
        super().__init__()
        self.attention, self.second, self.first = Streams(), nn.Linear(24, 24), nn.Linear(24, 24)

    def forward(self, x, y):
        second, first = self.attention(x, y)
        return self.second(second), self.first(first)


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_a_gate_numbers_layers_as_watch_does():
    torch.manual_seed(0)
    model, x, y = Projections(), torch.randn(2, 7, 24), torch.randn(2, 7, 24) * 9
    with hw.watch(model) as heads:
        plain = model(x, y)
    entropy = {row["module"]: row["entropy"] for row in heads.rows() if row["head"] == 2}
    assert entropy["attention"] > entropy["attention[1]"]  # large scores of the second stream
    for label, changed in (("attention", 1), ("attention[1]", 0)):
        with hw.gate(model, {(label, 2): 0.0}):
            gated = model(x, y)
        are_equal = [torch.allclose(one, other) for one, other in zip(gated, plain, strict=True)]
        assert are_equal == [index != changed for index in range(2)]


def test_a_gate_of_a_layer_that_did_not_run_is_refused():
    model = nn.Sequential(Loop(True))
    sentence = r"expected modules in which attention is seen, got none in 0\[3\]"
    with pytest.raises(hw.InputError, match=sentence), hw.gate(model, {("0[3]", 0): 0.0}):
        model(torch.randn(2, 14, 24))


def test_a_module_that_is_called_again_stays_one_layer():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.MultiheadAttention(24, 3, batch_first=True)

        def forward(self, x):
            for _ in range(2):
                x = x + self.layer(x, x, x)[0]
            return x

    model = Twice()
    with hw.watch(model) as heads:
        model(torch.randn(2, 5, 24))
    assert [record.site.label for record in heads.records] == ["layer"]
    assert len(heads.rows()) == 3


class BothAxes(nn.Module):
    """One matrix of scores with a softmax over each of its axes, for two streams of tokens.

    Args:
        projects: how queries and keys are computed: by two maps, by one, or by none (then there is one head).
        is_second_first: compute the softmax over the axis of the first stream first.
    """

    def __init__(self, projects, is_second_first):
        super().__init__()
        maps = [nn.Linear(24, 24) for _ in range(2)]
        self.maps = nn.ModuleList({"two": maps, "one": maps[:1] * 2}.get(projects, ()))
        self.values, self.outputs = (nn.ModuleList(nn.Linear(24, 24) for _ in range(2)) for _ in range(2))
        self.heads, self.is_second_first = 3 if projects != "none" else 1, is_second_first

    def split(self, x):
        return x.unflatten(-1, (self.heads, -1)).transpose(1, 2)

    def compared(self, *streams):
        mapped = (
            [each(x) for each, x in zip(self.maps, streams, strict=True)] if self.maps else [x / 3 for x in streams]
        )
        return map(self.split, mapped)

    def forward(self, x, y):
        one, other = self.compared(x, y)
        v, w = (self.split(each(stream)) for each, stream in zip(self.values, (y, x), strict=True))
        scores = torch.einsum("bhid,bhjd->bhij", one, other)

        def over_others():
            return torch.einsum("bhij,bhjd->bhid", scores.softmax(-1), v)

        def over_first():
            return (
                scores.mT.softmax(-1) @ w if self.heads == 1 else torch.einsum("bhij,bhid->bhjd", scores.softmax(2), w)
            )

        outputs = (over_first(), over_others()) if self.is_second_first else (over_others(), over_first())
        outputs = outputs[::-1] if self.is_second_first else outputs
        return [each(out.transpose(1, 2).flatten(2)) for each, out in zip(self.outputs, outputs, strict=True)]


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
@pytest.mark.parametrize("is_second_first", [False, True])
@pytest.mark.parametrize("projects", ["two", "one", "none"])
@pytest.mark.parametrize("length", [7, 4])
def test_softmaxes_over_both_axes_of_scores_are_two_layers(projects, is_second_first, length):
    torch.manual_seed(2)
    model, x, y = BothAxes(projects, is_second_first), torch.randn(2, 7, 24), torch.randn(2, length, 24)
    with hw.watch(model) as heads:
        plain = model(x, y)
    one, other = (part.double() for part in model.compared(x, y))
    scores = torch.einsum("bhid,bhjd->bhij", one, other).exp()
    weights = [scores / scores.sum(-1, keepdim=True), (scores / scores.sum(2, keepdim=True)).mT]
    rows = iter(heads.rows())
    of_parts = weights[::-1] if is_second_first else weights
    for part, of_part in enumerate(of_parts):
        for head in range(model.heads):
            row, expected = next(rows), [statistics_of(each[head]) for each in of_part]
            assert (row["module"], row["kind"]) == ("[1]" if part else "", "cross")
            for name in ("entropy", "confidence", "received"):
                assert row[name] == pytest.approx(sum(each[name] for each in expected) / 2, rel=1e-4), (part, name)
    assert next(rows, None) is None
    for part in range(2):
        with hw.gate(model, {("[1]" if part else "", 0): 0.0}):
            gated = model(x, y)
        are_equal = [torch.equal(one, other) for one, other in zip(gated, plain, strict=True)]
        assert are_equal == [(index == part) == is_second_first for index in range(2)]
