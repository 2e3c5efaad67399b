"""Prepared calls return what the readable path returns, bit for bit, and never the preparation of another call."""

import gc
import itertools
import random
import threading
import weakref

import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.overrides import TorchFunctionMode

import headwise as hw
from headwise.attention import prepared_calls
from headwise.attention.attend import attend
from headwise.attention.prepared_calls import PreparedCall
from strategies import MASKS, masks


@pytest.fixture
def runs(monkeypatch):
    """List of the results of prepared calls, in the order of the calls."""
    run, results = prepared_calls.run, []

    def recorded(key, q, k, v, bias):
        out = run(key, q, k, v, bias)
        if out is not None:
            results.append(out)
        return out

    monkeypatch.setattr(prepared_calls, "run", recorded)
    return results


def readable(*tensors, **options):
    """Return the result of the readable path of `attend`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared_calls, "signature", lambda *_: None)
        return attend(*tensors, **options)


def random_tensors(batch=2, heads=6, kv_heads=3, queries=5, keys=7, width=11, dtype=torch.float32):
    """Random queries, keys and values with the strides of projections that are split into heads."""
    sizes = ((heads, queries), (kv_heads, keys), (kv_heads, keys))
    return [torch.randn(batch, length, count, width).transpose(1, 2).to(dtype) for count, length in sizes]


def with_gradients(function, tensors, **options):
    """Return the results of a function of q, k and v, and the gradients of the sum of their squares."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    results = as_tuple(function(*leaves, **options))
    total = sum(result.square().sum() for result in results)
    if options.get("bias") is not None and options["bias"].requires_grad:
        leaves.append(options["bias"])
    return [*(result.detach() for result in results), *torch.autograd.grad(total, leaves)]


def as_tuple(result):
    """Return the result of `attend` as a tuple, also if it is the output alone."""
    return result if isinstance(result, tuple) else (result,)


def assert_same(got, wanted):
    """Assert that results are equal bit for bit, NaN included."""
    for one, other in zip(got, wanted, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one.nan_to_num(), other.nan_to_num())
        assert torch.equal(one.isnan(), other.isnan())


def random_bias(shape, dtype, requires_grad):
    """Random bias of one of the shapes that broadcast, in which a tenth of the numbers are -inf."""
    bias = torch.randn(shape).to(dtype)
    return bias.masked_fill(torch.rand(shape) < 0.1, -torch.inf).requires_grad_(requires_grad)


@pytest.mark.parametrize("kind", [None, *(kind for kind in MASKS if kind not in ("dense", "mask_rule"))])
def test_drawn_calls_are_the_same_bit_for_bit(kind, runs):
    @settings(max_examples=16, derandomize=True, deadline=None, database=None, phases=[Phase.generate])
    @given(st.data())
    def check(data):
        batch, kv_heads, group = (data.draw(st.integers(1, 3)) for _ in range(3))
        queries, keys = data.draw(st.integers(1, 23)), data.draw(st.integers(1, 23))
        keys = data.draw(st.sampled_from([queries, keys]))
        sizes = {"batch": batch, "heads": kv_heads * group, "queries": queries, "keys": keys}
        options = {"mask": None if kind is None else data.draw(masks(*sizes.values(), kinds=(kind,)))[0]}
        options["scale"] = data.draw(st.sampled_from([None, 0.3, -0.5]))
        options["return_weights"] = data.draw(st.booleans())
        full = (batch, kv_heads * group, queries, keys)
        shapes = list(itertools.product(*((1, size) for size in full)))
        shape = data.draw(st.sampled_from([None, None, None, full, full[2:], *shapes]))
        bias_requires_grad = data.draw(st.booleans())
        dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64]))
        prepared_calls.clear()
        for _ in range(3):
            tensors = random_tensors(**sizes, kv_heads=kv_heads, dtype=dtype)
            if shape is not None:
                options["bias"] = random_bias(shape, dtype, bias_requires_grad)
            assert_same(as_tuple(attend(*tensors, **options)), as_tuple(readable(*tensors, **options)))
            assert_same(with_gradients(attend, tensors, **options), with_gradients(readable, tensors, **options))
        # What runs is what `explain` names.
        for key, call in prepared_calls._calls.items():
            if isinstance(call, PreparedCall):
                with torch.set_grad_enabled(key[5]):
                    leaves = [tensor.detach().requires_grad_(key[5]) for tensor in tensors]
                    backend = "with_weights" if options["return_weights"] else hw.explain(*leaves, **options).backend
                    run = getattr(call.run, "func", call.run).__qualname__
                    assert run.startswith("_run_fused" if backend == "fused" else f"_{backend}.<locals>.")

    check()
    assert len(runs) > 8


