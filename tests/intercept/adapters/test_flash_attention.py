"""Calls of FlashAttention's functions are observed and gated, and computed by these functions, against float64."""

import copy
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch
from engine_model import DIM, HEADS, WIDTH, EngineAttention, model_of, require_rows, statistics_of_sequences
from flash_attn_stand_in import one_sequence
from torch import nn

import headwise as hw
from sequences_alone import require_statistics

OPTIONS = {
    "plain": {},
    "causal": {"causal": True},
    "window": {"window_size": (2, 1)},
    "causal window": {"causal": True, "window_size": (3, -1)},
    "left window": {"window_size": (2, -1)},
    "scale and softcap": {"softmax_scale": 0.7, "softcap": 1.5, "causal": True},
    "alibi": {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 0.9]), "causal": True},
    "alibi of sequences": {"alibi_slopes": torch.rand(3, HEADS, generator=torch.Generator().manual_seed(0))},
}
LENGTHS = (5, 1, 8)


def of_one(q, k, v, options, row=0):
    """Return output and weights of one sequence, from the definition."""
    slopes = options.get("alibi_slopes")
    return one_sequence(
        *(q, k, v, 0.0, options.get("softmax_scale"), options.get("causal", False)),
        *(options.get("window_size", (-1, -1)), options.get("softcap", 0.0)),
        slopes[row] if slopes is not None and slopes.ndim == 2 else slopes,
    )


def cumulative(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_batches_are_observed_with_every_option(flash_attn, name):
    options, model, x = OPTIONS[name], model_of(flash_attn.flash_attn_func), torch.randn(3, 7, WIDTH).double()
    plain = model[0](x, **options)
    with hw.watch(model) as heads:
        assert torch.equal(model[0](x, **options), plain)
    found = [of_one(*tensors, options, row) for row, tensors in enumerate(zip(*model[0].split(x), strict=True))]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])
    assert {row["kind"] for row in heads.rows()} == {"self"}


@pytest.mark.parametrize("queries", [3, 9])
@torch.no_grad()
def test_cross_attention_of_other_lengths_is_aligned_with_the_last_key(flash_attn, queries):
    model, options = model_of(flash_attn.flash_attn_func), {"causal": True, "window_size": (4, 0)}
    x, context = torch.randn(2, queries, WIDTH).double(), torch.randn(2, 6, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, context, **options)
    found = [of_one(*tensors, options) for tensors in zip(*model[0].split(x, context), strict=True)]
    without = {"distance", "self", "previous", "next", "duplicate", "induction"}
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], without)


def varlen(function, lengths, key_lengths=None):
    def attend(q, k, v, **options):
        of_keys = lengths if key_lengths is None else key_lengths
        sizes = (cumulative(lengths), cumulative(of_keys), max(lengths), max(of_keys))
        return function(q, k, v, *sizes, **options)

    return attend


@pytest.mark.parametrize("name", OPTIONS)
@torch.no_grad()
def test_packed_sequences_are_rows_of_the_statistics(flash_attn, name):
    options, model = OPTIONS[name], model_of(varlen(flash_attn.flash_attn_varlen_func, LENGTHS))
    x = torch.randn(sum(LENGTHS), WIDTH).double()
    plain = model[0](x, **options)
    with hw.watch(model) as heads:
        assert torch.equal(model[0](x, **options), plain)
    parts = zip(*(tensor.split(LENGTHS) for tensor in model[0].split(x)), strict=True)
    found = [of_one(*tensors, options, row) for row, tensors in enumerate(parts)]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


@pytest.mark.parametrize("causal", [False, True])
@torch.no_grad()
def test_packed_queries_and_keys_of_other_lengths(flash_attn, causal):
    lengths, key_lengths = (2, 5, 1), (6, 7, 3)
    model = model_of(varlen(flash_attn.flash_attn_varlen_func, lengths, key_lengths))
    x, context = torch.randn(8, WIDTH).double(), torch.randn(16, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, context, causal=causal)
    q, k, v = model[0].split(x, context)
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    found = [of_one(*tensors, {"causal": causal}) for tensors in parts]
    without = {"distance", "self", "previous", "next", "duplicate", "induction"}
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], without)
    assert {row["kind"] for row in heads.rows()} == {"cross"}


