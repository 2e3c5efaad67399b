"""One attention call with all statistics of `hw.watch`, except those of special tokens and of the output projection,
and its comparison with the definition.
"""

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

import headwise as hw
from benchmarks import weight_statistics
from benchmarks.oracle import WrongError
from benchmarks.regime import WINDOW, Regime
from benchmarks.watched_model import SHORT, words
from benchmarks.weight_statistics import Text
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.problem import Problem
from headwise.statistics.attend_observed import WholeCall, attend_observed
from headwise.statistics.tally import Tally

MASKS: dict[str, hw.Mask | None] = {"full": None, "causal": hw.causal(), "window": hw.window(WINDOW)}
"""Headwise's masks of the regimes that are measured without projections."""


def observed_call(regime: Regime) -> Callable[[], tuple[Tensor, Tally]]:
    """Return a function that runs one attention call as `hw.watch` does, and returns its output, `(batch, heads,
    length, head_dim)`, and the sums of its statistics.
    """
    q, k, v, _ = regime.attention_inputs()
    problem = Problem.checked(q, k, v, mask=MASKS[regime.mask])
    context = CallContext(words(regime.length, 2**31)[None].expand(regime.batch, -1))

    def run() -> tuple[Tensor, Tally]:
        tally = Tally()
        with torch.no_grad():
            answer = attend_observed(problem, tally.add, context, whole_call=WholeCall(tally))
        return answer.out, tally

    return run


def check_statistics(regime: Regime) -> None:
    """Exit with a message unless the statistics of one attention call of `SHORT` tokens equal those of the whole matrix
    in float64.
    """
    regime = replace(regime, length=SHORT)
    _, tally = observed_call(regime)()
    q, k, v = (tensor[0].double() for tensor in regime.attention_inputs()[:3])
    scores = q @ k.mT / regime.head_dim**0.5
    allowed = regime.allowed()
    weights = (scores if allowed is None else scores.masked_fill(~allowed[0], -torch.inf)).softmax(-1)
    text = Text(words(regime.length, 2**31))
    exact = weight_statistics.statistics(weights, weights @ v, text, causal=regime.mask == "causal")
    try:
        weight_statistics.check({name: values[0] for name, values in tally.means().items()}, exact)
    except WrongError as reason:
        raise SystemExit(f"{regime.name}, one call with statistics: {reason}") from reason