def test_sequences_of_differing_calls_never_mix_up(runs):
    """Every third call of a signature at the latest is prepared, in an order that mixes all signatures."""
    generator = random.Random(0)
    lengths = hw.padding([3, 7])
    options = [
        *({"mask": mask} for mask in (None, hw.causal(), hw.window(2), hw.window(3), hw.window(2, ahead=1))),
        *({"mask": mask} for mask in (lengths, hw.padding([7, 3]), hw.causal() & lengths, hw.causal() | lengths)),
        *({"mask": mask} for mask in (hw.window([1, 2, None, 3, 4, 5]), hw.window([2, 1, None, 3, 4, 5]))),
        *({"scale": scale} for scale in (0.1, 0.2)),
        *({"backend": backend} for backend in ("fused", "blockwise", "reference")),
        *({"mask": hw.window(2), "backend": backend} for backend in ("fused", "reference")),
        *({"mask": mask, "return_weights": True} for mask in (None, hw.window(2), lengths)),
        {"return_lse": True},
        {"softcap": 1.0},
        *({"bias": torch.randn(5, 7), "mask": mask} for mask in (None, hw.window(2))),
        *({"bias": torch.randn(5, 7), "mask": mask, "return_weights": True} for mask in (None, lengths)),
        *({"bias": torch.randn(shape)} for shape in ((1, 6, 1, 7), (2, 1, 5, 1), (2, 6, 5, 7))),
        {"gate": torch.randn(6)},
        {"mask": torch.ones(5, 7, dtype=torch.bool).tril()},
        {"mask": hw.mask_rule(lambda b, h, q, k: k != 1)},
    ]
    kinds = [{}, {"dtype": torch.bfloat16}, {"kv_heads": 6, "width": 8}]
    calls = [(kind, option, grad) for kind in kinds for option in options for grad in (False, True)] * 3
    generator.shuffle(calls)
    for kind, option, grad in calls:
        tensors = random_tensors(**kind)
        if grad and "return_lse" not in option:
            assert_same(with_gradients(attend, tensors, **option), with_gradients(readable, tensors, **option))
        else:
            with torch.no_grad():
                got, wanted = attend(*tensors, **option), readable(*tensors, **option)
            assert_same(*((each if isinstance(each, tuple) else (each,)) for each in (got, wanted)))
    assert len(runs) > 80