@torch.no_grad()
def test_keys_before_the_window_of_all_queries_are_tokens(flash_attn):
    lengths, key_lengths = (1, 2), (5, 7)
    model = model_of(varlen(flash_attn.flash_attn_varlen_func, lengths, key_lengths))
    x, context = torch.randn(3, WIDTH).double(), torch.randn(12, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, context, window_size=(1, 0))
    q, k, v = model[0].split(x, context)
    parts = zip(q.split(lengths), k.split(key_lengths), v.split(key_lengths), strict=True)
    found = [of_one(*tensors, {"window_size": (1, 0)}) for tensors in parts]
    without = {"distance", "self", "previous", "next", "duplicate", "induction"}
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], without)
    assert {row["first"] for row in heads.rows()} == {0.0}


class Unpadding(nn.Module):
    """Model that leaves padding out before attention, and receives a padding mask."""

    def __init__(self, function):
        super().__init__()
        self.embed, self.attention, self.function = nn.Embedding(7, WIDTH), EngineAttention(None), function

    def forward(self, input_ids, attention_mask):
        x, lengths = self.embed(input_ids)[attention_mask.bool()], attention_mask.sum(1).tolist()
        self.attention.attend = varlen(self.function, lengths)
        return self.attention(x, causal=True)


@pytest.mark.parametrize("side", ["left", "right"])
@torch.no_grad()
def test_a_model_that_leaves_padding_out_itself(flash_attn, side):
    torch.manual_seed(1)
    model, ids = Unpadding(flash_attn.flash_attn_varlen_func).double(), torch.randint(7, (3, 8))
    mask = torch.arange(8) < torch.tensor((5, 4, 7))[:, None]
    mask = (mask.flip(1) if side == "left" else mask).long()
    with hw.watch(model) as heads:
        model(ids, mask)
    rows = [model.embed(each[real.bool()]) for each, real in zip(ids, mask, strict=True)]
    found = [of_one(*model.attention.split(each), {"causal": True}) for each in rows]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


PACKED = {
    "flash_attn_qkvpacked_func": lambda f: lambda q, k, v, **o: f(torch.stack([q, k, v], 2), **o),
    "flash_attn_kvpacked_func": lambda f: lambda q, k, v, **o: f(q, torch.stack([k, v], 2), **o),
    "flash_attn_varlen_qkvpacked_func": lambda f: (
        lambda q, k, v, **o: f(torch.stack([q, k, v], -3).flatten(0, 1), cumulative([6, 6]), 6, **o).unflatten(
            0, (2, 6)
        )
    ),
    "flash_attn_varlen_kvpacked_func": lambda f: (
        lambda q, k, v, **o: f(
            q.flatten(0, 1), torch.stack([k, v], -3).flatten(0, 1), cumulative([6, 6]), cumulative([6, 6]), 6, 6, **o
        ).unflatten(0, (2, 6))
    ),
}


@pytest.mark.parametrize("name", PACKED)
@torch.no_grad()
def test_packed_tensors(flash_attn, name):
    model, x = model_of(PACKED[name](getattr(flash_attn, name)), kv_heads=HEADS), torch.randn(2, 6, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, causal=True)
    found = [of_one(*tensors, {"causal": True}) for tensors in zip(*model[0].split(x), strict=True)]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])


