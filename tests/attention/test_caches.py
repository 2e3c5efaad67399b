"""Tokens and positions that caches return and store, and their memory. The output of a layer with a cache is tested in
tests/nn/test_decoding.py. The cached tensors have the numbers of their tokens as values, so that a test can read which
tokens a cache returns.
"""

import copy
import math
import pickle
from typing import NamedTuple

import pytest
import torch
from torch import Tensor

import headwise as hw
from headwise.attention.caches import Cache

BATCH, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 3, 5, 7
SIZES = [(KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)]
CPU = torch.device("cpu")


class Step(NamedTuple):
    """Numbers of the returned tokens `(batch, keys)`, their positions, and the positions of the new tokens."""

    tokens: Tensor
    key_positions: Tensor | None
    positions: Tensor


def numbered(first: int, count: int, batch: int = BATCH) -> tuple[Tensor, Tensor]:
    """Keys and values filled with the number of their token, plus a hundredth of the index of their sequence."""
    number = torch.arange(first, first + count)[None, None, :, None] + torch.arange(batch)[:, None, None, None] / 100
    return number.expand(-1, KV_HEADS, -1, HEAD_DIM), number.expand(-1, KV_HEADS, -1, VALUE_DIM)


def append(cache: Cache, first: int, count: int, lengths=None) -> Step:
    """Append `count` tokens to the cache, numbered from `first`, as the forward pass of a layer does."""
    positions = cache.next_positions(BATCH, count, lengths, CPU)
    update = cache.prepare_update(numbered(first, count), positions)
    for tensor in update.tensors:
        assert torch.equal(tensor, tensor[:, :1, :, :1].expand_as(tensor))
    tokens = update.tensors[0][:, 0, :, 0].clone()
    cache.commit(update)
    return Step(tokens, update.key_positions, positions)


def first_sequence(step: Step) -> list[float]:
    """Return the numbers of the tokens that a step returned for sequence 0."""
    return step.tokens[0].tolist()


def static_cache(capacity: int = 6) -> hw.StaticCache:
    """Return an empty static cache for the tensors of `numbered`."""
    return hw.StaticCache(BATCH, capacity, SIZES)


# -- all caches --------------------------------------------------------------------------------------------------------


CACHES = {
    "dynamic": hw.DynamicCache,
    "sliding": lambda: hw.SlidingCache(90, sinks=2),
    "static": lambda: static_cache(capacity=90),
}
every_cache = pytest.mark.parametrize("make", CACHES.values(), ids=CACHES)


@every_cache
def test_reorder_and_crop(make):
    cache = make()
    append(cache, 0, 3)
    cache.reorder(torch.tensor([1, 1]))
    cache.crop(2)
    step = append(cache, 5, 1)
    torch.testing.assert_close(step.tokens[:, :3], torch.tensor([[0.01, 1.01, 5.0], [0.01, 1.01, 5.01]]))
    assert step.positions[0].tolist() == [2]


@every_cache
def test_reset_empties_a_cache(make):
    cache = make()
    append(cache, 0, 3)
    cache.reset()
    step = append(cache, 7, 1)
    assert first_sequence(step) == [7]
    assert step.positions[0].tolist() == [0]


@every_cache
@torch.no_grad()
def test_an_update_that_is_never_committed_changes_nothing(make):
    """A forward pass that fails after `prepare_update` can be repeated, also with other tokens or more of them."""
    cache = make()
    append(cache, 0, 3)
    append(cache, 3, 1)
    for count in (70, 1, 5):
        cache.prepare_update(numbered(50, count), cache.next_positions(BATCH, count, None, CPU))
    step = append(cache, 4, 2)
    assert first_sequence(step) == [0, 1, 2, 3, 4, 5]
    assert step.positions[0].tolist() == [4, 5]


@torch.no_grad()
def test_an_uncommitted_update_of_a_full_sliding_cache_changes_nothing():
    cache = hw.SlidingCache(3, sinks=2)
    for number in range(20):
        for count in (1, 9):
            cache.prepare_update(numbered(50, count), cache.next_positions(BATCH, count, None, CPU))
        step = append(cache, number, 1)
        assert first_sequence(step) == [token for token in range(number + 1) if token < 2 or token > number - 3]