MASKS_WITH_HIDDEN_KEYS = {
    "causal": hw.causal(),
    "window": hw.window(3),
    "padding": hw.padding([8, 13]),
    "causal, padding": hw.causal() & hw.padding([8, 13]),
    "per head": hw.window([2, 3, None, 4, 5, 6]),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("weights", [False, True], ids=["output", "weights"])
@pytest.mark.parametrize("name", MASKS_WITH_HIDDEN_KEYS)
def test_nan_and_infinity_in_hidden_keys_stay_contained(name, weights, dtype):
    mask, bad_from = MASKS_WITH_HIDDEN_KEYS[name], 9
    for place in (1, 2):
        for bad in (torch.nan, torch.inf, -torch.inf):
            tensors = random_tensors(queries=13, keys=13, dtype=dtype)
            for _ in range(3):
                attend(*tensors, mask=mask, return_weights=weights)
                with_gradients(attend, tensors, mask=mask, return_weights=weights)
            tensors[place][0, :, bad_from, 4] = bad
            got, wanted = (as_tuple(run(*tensors, mask=mask, return_weights=weights)) for run in (attend, readable))
            assert_same(got, wanted)
            got, wanted = (
                with_gradients(run, tensors, mask=mask, return_weights=weights) for run in (attend, readable)
            )
            assert_same(got, wanted)
            assert got[0][1].isfinite().all()


def test_weights_of_a_row_whose_scores_are_all_minus_infinity_are_zero(runs):
    q, k, v = random_tensors()
    for _ in range(3):
        attend(q, k, v, return_weights=True)
    assert runs
    q[0, 0, 1, 0], k[..., 0] = torch.inf, -1.0
    got, wanted = (run(q, k, v, return_weights=True) for run in (attend, readable))
    assert_same(got, wanted)
    assert (got[1][0, 0, 1] == 0.0).all()


def test_infinity_that_only_the_gradients_read_is_contained():
    """Infinite keys whose scores are -inf leave every output finite."""
    q, k, v = random_tensors(queries=13, keys=13)
    q = q.abs()
    for _ in range(3):
        with_gradients(attend, (q, k, v), mask=hw.causal())
    k[0, :, 9, 4] = -torch.inf
    got, wanted = (with_gradients(function, (q, k, v), mask=hw.causal()) for function in (attend, readable))
    assert got[0].isfinite().all()
    assert_same(got, wanted)
    assert got[1][0, :, :9].isfinite().all()


def test_rows_without_keys_are_zero(runs):
    tensors, mask = random_tensors(), hw.padding([0, 7])
    for _ in range(3):
        out, *gradients = with_gradients(attend, tensors, mask=mask)
        assert not out[0].any()
        assert out[1].any()
        assert all(gradient.isfinite().all() for gradient in gradients)
    assert runs


def test_a_mask_that_is_changed_in_place_is_prepared_again():
    tensors, mask = random_tensors(), hw.padding([3, 7])
    segments = hw.segments([[0, 0, 1, 1, 1, 1, 1]])
    for _ in range(3):
        attend(*tensors, mask=mask)
        attend(*tensors, mask=segments)
    mask.lengths[0] = 5
    segments.ids[0, 1] = 1
    assert torch.equal(attend(*tensors, mask=mask), readable(*tensors, mask=hw.padding([5, 7])))
    assert torch.equal(attend(*tensors, mask=segments), readable(*tensors, mask=hw.segments([[0, 1, 1, 1, 1, 1, 1]])))


def test_a_mask_made_in_inference_mode_is_evaluated_in_each_call():
    tensors = random_tensors()
    with torch.inference_mode():
        mask = hw.padding([3, 7])
        for _ in range(3):
            attend(*tensors, mask=mask)
        mask.lengths[0] = 5
        assert torch.equal(attend(*tensors, mask=mask), readable(*tensors, mask=hw.padding([5, 7])))


def test_nothing_outlives_a_mask_with_tensors():
    tensors, mask = random_tensors(), hw.padding([3, 7])
    alive = [weakref.ref(mask), weakref.ref(mask.lengths)]
    for options in ({"mask": mask}, {"mask": hw.causal() & mask}, {"mask": hw.window(2) | mask}) * 3:
        attend(*tensors, **options)
    alive += [weakref.ref(tensor) for tensor in tensors]
    assert sum(isinstance(call, PreparedCall) for call in prepared_calls._calls.values()) == 3
    del mask, options, tensors
    gc.collect()
    assert [reference() for reference in alive] == [None] * len(alive)
    assert not any(isinstance(call, PreparedCall) for call in prepared_calls._calls.values())


def test_the_number_of_prepared_calls_and_the_size_of_their_masks_is_limited(monkeypatch):
    monkeypatch.setattr(prepared_calls, "MOST_CALLS", 5)
    for queries in range(1, 20):
        for _ in range(3):
            attend(*random_tensors(queries=queries))
    assert len(prepared_calls._calls) == 5
    prepared_calls.clear()
    monkeypatch.setattr(prepared_calls, "MOST_ELEMENTS", 100)
    for keys in range(10, 15):
        for _ in range(3):
            attend(*random_tensors(queries=4, keys=keys), mask=hw.window(2), backend="fused")
    elements = [call.elements for call in prepared_calls._calls.values() if isinstance(call, PreparedCall)]
    assert 0 < sum(elements) <= 100


def test_equal_masks_share_a_signature(runs):
    tensors = random_tensors()
    for make in (hw.causal, lambda: hw.window(3), lambda: hw.window([1, 2, 3, 4, 5, 6]), lambda: ~hw.prefix(2)):
        count = len(runs)
        for _ in range(4):
            attend(*tensors, mask=make())
        assert len(runs) == count + 2


def test_decoding_steps_share_one_signature(runs):
    for keys in range(16, 45):
        attend(*random_tensors(queries=1, keys=keys, kv_heads=6), mask=hw.causal())
    assert len(prepared_calls._calls) == 1
    assert len(runs) == 27


def test_masks_that_may_change_are_not_prepared(runs):
    tensors = random_tensors()
    shown = torch.ones(5, 7, dtype=torch.bool)
    limit = [3]
    rule = hw.mask_rule(lambda b, h, q, k: k < limit[0])
    for _ in range(4):
        attend(*tensors, mask=hw.dense(shown))
        attend(*tensors, mask=rule)
    shown[:, 2:] = False
    limit[0] = 2
    expected = readable(*tensors, mask=hw.prefix(2))
    torch.testing.assert_close(attend(*tensors, mask=shown), expected)
    torch.testing.assert_close(attend(*tensors, mask=rule), expected)
    assert not runs


class Seen(TorchFunctionMode):
    """Mode that records the functions of torch that it sees."""

    def __init__(self):
        super().__init__()
        self.functions = []

    def __torch_function__(self, function, types, args=(), kwargs=None):
        self.functions.append(function)
        return function(*args, **(kwargs or {}))


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_what_is_not_ordinary_takes_the_readable_path(runs):
    q, k, v = random_tensors(kv_heads=6, queries=13, keys=17)  # enough queries and keys for torch's kernel
    for _ in range(3):
        expected = attend(q, k, v)
    assert len(runs) == 1

    class Subclass(torch.Tensor):
        pass

    with Seen() as mode:
        attend(q, k, v)
    assert nn.functional.scaled_dot_product_attention in mode.functions
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert attend(q, k, v).dtype == torch.bfloat16
    torch.testing.assert_close(torch.func.vmap(attend)(q[None], k[None], v[None])[0], expected)
    attend(q.as_subclass(Subclass), k, v)
    attend(q, k, v, dropout=0.5)
    layer = hw.MultiHeadAttention(24, 3).eval()
    with torch.no_grad(), hw.watch(layer) as heads:
        for _ in range(4):
            layer(torch.randn(1, 5, 24))
    assert len(heads.records) > 0
    assert len(runs) == 1
    assert torch.equal(attend(q, k, v), expected)
    assert len(runs) == 2


def test_a_replaced_function_of_torch_is_called(monkeypatch, runs):
    tensors = random_tensors(kv_heads=6, queries=13, keys=17)
    for _ in range(3):
        attend(*tensors)
    called = []
    original = nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        nn.functional, "scaled_dot_product_attention", lambda *a, **o: called.append(o) or original(*a, **o)
    )
    attend(*tensors)
    assert len(called) == 1


