"""Calls of a model that follow a plan have the results of calls that are traced, and plans do not become stale."""

import copy
import gc
import warnings
import weakref
from collections import UserDict
from collections.abc import Callable
from typing import ClassVar

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

import headwise as hw
from headwise.intercept import plans
from headwise.intercept.trace.functions import is_sized_by_numbers
from headwise.intercept.trace.refusals import HEADS_UNKNOWN
from tiny import FAMILIES, PADDED, TOKENS, family
from tiny import model as decoder_of


@pytest.fixture
def followed(monkeypatch):
    """List with an element for each call of a model that followed a plan."""
    calls: list[plans.Following] = []
    start = plans.Following.__init__

    def counted(following, *args):
        calls.append(following)
        start(following, *args)

    monkeypatch.setattr(plans.Following, "__init__", counted)
    return calls


class Attention(nn.Module):
    """Self-attention of 3 heads by SDPA, of which users may change attributes between two calls."""

    def __init__(self, width=24, heads=3):
        super().__init__()
        self.heads, self.causal, self.flip, self.order, self.kind = heads, True, False, [0, 1], "sdpa"
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(width, width) for _ in range(4))
        self.between = nn.Identity()

    def forward(self, x, memory=None):
        """Return the output, over the keys of `memory` or of `x`."""
        memory = x if memory is None else memory
        q, k, v = (
            layer(each).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for layer, each in ((self.q_proj, x), (self.k_proj, memory), (self.v_proj, memory))
        )
        if self.flip or self.order[0]:
            q = q.flip(2)
        if self.kind == "softmax":
            return self.o_proj(((q @ k.mT / 8**0.5).softmax(-1) @ v).transpose(1, 2).flatten(2))
        out = self.between(F.scaled_dot_product_attention(q, k, v, is_causal=self.causal))
        if self.flip or self.order[0]:
            out = out.flip(2)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two layers of attention, the second over `memory` if it is passed."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList([Attention(), Attention()])
        self.skip = False

    def forward(self, x, memory=None):
        """Return the output of both layers, or of the first alone."""
        x = x + self.layers[0](x)
        return x if self.skip else x + self.layers[1](x, memory)


def inputs(batch=2, length=7, seed=0):
    """Random inputs of the model."""
    return torch.randn(batch, length, 24, generator=torch.Generator().manual_seed(seed))


def watched(model, *calls, gates=None, **options):
    """Rows of each of the calls, in contexts of their own, with the warnings and the outputs."""
    results = []
    for call in calls:
        with warnings.catch_warnings(record=True) as caught, torch.no_grad():
            warnings.simplefilter("always")
            with hw.watch(model, **options) as heads:
                output = call(model)
        results.append((heads.rows(), sorted(str(each.message) for each in caught), output))
    return results


def require_equal(results, expected):
    """Compare results of `watched`."""
    for (rows, messages, output), (expected_rows, expected_messages, expected_output) in zip(
        results, expected, strict=True
    ):
        assert messages == expected_messages
        torch.testing.assert_close(output, expected_output, rtol=1e-4, atol=1e-5)
        assert [row.keys() for row in rows] == [row.keys() for row in expected_rows]
        for row, other in zip(rows, expected_rows, strict=True):
            for name, value in row.items():
                expected_value = other[name]
                if not isinstance(value, str):
                    expected_value = pytest.approx(expected_value, rel=1e-4, abs=1e-6, nan_ok=True)
                assert value == expected_value, name


@pytest.fixture
def traced(monkeypatch):
    """Function that returns the results of `watched` without any plan."""

    def run(model, *calls, **options):
        with monkeypatch.context() as patch:
            patch.setattr(plans.PlanKey, "plans", lambda key: [])
            patch.setattr(plans.PlanKey, "store", lambda key, plan: None)
            return watched(model, *calls, **options)

    return run


@pytest.mark.parametrize("padding", PADDED)
@pytest.mark.parametrize(("name", "implementation"), FAMILIES)
def test_transformers_models_have_the_same_rows_with_a_plan(name, implementation, padding, followed, traced):
    model = family(name, implementation)
    calls = [
        lambda model: model(input_ids=TOKENS, attention_mask=torch.ones_like(TOKENS)).last_hidden_state[0],
        lambda model: model(input_ids=TOKENS.flip(1), attention_mask=PADDED[padding]).last_hidden_state[:, -1],
    ]
    require_equal(watched(model, *3 * calls), traced(model, *3 * calls))
    assert followed


