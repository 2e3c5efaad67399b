"""What caches keep, where it stands, and what they refuse; what a layer makes of them is in tests/test_decoding.py."""

import copy
import pickle

import pytest
import torch

import headwise as hw

BATCH, KV_HEADS, HEAD_DIM, VALUE_DIM = 2, 3, 5, 7


def tokens(first: int, count: int, batch: int = BATCH):
    """Keys and values that say which token they are: the token's number, plus a hundredth for its sequence."""
    number = torch.arange(first, first + count)[None, None, :, None] + torch.arange(batch)[:, None, None, None] / 100
    return number.expand(-1, KV_HEADS, -1, HEAD_DIM), number.expand(-1, KV_HEADS, -1, VALUE_DIM)


def append(cache, first: int, count: int, lengths=None):
    """One call: what there was to attend to, as numbers of tokens, and their positions."""
    positions = cache.next_positions(BATCH, count, lengths, torch.device("cpu"))
    update = cache.prepare_update(tokens(first, count), positions)
    for tensor in update.tensors:
        assert torch.equal(tensor, tensor[:, :1, :, :1].expand_as(tensor))
    seen = update.tensors[0][:, 0, :, 0].clone()
    cache.commit(update)
    return seen, update.key_positions, positions


def static(capacity: int = 6) -> hw.StaticCache:
    return hw.StaticCache(BATCH, capacity, [(KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM)])


def test_a_dynamic_cache_keeps_all():
    cache = hw.DynamicCache()
    append(cache, 0, 3)
    seen, at, positions = append(cache, 3, 2)
    assert seen[0].tolist() == [0, 1, 2, 3, 4]
    assert at is None  # they lie as they stand
    assert positions.tolist() == [[3, 4]]
    cache.crop(4)
    assert append(cache, 9, 1)[0][0].tolist() == [0, 1, 2, 3, 9]
    cache.reset()
    assert append(cache, 7, 1)[0][0].tolist() == [7]


def test_a_sliding_cache_keeps_the_window_and_the_sinks():
    cache = hw.SlidingCache(3, sinks=2)
    seen, at, _ = append(cache, 0, 7)
    assert seen[0].tolist() == [0, 1, 2, 3, 4, 5, 6]  # the first queries of the piece still need them
    seen, at, positions = append(cache, 7, 1)
    assert seen[0].tolist() == [0, 1, 5, 6, 7]
    assert at.tolist() == [[0, 1, 5, 6, 7]]
    assert positions.tolist() == [[7]]
    assert append(cache, 8, 2)[1].tolist() == [[0, 1, 6, 7, 8, 9]]
    assert str(cache.mask) == str(hw.window(3) | hw.causal() & hw.prefix(2))


def test_a_sliding_cache_frees_what_it_drops():
    cache = hw.SlidingCache(3)
    append(cache, 0, 100)
    kept = cache.tensors[0]
    assert kept.shape[2] == 2
    assert kept.untyped_storage().nbytes() == kept.numel() * kept.element_size()


GROWING = {"dynamic": hw.DynamicCache, "sliding": lambda: hw.SlidingCache(5, sinks=2)}
growing = pytest.mark.parametrize("make", GROWING.values(), ids=GROWING)


def both_ways(make, steps):
    """What a cache shows at each step is the same where tokens are written into its room as where all is copied."""
    with torch.no_grad():
        written = steps(make())
    with torch.enable_grad():
        copied = steps(make())
    assert len(written) == len(copied)
    for got, wanted in zip(written, copied, strict=True):
        assert torch.equal(got, wanted)


@growing
def test_writing_into_room_shows_what_copying_does(make):
    def steps(cache):
        shown, first = [], 0
        for count in [3, *[1] * 150, 0, 2, 40, 1, 1, 400, *[1] * 9]:
            seen, at, _ = append(cache, first, count)
            shown += [seen, torch.arange(seen.shape[1])[None] if at is None else at]
            first += count
            if count == 40:
                cache.reorder([1, 0])
        return shown

    both_ways(make, steps)


def test_crops_between_steps_show_what_copying_does():
    def steps(cache):
        shown, first = [], 0
        for count, crop in ((5, 9), (3, 6), (2, 0), (4, 4), (1, 2), (70, 50), (1, 51)):
            shown.append(append(cache, first, count)[0])
            cache.crop(crop)
            first += count
        return shown

    both_ways(hw.DynamicCache, steps)
    both_ways(lambda: hw.SlidingCache(100), steps)