def test_training_keeps_the_gradients_and_counts_weights_before_dropout(flash_attn):
    model, x = model_of(flash_attn.flash_attn_func), torch.randn(2, 7, WIDTH).double()
    results = []
    for context in (None, hw.watch(model)):
        model.zero_grad()
        torch.manual_seed(3)
        if context is None:
            model[0](x, dropout_p=0.3, causal=True).square().sum().backward()
        else:
            with context as heads:
                model[0](x, dropout_p=0.3, causal=True).square().sum().backward()
        results.append([parameter.grad.clone() for parameter in model.parameters()])
    assert all(map(torch.equal, *results))
    found = [of_one(*tensors, {"causal": True}) for tensors in zip(*model[0].split(x), strict=True)]
    require_rows(heads, [each[1].detach() for each in found], [each[0].detach() for each in found])


@pytest.mark.parametrize("is_packed", [False, True])
def test_a_gate_multiplies_the_columns_of_the_projection_also_in_the_gradient(flash_attn, is_packed):
    attend = varlen(flash_attn.flash_attn_varlen_func, LENGTHS) if is_packed else flash_attn.flash_attn_func
    model, x = model_of(attend), torch.randn(*((14,) if is_packed else (2, 7)), WIDTH).double()
    factor = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    other, expected_factor = copy.deepcopy(model), torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
    with hw.watch(model) as heads, hw.gate(model, {("0", 2): factor}):
        out = model[0](x, causal=True)
    out.square().sum().backward()
    scale = torch.ones(HEADS * DIM, dtype=torch.float64)
    scale = torch.cat([scale[: 2 * DIM], scale[2 * DIM : 3 * DIM] * expected_factor, scale[3 * DIM :]])
    heads_out = other[0].attend(*other[0].split(x), causal=True).flatten(-2)
    expected = other[0].out_proj(heads_out * scale)
    expected.square().sum().backward()
    torch.testing.assert_close(out, expected)
    torch.testing.assert_close(factor.grad, expected_factor.grad)
    for one, another in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(one.grad, another.grad)
    assert len(heads.rows()) == HEADS


def test_checkpointing_repeats_the_gate_and_counts_once(flash_attn):
    model, x = model_of(flash_attn.flash_attn_func), torch.randn(2, 7, WIDTH).double()
    gradients = []
    for is_checkpointed in (False, True):
        model.zero_grad()
        with hw.watch(model) as heads, hw.gate(model, {("0", 1): 0.0}):
            arguments = (model, x)
            out = torch.utils.checkpoint.checkpoint(*arguments, use_reentrant=False) if is_checkpointed else model(x)
        out.square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
        found = [of_one(*tensors, {}) for tensors in zip(*model[0].split(x), strict=True)]
        require_rows(heads, [each[1].detach() for each in found])
    for one, another in zip(*gradients, strict=True):
        torch.testing.assert_close(one, another)


@torch.no_grad()
def test_one_layer_by_flash_attention_and_another_by_sdpa(flash_attn):
    def sdpa(q, k, v):
        q, k, v = (tensor.transpose(1, 2) for tensor in (q, k, v))
        return nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True).transpose(1, 2)

    model = nn.Sequential(EngineAttention(flash_attn.flash_attn_func), EngineAttention(sdpa)).double()
    x = torch.randn(2, 7, WIDTH).double()
    with hw.watch(model) as heads:
        model(x)
    assert [row["module"] for row in heads.rows()] == ["0"] * HEADS + ["1"] * HEADS
    by_sdpa = nn.Sequential(*copy.deepcopy(model))
    by_sdpa[0].attend = sdpa
    with hw.watch(by_sdpa) as expected:
        by_sdpa(x)
    for row, other in zip(heads.rows(), expected.rows(), strict=True):
        names = [name for name, value in row.items() if isinstance(value, float)]
        assert row.keys() == other.keys()
        assert [row[name] for name in names] == pytest.approx([other[name] for name in names], rel=1e-9)


def in_pages(tensors, size, order):
    """Return tensors `(sequences, tokens, ...)` in pages of `size` tokens, in another order, and the table of pages."""
    count = tensors[0].shape[1] // size
    order = torch.tensor(order)
    pages = []
    for tensor in tensors:
        split = tensor.unflatten(1, (count, size)).flatten(0, 1)
        pages.append(torch.empty_like(split).index_copy(0, order, split))
    return pages, order.view(-1, count).to(torch.int32)


