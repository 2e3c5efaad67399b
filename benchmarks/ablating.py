"""Time and losses of `hw.ablate`, which removes every head of a model one at a time, against whole forward passes.

Regime: SmolLM2-135M-Instruct (270 heads: 30 layers with 9 query heads on 3 key/value heads), float32, 16 sequences of
256 tokens in one batch (the documentation of this project), next-token loss of every sequence without each head.
`hw.ablate` is compared with two implementations that zero the head's output before the output projection with a hook,
as one would without a library:

- whole forwards: `model(**batch).logits`, then `cross_entropy`.
- whole forwards, our loss: the same with `hw.next_token_loss`, which never stores all the logits. The remaining ratio
  is what `ablate` gains by not recomputing the layers below the removed head.

Each round removes one head of every third layer, starting at layer 1, and another head in each round. The mean depth of
these heads equals that of all heads. The time for all heads is extrapolated from the mean time of the timed heads; that
of `ablate` includes its first run, which finds the attention modules. The losses of all three must agree to 4e-5 nats.
The number of rounds is `--long-rounds`. A quick run has one round of 4 sequences.

    python -m benchmarks.ablating [--quick] [--rounds N]
"""

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from benchmarks.command_line import arguments
from benchmarks.measure import Ratio, Row, report, show
from benchmarks.regime import Regime
from benchmarks.watched_model import TINY, repeated, sections, words
from headwise.data.models import load