@torch.no_grad()
def test_a_token_more_costs_what_it_takes_itself():
    cache = hw.DynamicCache()
    append(cache, 0, 100)
    moves, before = 0, None
    for token in range(100, 1000):
        append(cache, token, 1)
        moves += cache.tensors[0].data_ptr() != before
        before = cache.tensors[0].data_ptr()
    assert moves == 6  # room for 64 more, then for half as many again: 165, 249, 375, 564, 847, 1272
    assert cache.buffers[0].shape[2] == 1272


@torch.no_grad()
def test_a_sliding_cache_takes_a_bounded_room():
    cache = hw.SlidingCache(100, sinks=3)
    largest = 0
    for token in range(1000):
        append(cache, token, 1)
        stored = cache.tensors[0].untyped_storage().nbytes() // (BATCH * KV_HEADS * HEAD_DIM * 4)
        largest = max(largest, stored)
    assert largest <= 1.5 * 103 + 64


@growing
@torch.no_grad()
def test_copies_share_nothing(make):
    for twin in (copy.copy, copy.deepcopy, lambda cache: pickle.loads(pickle.dumps(cache))):
        cache = make()
        append(cache, 0, 3)
        append(cache, 3, 1)
        other = twin(cache)
        append(cache, 4, 1)
        assert append(other, 7, 1)[0][0].tolist() == [0, 1, 2, 3, 7]
        assert append(cache, 5, 1)[0][0].tolist() == [0, 1, 2, 3, 4, 5]
        cache.crop(2) if isinstance(cache, hw.DynamicCache) else cache.reset()
        append(cache, 8, 2)
        assert append(other, 9, 1)[0][0].tolist() == [0, 1, 2, 3, 7, 9]
        assert twin(make()).token_count == 0


@torch.no_grad()
def test_a_copy_holds_no_room():
    cache = hw.DynamicCache()
    append(cache, 0, 1000)
    append(cache, 1000, 1)
    for tensor in copy.copy(cache).tensors:
        assert tensor.untyped_storage().nbytes() == tensor.numel() * tensor.element_size()


@growing
@torch.no_grad()
def test_a_step_that_is_not_kept_leaves_no_trace(make):
    cache = make()
    append(cache, 0, 3)
    append(cache, 3, 1)
    for _ in range(3):
        cache.prepare_update(tokens(50, 70), cache.next_positions(BATCH, 70, None, torch.device("cpu")))
    assert append(cache, 4, 1)[0][0].tolist() == [0, 1, 2, 3, 4]


def test_what_a_gradient_may_need_is_never_written_over():
    """A step with gradients, between steps without, and after a crop that makes place where they are."""
    cache = hw.DynamicCache()
    with torch.no_grad():
        append(cache, 0, 2)
        append(cache, 2, 1)
    keys, values = (tensor.clone().requires_grad_() for tensor in tokens(3, 2))
    update = cache.prepare_update((keys, values), cache.next_positions(BATCH, 2, None, torch.device("cpu")))
    cache.commit(update)
    y = (update.tensors[0].exp() ** 2).sum() + (update.tensors[1] ** 2).sum()
    with torch.no_grad():
        cache.crop(3)
        assert append(cache, 7, 1)[0][0].tolist() == [0, 1, 2, 7]
        assert append(cache, 8, 1)[0][0].tolist() == [0, 1, 2, 7, 8]
    got = torch.autograd.grad(y, (keys, values))
    torch.testing.assert_close(got[0], 2 * keys.detach().exp() ** 2)
    torch.testing.assert_close(got[1], 2 * values.detach())


@torch.no_grad()
def test_what_a_cache_was_handed_first_is_not_written_over():
    cache = hw.DynamicCache()
    handed = tuple(tensor.clone() for tensor in tokens(0, 4))
    cache.commit(cache.prepare_update(handed, cache.next_positions(BATCH, 4, None, torch.device("cpu"))))
    cache.crop(1)
    append(cache, 9, 2)
    assert all(torch.equal(now, before) for now, before in zip(handed, tokens(0, 4), strict=True))


def test_what_inference_mode_made_is_not_written_outside_of_it():
    cache = hw.DynamicCache()
    with torch.inference_mode():
        append(cache, 0, 2)
        append(cache, 2, 1)
    with torch.no_grad():
        append(cache, 3, 1)
        assert append(cache, 4, 1)[0][0].tolist() == [0, 1, 2, 3, 4]
    with torch.inference_mode():
        assert append(cache, 5, 1)[0][0].tolist() == [0, 1, 2, 3, 4, 5]
    assert append(cache, 6, 1)[0][0].tolist() == [0, 1, 2, 3, 4, 5, 6]