@pytest.mark.parametrize("training", [False, True])
def test_plain_models_have_the_same_rows_with_a_plan(training, followed, traced):
    model = Model().train(training)
    calls = [lambda model, seed=seed: model(inputs(seed=seed)) for seed in range(4)]
    require_equal(watched(model, *calls), traced(model, *calls))
    assert len(followed) == 3


def test_calls_with_the_sizes_of_a_traced_call_follow_its_plan(followed, traced):
    model = Model()
    calls = [lambda model, n=n: model(inputs(length=n)) for n in (5, 9, 5, 9, 5, 7, 9, 1, 1, 1)]
    require_equal(watched(model, *calls), traced(model, *calls))
    assert len(followed) == 6


def test_gates_of_calls_with_a_plan_change_the_same_heads(followed):
    model, x = Model().requires_grad_(False), inputs()
    gate = torch.tensor(0.3, requires_grad=True)
    results = []
    for _ in range(4):
        with hw.gate(model, {("layers.1", 2): gate, (0, 1): 0.0}):
            out = model(x)
        results.append((out.detach(), torch.autograd.grad(out.square().sum(), gate)[0]))
    assert len(followed) == 3
    for out, gradient in results[1:]:
        torch.testing.assert_close(out, results[0][0])
        torch.testing.assert_close(gradient, results[0][1])
    with torch.no_grad(), hw.gate(model, {(0, 1): 0.0}), hw.watch(model) as heads:
        outputs = [model(x) for _ in range(4)]
    assert len(followed) == 6
    torch.testing.assert_close(outputs[0], outputs[-1])
    assert len(heads.rows()) == 6


def _module(model):
    return model.layers[1]


def _added_hook(model):
    model.layers[1].between.register_forward_hook(lambda module, args, output: output.roll(1, 2))


def _replaced_child(model):
    model.layers[1].between = nn.Sequential(nn.Identity(), nn.Identity())


def _other_forward(model):
    module = model.layers[1]
    module.forward = lambda x, memory=None: Attention.forward(module, x.flip(1), memory)