@torch.no_grad()
def test_an_uncommitted_update_with_lengths_changes_nothing():
    cache = static_cache()
    append(cache, 0, 2, lengths=[2, 1])
    cache.prepare_update(numbered(50, 3), cache.next_positions(BATCH, 3, [1, 3], CPU))
    step = append(cache, 2, 1)
    torch.testing.assert_close(step.tokens, torch.tensor([[0.0, 1, 2], [0.01, 2.01, 0.0]]))
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 2], [0, 1, -1]]


def test_repr_shows_options_and_number_of_tokens():
    caches = hw.DynamicCache(), hw.SlidingCache(3, sinks=1), static_cache()
    for cache in caches:
        append(cache, 0, 4)
    assert [repr(cache) for cache in caches] == [
        "DynamicCache(4 tokens)",
        "SlidingCache(window=3, sinks=1, 4 tokens seen)",
        "StaticCache(capacity=6, lengths=[4, 4])",
    ]


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize("cache", [hw.DynamicCache(), static_cache()], ids=["dynamic", "static"])
def test_reorder_rejects_an_unusable_index(cache):
    append(cache, 0, 1)
    with pytest.raises(hw.InputError, match="^index: expected whole numbers, one .*, got torch.bool"):
        cache.reorder(torch.tensor([True, False]))
    with pytest.raises(hw.InputError, match=r"^index: expected numbers from 0 to 1, the sequences, got \[0, 2\]"):
        cache.reorder([0, 2])


# -- the dynamic and the sliding cache: buffers with spare memory, written in place where that is safe -----------------


GROWING = {"dynamic": hw.DynamicCache, "sliding": lambda: hw.SlidingCache(5, sinks=2)}
every_growing_cache = pytest.mark.parametrize("make", GROWING.values(), ids=GROWING)


def test_a_dynamic_cache_returns_every_token():
    cache = hw.DynamicCache()
    append(cache, 0, 3)
    step = append(cache, 3, 2)
    assert first_sequence(step) == [0, 1, 2, 3, 4]
    assert step.key_positions is None
    assert step.positions.tolist() == [[3, 4]]
    cache.crop(4)
    assert first_sequence(append(cache, 9, 1)) == [0, 1, 2, 3, 9]


def test_reorder_of_a_dynamic_cache_may_change_the_batch():
    cache = hw.DynamicCache()
    append(cache, 0, 2)
    cache.reorder(torch.tensor([0, 0, 1, 1]))
    assert cache.tensors is not None
    assert cache.tensors[0][:, 0, 1, 0].tolist() == pytest.approx([1, 1, 1.01, 1.01])


def test_a_sliding_cache_stores_the_window_and_the_sinks():
    cache = hw.SlidingCache(3, sinks=2)
    # The first queries of a long call still need all tokens before them.
    assert first_sequence(append(cache, 0, 7)) == [0, 1, 2, 3, 4, 5, 6]
    step = append(cache, 7, 1)
    assert first_sequence(step) == [0, 1, 5, 6, 7]
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 5, 6, 7]]
    assert step.positions.tolist() == [[7]]
    step = append(cache, 8, 2)
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 6, 7, 8, 9]]


def test_the_mask_of_a_sliding_cache_is_a_window_with_sinks():
    assert str(hw.SlidingCache(3, sinks=2).mask) == str(hw.window(3) | hw.causal() & hw.prefix(2))


def test_dropped_tokens_use_no_memory():
    cache = hw.SlidingCache(3)
    append(cache, 0, 100)
    assert cache.tensors is not None
    stored = cache.tensors[0]
    assert stored.shape[2] == 2
    assert stored.untyped_storage().nbytes() == stored.numel() * stored.element_size()


def test_a_window_of_one_stores_nothing():
    cache = hw.SlidingCache(1)
    append(cache, 0, 4)
    assert first_sequence(append(cache, 4, 1)) == [4]


def test_crop_rejects_lengths_whose_tokens_have_been_dropped():
    cache = hw.SlidingCache(2)
    append(cache, 0, 5)
    with pytest.raises(hw.InputError, match="^length: expected 5 or more: a sliding cache has dropped .*, got 4"):
        cache.crop(4)


def test_a_window_of_zero_is_rejected():
    with pytest.raises(hw.InputError, match="^window: expected a whole number of 1 or more, got 0"):
        hw.SlidingCache(0)


