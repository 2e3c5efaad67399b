"""Time of a training step with `hw.monitor`, against the plain step.

Regime: a Llama of `transformers` with 10 million parameters (4 layers of 6 heads, width 384), float32, one sequence of
512 to 2,048 random tokens, sdpa attention. A step is the forward and the backward pass and a step of AdamW, with the
default statistics of the monitor. Three copies of the model are trained in alternating order: without a monitor, with
one that observes every step, and with one that observes none of the measured steps. Before they are timed, their losses
must be the same bit by bit.

The rows:

- "every=1": the observed step over the plain step of the same round.
- "between observed steps": the same for a step that is not observed, as 99 of 100 are with every=100. The monitor has
  no hook and no patch there; all that it runs is `monitor.step()`, which counts. So this ratio shows the noise.
- "every=100": the cost of one observed step and of 99 calls of `monitor.step()` that count, added to 100 plain steps,
  over these.

A quick run has 512 tokens.

    python -m benchmarks.monitoring [--quick] [--rounds N] [--only "1, 2048"]
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from typing import NamedTuple

import torch

import headwise as hw
from benchmarks.command_line import arguments
from benchmarks.measure import Call, Ratio, Row, interleaved, report, show
from benchmarks.regime import Regime

LLAMA = Regime(1, 2048, 384, 6, "causal", training=True, bias=False, rotary=True)
TINY = Regime(1, 40, 48, 6, "causal", training=True, bias=False, rotary=True)
LENGTHS = 512, 1024, 2048
VOCABULARY = 4096
PLAIN, OBSERVED, BETWEEN = "plain", "observed", "between"
"""Names of the three copies: no monitor, every step observed, and the steps between observed ones."""

EVERY_1, EVERY_100, UNOBSERVED = (f"plain step, {what}" for what in ("every=1", "every=100", "between observed steps"))
"""Names in `Row.against`."""

COUNTED = 1000
"""Number of calls of `monitor.step()` that are timed together."""

INTERVALS = {PLAIN: None, OBSERVED: 1, BETWEEN: sys.maxsize}
"""Argument `every` of each copy; None for no monitor."""

CHECKED = 3
"""First steps, which are not timed, and in which the losses must be the same."""


class Training(NamedTuple):
    """Training of one copy of the model.

    Attributes:
        step: makes a step, and returns its loss.
        monitor: its monitor; None for no monitor.
    """

    step: Callable[[], float]
    monitor: hw.Monitor | None


def training(regime: Regime, every: int | None, stack: ExitStack) -> Training:
    """Return the training of a new model, which has the same weights in every call.

    Args:
        regime: sizes of the model and of its input.
        every: number of steps from one observed step to the next; None for no monitor.
        stack: closes the monitor.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=regime.embed,
        num_hidden_layers=4,
        num_attention_heads=regime.heads,
        intermediate_size=regime.embed * 8 // 3,
        max_position_embeddings=regime.length,
        attn_implementation="sdpa",
    )
    model = transformers.LlamaForCausalLM(config).train()
    ids = torch.randint(VOCABULARY, (regime.batch, regime.length))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    monitor = None if every is None else stack.enter_context(hw.monitor(model, every=every))

    def step() -> float:
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if monitor is not None:
            monitor.step()
        return loss.item()

    return Training(step, monitor)


def rows_of(regime: Regime, rounds: int) -> list[Row]:
    """Return the rows of one length. Exit with a message if the losses differ."""
    with ExitStack() as stack:
        trainings = {name: training(regime, every, stack) for name, every in INTERVALS.items()}
        for number in range(CHECKED):
            losses = {name: each.step() for name, each in trainings.items()}
            if len(set(losses.values())) > 1:
                raise SystemExit(f"{regime.name}: losses differ in step {number}: {losses}")
        samples = interleaved({name: Call(each.step) for name, each in trainings.items()}, rounds)
        counting = Call(trainings[BETWEEN].monitor.step).seconds(COUNTED, time.perf_counter)
    pairs = zip(samples[PLAIN], samples[OBSERVED], strict=True)
    of_100_steps = [100 * plain + (observed - plain) + 99 * counting for plain, observed in pairs]
    measured = {
        EVERY_1: samples[OBSERVED],
        UNOBSERVED: samples[BETWEEN],
        EVERY_100: [seconds / 100 for seconds in of_100_steps],
    }
    plain = statistics.median(samples[PLAIN])
    return [
        Row(regime, against, Ratio.of(ours, samples[PLAIN]), statistics.median(ours), plain, "default statistics")
        for against, ours in measured.items()
    ]


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every length, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    base, rows = TINY if options.tiny else LLAMA, []
    lengths = [base.length] if options.tiny else LENGTHS[:1] if options.quick else LENGTHS
    for regime in (replace(base, length=length) for length in lengths):
        if options.wants(regime):
            of_length = rows_of(regime, options.rounds)
            for row in of_length:
                show(row)
            rows += of_length
    return report("monitoring", rows, options)


if __name__ == "__main__":
    main()
