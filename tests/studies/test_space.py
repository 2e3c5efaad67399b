"""Settings of a search space (heads, head width, key/value heads): enumeration, names, and refused numbers."""

import itertools
import re

import pytest

import headwise as hw
from headwise.studies.space import DEFAULT_HEADS

pytestmark = pytest.mark.usefixtures("as_user")


def names(*arguments, **options):
    return [setting.name for setting in hw.Space(*arguments, **options).settings()]


@pytest.mark.parametrize(
    ("space", "expected"),
    [
        ({"embed_dim": 64}, ["1x64", "2x32", "4x16", "8x8", "16x4"]),
        ({"embed_dim": 24, "heads": [3, 1, 4, 3]}, ["1x24", "3x8", "4x6"]),
        ({"embed_dim": 24, "heads": (1, 5, 7, 12, 24)}, ["1x24", "12x2"]),
        ({"embed_dim": 12, "heads": (2, 4, 12)}, ["2x6"]),
        ({"embed_dim": 12, "heads": (2, 3), "head_dims": (3, 4, 10)}, ["2x4", "2x10", "3x4", "3x10"]),
        ({"embed_dim": 12, "heads": (4,), "head_dims": (1, 2, 64)}, ["4x2", "4x64"]),
        (
            {"embed_dim": 24, "heads": (2, 6), "kv_heads": (1, 2, 3, 4)},
            ["2x12/1", "2x12", "6x4/1", "6x4/2", "6x4/3"],
        ),
        (
            {"embed_dim": 24, "heads": (1, 2, 4), "head_dims": (2, 6), "kv_heads": (4, 2)},
            ["2x2", "2x6", "4x2/2", "4x2", "4x6/2", "4x6"],
        ),
        ({"embed_dim": 24, "heads": (1, 2, 3, 4, 6), "tensor_parallel": 2}, ["2x12", "4x6", "6x4"]),
        ({"embed_dim": 24, "heads": (4, 12), "kv_heads": (1, 2, 4), "tensor_parallel": 4}, ["4x6", "12x2/4"]),
        ({"embed_dim": 24, "heads": (6,), "kv_heads": (1, 2, 3, 6), "tensor_parallel": 3}, ["6x4/3", "6x4"]),
    ],
)
def test_a_space_has_every_valid_combination(space, expected):
    assert names(**space) == expected


def test_a_space_equals_a_filtered_enumeration_of_all_numbers():
    """The enumeration covers all numbers up to the width, and keeps those that the space allows."""
    heads, widths, shared, ranks = (1, 2, 3, 5, 6, 9, 10), (1, 2, 7, 8), (1, 2, 3, 4, 6), (1, 2, 3)
    for rank in ranks:
        expected = [
            hw.Setting(h, d, k)
            for h, d, k in itertools.product(range(1, 31), repeat=3)
            if (h in heads and d in widths and k in shared) and 30 % h == d % 2 == h % k == h % rank == k % rank == 0
        ]
        assert hw.Space(30, heads, widths, shared, rank).settings() == tuple(expected)


def test_numbers_have_defaults_and_can_be_any_iterable():
    assert hw.Space(32).heads == DEFAULT_HEADS == (1, 2, 4, 8, 16)
    space = hw.Space(8, iter([2, 1]), range(2, 5, 2), {1})
    assert (space.heads, space.head_dims, space.kv_heads) == ((2, 1), (2, 4), (1,))
    assert names(8, iter([2, 1]), range(2, 5, 2), {1}) == ["1x2", "1x4", "2x2/1", "2x4/1"]


@pytest.mark.parametrize(
    ("text", "setting"),
    [
        ("8", hw.Setting(8, 32, 8)),
        ("8x64", hw.Setting(8, 64, 8)),
        ("8x64/2", hw.Setting(8, 64, 2)),
        ("8/2", hw.Setting(8, 32, 2)),
        ("1x2", hw.Setting(1, 2, 1)),
        (" 16 ", hw.Setting(16, 16, 16)),
        ("32/32", hw.Setting(32, 8, 32)),
    ],
)
def test_a_setting_is_parsed_from_text_and_from_its_name(text, setting):
    """Settings outside every space are parsed as well."""
    assert hw.Space(256, (1, 2)).parse(text) == hw.Space(256).parse(setting.name) == setting
    assert str(setting) == setting.name
    assert text == setting.name or "x" not in text


WRITTEN = "heads as in 8, 8x64, 8x64/2 or 8/2"