def storage_tokens(tensor: torch.Tensor) -> int:
    """Return how many tokens the memory of a tensor of float32 keys has space for."""
    return tensor.untyped_storage().nbytes() // (BATCH * KV_HEADS * HEAD_DIM * 4)


def assert_same_with_and_without_gradients(make, steps):
    """Check that writing into buffers, without gradients, returns the same tokens as copying, with gradients."""
    with torch.no_grad():
        written = steps(make())
    with torch.enable_grad():
        copied = steps(make())
    assert len(written) == len(copied)
    torch.testing.assert_close(written, copied, rtol=0, atol=0)


@every_growing_cache
def test_writing_into_buffers_returns_the_same_as_copying(make):
    def steps(cache):
        returned, first = [], 0
        for count in [3, *[1] * 150, 0, 2, 40, 1, 1, 400, *[1] * 9]:
            tokens, key_positions, _ = append(cache, first, count)
            returned += [tokens, torch.arange(tokens.shape[1])[None] if key_positions is None else key_positions]
            first += count
            if count == 40:
                cache.reorder([1, 0])
        return returned

    assert_same_with_and_without_gradients(make, steps)


def test_crops_between_steps_return_the_same_as_copying():
    def steps(cache):
        returned, first = [], 0
        for count, crop in ((5, 9), (3, 6), (2, 0), (4, 4), (1, 2), (70, 50), (1, 51)):
            returned.append(append(cache, first, count).tokens)
            cache.crop(crop)
            first += count
        return returned

    assert_same_with_and_without_gradients(hw.DynamicCache, steps)
    assert_same_with_and_without_gradients(lambda: hw.SlidingCache(100), steps)


@torch.no_grad()
def test_appending_tokens_rarely_moves_the_stored_ones():
    cache = hw.DynamicCache()
    append(cache, 0, 100)
    moves, before = 0, None
    for token in range(100, 1000):
        append(cache, token, 1)
        moves += cache.tensors[0].data_ptr() != before
        before = cache.tensors[0].data_ptr()
    assert moves == 6  # 64 spare tokens, then half as many again: 165, 247, 370, 555, 832, 1248
    assert cache.buffers[0].shape[2] == 1248


@torch.no_grad()
def test_memory_of_a_sliding_cache_is_bounded():
    cache = hw.SlidingCache(100, sinks=3)
    largest = 0
    for token in range(1000):
        append(cache, token, 1)
        largest = max(largest, storage_tokens(cache.tensors[0]))
    assert largest <= 1.5 * 103 + 64


