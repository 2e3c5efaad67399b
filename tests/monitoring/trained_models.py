"""Short trainings of tiny models, with and without a monitor."""

from contextlib import nullcontext

import torch

import tiny
from headwise.monitoring.monitor import monitor

BATCH, LENGTH = 3, 17


def decoder(implementation="sdpa", **options):
    """Return a Llama that trains, with small weights so that a training is stable."""
    model = tiny.model("decoder", top="ForCausalLM", attn_implementation=implementation, **options)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            torch.nn.init.normal_(parameter, std=0.05)
    return model.train()


def token_batches(steps, batch=BATCH, seed=2):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 97, (batch, LENGTH), generator=generator) for _ in range(steps)]


def train(model, batches, *, micro=1, autocast=False, run=None, call=None, after_step=lambda _: None, **options):
    """Train a model, and return the bits of all losses and gradients, and the monitor, or None without one.

    Args:
        model: the model.
        batches: token ids of each step.
        micro: number of forward passes of a step, on parts of its batch.
        autocast: True for mixed precision in bfloat16.
        run: a monitor; by default that of `options`, if there are some.
        call: function that is called in place of the model, such as the compiled one.
        after_step: function that is called with the number of each step after it.
        options: arguments of `monitor`; without them the training is not monitored.
    """
    call = model if call is None else call
    optimizer, seen = torch.optim.AdamW(model.parameters(), 1e-2), []
    if run is None and options:
        run = monitor(call, **options)
    with nullcontext() if run is None else run:
        for number, ids in enumerate(batches):
            for part in ids.chunk(micro):
                with torch.autocast("cpu", torch.bfloat16) if autocast else nullcontext():
                    loss = call(input_ids=part, labels=part).loss / micro
                loss.backward()
                seen.append(loss.detach().clone())
            seen += [parameter.grad.clone() for parameter in model.parameters()]
            optimizer.step()
            optimizer.zero_grad()
            if run is not None:
                run.step()
            after_step(number)
    return seen, run
