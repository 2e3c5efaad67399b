"""What caches keep, where it stands, and what they refuse; what a layer makes of them is in tests/test_decoding.py."""

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
    positions = cache.positions(BATCH, count, lengths, torch.device("cpu"))
    joined = cache.joined(tokens(first, count), positions)
    cache.keep(joined)
    for tensor in joined.tensors:
        assert torch.equal(tensor, tensor[:, :1, :, :1].expand_as(tensor))
    return joined.tensors[0][:, 0, :, 0], joined.key_positions, positions


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
    positions = cache.positions(BATCH, 2, None, torch.device("cpu"))
    joined = cache.joined(tokens(0, 2), positions, whole=True)
    assert [tensor.shape[2] for tensor in joined.tensors] == [6, 6]
    assert joined.key_positions.tolist() == [[0, 1, -1, -1, -1, -1]] * 2


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
        filled_dynamic.joined(other, torch.tensor([[1]]))
    positions = cache.positions(BATCH, 1, None, torch.device("cpu"))
    with pytest.raises(
        hw.InputError, match="^cache: expected keys and values of torch.float32 on cpu, got torch.float64"
    ):
        cache.joined(tuple(each.double() for each in tokens(0, 1)), positions)
    with pytest.raises(hw.InputError, match="^cache: expected no gradient, .* call the layer under torch.no_grad"):
        cache.joined(tuple(each.clone().requires_grad_() for each in tokens(0, 1)), positions)
    with pytest.raises(hw.InputError, match=r"^cache: expected room for \[\(3, 5\)\] heads .* \(3, 7\)\]"):
        cache.joined(tokens(0, 1)[:1], positions)
    with pytest.raises(hw.InputError, match="^capacity: expected a whole number of 1 or more, got 0"):
        static(capacity=0)

    for cache in (hw.DynamicCache(), hw.SlidingCache(2)):
        append(cache, 0, 5)
        with pytest.raises(hw.InputError, match="^x: expected the batch of 2 that the cache holds, got a batch of 4"):
            cache.positions(4, 1, None, torch.device("cpu"))
        with pytest.raises(hw.InputError, match="^lengths: expected a StaticCache, .*, got .*Cache"):
            cache.positions(BATCH, 1, [1, 1], torch.device("cpu"))
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
