"""Heads whose columns of the output projection are not their own: reordered, selected one by one, or added."""

import pytest
import torch
import torch.nn.functional as F
from self_attention import DIM, HEADS, LENGTH, WIDTH, SelfAttention, merge, require_gate, sdpa, softmax, split
from test_watch import require_statistics
from torch import nn

import headwise as hw
import tiny

pytestmark = pytest.mark.usefixtures("no_grad")

ORDER = torch.tensor([2, 0, 1])
WAYS = {"softmax": softmax, "SDPA": sdpa}
PLACES = ORDER[None, :, None, None].expand(2, -1, LENGTH, DIM)


def by_assignment(out):
    result = torch.zeros(out.shape)
    result[:, ORDER] = out
    return result


def into_views(out):
    result = torch.zeros(len(out), LENGTH, HEADS, DIM)
    for head in range(HEADS):
        result[:, :, head].copy_(out[:, ORDER[head]])
    return result.transpose(1, 2)


def into_a_view(out):
    result = torch.zeros(len(out), LENGTH, HEADS, DIM)
    result.transpose(1, 2)[:, ORDER] = out
    return result.transpose(1, 2)


def overwritten(out):
    result = out.clone()
    result[:, 1] = result[:, 2]
    return result


REORDERED = {
    "scatter": lambda out: torch.zeros_like(out).scatter(1, PLACES, out),
    "index_copy": lambda out: torch.zeros_like(out).index_copy(1, ORDER, out),
    "index_add": lambda out: torch.zeros_like(out).index_add(1, ORDER, out),
    "index_put": lambda out: torch.zeros_like(out).index_put((torch.arange(2)[:, None], ORDER[None]), out),
    "take": lambda out: out.take(torch.arange(out.numel()).view(out.shape)[:, ORDER]),
    "out": lambda out: torch.index_select(out, 1, ORDER, out=torch.empty(out.shape)),
    "vmap": torch.vmap(lambda out: out.flip(0)),
    **{each.__name__: each for each in (by_assignment, into_views, into_a_view)},
    "flip": lambda out: out.flip(1),
    "index": lambda out: out[:, ORDER],
    "list": lambda out: out[:, [2, 0, 1]],
    "index_select": lambda out: out.index_select(1, ORDER),
    "roll": lambda out: torch.roll(out, 1, dims=1),
    "gather": lambda out: out.gather(1, ORDER[None, :, None, None].expand(2, -1, LENGTH, DIM)),
    "take_along_dim": lambda out: torch.take_along_dim(out, ORDER[None, :, None, None], 1),
    "some fixed": lambda out: out[:, [0, 2, 1]],
}
MIXED = {
    "cumsum": lambda out: out.cumsum(1),
    "sort": lambda out: out.sort(1).values,
    "fft": lambda out: torch.fft.fft(out, dim=1).real,
    "pool": lambda out: F.avg_pool1d(out.flatten(2).mT, 3, 1, 1).mT.reshape(out.shape),
    "logcumsumexp": lambda out: out.logcumsumexp(1),
}
AFTER_THE_MERGE = {
    "cumsum": lambda out: out.cumsum(-1),
    "flip": lambda out: out.flip(-1),
    "roll": lambda out: out.roll(1, -1),
    "index_select": lambda out: out.index_select(2, torch.arange(WIDTH).view(HEADS, DIM)[ORDER].flatten()),
    "channel_shuffle": lambda out: F.channel_shuffle(out.mT, HEADS).mT,
}


def of_heads(change):
    return lambda module, q, k, v: module.out_proj(merge(change(module.attend(q, k, v))))


def of_features(change):
    return lambda module, q, k, v: module.out_proj(change(merge(module.attend(q, k, v))))


def by_index(module, q, k, v):
    """A loop over heads, each with its columns of the projection."""
    out, columns = module.attend(q, k, v), module.out_proj.weight.split(DIM, 1)
    return sum(out[:, head] @ columns[head].T for head in range(HEADS))


def by_list(module, q, k, v):
    out, columns = module.attend(q, k, v), module.out_proj.weight.split(DIM, 1)
    return sum(out[:, [head]].squeeze(1) @ columns[head].T for head in range(HEADS))


def by_unbind(module, q, k, v):
    pairs = zip(module.attend(q, k, v).unbind(1), module.out_proj.weight.split(DIM, 1), strict=True)
    return sum(F.linear(out, columns) for out, columns in pairs)


def by_slice(module, q, k, v):
    """The first two heads together, the last one by itself."""
    out, weight = module.attend(q, k, v), module.out_proj.weight
    return merge(out[:, :2]) @ weight[:, : 2 * DIM].T + merge(out[:, 2:]) @ weight[:, 2 * DIM :].T


