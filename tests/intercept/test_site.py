"""Statements of users about the attention of a module: used where nothing is derived, and compared otherwise."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw


class Attention(nn.Module):
    """Attention whose queries, or keys too, are tensors that the model did not receive."""

    def __init__(self):
        super().__init__()
        self.out_proj = nn.Linear(24, 24)
        self.stored = [torch.randn(2, 3, 7, 8) for _ in range(3)]

    def forward(self, x):
        return self.out_proj(F.scaled_dot_product_attention(*self.stored).transpose(1, 2).flatten(2)) + x


class Derived(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.MultiheadAttention(24, 3, batch_first=True)

    def forward(self, x):
        return self.inner(x, x, x)[0]


X = torch.randn(2, 7, 24)


@pytest.mark.parametrize("kind", ["self", "cross"])
@torch.no_grad()
def test_a_stated_kind_is_used_where_none_is_derived(kind):
    model = nn.Sequential(Attention())
    with hw.watch(model, sites=[hw.Site("0", kind=kind, heads=3)]) as heads:
        model(X)
    assert [row["kind"] for row in heads.rows()] == [kind] * 3


@torch.no_grad()
def test_a_statement_about_a_gated_module_is_accepted():
    model = nn.Sequential(Attention())
    with hw.gate(model, {("0", 1): 0.0}, sites=[hw.Site("0", kind="self")]):
        gated = model(X)
    model[0].stored[2][:, 1] = 0.0
    torch.testing.assert_close(gated, model(X))


CONTRADICTIONS = {
    "kind": ({"kind": "cross"}, "sites: expected attention in inner of the stated kind 'cross', got 'self'"),
    "heads": ({"heads": 2}, "sites: expected 2 heads in inner, as stated, got 3"),
}


@pytest.mark.parametrize("name", CONTRADICTIONS)
@torch.no_grad()
def test_a_statement_that_contradicts_what_is_derived_is_refused(name):
    statement, sentence = CONTRADICTIONS[name]
    model = Derived()
    with pytest.raises(hw.InputError, match=sentence), hw.watch(model, sites=[hw.Site("inner", **statement)]):
        model(X)


@pytest.mark.parametrize(
    ("sites", "sentence"),
    [
        (["inner"], "sites: expected a list of headwise.Site, got 'inner'"),
        ([hw.Site("outer")], "sites: expected paths of modules of the model, got 'outer'"),
        ([hw.Site("inner"), hw.Site("inner", heads=3)], "sites: expected one statement for each module, got two for"),
    ],
)
def test_statements_about_no_module_are_refused(sites, sentence):
    with pytest.raises(hw.InputError, match=sentence), hw.watch(Derived(), sites=sites):
        pass


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"path": "", "heads": 0}, "heads: expected a positive whole number or None, got 0"),
        ({"path": "", "heads": True}, "heads: expected a positive whole number or None, got True"),
        ({"path": "", "kind": "both"}, "kind: expected 'self', 'cross' or None, got 'both'"),
    ],
)
def test_unusable_statements_are_refused(fields, sentence):
    with pytest.raises(hw.InputError, match=sentence):
        hw.Site(**fields)


@torch.no_grad()
def test_statements_about_modules_without_attention_are_errors():
    model, sites = nn.Sequential(Derived(), nn.Linear(24, 24)), [hw.Site("1", heads=4)]
    match = "sites: expected modules in which attention is seen, got none in 1"
    with pytest.raises(hw.InputError, match=match), hw.watch(model, sites=sites):
        model(X)
    with pytest.raises(hw.InputError, match=match), hw.gate(model, {("0.inner", 0): 0.5}, sites=iter(sites)):
        model(X)
    with hw.watch(model, sites=[hw.Site("0", heads=3)]) as heads:  # a module around the attention
        model(X)
    assert len(heads.rows()) == 3
