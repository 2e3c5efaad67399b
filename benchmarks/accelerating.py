"""Time of a model's forward pass under `hw.accelerate`, against its plain one.

Regime: SmolLM2-135M-Instruct (30 layers with 9 query heads on 3 key/value heads, width 576), one text of 2,048 and one
of 8,192 tokens (the documentation of this project), float32 and bfloat16, no gradients and no cache. The plain forward
pass calls torch's SDPA. The ratio is its time divided by that under `hw.accelerate`, both measured in the same round;
the hooks are installed before each run, which is not timed. 8,192 tokens have `--long-rounds` rounds. A quick run has
1,024 tokens in float32.

The last hidden states of both are first compared, on 1,024 tokens, with those of the model in float64 under "eager"
attention, whose norms transformers computes in float32. The error under `hw.accelerate` may be at most twice that of
the plain forward pass. The script ends with a message if an attention call of the model was left to torch.

    python -m benchmarks.accelerating [--quick] [--rounds N] [--only "8192"]
"""

import copy
from collections.abc import Sequence
from dataclasses import replace
from itertools import product

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks import oracle
from benchmarks.command_line import Options, arguments
from benchmarks.measure import Call, Row, compared, interleaved, report, show
from benchmarks.oracle import WrongError
from benchmarks.regime import Regime
from benchmarks.watched_model import SMOLLM2, TINY, WatchedModel, watched_model

OURS, PLAIN, LONG = "accelerated", "plain forward", 8192
CHECKED = 1024
"""Number of tokens for the comparison with the definition. For fewer, `hw.accelerate` may leave calls to torch."""


def forward(model: nn.Module, tokens: Tensor) -> Tensor:
    """Return the model's last hidden states, `(1, length, embed)`, without gradients."""
    with torch.no_grad():
        states: Tensor = model(input_ids=tokens[None], use_cache=False).last_hidden_state
    return states


def accelerated(model: nn.Module, tokens: Tensor) -> Call:
    """Return the call that runs the forward pass under `hw.accelerate`. Its run returns the last hidden states."""

    def run(acceleration: hw.Acceleration) -> Tensor:
        with acceleration:
            return forward(model, tokens)

    return Call(run, lambda: hw.accelerate(model))


def check(model: nn.Module, tokens: Tensor, regime: Regime) -> None:
    """Exit with a message if the accelerated model is wrong, has more than twice the error of the plain one, or leaves
    an attention call to torch.
    """
    exact_model = copy.deepcopy(model).double()
    exact_model.set_attn_implementation("eager")
    exact = {"out": forward(exact_model, tokens)}
    acceleration = hw.accelerate(model)
    with acceleration:
        ours = {"out": forward(model, tokens)}
    number_of_layers = model.config.num_hidden_layers
    if [(each.accelerated, each.unchanged) for each in acceleration.modules] != [(1, {})] * number_of_layers:
        raise SystemExit(f"{regime.name}: not every attention call was accelerated; {acceleration.summary()}")
    try:
        oracle.check(ours, {"out": forward(model, tokens)}, exact, replace(regime, length=len(tokens)))
    except WrongError as reason:
        raise SystemExit(f"{regime.name}, accelerated: {reason}") from reason


def row_of(watched: WatchedModel, regime: Regime, options: Options) -> Row:
    """Check the accelerated model, time it and the plain one interleaved, and return the row."""
    model = watched.model.to(regime.torch_dtype)
    check(model, watched.tokens[:CHECKED], regime)
    tokens = watched.tokens[: regime.length]
    calls = {OURS: accelerated(model, tokens), PLAIN: Call(lambda: forward(model, tokens))}
    samples = interleaved(calls, options.long_rounds if regime.length >= LONG else options.rounds)
    return compared(regime, samples, OURS, PLAIN, "SmolLM2" if regime.embed == SMOLLM2.embed else "a random model")


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every length and dtype, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    base, rows = TINY if options.tiny else SMOLLM2, []
    lengths = [CHECKED] if options.tiny or options.quick else [base.length, LONG]
    dtypes = ("float32",) if options.quick else ("float32", "bfloat16")  # in this order, since a model is converted
    regimes = [replace(base, length=length, dtype=dtype) for dtype, length in product(dtypes, lengths)]
    regimes = [regime for regime in regimes if options.wants(regime)]
    if regimes:
        watched = watched_model(max(regimes, key=lambda regime: regime.length))
        for regime in regimes:
            rows.append(row_of(watched, regime, options))
            show(rows[-1])
    return report("accelerating", rows, options)


if __name__ == "__main__":
    main()