SMOLLM2 = Regime(16, 256, 576, 9, "causal", kv_heads=3, bias=False, rotary=True)
WHOLE, SAME_LOSS = "whole forwards", "whole forwards, our loss"
APART = 4e-5
"""Largest accepted difference between losses in nats. A logit of 30, the sum of 576 products in float32, has an error
of at most 30 * 24 / 2^24.
"""
STEP = 3
"""Heads are removed in one of so many layers."""

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def model_and_batch(regime: Regime) -> tuple[nn.Module, Batch]:
    """Return a model and one batch for it: SmolLM2 with documentation text if `regime` has SmolLM2's width, otherwise a
    small random Llama with random-looking token ids.
    """
    import transformers

    token_count = regime.batch * regime.length
    if regime.embed == SMOLLM2.embed:
        loaded = load("smollm2", "causal")
        model = loaded.model
        ids = repeated(
            [token for section in sections() for token in loaded.tokenizer(section)["input_ids"]], token_count
        )
    else:
        sizes = {"hidden_size": regime.embed, "num_hidden_layers": 4, "intermediate_size": 37, "vocab_size": 97}
        heads = {"num_attention_heads": regime.heads, "num_key_value_heads": regime.kv_heads}
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, **heads)).eval()
        ids = words(token_count, 97)
    return model, {"input_ids": ids.view(regime.batch, regime.length)}


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Return the next-token loss of each sequence, `(batch,)`, from all logits of a whole forward pass."""
    ids = batch["input_ids"]
    logits = model(**batch).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


class Timed:
    """A loss function that records the duration and the result of each call.

    Attributes:
        loss: the wrapped function, from model and batch to one loss for each sequence.
        seconds: duration of each call so far.
        losses: result of each call so far.
    """

    def __init__(self, loss: Loss) -> None:
        self.loss = loss
        self.seconds: list[float] = []
        self.losses: list[Tensor] = []

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """Return the loss of the wrapped function, and record its value and duration."""
        start = time.perf_counter()
        losses = self.loss(model, batch)
        self.seconds.append(time.perf_counter() - start)
        self.losses.append(losses)
        return losses


def by_ablate(
    model: nn.Module, batch: Batch, heads: Sequence[tuple[int, int]], number_of_heads: int
) -> tuple[float, list[Tensor]]:
    """Run `hw.ablate` for the given (layer, head) pairs. Return the seconds extrapolated to all heads, and the losses:
    first those of the whole model, then those without each head.

    Args:
        model: the model.
        batch: its input.
        heads: the heads that are removed, one at a time.
        number_of_heads: the number of heads to which the time is extrapolated.
    """
    timed = Timed(hw.next_token_loss)
    hw.ablate(model, [batch], timed, units={f"{layer}.{head}": [(layer, head)] for layer, head in heads})
    # Calls before the ablated ones discover the heads, compute the whole model, and check that results can be reused.
    setup, ablated = timed.seconds[: -len(heads)], timed.seconds[-len(heads) :]
    seconds = sum(setup) + number_of_heads * statistics.fmean(ablated)
    return seconds, [timed.losses[1], *timed.losses[-len(heads) :]]


def forwards(loss: Loss) -> Callable[..., tuple[float, list[Tensor]]]:
    """Return a function that does the same as `by_ablate` with whole forward passes: one without ablation, then one for
    each removed head, under the given loss. It returns the seconds extrapolated to all heads, and the losses.
    """

    def run(
        model: Any, batch: Batch, heads: Sequence[tuple[int, int]], number_of_heads: int
    ) -> tuple[float, list[Tensor]]:
        timed = Timed(loss)
        with torch.no_grad():
            timed(model, batch)
            for layer, head in heads:
                with without(model, layer, head):
                    timed(model, batch)
        return (1 + number_of_heads) * statistics.fmean(timed.seconds), timed.losses

    return run


@contextmanager
def without(model: Any, layer: int, head: int):
    """Within the context, a hook zeroes the output of one head before the output projection."""
    attention = model.model.layers[layer].self_attn
    columns = slice(head * attention.head_dim, (head + 1) * attention.head_dim)

    def zero(_: nn.Module, inputs: tuple[Tensor]) -> tuple[Tensor]:
        x = inputs[0].clone()
        x[..., columns] = 0.0
        return (x,)

    handle = attention.o_proj.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        handle.remove()


METHODS = {"ours": by_ablate, WHOLE: forwards(plain_loss), SAME_LOSS: forwards(hw.next_token_loss)}


def require_same(losses_by_method: dict[str, list[Tensor]]) -> None:
    """Exit with a message if the losses of one implementation differ from those of whole forward passes by more than
    `APART`.
    """
    for name, losses in losses_by_method.items():
        difference = max(float((a - b).abs().max()) for a, b in zip(losses, losses_by_method[WHOLE], strict=True))
        if not difference <= APART:
            raise SystemExit(f"{name}: losses differ from those of {WHOLE} by {difference:.1e}")


def main(command_line: Sequence[str] | None = None) -> dict:
    """Time all implementations in alternating order, check their losses, and print a line of JSON last."""
    options = arguments(__doc__, command_line)
    regime = replace(TINY, batch=3) if options.tiny else replace(SMOLLM2, batch=4) if options.quick else SMOLLM2
    rows: list[Row] = []
    if options.wants(regime):
        model, batch = model_and_batch(regime)
        layers = range(1, model.config.num_hidden_layers, STEP)
        number_of_heads = model.config.num_hidden_layers * regime.heads
        seconds_by_method: dict[str, list[float]] = {name: [] for name in METHODS}
        for round_number in range(1 if options.quick else options.long_rounds):
            heads = [(layer, (round_number + layer) % regime.heads) for layer in layers]
            losses_by_method = {}
            for name in (list(METHODS), list(METHODS)[::-1])[round_number % 2]:
                seconds, losses_by_method[name] = METHODS[name](model, batch, heads, number_of_heads)
                seconds_by_method[name].append(seconds)
            require_same(losses_by_method)
        for name in (WHOLE, SAME_LOSS):
            medians = (statistics.median(seconds_by_method[method]) for method in ("ours", name))
            ratio = Ratio.of(seconds_by_method[name], seconds_by_method["ours"])
            rows.append(Row(regime, name, ratio, *medians, f"{number_of_heads} heads"))
            show(rows[-1])
    return report("ablating", rows, options)


if __name__ == "__main__":
    main()