@every_growing_cache
@torch.no_grad()
def test_copies_share_no_memory(make):
    for duplicate in (copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        cache = make()
        append(cache, 0, 3)
        append(cache, 3, 1)
        other = duplicate(cache)
        append(cache, 4, 1)
        assert first_sequence(append(other, 7, 1)) == [0, 1, 2, 3, 7]
        assert first_sequence(append(cache, 5, 1)) == [0, 1, 2, 3, 4, 5]
        if isinstance(cache, hw.DynamicCache):
            cache.crop(2)
        else:
            cache.reset()
        append(cache, 8, 2)
        assert first_sequence(append(other, 9, 1)) == [0, 1, 2, 3, 7, 9]
        assert duplicate(make()).token_count == 0


@torch.no_grad()
def test_a_copy_has_no_spare_memory():
    cache = hw.DynamicCache()
    append(cache, 0, 1000)
    append(cache, 1000, 1)
    for tensor in copy.copy(cache).tensors:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


def test_tensors_of_a_pending_gradient_are_never_overwritten():
    """One step with gradients, after steps without, and then a crop and new tokens in place of its tokens."""
    cache = hw.DynamicCache()
    with torch.no_grad():
        append(cache, 0, 2)
        append(cache, 2, 1)
    keys, values = (tensor.clone().requires_grad_() for tensor in numbered(3, 2))
    update = cache.prepare_update((keys, values), cache.next_positions(BATCH, 2, None, CPU))
    cache.commit(update)
    y = (update.tensors[0].exp() ** 2).sum() + (update.tensors[1] ** 2).sum()
    with torch.no_grad():
        cache.crop(3)
        assert first_sequence(append(cache, 7, 1)) == [0, 1, 2, 7]
        assert first_sequence(append(cache, 8, 1)) == [0, 1, 2, 7, 8]
    gradients = torch.autograd.grad(y, (keys, values))
    torch.testing.assert_close(gradients[0], 2 * keys.detach().exp() ** 2)
    torch.testing.assert_close(gradients[1], 2 * values.detach())


@torch.no_grad()
def test_tensors_of_the_first_call_are_never_overwritten():
    cache = hw.DynamicCache()
    passed = tuple(tensor.clone() for tensor in numbered(0, 4))
    cache.commit(cache.prepare_update(passed, cache.next_positions(BATCH, 4, None, CPU)))
    cache.crop(1)
    append(cache, 9, 2)
    assert all(torch.equal(now, before) for now, before in zip(passed, numbered(0, 4), strict=True))


def test_buffers_are_written_within_inference_mode_and_outside():
    cache = hw.DynamicCache()
    with torch.inference_mode():
        append(cache, 0, 2)
        append(cache, 2, 1)
        cache.reorder([1, 0])
        cache.reorder([1, 0])
    buffer = cache.buffers[0]
    with torch.no_grad():
        append(cache, 3, 1)
        assert first_sequence(append(cache, 4, 1)) == [0, 1, 2, 3, 4]
    with torch.inference_mode():
        assert first_sequence(append(cache, 5, 1)) == [0, 1, 2, 3, 4, 5]
    assert cache.buffers[0] is buffer
    assert first_sequence(append(cache, 6, 1)) == [0, 1, 2, 3, 4, 5, 6]


@torch.no_grad()
def test_nothing_is_written_in_place_under_vmap():
    cache = hw.DynamicCache()
    append(cache, 0, 2)
    append(cache, 2, 1)
    cache.tensors, cache.buffers = (cache.tensors[0],) * 2, (cache.buffers[0],) * 2

    def tensors_with(key):
        return cache.prepare_update((key, key), torch.tensor([[3]])).tensors[0]

    keys = torch.stack([numbered(first, 1)[0] for first in (5, 7)])
    assert torch.vmap(tensors_with)(keys)[:, 0, 0, :, 0].tolist() == [[0, 1, 2, 5], [0, 1, 2, 7]]


@pytest.mark.parametrize("make", [hw.DynamicCache, lambda: hw.SlidingCache(2)], ids=["dynamic", "sliding"])
def test_calls_that_do_not_fit_are_rejected(make):
    cache = make()
    append(cache, 0, 5)
    with pytest.raises(hw.InputError, match="^x: expected the batch of 2 that the cache holds, got a batch of 4"):
        cache.prepare_update(tuple(tensor.repeat(2, 1, 1, 1) for tensor in numbered(5, 1)), torch.tensor([[5]]))
    with pytest.raises(hw.InputError, match="^lengths: expected a StaticCache, .*, got .*Cache"):
        cache.next_positions(BATCH, 1, [1, 1], CPU)
    with pytest.raises(hw.InputError, match="^length: expected a whole number of 0 or more, got -1"):
        cache.crop(-1)


@pytest.mark.usefixtures("as_user")
def test_tensors_of_another_layer_are_rejected():
    cache = hw.DynamicCache()
    append(cache, 0, 1)
    other_widths = tuple(torch.zeros(BATCH, KV_HEADS, 1, HEAD_DIM) for _ in range(2))
    with pytest.raises(hw.InputError, match=r"^cache: expected heads, .*\(3, 5, .*; a cache belongs to one"):
        cache.prepare_update(other_widths, torch.tensor([[1]]))
    other_device = tuple(tensor.to("meta") for tensor in numbered(0, 1))
    with pytest.raises(hw.InputError, match="^cache: expected tensors on meta like the layer, got cpu"):
        cache.prepare_update(other_device, torch.tensor([[1]]))


# -- the static cache: where tokens are written, and which slots a call can see ----------------------------------------


def test_each_sequence_has_its_own_length():
    cache = static_cache()
    step = append(cache, 0, 3, lengths=[3, 1])
    assert step.positions.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 2], [0, -1, -1]]  # without the slots that are empty in both
    step = append(cache, 5, 2, lengths=torch.tensor([0, 2]))
    assert step.positions.tolist() == [[-1, -1], [1, 2]]
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(step.tokens, torch.tensor([[0.0, 1, 2], [0.01, 5.01, 6.01]]))
    assert cache.lengths.tolist() == [3, 3]
    step = append(cache, 7, 1)
    assert step.key_positions is None  # equal lengths again: key j is at position j
    torch.testing.assert_close(step.tokens, torch.tensor([[0.0, 1, 2, 7], [0.01, 5.01, 6.01, 7.01]]))


