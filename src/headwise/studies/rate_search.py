"""Search for the learning rate of each setting: the rates that are tried, one after another."""

import math
from typing import Any

from headwise.errors import InputError, require
from headwise.studies.optuna_storage import require_optuna
from headwise.studies.space import Setting

SPREAD_TRIALS = 3
"""Trials whose learning rates are spread over the range; later ones depend on the losses of earlier ones."""


def search_sampler(number: int, rates: tuple[float, float], seed: int) -> Any:
    """Return the Optuna sampler that chooses the rate of learning-rate trial `number` (from 0) of a head setting. For
    the first three trials the rate is fixed, at points spread over the range `rates` on a log scale. For later trials
    it is chosen by TPE (tree-structured Parzen estimator).

    Args:
        number: number of the trial within its setting, from 0.
        rates: smallest and largest learning rate.
        seed: seed of the search.
    """
    samplers = require_optuna().samplers
    if number < SPREAD_TRIALS:
        low, high = map(math.log, rates)
        return _fixed_rate_sampler(math.exp(low + (high - low) * spread_point(number)), seed)
    return samplers.TPESampler(seed=seed + number, n_startup_trials=1)


def final_sampler(setting: Setting, best_rate: float | None, seed: int) -> Any:
    """Return the Optuna sampler of a final training. It always suggests `best_rate`, the best learning rate found for
    `setting`; if that is None, `InputError` is raised.

    Raises:
        InputError: `best_rate` is None because every trial of the search diverged.
    """
    if best_rate is None:
        expected = f"at least one learning rate with which {setting} trains"
        raise InputError("rates", expected=expected, got="no finite loss in the search")
    return _fixed_rate_sampler(best_rate, seed)


def spread_point(number: int) -> float:
    """Return element `number`, counted from 0, of van der Corput's sequence: 1/2, 1/4, 3/4, 1/8, 5/8, ... Each element
    halves one of the largest gaps that the elements before it leave between 0 and 1.
    """
    qmc = require("scipy.stats.qmc", purpose="a study", extra="study")
    halton = qmc.Halton(1, scramble=False)  # its point 0 is 0
    return float(halton.fast_forward(number + 1).random().item())


def _fixed_rate_sampler(rate: float, seed: int) -> Any:
    """Return an Optuna sampler that always suggests the learning rate `rate`."""
    samplers = require_optuna().samplers
    return samplers.PartialFixedSampler({"rate": rate}, samplers.RandomSampler(seed=seed))
