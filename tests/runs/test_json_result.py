"""Results that are saved as JSON come back equal, and other files are refused in one sentence."""

import math
from dataclasses import dataclass

import pytest

import headwise as hw
from headwise.runs.json_result import JsonResult


@dataclass(frozen=True)
class Pair(JsonResult):
    """Two numbers, the first below the second."""

    ARGUMENT, NOUN = "pair", "a pair"

    low: float
    high: float

    def require_consistent(self):
        if self.low >= self.high:
            raise hw.InputError("pair", expected="a low number below the high one", got=self.low)


def test_a_saved_result_is_loaded(tmp_path):
    Pair(0.1, 1e300).save(tmp_path / "pair.json")
    assert Pair.load(tmp_path / "pair.json") == Pair(0.1, 1e300)
    Pair(float("-inf"), float("inf")).save(tmp_path / "infinite.json")
    assert Pair.load(tmp_path / "infinite.json") == Pair(float("-inf"), float("inf"))
    assert math.isnan(Pair.from_json(Pair(0.0, float("nan")).to_json()).high)


@pytest.mark.parametrize(
    "text",
    [
        *("", "{", "[]", "{}", "null", "[" * 100_000, '{"format": 1, "low": 1, "high": 2, "high": 3}'),
        *('{"format": 1, "low": 1, "high": 2, "x": 3}', '{"format": 1, "low": NaN, "high": 2}'),
        *('{"format": 2, "low": 1, "high": 2}', '{"format": 1, "low": 1}', '{"format": 1, "x": 1}'),
    ],
)
def test_another_text_is_refused(text, tmp_path):
    (tmp_path / "pair.json").write_text(text)
    with pytest.raises(hw.InputError, match=r"^pair: expected JSON of a pair, got '"):
        Pair.load(tmp_path / "pair.json")


def test_parts_that_do_not_fit_are_refused():
    with pytest.raises(hw.InputError, match=r"^pair: expected a low number below the high one, got 2"):
        Pair.from_json('{"format": 1, "low": 2, "high": 1}')


def test_a_file_that_cannot_be_read_is_refused(tmp_path):
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, tmp_path / "none.json", tmp_path / "bytes", "a\0b", "a" * 5000):
        with pytest.raises(hw.InputError, match=r"^pair: expected a file with a pair, got '"):
            Pair.load(path)
