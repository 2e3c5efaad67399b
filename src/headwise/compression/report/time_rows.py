"""Times of a compression report: calls and steps of decoding, and the attention modules in them."""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import nn

from headwise.compression.report.cached_decoding import decode
from headwise.compression.report.paired_times import Times, paired_times
from headwise.compression.report.report_data import ModelPair, ReportData, has_examples_first
from headwise.compression.report.report_row import ReportRow
from headwise.compression.report.stopwatch import ATTENTION, TOTAL, Stopwatch
from headwise.data.batches import call_model, copied, count_sequences_and_tokens


@torch.no_grad()
def decoding_rows(
    models: ModelPair,
    paths: Sequence[Sequence[str]],
    data: ReportData,
    batch: int,
    prompt: int,
    steps: int,
    rounds: int,
) -> list[ReportRow]:
    """Return the times of a prompt, and of decoding one token after it with a cache: the mean of several steps, each
    time with a copy of the cache of the prompt.

    Args:
        models: the dense model and the compressed one.
        paths: paths of the attention modules of each.
        data: the data, from which the tokens are.
        batch: number of sequences.
        prompt: number of tokens of the prompt.
        steps: number of tokens that are decoded.
        rounds: number of rounds.
    """
    ids = data.tokens(batch, prompt + steps)

    def run_prompt(model: nn.Module, _: None) -> Any:
        return decode(model, ids[:, :prompt])

    def run_steps(model: nn.Module, cache: Any) -> None:
        for position in range(prompt, prompt + steps):
            cache = decode(model, ids[:, position : position + 1], cache).past_key_values

    caches = {model: decode(model, ids[:, :prompt]).past_key_values for model in models}
    rows = _rows(f"prompt of {prompt} tokens, batch {batch}", models, paths, run_prompt, lambda model: None, rounds)
    title = f"decoding a token after {prompt}, batch {batch}"
    return rows + _rows(title, models, paths, run_steps, lambda model: deepcopy(caches[model]), rounds, steps)


@torch.no_grad()
def call_rows(
    models: ModelPair,
    paths: Sequence[Sequence[str]],
    data: ReportData,
    batches: Sequence[int],
    prompt: int,
    rounds: int,
) -> tuple[list[ReportRow], list[str]]:
    """Return the times of a call of models that do not decode, and notes. Sizes of the batch are those in `batches` if
    the first axis of the data is known to be that of examples; otherwise the first batch of the data is timed.
    """
    inputs: dict[str, dict[str, Any]] = {}
    notes = []
    if data.sequences:
        inputs = {f"call on {prompt} tokens, batch {size}": data.call_inputs(size, prompt) for size in batches}
    elif has_examples_first(models[0], data.batches[0]):
        inputs = {f"call, batch {size}": data.call_inputs(size, prompt) for size in batches}
        notes.append("times are of examples of the first batch; prompt does not change their length")
    else:
        inputs = {f"call on the first batch, of {count_sequences_and_tokens(data.batches[0])[0]}": data.batches[0]}
        notes.append(f"no times of batches {', '.join(map(str, batches))}: the first axis of the data is not examples")
    rows: list[ReportRow] = []
    for name, batch in inputs.items():
        rows += _rows(name, models, paths, call_model, partial(_copy_of, batch), rounds)
    return rows, notes


def _copy_of(batch: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """Return a copy of a batch, to which the model may write."""
    return copied(batch)


def _rows(
    name: str,
    models: ModelPair,
    paths: Sequence[Sequence[str]],
    run: Callable[[nn.Module, Any], Any],
    prepare: Callable[[nn.Module], Any],
    rounds: int,
    steps: int = 1,
) -> list[ReportRow]:
    """Return the rows of the times of `run(model, prepare(model))` for both models, whole and in attention modules.

    Args:
        name: name of what is timed.
        models: the dense model and the compressed one.
        paths: paths of the attention modules of each.
        run: is timed.
        prepare: returns the second argument; is not timed.
        rounds: number of rounds.
        steps: number of steps in a run; the times are those of one step.
    """
    dense, compressed = (
        _timed(model, Stopwatch(model, of_model), run, prepare) for model, of_model in zip(models, paths, strict=True)
    )
    titles = {TOTAL: name, ATTENTION: f"{name}, attention"}
    times = paired_times((dense, compressed), rounds, steps)
    return [ReportRow.of_times(titles[part], ratio) for part, ratio in times.items()]


def _timed(
    model: nn.Module,
    stopwatch: Stopwatch,
    run: Callable[[nn.Module, Any], Any],
    prepare: Callable[[nn.Module], Any],
) -> Callable[[], Times]:
    """Return a function that runs a model once, and returns the seconds that a stopwatch measured."""

    def once() -> Times:
        prepared = prepare(model)
        with stopwatch:
            run(model, prepared)
        return stopwatch.times

    return once
