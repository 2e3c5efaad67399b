"""Cost of a short call: the microseconds of Python that headwise adds to the operators of torch.

Regime: one sequence of 1, 16, 32 and 64 tokens, 4 heads of 32 features, float32, one thread; forward without gradients,
and training, which is the forward and the backward pass. A figure is a difference of two times in microseconds, not a
ratio. In each round, both calls run alternately in samples of a few calls, and the smallest sample counts: other
processes only add to it. The clock is the time of the thread. A mask has been seen before, as in all layers of a model
but the first two.

The rows:

- "SDPA": `hw.attend` without a mask and with `causal()`, minus torch's function.
- "attend without a mask": `hw.attend` with a window, padding, or a window for each head, minus `hw.attend` without.
- "block by hand": `hw.MultiHeadAttention` with `causal()`, minus the same block from `F.linear` and torch's function.
- "nn.MultiheadAttention": `hw.compat.MultiheadAttention` minus torch's layer, with and without returned weights.
- "step by hand": a step of decoding with a `DynamicCache` and a `StaticCache`, with and without rotary positions, minus
  the same step that writes into preallocated memory.

Results are compared before they are timed. A quick run has fewer rounds.

    python -m benchmarks.calls [--quick] [--rounds N] [--only "16, 128"]
"""

import statistics
import time
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import headwise as hw
from benchmarks.command_line import arguments
from benchmarks.measure import Call, Ratio, Row, report, show
from benchmarks.regime import Regime
from headwise.compat import MultiheadAttention

LENGTHS = 1, 16, 32, 64
EMBED, HEADS, WIDTH = 128, 4, 32
SDPA, UNMASKED, BLOCK, TORCH_LAYER, STEP = (
    *("SDPA", "attend without a mask", "block by hand"),
    *("nn.MultiheadAttention", "step by hand"),
)
"""Names in `Row.against`."""

SAMPLES, CALLS = 60, 4
"""Samples of each call in a round, and calls in a sample."""

CAPACITY = 512
"""Number of tokens of the memory of a step of decoding. It is cropped before it is full."""

Function = Callable[..., Tensor]


def fastest(calls: Sequence[Call], samples: int) -> list[float]:
    """Return the seconds of one run of each call in its fastest sample."""
    seconds = [[call.seconds(CALLS, time.thread_time) for call in calls] for _ in range(samples)]
    return [min(of_call) for of_call in zip(*seconds, strict=True)]


def pass_of(function: Function, inputs: Sequence[Tensor], training: bool) -> Callable[[], list[Tensor]]:
    """Return a function without arguments that makes a forward pass, or a forward and a backward pass. It returns the
    output and the gradients of the inputs.
    """
    if not training:

        def forward() -> list[Tensor]:
            with torch.no_grad():
                return [function()]

        return forward
    upstream = torch.linspace(-1, 1, function().numel()).view_as(function())

    def step() -> list[Tensor]:
        out = function()
        return [out, *torch.autograd.grad(out, inputs, upstream)]

    return step