def test_padding_of_an_empty_cache_takes_no_slot():
    cache = static_cache()
    step = append(cache, 0, 2, lengths=[1, 1])  # positions 0 and -1
    torch.testing.assert_close(step.tokens, torch.tensor([[0.0], [0.01]]))
    assert cache.lengths.tolist() == [1, 1]


def test_full_capacity_returns_empty_slots_too():
    cache = static_cache()
    positions = cache.next_positions(BATCH, 2, None, CPU)
    update = cache.prepare_update(numbered(0, 2), positions, full_capacity=True)
    assert [tensor.shape[2] for tensor in update.tensors] == [6, 6]
    assert update.key_positions is not None
    assert update.key_positions.tolist() == [[0, 1, -1, -1, -1, -1]] * 2


def test_padding_may_exceed_the_capacity():
    cache = static_cache(capacity=4)
    append(cache, 0, 3, lengths=[3, 3])
    tokens = append(cache, 3, 3, lengths=[1, 0]).tokens  # 6 slots if all 3 were real
    torch.testing.assert_close(tokens[:, :3], torch.tensor([[0.0, 1, 2], [0.01, 1.01, 2.01]]))
    assert tokens[0, 3] == 3


def test_slots_and_lengths_stay_at_their_addresses():
    cache = static_cache()
    before = [slots.data_ptr() for slots in cache.slots] + [cache.lengths.data_ptr()]
    append(cache, 0, 3)
    cache.crop(2)
    cache.reorder(torch.tensor([1, 0]))
    cache.reset()
    assert before == [slots.data_ptr() for slots in cache.slots] + [cache.lengths.data_ptr()]


def test_crop_accepts_one_length_for_each_sequence():
    cache = static_cache()
    append(cache, 0, 4)
    cache.crop(torch.tensor([1, 3]))
    step = append(cache, 4, 1)
    assert step.key_positions is not None
    assert step.key_positions.tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]


# -- NaN in slots that are empty again: a weight of 0 does not hide it -----------------------------------------------


def write_nan(cache: hw.StaticCache, count: int, *, commit: bool = True) -> None:
    """Append tokens whose keys and values are NaN."""
    new = tuple(torch.full((BATCH, KV_HEADS, count, width), math.nan) for width in (HEAD_DIM, VALUE_DIM))
    update = cache.prepare_update(new, cache.next_positions(BATCH, count, None, CPU))
    if commit:
        cache.commit(update)


REMOVALS = {
    "reset": lambda cache: (write_nan(cache, 5), cache.reset()),
    "crop": lambda cache: (write_nan(cache, 5), cache.crop(0)),
    "crop of each sequence": lambda cache: (append(cache, 0, 1), write_nan(cache, 4), cache.crop([1, 0])),
    "failed call": lambda cache: write_nan(cache, 5, commit=False),
    "failed call and reset": lambda cache: (write_nan(cache, 5, commit=False), cache.reset()),
    "failed call and crop": lambda cache: (append(cache, 0, 2), write_nan(cache, 4, commit=False), cache.crop(1)),
    "failed call and reorder": lambda cache: (write_nan(cache, 5, commit=False), cache.reorder([1, 0])),
}


@pytest.mark.parametrize("remove", REMOVALS.values(), ids=REMOVALS)
def test_removed_nan_reaches_no_later_call(remove):
    cache = static_cache()
    remove(cache)
    for count, lengths in ((2, [2, 1]), (1, None)):
        update = cache.prepare_update(
            numbered(0, count), cache.next_positions(BATCH, count, lengths, CPU), full_capacity=True
        )
        assert all(tensor.isfinite().all() for tensor in update.tensors)
        cache.commit(update)


@torch.no_grad()
@pytest.mark.parametrize("return_weights", [False, True])
def test_a_layer_gives_the_output_of_a_new_cache_after_nan_was_removed(return_weights):
    layer = hw.MultiHeadAttention(12, 3, num_kv_heads=1, mask=hw.causal()).eval()
    x = torch.randn(BATCH, 3, 12)
    cache = layer.static_cache(BATCH, 6)
    layer(torch.full((BATCH, 5, 12), math.nan), cache=cache)
    cache.reset()
    outputs = [
        layer(x, cache=used, lengths=[3, 1], return_weights=return_weights)
        for used in (cache, layer.static_cache(BATCH, 6))
    ]
    torch.testing.assert_close(*outputs, rtol=0, atol=0)