@torch.no_grad()
def test_keys_in_pages(flash_attn):
    model, lengths = model_of(flash_attn.flash_attn_varlen_func), (5, 1, 8)
    x = torch.randn(3, 8, WIDTH).double()

    def attend(q, k, v):
        (k, v), table = in_pages((k, v), 2, (7, 3, 1, 0, 10, 2, 4, 5, 8, 6, 11, 9))
        packed = torch.cat([row[-length:] for row, length in zip(q, (2, 1, 3), strict=True)])
        sizes = (cumulative((2, 1, 3)), cumulative(lengths), 3, 8)
        return flash_attn.flash_attn_varlen_func(packed, k, v, *sizes, causal=True, block_table=table)

    model[0].attend = attend
    with pytest.warns(UserWarning, match="positions of queries among the keys"), hw.watch(model) as heads:
        model[0](x)
    q, k, v = model[0].split(x)
    found = [
        of_one(q[row, -queries:], k[row, :length], v[row, :length], {"causal": True})
        for row, (queries, length) in enumerate(zip((2, 1, 3), lengths, strict=True))
    ]
    without = {"distance", "self", "previous", "next", "duplicate", "induction", "first"}
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], without)


class Cached(EngineAttention):
    """Attention whose keys and values a function of FlashAttention writes to a cache."""

    def __init__(self, function, length):
        super().__init__(None)
        self.function, self.filled = function, 0
        self.cache = [torch.zeros(2, length, 2, DIM, dtype=torch.float64) for _ in range(2)]

    def forward(self, x):
        q, k, v = self.split(x)
        out = self.function(q, *self.cache, k, v, cache_seqlens=self.filled, causal=True)
        self.filled += x.shape[1]
        return self.out_proj(out.flatten(-2))


@torch.no_grad()
def test_decoding_with_a_cache_continues_the_sequences(flash_attn):
    torch.manual_seed(2)
    model = nn.Sequential(Cached(flash_attn.flash_attn_with_kvcache, 12)).double()
    x = torch.randn(2, 9, WIDTH).double()
    with hw.watch(model) as heads:
        for part in (x[:, :5], x[:, 5:6], x[:, 6:9]):
            model(part)
    found = [of_one(*tensors, {"causal": True}) for tensors in zip(*model[0].split(x), strict=True)]
    require_rows(heads, [each[1] for each in found], [each[0] for each in found])
    assert {row["kind"] for row in heads.rows()} == {"self"}


REFUSED = {
    "flash_attn_func": {
        "qv": torch.ones(2, 7, HEADS, DIM).double(),
        "q_descale": torch.ones(2, 2),
        "attention_chunk": 4,
        "window_size": (-3, 0),
    },
    "flash_attn_with_kvcache": {
        "rotary_cos": torch.ones(7, 3),
        "cache_leftpad": torch.zeros(2, dtype=torch.int32),
        "k_descale": torch.ones(2, 2),
    },
}


@pytest.mark.parametrize(
    ("function", "argument"), [(function, name) for function, options in REFUSED.items() for name in options]
)
@torch.no_grad()
def test_arguments_that_cannot_be_read_are_named(flash_attn_3, function, argument):
    model, x = model_of(getattr(flash_attn_3, function)), torch.randn(2, 7, WIDTH).double()
    options = {argument: REFUSED[function][argument]}
    plain = model[0](x, **options)
    sentence = rf"none in 0; attention of these modules by {function} with {argument}.* cannot be read$"
    with pytest.raises(hw.errors.InputError, match=sentence), hw.watch(model):
        assert torch.equal(model[0](x, **options), plain)
    with pytest.raises(hw.errors.InputError, match=f"{function} with {argument}"), hw.gate(model, {("0", 1): 0.0}):
        model[0](x, **options)