def test_calls_prepared_in_inference_mode_serve_training():
    tensors = random_tensors()
    for mask in (hw.padding([3, 7]), hw.window(3), hw.window([1, 2, 3, 4, 5, None])):
        with torch.inference_mode():
            made_inside = hw.padding([3, 7]) & mask
            for _ in range(3):
                attend(*tensors, mask=mask)
                attend(*tensors, mask=made_inside)
        for each in (mask, made_inside):
            for _ in range(3):
                assert_same(with_gradients(attend, tensors, mask=each), with_gradients(readable, tensors, mask=each))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda q, k, v: (q, k, v[:, :, 1:]), "v: expected"),
        (lambda q, k, v: (q, k.double(), v), r"k: expected torch.float32 like q, got torch.float64"),
        (lambda q, k, v: (q, k, v.to("meta")), "v: expected a tensor on cpu"),
        (lambda q, k, v: (q[:1], k, v), "k: expected batch 1 like q, got batch 2"),
        (lambda q, k, v: (q, k[..., :5], v[..., :5]), "k: expected head_dim 11 like q"),
        (lambda q, k, v: (q[0], k, v), "q: expected 4 dimensions"),
    ],
)
def test_mistakes_after_a_prepared_call_are_named(change, message, as_user):
    for queries in (1, 5):
        tensors = random_tensors(queries=queries)
        for _ in range(3):
            attend(*tensors)
        with pytest.raises(hw.InputError, match=message):
            attend(*change(*tensors))


def test_threads_prepare_and_run_at_the_same_time():
    failures = []

    def work(number):
        try:
            for count in range(20):
                tensors = random_tensors(queries=2 + (count + number) % 7)
                for mask in (hw.window(2 + count % 3), hw.padding([count % 8, 7])):
                    if not torch.equal(attend(*tensors, mask=mask), readable_once(*tensors, mask=mask)):
                        failures.append((number, count))
        except Exception as error:
            failures.append(error)

    def readable_once(*tensors, mask):
        return attend(*tensors, mask=~~mask)  # another signature, which is seen once

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