# -- errors -----------------------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("as_user")
def test_calls_that_do_not_fit_a_static_cache_are_rejected():
    cache = static_cache(capacity=4)
    with pytest.raises(hw.InputError, match="^cache: expected room for 5 tokens, got a capacity of 4"):
        append(cache, 0, 5)
    with pytest.raises(hw.InputError, match="^lengths: expected one for each of 2 sequences, got"):
        append(cache, 0, 2, lengths=[1])
    with pytest.raises(hw.InputError, match=r"^lengths: expected numbers from 0 to 2, the tokens, got \[1, 3\]"):
        append(cache, 0, 2, lengths=[1, 3])


@pytest.mark.usefixtures("as_user")
def test_tensors_that_do_not_fit_are_rejected():
    cache = static_cache()
    positions = cache.next_positions(BATCH, 1, None, CPU)
    with pytest.raises(hw.InputError, match=r"^cache: expected keys and values of torch.float32 on cpu, got .*float64"):
        cache.prepare_update(tuple(tensor.double() for tensor in numbered(0, 1)), positions)
    with pytest.raises(hw.InputError, match=r"^cache: expected no gradient, .* call the layer under torch.no_grad"):
        cache.prepare_update(tuple(tensor.clone().requires_grad_() for tensor in numbered(0, 1)), positions)
    with pytest.raises(hw.InputError, match=r"^cache: expected room for \[\(3, 5\)\] heads .* \(3, 7\)\]"):
        cache.prepare_update(numbered(0, 1)[:1], positions)


@pytest.mark.usefixtures("as_user")
def test_reorder_and_crop_reject_another_number_of_sequences():
    cache = static_cache()
    with pytest.raises(hw.InputError, match=r"^index: expected one for each of 2 sequences, got \(3,\)"):
        cache.reorder(torch.tensor([0, 1, 1]))
    for lengths, got in (([1], "1"), ([-1, 2], "-1, 2")):
        with pytest.raises(
            hw.InputError, match=rf"^length: expected a number of 0 or more, or one .* 2 .*, got \[{got}"
        ):
            cache.crop(lengths)


@pytest.mark.usefixtures("as_user")
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: static_cache(capacity=0), "capacity: expected a whole number of 1 or more, got 0"),
        (lambda: static_cache(capacity=2**63), "capacity: expected a whole number from 1 to 2147483648, got 9223"),
        (lambda: hw.StaticCache(2**63, 4, [(3, 5)]), "batch: expected a whole number from 1 to 2147483648, got 9223"),
        (lambda: hw.StaticCache(2, 4, "abc"), "tensor_sizes: expected a collection of pairs, got 'abc'"),
        (lambda: hw.StaticCache(2, 4, [(3, 5, 7)]), r"tensor_sizes: expected a pair \(heads, width\) .* got \(3, 5, 7"),
        (lambda: hw.StaticCache(2, 4, [(3, 5.0)]), "tensor_sizes: expected a whole number of 1 or more, got 5.0"),
        (lambda: hw.StaticCache(2, 4, [(3, 5)], dtype=torch.int64), "dtype: expected a floating-point dtype, .*int64"),
        (lambda: hw.MultiHeadAttention(8, 2).static_cache(1, 4, dtype="float16"), "dtype: .*, got 'float16'"),
    ],
)
def test_unusable_sizes_are_rejected(make, message):
    with pytest.raises(hw.InputError, match="^" + message):
        make()


@pytest.mark.parametrize("length", [5, 2**63, 10**30])
def test_a_crop_to_more_tokens_than_the_cache_has_changes_nothing(length):
    layer = hw.MultiHeadAttention(8, 2, mask=hw.causal())
    cache = layer.static_cache(2, 4)
    with torch.no_grad():
        layer(torch.randn(2, 3, 8), cache=cache)
    slots = [tensor.clone() for tensor in cache.slots]
    cache.crop(length)
    assert cache.lengths.tolist() == [3, 3]
    assert all(map(torch.equal, cache.slots, slots))
