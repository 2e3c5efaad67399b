"""What it costs to remove every head of a model, one at a time: `hw.ablate` against as many whole forwards.

Regime: SmolLM2-135M-Instruct (270 heads: 30 layers of 9 on 3), float32, 16 sequences of 256 tokens in one batch (the
documents of this project), next-token loss of every sequence without each head. Two others, who take the head's part
out of what goes into the output projection by a hook, which is what one writes without a library:

- whole forwards: `model(**batch).logits`, then `cross_entropy`.
- whole forwards, our loss: the same under `hw.next_token_loss`, which never has all the logits in memory; what is left
  of the ratio is what `ablate` does not compute again.

A round takes one head of every third layer, from layer 1 up, another head each round; the mean depth is that of all
heads. Each run is timed, and the time of all heads is that of the whole model and of as many runs as there are heads,
at the mean of the round; ours also pays for the run in which it finds where the model attends. The losses of all three
are compared, to 4e-5 nats. There are 3 rounds at most. A quick run has one round of 4 sequences.

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
from benchmarks.peers import FEW_ROUNDS
from benchmarks.regime import Regime
from benchmarks.watching import TINY, repeated, sections, words
from headwise.data.models import load

SMOLLM2 = Regime(16, 256, 576, 9, "causal", kv_heads=3, bias=False, rotary=True)
WHOLE, SAME_LOSS = "whole forwards", "whole forwards, our loss"
APART = 4e-5
"""By how much losses may differ, nats: a logit of 30, the sum of 576 products in float32, is sure to 30 * 24 / 2^24."""
STEP = 3
"""One layer of so many."""

Batch = dict[str, Tensor]
Loss = Callable[[nn.Module, Batch], Tensor]


def subject(regime: Regime) -> tuple[nn.Module, Batch]:
    """SmolLM2, or where the sizes are others a small model of random weights; and a batch."""
    import transformers

    number = regime.batch * regime.length
    if regime.embed == SMOLLM2.embed:
        loaded = load("smollm2", "causal")
        model = loaded.model
        ids = repeated([token for each in sections() for token in loaded.tokenizer(each)["input_ids"]], number)
    else:
        sizes = {"hidden_size": regime.embed, "num_hidden_layers": 4, "intermediate_size": 37, "vocab_size": 97}
        heads = {"num_attention_heads": regime.heads, "num_key_value_heads": regime.kv_heads}
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(transformers.LlamaConfig(**sizes, **heads)).eval()
        ids = words(number, 97)
    return model, {"input_ids": ids.view(regime.batch, regime.length)}


def plain_loss(model: nn.Module, batch: Batch) -> Tensor:
    """Next-token loss of each sequence, as one writes it."""
    ids = batch["input_ids"]
    logits = model(**batch).logits[:, :-1]
    losses = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="none")
    return losses.view(len(ids), -1).mean(1)


class Timed:
    """A loss that keeps what each call took."""

    def __init__(self, loss: Loss) -> None:
        self.loss, self.seconds, self.found = loss, [], []

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss."""
        start = time.perf_counter()
        losses = self.loss(model, batch)
        self.seconds.append(time.perf_counter() - start)
        self.found.append(losses)
        return losses


def ours(model: nn.Module, batch: Batch, heads: Sequence[tuple[int, int]], every: int) -> tuple[float, list[Tensor]]:
    """Seconds that all heads would take, and the losses: of the whole model and without each head."""
    timed = Timed(hw.next_token_loss)
    hw.ablate(model, [batch], timed, units={f"{layer}.{head}": [(layer, head)] for layer, head in heads})
    find, whole, *without = timed.seconds
    return find + whole + every * statistics.fmean(without), timed.found[1:]


def forwards(loss: Loss) -> Callable[..., tuple[float, list[Tensor]]]:
    """The same by whole forwards."""

    def run(model: Any, batch: Batch, heads: Sequence[tuple[int, int]], every: int) -> tuple[float, list[Tensor]]:
        timed = Timed(loss)
        with torch.no_grad():
            timed(model, batch)
            for layer, head in heads:
                with without(model, layer, head):
                    timed(model, batch)
        return (1 + every) * statistics.fmean(timed.seconds), timed.found

    return run


@contextmanager
def without(model: Any, layer: int, head: int):
    """The model without a head, by a hook."""
    attention = model.model.layers[layer].self_attn
    columns = slice(head * attention.head_dim, (head + 1) * attention.head_dim)

    def zero(_: nn.Module, given: tuple[Tensor]) -> tuple[Tensor]:
        x = given[0].clone()
        x[..., columns] = 0.0
        return (x,)

    handle = attention.o_proj.register_forward_pre_hook(zero)
    try:
        yield
    finally:
        handle.remove()


WAYS = {"ours": ours, WHOLE: forwards(plain_loss), SAME_LOSS: forwards(hw.next_token_loss)}


def require_same(found: dict[str, list[Tensor]]) -> None:
    """End with a sentence unless all come to the same losses."""
    for name, losses in found.items():
        apart = max(float((a - b).abs().max()) for a, b in zip(losses, found[WHOLE], strict=True))
        if not apart <= APART:
            raise SystemExit(f"{name}: losses differ from those of {WHOLE} by {apart:.1e}")


def main(given: Sequence[str] | None = None) -> dict:
    """Every way in turns, and a line of JSON last."""
    options = arguments(__doc__, given)
    regime = replace(TINY, batch=3) if options.tiny else replace(SMOLLM2, batch=4) if options.quick else SMOLLM2
    rows: list[Row] = []
    if options.wants(regime):
        model, batch = subject(regime)
        layers, every = range(1, model.config.num_hidden_layers, STEP), model.config.num_hidden_layers * regime.heads
        taken: dict[str, list[float]] = {name: [] for name in WAYS}
        for number in range(1 if options.quick else min(options.rounds, FEW_ROUNDS)):
            heads = [(layer, (number + layer) % regime.heads) for layer in layers]
            found = {}
            for name in (list(WAYS), list(WAYS)[::-1])[number % 2]:
                seconds, found[name] = WAYS[name](model, batch, heads, every)
                taken[name].append(seconds)
            require_same(found)
        for name in (WHOLE, SAME_LOSS):
            both = (statistics.median(taken[each]) for each in ("ours", name))
            rows.append(Row(regime, name, Ratio.of(taken[name], taken["ours"]), *both, f"{every} heads"))
            show(rows[-1])
    return report("ablating", rows, options)


if __name__ == "__main__":
    main()
