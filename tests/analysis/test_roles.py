"""The rule that names heads."""

import math

import pytest

from headwise.analysis.roles import ROLES, role_of

NOTHING = {"previous": 0.1, "next": 0.1, "induction": math.nan, "duplicate": math.nan, "self": 0.1, "first": 0.1}
NOTHING |= {"special": 0.1, "evenness": 0.5, "confidence": 0.4}
COUNTS = dict.fromkeys(NOTHING, 10.0) | {"induction": 0.0, "duplicate": 0.0}


@pytest.mark.parametrize(
    ("means", "counts", "role"),
    [
        ({}, {}, "mixed"),
        ({"previous": 0.5}, {}, "previous token"),
        ({"previous": 0.499}, {}, "mixed"),
        ({"next": 0.7, "previous": 0.6}, {}, "next token"),
        ({"self": 0.9}, {}, "same token"),
        ({"first": 0.6, "special": 0.9}, {}, "sink on the first token"),
        ({"first": 0.3, "special": 0.5}, {}, "sink on special tokens"),
        ({"previous": 0.6, "first": 0.55, "special": 0.9}, {}, "previous token"),
        ({"evenness": 0.9}, {}, "broad"),
        ({"evenness": 0.9, "first": 0.6}, {}, "sink on the first token"),
        ({"induction": 0.8}, {"induction": 2.0}, "induction"),
        ({"induction": 0.8}, {"induction": 1.0}, "mixed"),
        ({"duplicate": 0.8, "induction": 0.7}, {"duplicate": 3.0, "induction": 3.0}, "duplicate token"),
    ],
)
def test_the_rule(means, counts, role):
    assert role_of(NOTHING | means, COUNTS | counts).name == role


@pytest.mark.parametrize(
    ("means", "random", "role"),
    [
        ({}, {"induction": 0.5}, "induction"),
        ({}, {"induction": 0.49}, "mixed"),
        ({}, {"duplicate": 0.6, "induction": 0.5}, "duplicate token"),
        ({"first": 0.9}, {"induction": 0.5}, "induction"),
        ({"special": 0.9, "first": 0.6}, {"duplicate": 0.5}, "duplicate token"),
        ({"first": 0.9}, {"induction": 0.4}, "sink on the first token"),
        ({"previous": 0.7}, {"induction": 0.6}, "previous token"),
        ({"previous": 0.6}, {"induction": 0.7}, "induction"),
        ({"evenness": 0.9}, {"duplicate": 0.5}, "duplicate token"),
    ],
)
def test_random_tokens_decide_who_copies(means, random, role):
    assert role_of(NOTHING | means, COUNTS, {"induction": 0.0, "duplicate": 0.0} | random).name == role


def test_half_on_the_data_is_enough():
    counts = COUNTS | {"induction": 5.0}
    assert role_of(NOTHING | {"induction": 0.8}, counts, {"induction": 0.1, "duplicate": 0.1}).name == "induction"


def test_a_statistic_that_was_not_measured_names_nothing():
    without = {name: mean for name, mean in NOTHING.items() if name != "special"}
    assert role_of(without, dict.fromkeys(without, 10.0)).name == "mixed"


def test_every_role_can_be_given():
    assert len(ROLES) == len({role.name for role in ROLES}) == 9