@torch.no_grad()
def test_under_vmap_nothing_is_written_in_place():
    cache = hw.DynamicCache()
    append(cache, 0, 2)
    append(cache, 2, 1)

    def one(key):
        update = cache.prepare_update((key, key), torch.tensor([[3]]))
        return update.tensors[0]

    cache.tensors, cache.buffers = (cache.tensors[0],) * 2, (cache.buffers[0],) * 2
    keys = torch.stack([tokens(first, 1)[0] for first in (5, 7)])
    assert torch.vmap(one)(keys)[:, 0, 0, :, 0].tolist() == [[0, 1, 2, 5], [0, 1, 2, 7]]


def test_a_window_of_one_keeps_nothing():
    cache = hw.SlidingCache(1)
    append(cache, 0, 4)
    assert append(cache, 4, 1)[0][0].tolist() == [4]


def test_a_static_cache_gives_each_sequence_its_own_length():
    cache = static()
    seen, at, positions = append(cache, 0, 3, lengths=[3, 1])
    assert positions.tolist() == [[0, 1, 2], [0, -1, -1]]
    assert at.tolist() == [[0, 1, 2], [0, -1, -1]]  # and nothing of the room beyond
    seen, at, positions = append(cache, 5, 2, lengths=torch.tensor([0, 2]))
    assert positions.tolist() == [[-1, -1], [1, 2]]
    assert at.tolist() == [[0, 1, 2], [0, 1, 2]]
    torch.testing.assert_close(seen, torch.tensor([[0.0, 1, 2], [0.01, 5.01, 6.01]]))
    assert cache.lengths.tolist() == [3, 3]
    seen, at, _ = append(cache, 7, 1)
    assert at is None  # all alike: they lie as they stand
    torch.testing.assert_close(seen, torch.tensor([[0.0, 1, 2, 7], [0.01, 5.01, 6.01, 7.01]]))


def test_a_static_cache_shows_all_its_room_where_tensors_speak_of_it():
    cache = static()
    positions = cache.next_positions(BATCH, 2, None, torch.device("cpu"))
    update = cache.prepare_update(tokens(0, 2), positions, full_capacity=True)
    assert [tensor.shape[2] for tensor in update.tensors] == [6, 6]
    assert update.key_positions.tolist() == [[0, 1, -1, -1, -1, -1]] * 2


def test_padding_beyond_the_capacity_is_written_nowhere():
    cache = static(capacity=4)
    append(cache, 0, 3, lengths=[3, 3])
    seen, _, _ = append(cache, 3, 3, lengths=[1, 0])  # 6 slots, were it all real
    torch.testing.assert_close(seen[:, :3], torch.tensor([[0.0, 1, 2], [0.01, 1.01, 2.01]]))
    assert seen[0, 3] == 3


def test_a_static_cache_never_moves():
    cache = static()
    before = [slots.data_ptr() for slots in cache.slots] + [cache.lengths.data_ptr()]
    append(cache, 0, 3)
    cache.crop(2)
    cache.reorder(torch.tensor([1, 0]))
    cache.reset()
    assert before == [slots.data_ptr() for slots in cache.slots] + [cache.lengths.data_ptr()]


@pytest.mark.parametrize(
    "make", [hw.DynamicCache, lambda: hw.SlidingCache(9), static], ids=["dynamic", "sliding", "static"]
)
def test_reorder_and_crop(make):
    cache = make()
    append(cache, 0, 3)
    cache.reorder(torch.tensor([1, 1]))
    cache.crop(2)
    seen, _, positions = append(cache, 5, 1)
    torch.testing.assert_close(seen[:, :3], torch.tensor([[0.01, 1.01, 5.0], [0.01, 1.01, 5.01]]))
    assert positions[0].tolist() == [2]


def test_a_dynamic_cache_may_change_its_batch():
    cache = hw.DynamicCache()
    append(cache, 0, 2)
    cache.reorder(torch.tensor([0, 0, 1, 1]))  # two beams each
    assert cache.tensors[0][:, 0, 1, 0].tolist() == pytest.approx([1, 1, 1.01, 1.01])


def test_a_static_cache_is_cropped_to_a_length_for_each_sequence():
    cache = static()
    append(cache, 0, 4)
    cache.crop(torch.tensor([1, 3]))
    assert append(cache, 4, 1)[1].tolist() == [[0, 1, -1, -1], [0, 1, 2, 3]]


