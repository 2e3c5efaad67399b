"""How far every backend is from the exact result, in many drawn problems: test_attend.py has a fifth of them."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from test_attend import errors_and_budget

from strategies import problems

pytestmark = pytest.mark.slow

# The same examples in every run, drawn from the text of the test: a bound that is met by rounding may be met narrowly.
many = settings(max_examples=2000, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@many
@given(drawn=problems())
def test_error_is_at_most_twice_that_of_plain_attention(dtype, drawn):
    # The largest of a few rounding errors is small or large by luck. What exceeds the budget on two sets of
    # values is measured again on 64, where luck evens out and a kernel that is worse stays worse.
    for sets in (2, 64):
        errors, budget = errors_and_budget(drawn, dtype, sets)
        if all(error <= budget[name] for (_, name), error in errors.items()):
            return
    pytest.fail(f"errors {dict(errors)} beyond {dict(budget)}")
