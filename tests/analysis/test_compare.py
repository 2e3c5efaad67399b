"""Two profiles side by side, against numbers written out by hand."""

import math

import pytest
import scipy.stats

import headwise as hw
from headwise.analysis.profile import ProfiledHead
from headwise.runs.rows import MeanEstimate


def profile(*heads, module="layers.0.attention"):
    """Of heads with `name: (value, sem)`."""
    made = [
        ProfiledHead(
            layer=0,
            head=index,
            kv_head=index,
            module=module,
            kind="self",
            role="mixed",
            statistics={name: MeanEstimate(*each, 7, 6) for name, each in head.items()},
        )
        for index, head in enumerate(heads)
    ]
    return hw.Profile(tuple(made), {"model": {"name": "m"}, "data": None, "measured": {"sequences": 7, "tokens": 91}})


A = profile({"entropy": (2.0, 0.3), "first": (0.5, 0.0)}, {"entropy": (1.0, 0.1), "first": (0.0, 0.0)})
B = profile({"first": (0.25, 0.0), "entropy": (3.0, 0.4)}, {"first": (0.0, 0.0), "entropy": (1.0, math.nan)})


def test_differences_in_standard_errors():
    table = hw.compare(A, B).table()
    assert list(table.columns) == [
        *("layer", "head", "kv_head", "module", "kind", "role_a", "role_b"),
        *("statistic", "a", "b", "difference", "errors", "p", "q"),
    ]
    assert table["statistic"].tolist() == ["entropy", "first"] * 2
    assert table["difference"].tolist() == [1.0, -0.25, 0.0, 0.0]
    assert table["errors"].tolist() == pytest.approx([2.0, -math.inf, math.nan, 0.0], nan_ok=True)
    welch = scipy.stats.ttest_ind_from_stats(2.0, 0.3 * 7**0.5, 7, 3.0, 0.4 * 7**0.5, 7, equal_var=False).pvalue
    assert table["p"].tolist() == pytest.approx([welch, 2 / 3432, math.nan, 1.0], nan_ok=True)  # 14 over 7 is 3432


def test_rounding_is_no_difference():
    noisy = profile({"entropy": (2.0, 1e-17), "first": (0.5, 0.0)}, {"entropy": (0.3, 0.0), "first": (0.0, 0.0)})
    other = profile(
        {"entropy": (2.0 + 4e-16, 0.0), "first": (0.5, 1e-16)}, {"entropy": (0.4, 0.0), "first": (0.0, 0.0)}
    )
    table = hw.compare(noisy, other).table()
    assert table["errors"].tolist() == [0.0, 0.0, math.inf, 0.0]
    assert table["p"].tolist() == pytest.approx([1.0, 1.0, 2 / 3432, 1.0])


def test_the_largest_first():
    found = hw.compare(A, B)
    names = [(each.a.name, each.statistic) for each in found.largest()]
    assert names == [("0.0", "first"), ("0.0", "entropy"), ("0.1", "first"), ("0.1", "entropy")]
    assert [each.a.name for each in found.largest(["entropy"])] == ["0.0", "0.1"]
    with pytest.raises(hw.InputError, match="^statistic: expected one of entropy, first, got 'next'$"):
        found.largest(["next"])


def test_a_profile_does_not_differ_from_itself():
    assert [each.difference for each in hw.compare(A, A).differences] == [0.0] * 4


@pytest.mark.usefixtures("as_user")
def test_arguments_that_are_not_profiles():
    with pytest.raises(hw.InputError, match="^a: expected a profile, got NoneType; hw.load_profile"):
        hw.compare(None, B)
    with pytest.raises(hw.InputError, match=r"^b: expected a profile, got str; hw.load_profile\(folder\) reads one$"):
        hw.compare(A, "B")


def test_heads_that_do_not_line_up():
    fewer = profile({"entropy": (2.0, 0.3)})
    with pytest.raises(
        hw.InputError, match="^b: expected the heads of a, here 0.1 in layers.0.attention .self.*no more$"
    ):
        hw.compare(A, fewer)
    with pytest.raises(hw.InputError, match="^b: expected the heads of a, here no more, got 0.1 in layers.0.attention"):
        hw.compare(fewer, A)
    other = profile({"entropy": (2.0, 0.3)}, module="encoder.0")
    sentence = (
        "^b: expected the heads of a, here 0.0 in layers.0.attention .self.*, got 0.0 in encoder.0 .self attention.$"
    )
    with pytest.raises(hw.InputError, match=sentence):
        hw.compare(A, other)
    with pytest.raises(hw.InputError, match="^b: expected some of the statistics of a .entropy, first., got none$"):
        hw.compare(A, profile({"next": (0.0, 0.0)}, {"next": (0.0, 0.0)}))