CHANGES: dict[str, Callable[[nn.Module], object]] = {
    "an attribute that reorders queries": lambda model: setattr(_module(model), "flip", True),
    "an attribute that chooses hand-written attention": lambda model: setattr(_module(model), "kind", "softmax"),
    "an attribute of the model that skips a layer": lambda model: setattr(model, "skip", True),
    "the mask": lambda model: setattr(_module(model), "causal", False),
    "a hook that moves outputs": _added_hook,
    "a module that is replaced": _replaced_child,
    "a forward of one module": _other_forward,
    "the dtype": lambda model: model.double(),
    "training mode": lambda model: model.train(),
    "the number of heads": lambda model: [setattr(each, "heads", 6) for each in model.layers],
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_plan_is_not_followed_after_a_change_of(change, traced):
    model, other = Model().eval(), Model().eval()
    call = lambda model: model(inputs().to(next(model.parameters()).dtype))  # noqa: E731
    watched(model, *3 * [call])
    CHANGES[change](model)
    CHANGES[change](other)
    require_equal(watched(model, *3 * [call]), traced(other, *3 * [call]))


def _autocast(model):
    with torch.autocast("cpu", torch.bfloat16):
        return model(inputs()).float()


def _with_gradient(model):
    with torch.enable_grad():
        return model(inputs().requires_grad_()).detach()


CALLS: dict[str, Callable[[nn.Module], object]] = {
    "another kind of attention": lambda model: model(inputs(), inputs(seed=1)),
    "the same tensor twice": lambda model: model(*2 * [inputs()]),
    "a memory of another length": lambda model: model(inputs(), inputs(length=4, seed=1)),
    "a batch of one": lambda model: model(inputs(batch=1)),
    "one token": lambda model: model(inputs(length=1)),
    "arguments by name": lambda model: model(x=inputs(), memory=inputs(seed=2)),
    "a layer by itself": lambda model: model.layers[0](inputs()),
    "autocast": _autocast,
    "two calls": lambda model: model(model(inputs())),
    "a gradient": _with_gradient,
}


@pytest.mark.parametrize("kind", CALLS)
def test_a_plan_is_not_followed_by_calls_with(kind, traced):
    model, other = Model(), Model()
    first = lambda model: model(inputs())  # noqa: E731
    calls = [first, first, first, *3 * [CALLS[kind]], first]
    require_equal(watched(model, *calls), traced(other, *calls))


def test_a_plan_is_not_followed_under_another_implementation_of_transformers(traced):
    model, call = family("llama", "sdpa"), lambda model: model(input_ids=TOKENS).last_hidden_state
    watched(model, *3 * [call])
    model.set_attn_implementation("eager")
    require_equal(watched(model, *3 * [call]), traced(family("llama", "eager"), *3 * [call]))


def test_generation_after_a_planned_prompt_continues_its_sequences(traced):
    model = decoder_of("decoder", top="ForCausalLM")
    other, tokens = copy.deepcopy(model), torch.arange(12).view(2, 6)

    def generated(model):
        first = model(tokens, use_cache=True)
        second = model(tokens[:, :1], past_key_values=first.past_key_values, use_cache=True)
        return second.logits

    require_equal(watched(model, *3 * [generated]), traced(other, *3 * [generated]))
    require_equal(
        watched(model, lambda m: m(tokens, attention_mask=torch.ones(2, 6)).logits, generated),
        traced(other, lambda m: m(tokens, attention_mask=torch.ones(2, 6)).logits, generated),
    )


class Switching(Attention):
    """Attention that a number outside of the model turns into softmax by hand."""

    way = "sdpa"

    def forward(self, x, memory=None):
        """Return the output in the way that the class states."""
        self.__dict__["kind"] = Switching.way
        return super().forward(x, memory)


@pytest.fixture
def switched():
    """Function that chooses the way of `Switching` for the rest of the test."""
    yield lambda way: setattr(Switching, "way", way)
    Switching.way = "sdpa"


@pytest.mark.parametrize("places", [(0,), (0, 1)])
def test_another_way_to_attend_is_traced_if_the_model_has_not_attended_before(places, switched, traced):
    model = nn.Sequential(*(Switching() if place in places else Attention() for place in range(2)))
    other, call = copy.deepcopy(model), lambda model: model(inputs())
    watched(model, *3 * [call])
    switched("softmax")
    require_equal(watched(model, *3 * [call]), traced(other, *3 * [call]))


def test_attention_that_contradicts_the_plan_is_named_once(switched, traced):
    model, x = nn.Sequential(Attention(), Switching()), inputs()
    other, call = copy.deepcopy(model), lambda model: model(x)
    watched(model, *3 * [call])
    switched("softmax")
    with pytest.raises(hw.InputError, match=plans.OTHER_WAY), hw.watch(model), torch.no_grad():
        model(x)
    require_equal(watched(model, *3 * [call]), traced(other, *3 * [call]))


def test_attention_by_hand_after_a_contradiction_is_named(switched):
    model, x = nn.Sequential(Attention(), Switching()), inputs()
    watched(model, *3 * [lambda model: model(x)])

    def run():
        with hw.watch(model), torch.no_grad():
            for way in ("sdpa", "softmax", "softmax"):
                switched(way)
                model(x)

    with pytest.raises(hw.InputError, match=f"got none in 0, 1; {plans.OTHER_WAY}"):
        run()


class Parts(nn.Module):
    """A module with two layers of its own, one of which attends in each call."""

    which = 0

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Attention(), Attention()])

    def forward(self, x):
        """Return the output of the layer that the class states."""
        layer = self.layers[Parts.which]
        q, k, v = (
            each(x).unflatten(-1, (3, -1)).transpose(1, 2) for each in (layer.q_proj, layer.k_proj, layer.v_proj)
        )
        return layer.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_layers_of_a_module_that_differ_in_their_weights_are_not_mistaken(monkeypatch, traced):
    model, x = nn.Sequential(Parts()), inputs()
    other = copy.deepcopy(model)

    def alternating(model):
        for which in (0, 0, 0, 1, 1, 1, 0):
            monkeypatch.setattr(Parts, "which", which)
            out = model(x)
        return out

    results = watched(model, alternating)
    assert {row["module"] for row in results[0][0]} == {"0", "0[1]"}
    require_equal(results, traced(other, alternating))
    monkeypatch.setattr(Parts, "which", 1)
    plain = model(x)
    monkeypatch.setattr(Parts, "which", 0)
    with torch.no_grad(), hw.gate(model, {("0", 1): 0.0}):
        for _ in range(3):
            model(x)
        monkeypatch.setattr(Parts, "which", 1)
        torch.testing.assert_close(model(x), plain)