def halves_subtracted(module, q, k, v):
    """Differential attention in one call: two of six halves of heads are one output."""
    q, k = (tensor.repeat_interleave(2, 1).roll(1, 1) for tensor in (q, k))
    first, second = module.attend(q, k, v.repeat(1, 2, 1, 1)).chunk(2, 1)
    return module.out_proj(merge(first - 0.4 * second))


def calls_subtracted(module, q, k, v):
    """Differential attention in two calls."""
    return module.out_proj(merge(module.attend(q, k, v) - 0.4 * module.attend(k, q, v)))


def merged_calls_added(module, q, k, v):
    return module.out_proj(torch.add(merge(module.attend(q, k, v)), merge(module.attend(q, v, v)), alpha=0.3))


def calls_chosen_by_row(module, q, k, v):
    is_early = torch.arange(LENGTH)[:, None] < 3
    return module.out_proj(merge(torch.where(is_early, module.attend(q, k, v), module.attend(q, v, v))))


def two_calls(module, q, k, v):
    return module.attend(q, k, v), module.attend(q, v, v)


def stack_weighted(module, q, k, v):
    """Each query has a weight for the output of each softmax."""
    gate = q.mean(-1)[..., None] * torch.tensor([0.2, 1.3])
    return module.out_proj(merge(torch.einsum("sbhnd,bhns->bhnd", torch.stack(two_calls(module, q, k, v)), gate)))


def stack_times_vector(module, q, k, v):
    return module.out_proj(merge(torch.stack(two_calls(module, q, k, v), 2).movedim(2, -1) @ torch.tensor([0.2, 1.3])))


def stack_of_merged_added(module, q, k, v):
    return module.out_proj(torch.stack([merge(each) for each in two_calls(module, q, k, v)]).sum(0))


def stack_averaged(module, q, k, v):
    return module.out_proj(merge(torch.stack(two_calls(module, q, k, v), dim=-1).mean(dim=-1)))


UNKNOWN = "it is not established which axis is the heads"
ADDED = "several softmaxes are added before the output projection"
REFUSED = {
    **{f"{name} of heads": (of_heads(change), UNKNOWN) for name, change in REORDERED.items()},
    **{f"{name} of heads": (of_heads(change), UNKNOWN) for name, change in MIXED.items()},
    "assignment of one head to another": (of_heads(overwritten), ADDED),
    **{f"{name} of features": (of_features(change), UNKNOWN) for name, change in AFTER_THE_MERGE.items()},
    **{each.__name__: (each, UNKNOWN) for each in (by_index, by_list, by_unbind, by_slice)},
    **{each.__name__: (each, ADDED) for each in (halves_subtracted, calls_subtracted)},
    **{each.__name__: (each, ADDED) for each in (merged_calls_added, calls_chosen_by_row)},
    **{each.__name__: (each, ADDED) for each in (stack_weighted, stack_times_vector)},
    **{each.__name__: (each, ADDED) for each in (stack_of_merged_added, stack_averaged)},
}


@pytest.mark.parametrize("route", ["softmax", "SDPA"])
@pytest.mark.parametrize("way", REFUSED)
def test_heads_without_columns_of_their_own_are_named(way, route):
    torch.manual_seed(0)
    project, reason = REFUSED[way]
    model, x = nn.Sequential(SelfAttention(WAYS[route], project)), torch.randn(2, LENGTH, WIDTH)
    plain = model(x)
    match = f"got none in 0; attention of these modules is left out.*{reason}"
    with pytest.raises(hw.InputError, match=match), hw.watch(model):
        model(x)
    reasons = f"{reason}|function that is not linear|output in place"  # functions may be refused before their use
    with pytest.raises(hw.InputError, match=reasons), hw.gate(model, {("0", 2): 0.0}):
        model(x)
    assert torch.equal(model(x), plain)


def reordered_back(module, q, k, v):
    q, k, v = (tensor[:, ORDER] for tensor in (q, k, v))
    return module.out_proj(merge(module.attend(q, k, v)))


def queries_reordered(module, q, k, v):
    """The projection is the same for all queries, whatever their order."""
    order = torch.arange(LENGTH).roll(2)
    return module.out_proj(merge(module.attend(q, k, v)[:, :, order].flip(2)))


def minus_a_share(module, q, k, v):
    out = module.attend(q, k, v)
    return module.out_proj(merge(out - 0.3 * out))


def assigned_by_sequence(module, q, k, v):
    out = torch.zeros(q.shape)
    for number in range(len(q)):
        out[number] = module.attend(q[None, number], k[None, number], v[None, number])[0]
    scores = (q @ k.mT * DIM**-0.5).exp()
    module.weights = scores / scores.sum(-1, keepdim=True)
    return module.out_proj(merge(out))


def copied(module, q, k, v):
    out = torch.empty(len(q), LENGTH, HEADS, DIM)
    out.copy_(module.attend(q, k, v).transpose(1, 2))
    return module.out_proj(out.flatten(2))