@torch.no_grad()
def test_flash_attention_3_reads_used_lengths_and_ignores_speed_options(flash_attn_3):
    lengths, used = (5, 2, 8), (3, 2, 6)

    def attend(q, k, v):
        sizes = (cumulative(lengths), cumulative(lengths), 8, 8)
        used_k = torch.tensor(used, dtype=torch.int32)
        return flash_attn_3.flash_attn_varlen_func(q, k, v, *sizes, seqused_k=used_k, num_splits=3, pack_gqa=True)

    model, x = model_of(attend), torch.randn(15, WIDTH).double()
    with pytest.warns(UserWarning, match="positions of queries among the keys"), hw.watch(model) as heads:
        model(x)
    parts = zip(*(tensor.split(lengths) for tensor in model[0].split(x)), used, strict=True)
    found = [of_one(q, k[:count], v[:count], {}) for q, k, v, count in parts]
    without = {"distance", "self", "previous", "next", "duplicate", "induction", "first"}
    require_rows(heads, [each[1] for each in found], [each[0] for each in found], without)


def flash_attn_4_func(
    q,
    k,
    v,
    softmax_scale=None,
    causal=False,
    window_size=(None, None),
    learnable_sink=None,
    softcap=0.0,
    mask_mod=None,
    return_lse=False,
):
    """Stand-in for `flash_attn.cute.interface.flash_attn_func`, whose result always has two elements."""
    window = (0, 0) if mask_mod is not None else window_size
    parts = zip(q, k, v, strict=True)
    outs = [one_sequence(*each, 0.0, softmax_scale, causal, window, softcap, None, learnable_sink)[0] for each in parts]
    return torch.stack(outs), None


@torch.no_grad()
def test_flash_attention_4_has_sinks_and_functions_of_the_mask(monkeypatch):
    library = ModuleType("flash_attn.cute.interface")
    library.flash_attn_func = flash_attn_4_func
    monkeypatch.setitem(sys.modules, library.__name__, library)
    sinks = torch.randn(HEADS).double()
    model = model_of(lambda *tensors, **options: flash_attn_4_func(*tensors, **options)[0])
    x = torch.randn(2, 7, WIDTH).double()
    with hw.watch(model) as heads:
        model[0](x, causal=True, window_size=(3, None), learnable_sink=sinks)
    tensors = zip(*model[0].split(x), strict=True)
    found = [one_sequence(*each, 0.0, None, True, (3, None), 0.0, None, sinks) for each in tensors]
    for head, row in enumerate(heads.rows()):
        confidences = [weights[head].amax(-1).mean() for _, weights in found]
        norms = [out[:, head].norm(dim=-1).mean() for out, _ in found]
        assert row["confidence"] == pytest.approx(float(sum(confidences) / 2), rel=1e-9)
        assert row["output_norm"] == pytest.approx(float(sum(norms) / 2), rel=1e-9)
    with pytest.raises(hw.errors.InputError, match="with mask_mod cannot be read"), hw.watch(model):
        model[0](x, mask_mod=lambda *indices: True)


BINDINGS = {
    "a default argument": lambda f: lambda q, k, v, function=f: function(q, k, v),
    "a table": lambda f: {"attend": f}["attend"],
    "a partial": lambda f: __import__("functools").partial(f, causal=False),
    "a closure": lambda f: f,
    "a compiled function": lambda f: torch.compile(f, backend="eager"),
}


@pytest.mark.parametrize("name", BINDINGS)
@torch.no_grad()
def test_calls_are_intercepted_wherever_the_function_is_stored(flash_attn, name):
    import torch._dynamo

    model, x = model_of(BINDINGS[name](flash_attn.flash_attn_func)), torch.randn(2, 7, WIDTH).double()
    plain = model(x)
    with hw.watch(model) as heads:
        assert torch.equal(model(x), plain)
    found = [of_one(*tensors, {}) for tensors in zip(*model[0].split(x), strict=True)]
    require_rows(heads, [each[1] for each in found])