class Number(int):
    """A whole number of another class than int."""


class Rolled(Attention):
    """Attention with keys and values that a function outside of the model rearranges."""

    rearrange = staticmethod(lambda x: x)

    def forward(self, x, memory=None):
        """Return the output."""
        q, k, v = (layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        out = F.scaled_dot_product_attention(q, Rolled.rearrange(k), Rolled.rearrange(v))
        return self.o_proj(out.transpose(1, 2).flatten(2))


IN_ORDER, MIRRORED = np.arange(7), np.arange(7)[::-1].copy()
REARRANGED = {
    "numbers of numpy": (lambda x: x.roll(np.int64(0), 2), lambda x: x.roll(np.int64(2), 2)),
    "numbers of another class": (lambda x: x.roll(Number(0), 2), lambda x: x.roll(Number(2), 2)),
    "arrays": (lambda x: x[:, :, IN_ORDER], lambda x: x[:, :, MIRRORED]),
    "ranges": (lambda x: x[:, :, range(7)], lambda x: x[:, :, range(6, -1, -1)]),
}


@pytest.mark.parametrize("name", REARRANGED)
def test_arguments_that_are_no_tensors_are_compared_by_value(name, monkeypatch, traced):
    model, call, results = Rolled(), lambda model: model(inputs()), []
    for run in (watched, traced):
        own = copy.deepcopy(model)
        for rearrange in REARRANGED[name]:
            monkeypatch.setattr(Rolled, "rearrange", staticmethod(rearrange))
            results.append(run(own, *3 * [call]))
    require_equal(results[1], results[3])
    assert all("distance" not in row for row in results[1][0][0])


class WithTable(Attention):
    """Attention with a table of the visible keys, which follows from no input, and may be kept for later calls."""

    tables: ClassVar[dict] = {}
    keeps = False

    def forward(self, x, memory=None):
        """Return the output."""
        q, k, v = (layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        table = self.tables.get(x.shape[1])
        if table is None:
            places = torch.arange(x.shape[1])
            table = (places[:, None] - places).abs() < 3
        if self.keeps:
            self.tables[x.shape[1]] = table
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, attn_mask=table).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("keeps", [False, True])
def test_what_the_first_call_of_a_model_keeps_contradicts_no_plan(keeps, followed, traced, monkeypatch):
    monkeypatch.setattr(WithTable, "keeps", keeps)
    monkeypatch.setattr(WithTable, "tables", {})
    model = nn.Sequential(Attention(), WithTable())
    calls = 4 * [lambda model: model(inputs())]
    require_equal(watched(model, *calls), traced(copy.deepcopy(model), *calls))
    assert len(followed) == 2


def test_few_plans_are_kept_of_models_that_change_in_every_call():
    model = Model()
    for number in range(2 * plans.MOST_KINDS):
        model.count = number
        watched(model, lambda model: model(inputs()))
    assert len(plans._PLANS[model]) == plans.MOST_KINDS


class Indexed(Attention):
    """Attention whose queries an index outside of the model selects: in their order by 1, in reverse order by True."""

    at: object = 1

    def forward(self, x, memory=None):
        """Return the output in the order of the queries."""
        q, k, v = (layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj))
        q = torch.stack([q.flip(2), q])[Indexed.at].reshape(-1, *q.shape)[0]
        return self.o_proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))


def test_equal_arguments_of_other_types_are_other_steps(traced, monkeypatch):
    model, call = Indexed(), lambda model: model(inputs())
    other = copy.deepcopy(model)
    watched(model, *3 * [call])
    monkeypatch.setattr(Indexed, "at", True)
    expected = traced(other, call)
    assert "distance" not in expected[0][0][0]
    require_equal(watched(model, call), expected)