@pytest.mark.parametrize(
    ("text", "expected", "got"),
    [
        ("3x", WRITTEN, "'3x'"),
        ("", WRITTEN, "''"),
        ("x64", WRITTEN, "'x64'"),
        ("8 x 64", WRITTEN, "'8 x 64'"),
        ("-8", WRITTEN, "'-8'"),
        ("8x64/2/1", WRITTEN, "'8x64/2/1'"),
        ("eight", WRITTEN, "'eight'"),
        ("0", WRITTEN, "'0'"),
        ("8x0", WRITTEN, "'8x0'"),
        ("8/0", WRITTEN, "'8/0'"),
        ("3", "a valid setting", "'3': 3 heads do not divide embed_dim 256"),
        ("512", "a valid setting", "'512': 512 heads do not divide embed_dim 256"),
        ("8x63", "a valid setting", "'8x63': 8x63 has an odd head_dim"),
        ("256", "a valid setting", "'256': 256x1 has an odd head_dim"),
        ("8x64/3", "a valid setting", "'8x64/3': 8x64/3 has key/value heads that do not divide its query heads"),
        ("4/8", "a valid setting", "'4/8': 4x64/8 has key/value heads that do not divide its query heads"),
        ("1", "a valid setting", "'1': 1x256 has heads that 2 ranks cannot share equally"),
        ("4/1", "a valid setting", "'4/1': 4x64/1 has heads that 2 ranks cannot share equally"),
    ],
)
def test_unusable_names_of_settings_are_refused(text, expected, got):
    with pytest.raises(hw.InputError, match=f"^{re.escape(f'baseline: expected {expected}, got {got}')}$"):
        hw.Space(256, tensor_parallel=2).parse(text)


def test_each_omitted_number_is_reported_once():
    space = hw.Space(24, (1, 5, 12, 24, 4), None, (1, 2, 4), 2)
    assert names(24, (1, 5, 12, 24, 4), None, (1, 2, 4), 2) == ["4x6/2", "4x6", "12x2/2", "12x2/4"]
    assert space.left_out() == (
        "1x24 has heads that 2 ranks cannot share equally",
        "1x24/2 has key/value heads that do not divide its query heads",
        "1x24/4 has key/value heads that do not divide its query heads",
        "5 heads do not divide embed_dim 24",
        "12x2/1 has heads that 2 ranks cannot share equally",
        "24x1/1 has an odd head_dim",
        "24x1/2 has an odd head_dim",
        "24x1/4 has an odd head_dim",
        "4x6/1 has heads that 2 ranks cannot share equally",
    )
    assert hw.Space(64).left_out() == ()


THREE = "3 heads do not divide embed_dim 10"
FIRST = f"{THREE}; 4 heads do not divide embed_dim 10; 6 heads do not divide embed_dim 10 and 2 more"


@pytest.mark.parametrize(
    ("heads", "got"),
    [((3,), THREE), ((3, 10), f"{THREE}; 10x1 has an odd head_dim"), ((3, 4, 6, 7, 10), FIRST)],
)
def test_a_space_without_settings_is_refused(heads, got):
    sentence = f"space: expected at least one valid setting, got none: {got}"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        hw.Space(10, heads).settings()


WHOLE = "expected a whole number of 1 or more, got"


@pytest.mark.parametrize(
    ("numbers", "sentence"),
    [
        ({"embed_dim": 0}, f"embed_dim: {WHOLE} 0"),
        ({"embed_dim": 8.0}, f"embed_dim: {WHOLE} 8.0"),
        ({"tensor_parallel": 0}, f"tensor_parallel: {WHOLE} 0"),
        ({"heads": ()}, "heads: expected one number or more, got ()"),
        ({"heads": 4}, "heads: expected one number or more, got 4"),
        ({"heads": (4, 0)}, f"heads: {WHOLE} 0"),
        ({"heads": (True,)}, f"heads: {WHOLE} True"),
        ({"head_dims": []}, "head_dims: expected one number or more, got ()"),
        ({"head_dims": (8, -2)}, f"head_dims: {WHOLE} -2"),
        ({"kv_heads": (1, "2")}, f"kv_heads: {WHOLE} '2'"),
        ((0, 8, 1), f"num_heads: {WHOLE} 0"),
        ((2, 8.0, 1), f"head_dim: {WHOLE} 8.0"),
        ((2, 8, -1), f"num_kv_heads: {WHOLE} -1"),
    ],
)
def test_unusable_numbers_of_a_space_and_of_a_setting_are_refused(numbers, sentence):
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        hw.Setting(*numbers) if isinstance(numbers, tuple) else hw.Space(**{"embed_dim": 8} | numbers)