def test_the_function_is_as_before_after_the_context(flash_attn):
    import inspect

    function, names = flash_attn.flash_attn_func, set(vars(flash_attn))
    code, signature = function.__code__, inspect.signature(function)
    model = model_of(function)
    with hw.watch(model), hw.gate(model, {("0", 1): 0.0}):
        assert function.__code__ is not code
        assert inspect.signature(function) == signature
        model(torch.randn(2, 7, WIDTH).double())
    with pytest.raises(ValueError, match="dropout"), hw.gate(model, {("0", 1): 0.0}):  # the engine itself raises
        model[0](torch.randn(2, 7, WIDTH).double(), dropout_p=-1.0)
    assert function.__code__ is code
    assert set(vars(flash_attn)) == names


@torch.no_grad()
def test_a_module_that_attends_by_flash_attention_while_it_is_not_watched(flash_attn):
    model, other = model_of(flash_attn.flash_attn_func), model_of(flash_attn.flash_attn_func)
    x = torch.randn(2, 7, WIDTH).double()
    with hw.watch(model) as heads:
        other(x)
        model(x)
    found = [of_one(*tensors, {}) for tensors in zip(*model[0].split(x), strict=True)]
    require_rows(heads, [each[1] for each in found])


@torch.no_grad()
def test_positions_of_gates_are_those_within_packed_sequences(flash_attn):
    attend = varlen(flash_attn.flash_attn_varlen_func, LENGTHS)
    model, x = model_of(attend), torch.randn(sum(LENGTHS), WIDTH).double()
    plain = model[0](x, causal=True)
    with hw.gate(model, {("0", 1): 0.0}, positions=[1]):
        gated = model[0](x, causal=True)
    assert (gated != plain).any(-1).nonzero().flatten().tolist() == [1, 7]  # the second token of sequences 0 and 2
    other = model_of(varlen(flash_attn.flash_attn_varlen_func, LENGTHS, (6, 4, 9)))
    context = torch.randn(19, WIDTH).double()
    with pytest.raises(hw.errors.InputError, match="positions"), hw.gate(other, {("0", 1): 0.0}, positions=[1]):
        other[0](x, context, causal=True)


def test_training_is_monitored(flash_attn):
    model, x = model_of(flash_attn.flash_attn_func), torch.randn(2, 7, WIDTH).double()
    optimizer, expected = torch.optim.SGD(model.parameters(), lr=1e-3), []
    with hw.monitor(model, every=1) as monitor:
        for _ in range(2):
            with torch.no_grad():
                found = [of_one(*tensors, {"causal": True}) for tensors in zip(*model[0].split(x), strict=True)]
            expected += statistics_of_sequences([each[1] for each in found], [each[0] for each in found])
            model[0](x, causal=True).square().sum().backward()
            optimizer.step()
            monitor.step()
    names = ("entropy", "first", "output_norm")
    expected = [{name: row[name] for name in names} for row in expected]
    require_statistics(monitor.history.rows(), expected, tolerance=1e-9)


def test_the_example_of_the_page_runs_with_a_stand_in(flash_attn, monkeypatch):
    page = (Path(__file__).parents[3] / "docs" / "flash-attention.md").read_text(encoding="utf-8")
    code = page.split("```python\n")[1].split("```")[0]
    smaller = {"700, 1000, 2048": "7, 10, 21", "2048": "21", "1048": "11", "512": "32", "bfloat16": "float32"}
    for before, after in (smaller | {'"cuda"': '"cpu"'}).items():
        assert before in code
        code = code.replace(before, after)
    package = ModuleType("flash_attn")
    package.flash_attn_varlen_func = flash_attn.flash_attn_varlen_func
    monkeypatch.setitem(sys.modules, "flash_attn", package)
    names = {}
    exec(code, names)
    assert len(names["monitor"].history.table()) == 3 * 8  # 3 observed steps of 8 heads