@pytest.mark.usefixtures("as_user")
def test_mistakes():
    cache = static(capacity=4)
    with pytest.raises(hw.InputError, match="^cache: expected room for 5 tokens, got a capacity of 4"):
        append(cache, 0, 5)
    with pytest.raises(hw.InputError, match="^lengths: expected one for each of 2 sequences, got"):
        append(cache, 0, 2, lengths=[1])
    with pytest.raises(hw.InputError, match=r"^lengths: expected numbers from 0 to 2, the tokens, got \[1, 3\]"):
        append(cache, 0, 2, lengths=[1, 3])
    with pytest.raises(hw.InputError, match=r"^index: expected one for each of 2 sequences, got \(3,\)"):
        cache.reorder(torch.tensor([0, 1, 1]))
    for crop, got in (([1], "1"), ([-1, 2], "-1, 2")):
        with pytest.raises(
            hw.InputError, match=rf"^length: expected a number of 0 or more, or one .* 2 .*, got \[{got}"
        ):
            cache.crop(crop)
    for each in (cache, filled_dynamic := hw.DynamicCache()):
        if each is filled_dynamic:
            append(each, 0, 1)
        with pytest.raises(hw.InputError, match="^index: expected whole numbers, one .*, got torch.bool"):
            each.reorder(torch.tensor([True, False]))
        with pytest.raises(hw.InputError, match=r"^index: expected numbers from 0 to 1, the sequences, got \[0, 2\]"):
            each.reorder([0, 2])
    other = tuple(torch.zeros(BATCH, KV_HEADS, 1, width) for width in (HEAD_DIM, HEAD_DIM))
    with pytest.raises(hw.InputError, match=r"^cache: expected heads, .*\(3, 5, .*; a cache belongs to one"):
        filled_dynamic.prepare_update(other, torch.tensor([[1]]))
    elsewhere = tuple(tensor.to("meta") for tensor in tokens(0, 1))
    with pytest.raises(hw.InputError, match="^cache: expected tensors on meta like the layer, got cpu"):
        filled_dynamic.prepare_update(elsewhere, torch.tensor([[1]]))
    positions = cache.next_positions(BATCH, 1, None, torch.device("cpu"))
    with pytest.raises(
        hw.InputError, match="^cache: expected keys and values of torch.float32 on cpu, got torch.float64"
    ):
        cache.prepare_update(tuple(each.double() for each in tokens(0, 1)), positions)
    with pytest.raises(hw.InputError, match="^cache: expected no gradient, .* call the layer under torch.no_grad"):
        cache.prepare_update(tuple(each.clone().requires_grad_() for each in tokens(0, 1)), positions)
    with pytest.raises(hw.InputError, match=r"^cache: expected room for \[\(3, 5\)\] heads .* \(3, 7\)\]"):
        cache.prepare_update(tokens(0, 1)[:1], positions)
    with pytest.raises(hw.InputError, match="^capacity: expected a whole number of 1 or more, got 0"):
        static(capacity=0)

    for cache in (hw.DynamicCache(), hw.SlidingCache(2)):
        append(cache, 0, 5)
        with pytest.raises(hw.InputError, match="^x: expected the batch of 2 that the cache holds, got a batch of 4"):
            cache.next_positions(4, 1, None, torch.device("cpu"))
        with pytest.raises(hw.InputError, match="^lengths: expected a StaticCache, .*, got .*Cache"):
            cache.next_positions(BATCH, 1, [1, 1], torch.device("cpu"))
        with pytest.raises(hw.InputError, match="^length: expected a whole number of 0 or more, got -1"):
            cache.crop(-1)
    with pytest.raises(hw.InputError, match="^length: expected 5 or more: a sliding cache has dropped .*, got 4"):
        cache.crop(4)
    with pytest.raises(hw.InputError, match="^window: expected a whole number of 1 or more, got 0"):
        hw.SlidingCache(0)


def test_they_say_what_they_are():
    caches = hw.DynamicCache(), hw.SlidingCache(3, sinks=1), static()
    for cache in caches:
        append(cache, 0, 4)
    assert [repr(cache) for cache in caches] == [
        "DynamicCache(4 tokens)",
        "SlidingCache(window=3, sinks=1, 4 tokens seen)",
        "StaticCache(capacity=6, lengths=[4, 4])",
    ]