REACHED = [reordered_back, queries_reordered, minus_a_share, assigned_by_sequence, copied]


@pytest.mark.parametrize("route", ["softmax", "SDPA"])
@pytest.mark.parametrize("way", REACHED)
@pytest.mark.filterwarnings("ignore:the output projection was not seen")  # its input is not the heads' output
def test_heads_with_columns_of_their_own_are_reported(way, route):
    torch.manual_seed(0)
    model, x = nn.Sequential(SelfAttention(WAYS[route], way)), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    require_statistics(heads, [model[0].weights])
    require_gate(model, x)


def normed(module, q, k, v):
    """A norm of the features of all heads divides them by their common root mean square."""
    out = merge(module.attend(q, k, v))
    return module.out_proj(out * out.square().mean(-1, keepdim=True).rsqrt())


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_a_norm_of_all_heads_is_not_a_sum_of_softmaxes():
    torch.manual_seed(0)
    model = nn.Sequential(SelfAttention(softmax, normed))
    with hw.watch(model) as heads:
        model(torch.randn(2, LENGTH, WIDTH))
    require_statistics(heads, [model[0].weights])


class Block(nn.Module):
    """Attention in a module of its own, without a projection."""

    num_heads = HEADS

    def forward(self, q, k, v):
        return merge(F.scaled_dot_product_attention(q, k, v))


class BothProjected(nn.Module):
    """Two attention modules whose merged outputs are concatenated in front of one projection."""

    def __init__(self):
        super().__init__()
        self.one, self.other = (
            SelfAttention(softmax, lambda module, *qkv: merge(module.attend(*qkv))) for _ in range(2)
        )
        self.out_proj = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        return self.out_proj(torch.cat([self.one(x), self.other(x)], -1))


@pytest.mark.filterwarnings("ignore:the output projection was not seen")
def test_outputs_of_two_modules_that_share_a_projection_have_columns_of_their_own():
    model, x = BothProjected(), torch.randn(2, LENGTH, WIDTH)
    with hw.watch(model) as heads:
        model(x)
    assert [row["module"] for row in heads.rows()] == ["one"] * HEADS + ["other"] * HEADS
    expected = torch.cat([model.one(x), model.other(x)], -1)
    expected[..., WIDTH + 2 * DIM :] = 0
    with hw.gate(model, {("other", 2): 0.0}):
        assert torch.allclose(model(x), model.out_proj(expected), atol=1e-6)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.core, self.out_proj = nn.Linear(WIDTH, 3 * WIDTH), Block(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = map(split, self.qkv(x).chunk(3, -1))
        return self.out_proj(self.core(q, k, v) - 0.4 * self.core(k, q, v))


def test_outputs_of_two_calls_of_a_module_that_are_added_are_withdrawn():
    model = nn.Sequential(Outer(), nn.Identity(), SelfAttention())
    x = torch.randn(2, LENGTH, WIDTH)
    with pytest.warns(UserWarning, match=f"{ADDED}.*: 0.core$"), hw.watch(model) as heads:
        model(x)
    assert {row["module"] for row in heads.rows()} == {"2"}
    with pytest.raises(hw.InputError, match=ADDED), hw.gate(model, {("0.core", 0): 0.5}):
        model(x)


class Rearranged(nn.Linear):
    """Output projection that rearranges the heads of its input before."""

    def __init__(self, linear, rearrange):
        super().__init__(linear.in_features, linear.out_features, bias=False)
        self.rearrange = rearrange

    def forward(self, x):
        return super().forward(self.rearrange(x.unflatten(-1, (6, -1))).flatten(-2))


REARRANGED = {
    "flip": lambda out: out.flip(-2),
    "index": lambda out: out[..., [1, 0, 2, 3, 4, 5], :],
    "concatenation": lambda out: torch.cat([out[..., 1:, :], out[..., :1, :]], -2),
    "roll of columns": lambda out: out.flatten(-2).roll(10, -1).unflatten(-1, (6, -1)),
}


@pytest.mark.parametrize("way", REARRANGED)
def test_heads_that_a_model_of_transformers_reorders_are_named(way):
    model = tiny.model("decoder")
    attention = model.layers[1].self_attn
    attention.o_proj = Rearranged(attention.o_proj, REARRANGED[way])
    match = f"{UNKNOWN}.*: layers.1.self_attn$"
    with pytest.warns(UserWarning, match=match), hw.watch(model) as heads:
        model(tiny.TOKENS)
    assert {row["module"] for row in heads.rows()} == {"layers.0.self_attn"}
    with pytest.raises(hw.InputError, match=UNKNOWN), hw.gate(model, {(1, 0): 0.0}):
        model(tiny.TOKENS)
    with hw.gate(model, {(0, 0): 0.0}):
        model(tiny.TOKENS)