def require_same(name: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
    """Exit with a message if the results of two passes differ."""
    for got, wanted in zip(ours, theirs, strict=True):
        if not torch.allclose(got, wanted, rtol=1e-3, atol=1e-4):
            raise SystemExit(f"{name}: results differ by {(got - wanted).abs().max():.2g}")


def attention_pairs(length: int, training: bool) -> list[tuple[str, str, str, Callable, Callable]]:
    """Return the comparisons of attention alone: mask, `against`, note, and the passes of both."""
    q, k, v = (torch.randn(1, HEADS, length, WIDTH, requires_grad=training) for _ in range(3))
    run = lambda function: pass_of(function, (q, k, v), training)  # noqa: E731
    causal, window = hw.causal(), hw.window(max(length // 4, 1))
    padding = hw.padding([max(length - length // 4, 1)])
    per_head = hw.window([max(length // 4, 1)] * 2 + [None] * 2)
    unmasked = run(lambda: hw.attend(q, k, v))
    pairs = [
        ("full", SDPA, "", unmasked, run(lambda: F.scaled_dot_product_attention(q, k, v))),
        (
            *("causal", SDPA, ""),
            run(lambda: hw.attend(q, k, v, mask=causal)),
            run(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True)),
        ),
    ]
    masked = {"window": window, "padding": padding, "heads": per_head}
    return [
        *pairs,
        *(
            (name, UNMASKED, "", run(lambda mask=mask: hw.attend(q, k, v, mask=mask)), unmasked)
            for name, mask in masked.items()
        ),
    ]


def split(x: Tensor) -> Tensor:
    """Return projected features split into heads."""
    return x.view(*x.shape[:2], HEADS, WIDTH).transpose(1, 2)


def parameters_of(layer: hw.MultiHeadAttention) -> list[tuple[Tensor, Tensor]]:
    """Return weight and bias of the projections to queries, keys, values and the output."""
    return [(each.weight, each.bias) for each in (layer.q_proj, layer.k_proj, layer.v_proj, layer.out_proj)]


def layer_pairs(length: int, training: bool) -> list[tuple[str, str, str, Callable, Callable]]:
    """Return the comparisons of layers."""
    x = torch.randn(1, length, EMBED, requires_grad=training)
    layer = hw.MultiHeadAttention(EMBED, HEADS, mask=hw.causal()).train(training)
    *projections, out = parameters_of(layer)
    ours, theirs = (
        kind(EMBED, HEADS, batch_first=True).train(training) for kind in (MultiheadAttention, nn.MultiheadAttention)
    )
    ours.load_state_dict(theirs.state_dict())

    def block() -> Tensor:
        q, k, v = (split(F.linear(x, *each)) for each in projections)
        return F.linear(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2), *out)

    def run(function: Function, layer: nn.Module) -> Callable:
        return pass_of(function, (x, *layer.parameters()), training)

    pairs = [("causal", BLOCK, "", run(lambda: layer(x), layer), run(block, layer))]
    for weights, note in ((False, "need_weights=False"), (True, "with weights")):
        passes = [
            run(lambda each=each, weights=weights: each(x, x, x, need_weights=weights)[0], each)
            for each in (ours, theirs)
        ]
        pairs.append(("full", TORCH_LAYER, note, *passes))
    return pairs


def decoding_pairs(length: int) -> list[tuple[str, str, str, Callable, Callable]]:
    """Return the comparisons of a step of decoding after `length` tokens."""
    x, prompt = torch.randn(1, 1, EMBED), torch.randn(1, length, EMBED)
    pairs = []
    for rotary in (None, hw.Rotary()):
        for static in (False, True):
            layer = hw.MultiHeadAttention(EMBED, HEADS, mask=hw.causal(), rotary=rotary).eval()
            with torch.no_grad():
                cache = layer.static_cache(1, CAPACITY) if static else hw.DynamicCache()
                layer(prompt, cache=cache)
                by_hand = hand_written_step(layer, prompt)
            cached = [length]

            def step(layer=layer, cache=cache, cached=cached) -> list[Tensor]:
                with torch.no_grad():
                    if cached[0] == CAPACITY:
                        cache.crop(length)
                        cached[0] = length
                    cached[0] += 1
                    return [layer(x, cache=cache)]

            note = f"{'StaticCache' if static else 'DynamicCache'}{'' if rotary is None else ', rotary'}"
            pairs.append(("causal", STEP, note, step, lambda by_hand=by_hand: by_hand(x)))
    return pairs


def hand_written_step(layer: hw.MultiHeadAttention, prompt: Tensor) -> Callable[[Tensor], list[Tensor]]:
    """Return a step of decoding with the weights of a layer, after a prompt, in few calls of torch."""
    *projections, out = parameters_of(layer)
    memory = [torch.zeros(1, HEADS, CAPACITY, WIDTH) for _ in range(2)]
    angles = torch.arange(CAPACITY)[:, None] / 10_000 ** (torch.arange(0, WIDTH, 2) / WIDTH)
    cos, sin = (torch.cat((table, table), -1) for table in (angles.cos(), angles.sin()))

    def rotated(y: Tensor, start: int) -> Tensor:
        if layer.rotary is None:
            return y
        stop, (first, second) = start + y.shape[2], y.chunk(2, -1)
        return y * cos[start:stop] + torch.cat((-second, first), -1) * sin[start:stop]

    def write(x: Tensor, start: int) -> Tensor:
        q, k, v = (split(F.linear(x, *each)) for each in projections)
        for stored, new in zip(memory, (rotated(k, start), v), strict=True):
            stored[:, :, start : start + x.shape[1]] = new
        return rotated(q, start)

    write(prompt, 0)
    stored = [prompt.shape[1]]

    def step(x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            if stored[0] == CAPACITY:
                stored[0] = prompt.shape[1]
            q = write(x, stored[0])
            stored[0] += 1
            k, v = (each[:, :, : stored[0]] for each in memory)
            return [F.linear(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2), *out)]

    return step


def rows_of(length: int, training: bool, rounds: int, samples: int) -> list[Row]:
    """Return the rows of one length. Exit with a message if results differ."""
    pairs = [*attention_pairs(length, training), *layer_pairs(length, training)]
    pairs += [] if training else decoding_pairs(length)
    rows = []
    for mask, against, note, ours, theirs in pairs:
        regime = Regime(1, length, EMBED, HEADS, mask, training=training)
        for _ in range(3):  # a call is prepared when it is seen for the second time
            first = ours(), theirs()
        if against != UNMASKED:
            require_same(f"{regime.name}, against {against} {note}", *first)
        calls = Call(ours), Call(theirs)
        seconds = [fastest(calls, samples) for _ in range(rounds)]
        extra = [(mine - other) * 1e6 for mine, other in seconds]
        ratio = Ratio(statistics.median(extra), min(extra), max(extra))
        medians = (statistics.median(of_call) for of_call in zip(*seconds, strict=True))
        rows.append(Row(regime, against, ratio, *medians, note))
    return rows


def main(command_line: Sequence[str] | None = None) -> dict:
    """Measure every length, and print a line of JSON last."""
    options, rows = arguments(__doc__, command_line), []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for training in (False, True):
            for length in LENGTHS[:1] if options.tiny else LENGTHS:
                if options.wants(Regime(1, length, EMBED, HEADS, "full", training=training)):
                    of_length = rows_of(length, training, options.rounds, 2 if options.tiny else SAMPLES)
                    for row in of_length:
                        show(row)
                    rows += of_length
        return report("calls", rows, options)
    finally:
        torch.set_num_threads(threads)


if __name__ == "__main__":
    main()