class BySorting(Attention):
    """Attention whose queries, keys and values are in the order of a number of each token."""

    def __init__(self, way):
        super().__init__()
        self.way = way

    def forward(self, x, memory=None):
        """Return the output in the order of the input."""
        heads = [layer(x).unflatten(-1, (3, -1)).transpose(1, 2) for layer in (self.q_proj, self.k_proj, self.v_proj)]
        order = x[0, :, 0].argsort()
        if self.way == "index":
            heads = [each[:, :, order] for each in heads]
        elif self.way == "list":
            heads = [each[:, :, order.tolist()] for each in heads]
        elif self.way == "branch" and bool(x[0, 0, 0] > x[0, -1, 0]):
            heads = [each.flip(2) for each in heads]
        out = F.scaled_dot_product_attention(*heads, is_causal=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


@pytest.mark.parametrize("way", ["index", "list", "branch"])
def test_the_order_of_tokens_may_depend_on_numbers(way, traced):
    model, x = BySorting(way), inputs()
    ascending = x[:, x[0, :, 0].argsort()]
    calls = [*3 * [lambda model: model(ascending)], lambda model: model(ascending.flip(1)), lambda model: model(x)]
    require_equal(watched(model, *calls), traced(copy.deepcopy(model), *calls))


class Placed(nn.Module):
    """Attention over tokens or sequences in the order of an index, which users may change in place."""

    def __init__(self, way, places):
        super().__init__()
        torch.manual_seed(0)
        self.way, self.attention, self.embedding = way, Attention(), nn.Embedding(9, 24)
        self.register_buffer("order", torch.arange(places))

    def forward(self, input_ids):
        """Return the output of attention for token ids."""
        x = self.embedding(input_ids)
        if self.way == "tokens":
            x = x[:, self.order]
        elif self.way == "gathered tokens":
            x = x.gather(1, self.order[None, :, None].expand(x.shape))
        elif self.way == "sequences":
            x = x[self.order]
        x = self.attention(x)
        return self.attention(x[:, self.order] if self.way == "outputs" else x)


@pytest.mark.parametrize(("way", "places"), [("tokens", 7), ("gathered tokens", 7), ("sequences", 3), ("outputs", 7)])
def test_numbers_of_an_index_may_change_between_two_calls(way, places, traced):
    model, ids = Placed(way, places), torch.randint(9, (3, 7), generator=torch.Generator().manual_seed(0))

    def call(model):
        return model(input_ids=ids)

    def reversed_order(model):
        model.order.copy_(torch.arange(places).flip(0))
        return call(model)

    other = copy.deepcopy(model)
    require_equal(watched(model, call, call, reversed_order), traced(other, call, call, reversed_order))


class Selected(nn.Module):
    """Selection of heads by an index."""

    def __init__(self):
        super().__init__()
        self.register_buffer("order", torch.arange(3))

    def forward(self, out):
        """Return the head outputs in the order of the index."""
        return out.index_select(1, self.order)


def test_an_index_of_heads_may_change_between_two_calls():
    model = Model()
    model.layers[0].between = selected = Selected()
    watched(model, *2 * [lambda model: model(inputs())])
    selected.order.copy_(torch.tensor([1, 2, 0]))
    _, messages, _ = watched(model, lambda model: model(inputs()))[0]
    assert any(each == f"{HEADS_UNKNOWN}: layers.0" for each in messages)


class Overwriting(nn.Module):
    """Attention that overwrites some of its token ids after it has looked up their embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embedding, self.attention = nn.Embedding(9, 24), Attention()

    def forward(self, input_ids):
        """Return the output of attention."""
        x = self.embedding(input_ids)
        input_ids.masked_fill_(input_ids == 8, 0)
        return self.attention(x)


def test_token_ids_may_be_overwritten_after_their_embeddings_were_looked_up(traced):
    model = Overwriting()
    calls = [lambda model, ids=ids: model(torch.tensor([ids])) for ids in ([1, 2, 1, 3], [2, 2, 0, 0], [8, 0, 8, 0])]
    require_equal(watched(model, *calls), traced(copy.deepcopy(model), *calls))


def test_a_model_with_plans_is_freed():
    model = Model()
    model.layers[1].owner = [model.layers[0]]
    watched(model, lambda model: model(inputs()))
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


def cycle_of_lists():
    cycle = [torch.ones(2)]
    cycle.append([cycle])
    return cycle


def cycle_of_dicts():
    cycle = {"a": torch.ones(2)}
    cycle["b"] = {"c": [cycle]}
    return cycle


def cycle_of_tuples():
    inner = []
    cycle = (torch.ones(2), inner)
    inner.append(cycle)
    return cycle


def mapping_with_itself():
    cycle = UserDict(a=1)
    cycle["b"] = cycle
    return cycle


def deep_list():
    nested = [torch.ones(2)]
    for _ in range(5000):
        nested = [nested]
    return nested


class WithCycles(Model):
    """The same with an argument that it passes to the layer and returns, next to the result."""

    class Layer(nn.Module):
        """Output projection of heads that are passed in a container."""

        def __init__(self):
            super().__init__()
            self.proj = nn.Linear(24, 24)

        def forward(self, heads):
            """Return the output of the layer."""
            return self.proj(heads[0])

    def __init__(self):
        super().__init__()
        self.qkv, self.last = nn.Linear(24, 72), self.Layer()

    def forward(self, x, others):
        """Return a container with itself, as are the arguments of the last layer."""
        q, k, v = (part.unflatten(-1, (3, 8)).transpose(1, 2) for part in self.qkv(super().forward(x)).chunk(3, -1))
        heads = [F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)]
        heads.append(heads)
        output = {"others": others, "output": self.last(heads)}
        output["itself"] = output
        return output


@pytest.mark.filterwarnings("error", "ignore:the output projection was not seen")
@pytest.mark.parametrize("make", [cycle_of_lists, cycle_of_dicts, cycle_of_tuples, mapping_with_itself, deep_list])
def test_arguments_that_contain_themselves_have_no_plan(make, followed):
    model, others = WithCycles(), make()
    with torch.no_grad():
        expected = model(inputs(), others)["output"]
        for _ in range(3):
            with hw.watch(model) as heads:
                assert torch.equal(model(inputs(), others)["output"], expected)
            assert len(heads.rows()) == 9
            with hw.gate(model, {("layers.0", 1): 0.0, ("", 2): 0.0}):
                gated = model(inputs(), others)["output"]
        for proj, head in ((model.layers[0].o_proj, 1), (model.last.proj, 2)):
            proj.weight[:, 8 * head : 8 * (head + 1)] = 0.0
        torch.testing.assert_close(gated, model(inputs(), others)["output"])
    assert not followed


# -- caches of keys and values ---------------------------------------------------------------------------------------


def decoder(name):
    """Return a tiny decoder: a family, or one in which a layer without a window precedes one with a window."""
    if name != "mixed windows":
        return family(name, "sdpa")
    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2}
    windows = {"use_sliding_window": True, "sliding_window": 6, "layer_types": ["full_attention", "sliding_attention"]}
    torch.manual_seed(0)
    config = transformers.Qwen2Config(vocab_size=97, intermediate_size=37, **sizes, **windows)
    return transformers.AutoModel.from_config(config).eval()


def steps(*sizes, change=None, after=None):
    """Function that calls a decoder with a prompt and further tokens, of these numbers, and a growing cache. After one
    of the calls, `change` may change the cache.
    """
    generator = torch.Generator().manual_seed(sum(sizes))
    tokens = torch.randint(0, 97, (2, sum(sizes)), generator=generator).split(sizes, 1)

    def run(model):
        cache, outputs = transformers.DynamicCache(config=model.config), []
        for number, each in enumerate(tokens):
            outputs.append(model(each, past_key_values=cache).last_hidden_state[:, -1])
            if number == after:
                change(cache)
        return torch.stack(outputs)

    return run


@pytest.mark.parametrize("name", ["llama", "gpt2", "mistral, window 4", "mixed windows"])
def test_decoding_steps_follow_a_plan_and_have_the_same_rows(name, followed, traced):
    model = decoder(name)
    calls = [steps(5, *9 * [1]), steps(3, *12 * [1]), steps(5, *9 * [1]), steps(7, 3, 3, 3, 1, 1)]
    require_equal(watched(model, *calls), traced(decoder(name), *calls))
    cached = [following.plan.cached for following in followed]
    assert len(cached) > 20
    assert {7, 8, 13} <= set(cached)


def test_generation_with_padding_and_beams_follows_a_plan_and_has_the_same_rows(followed, traced):
    def generated(model):
        options = {"max_new_tokens": 6, "min_new_tokens": 6, "num_beams": 2, "pad_token_id": 0, "do_sample": False}
        return model.generate(input_ids=TOKENS, attention_mask=PADDED["left"], **options)

    model = decoder_of("decoder", top="ForCausalLM")
    require_equal(watched(model, *3 * [generated]), traced(decoder_of("decoder", top="ForCausalLM"), *3 * [generated]))
    assert len(followed) > 8


class OtherLayer(transformers.cache_utils.DynamicLayer):
    """Layer of a cache whose class is unknown."""


def shortened(layer, keys, values, *_):
    """Add keys and values to a layer of a cache, and return only those of the latest 4 tokens."""
    return tuple(each[:, :, -4:] for each in type(layer).update(layer, keys, values))


CACHE_CHANGES = {
    "cropped": lambda cache: cache.crop(-2),
    "reordered": lambda cache: cache.reorder_cache(torch.tensor([1, 0])),
    "without a layer's tokens": lambda cache: cache.layers[1].crop(-1),
    "with other keys": lambda cache: cache.layers[0].keys.neg_(),
    "with another method": lambda cache: setattr(
        cache.layers[1], "update", lambda *states: shortened(cache.layers[1], *states)
    ),
    "with shared keys": lambda cache: setattr(cache.layers[1], "keys", cache.layers[0].keys),
    "of another class": lambda cache: setattr(
        cache.layers[1], "__class__", type("Other", (type(cache.layers[1]),), {})
    ),
}


@pytest.mark.parametrize("change", CACHE_CHANGES)
def test_a_changed_cache_has_the_same_rows_with_a_plan(change, followed, traced):
    model, plain = decoder("llama"), steps(5, *6 * [1])
    changed = steps(5, *6 * [1], change=CACHE_CHANGES[change], after=3)
    require_equal(
        watched(model, plain, changed, plain, changed), traced(decoder("llama"), plain, changed, plain, changed)
    )
    assert followed


def test_gates_of_decoding_steps_with_a_plan_change_the_same_heads(followed, monkeypatch):
    results = []
    for _ in range(3):
        with torch.no_grad(), hw.gate(model := decoder("llama"), {(1, 2): 0.0}):
            results.append(steps(5, *6 * [1])(model))
    model = decoder("llama")
    for _ in range(3):
        with torch.no_grad(), hw.gate(model, {(1, 2): 0.0}):
            results.append(steps(5, *6 * [1])(model))
    assert len(followed) > 10
    for each in results[1:]:
        torch.testing.assert_close(each, results[0])


def test_a_step_that_contradicts_a_grown_plan_is_named(monkeypatch):
    layer = transformers.models.llama.modeling_llama.LlamaAttention
    forward = layer.forward

    def other_from_ten(self, hidden_states, *args, past_key_values, **kwargs):
        if self.layer_idx and past_key_values.get_seq_length(self.layer_idx) >= 10:
            hidden_states = hidden_states.clone()
        return forward(self, hidden_states, *args, past_key_values=past_key_values, **kwargs)

    monkeypatch.setattr(layer, "forward", other_from_ten)
    model = decoder("llama")
    ((rows, messages, _),) = watched(model, steps(5, *4 * [1]))
    assert rows
    assert not messages
    with pytest.raises(hw.InputError, match=plans.OTHER_WAY), hw.watch(model), torch.no_grad():
        steps(5, *9 * [1])(model)


def plan_of(cached, *steps, kept=()):
    """A plan with an attention call after the first step."""
    attention = ("layer", plans.CallFacts("sdpa", 3, 3, 8, 8)), (), ((9, 5),)
    functions = [(torch.add, ("alpha",), step) for step in steps]
    kept, length = frozenset(kept), cached + 1
    return plans.Plan([functions[0], attention, *functions[1:]], [], frozenset(), frozenset(), [], kept, cached, length)


def test_plans_are_joined_if_whole_numbers_and_sizes_differ_linearly():
    first = plan_of(4, ((1, 5, 24), 9, (tuple, 4, (2, 3))), ((3, 4), 2.0, 9))
    second = plan_of(6, ((1, 7, 24), 13, (tuple, 6, (2, 3))), ((3, 6), 2.0, 13))
    for one, other in ((first, second), (second, first)):
        joined = one.joined(other)
        assert joined.with_cached(3) is None
        assert joined.with_cached(4) is joined
        expected = plan_of(9, ((1, 10, 24), 19, (tuple, 9, (2, 3))), ((3, 9), 2.0, 19))
        assert joined.with_cached(9)._replace(growing=None) == expected


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((2, 7, 24), 13, (tuple, 6, (2, 3))), ((3, 6), 2.0, 13)),  # another tensor
        (((1, 7, 24), 12, (tuple, 6, (2, 3))), ((3, 6), 2.0, 13)),  # no whole number for each token
        (((1, 7, 24), 13, (list, 6, (2, 3))), ((3, 6), 2.0, 13)),
        (((1, 7, 24), 13, (tuple, 6)), ((3, 6), 2.0, 13)),
        (((1, 7, 24), 13, (tuple, 6, (2, 3))), ((3, 6), 4.0, 13)),
        (((1, 7, 24), 13, (tuple, 6, (2, 3))), ((3, 6), 2.0, 11)),  # a number that first grows after attention
    ],
)
def test_plans_that_differ_in_another_way_are_not_joined(before, after):
    first = plan_of(4, ((1, 5, 24), 9, (tuple, 4, (2, 3))), ((3, 4), 2.0, 9))
    assert first.joined(plan_of(6, before, after)) is None
    assert first.joined(plan_of(6, before)) is None


def test_plans_are_not_joined_if_a_growing_result_may_be_kept_or_an_axis_has_size_1():
    first = plan_of(4, ((1, 5), 9), ((3, 4), 2.0), kept=[2])
    assert first.joined(plan_of(6, ((1, 7), 9), ((3, 6), 2.0), kept=[2])) is None
    assert first.joined(plan_of(4, ((1, 5), 9), ((3, 4), 2.0))) is None
    assert plan_of(4, ((1, 1), 9)).joined(plan_of(6, ((1, 3), 9))) is None
    assert plan_of(4, ((1, 5), 9), ((3, 4), 2.0), kept=[1]).joined(plan_of(6, ((1, 7), 9), ((3, 6), 2.0), kept=[1]))


class Experts(Attention):
    """Attention after which the tokens with a positive feature go through a layer, if there are any."""

    def forward(self, x, memory=None):
        """Return the output."""
        out = super().forward(x)
        for layer, is_of_expert in ((self.q_proj, out[..., 0] > 0), (self.k_proj, out[..., 0] <= -2)):
            (rows,) = torch.where(is_of_expert.flatten())
            if rows.shape[0]:
                out = out + layer(out)
        return out


@pytest.mark.parametrize(
    "call",
    [
        lambda x, count: x[:, :count],
        lambda x, count: torch.arange(count),
        lambda x, count: x.expand(count, -1, -1),
        lambda x, count: F.one_hot(count[None]),
        lambda x, count: (x > 0).nonzero(),
        lambda x, count: x[:, (x > 0)[0, :, 0]],
    ],
)
def test_functions_whose_results_have_a_size_by_numbers_are_known(call):
    found = []

    class Mode(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            found.append(is_sized_by_numbers(func, args, kwargs or {}))
            return func(*args, **(kwargs or {}))

    x, count = torch.randn(1, 3, 2), torch.tensor(2)
    with Mode():
        x.reshape(3, 2)[None, 0] + x[0].expand(1, -1, -1)
        torch.where(x > 0, x, count)
        F.one_hot(torch.arange(3), 5) + F.one_hot(input=torch.arange(3), num_classes=5)
    assert not any(found)
    with Mode():
        call(x, count)
    assert any(found)


def test_models_that_choose_by_the_number_of_selected_tokens_are_traced(followed, traced):
    model, call = nn.Sequential(Experts(), Attention()), [lambda model, s=s: model(s * inputs()) for s in (1, 9, 1, 50)]
    require_equal(watched(model, *call), traced(copy.deepcopy(model), *call))
    assert not followed
