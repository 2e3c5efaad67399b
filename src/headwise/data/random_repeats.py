"""The random-token protocol: sequences that say nothing and repeat, in which only a copy can be attended to.

On real text a head that copies may rest for want of something to copy, and one that likes frequent words may look as if
it did. On random tokens that come again, what is attended to after an earlier copy is induction (Olsson et al. 2022,
"In-context Learning and Induction Heads").
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from headwise.data.texts import SpecialTokens
from headwise.errors import InputError
from headwise.shapes import Int

TOKENS, TIMES, SAMPLES = 25, 4, 10


def random_repeats(
    vocabulary: int,
    *,
    tokens: int = TOKENS,
    times: int = TIMES,
    samples: int = SAMPLES,
    avoid: Collection[int] = (),
    seed: int = 0,
) -> Int[Tensor, "samples length"]:
    """Random tokens, no two alike, several times over.

    Args:
        vocabulary: ids are drawn below this number.
        tokens: how many different ones are drawn for a sample.
        times: how often they come.
        samples: how many sequences.
        avoid: ids that are not drawn, such as those of special tokens.
        seed: of the draw.

    Raises:
        InputError: fewer ids to draw from than are asked for.
    """
    for name, number in (("tokens", tokens), ("times", times), ("samples", samples)):
        if number < 1:
            raise InputError(name, expected="at least 1", got=number)
    allowed = torch.ones(vocabulary, dtype=torch.bool)
    allowed[[token for token in avoid if 0 <= token < vocabulary]] = False
    ids = allowed.nonzero()[:, 0]
    if len(ids) < tokens:
        raise InputError("vocabulary", expected=f"at least {tokens} ids to draw from", got=len(ids))
    generator = torch.Generator().manual_seed(seed)
    drawn = [ids[torch.randperm(len(ids), generator=generator)[:tokens]] for _ in range(samples)]
    return torch.stack(drawn).repeat(1, times)


def repeats_for_model(model: nn.Module, avoid: Collection[int], tokenizer: Any = None) -> Int[Tensor, "samples length"]:
    """The protocol over the vocabulary of a model, within the special tokens that its tokenizer puts around a text.

    Raises:
        InputError: a model that does not say what its vocabulary is, or takes fewer tokens.
    """
    given: Any = model
    embeddings = given.get_input_embeddings() if hasattr(given, "get_input_embeddings") else None
    if not isinstance(embeddings, nn.Embedding):
        remedy = "repeats=hw.random_repeats(vocabulary), or repeats=False"
        raise InputError("model", expected="one that tells its vocabulary", got=type(model).__name__, remedy=remedy)
    known = embeddings.num_embeddings if tokenizer is None else min(embeddings.num_embeddings, len(tokenizer))
    frame = SpecialTokens([], []) if tokenizer is None else SpecialTokens.of(tokenizer)
    length = TOKENS * TIMES + frame.size
    positions = getattr(given.config, "max_position_embeddings", None)
    if positions is not None and positions < length:
        remedy = "--no-repeats (repeats=False) leaves out the random tokens"
        raise InputError("model", expected=f"room for {length} random tokens", got=positions, remedy=remedy)
    samples = random_repeats(known, avoid=avoid)
    before, after = (torch.tensor(each, dtype=torch.int64).expand(SAMPLES, -1) for each in frame)
    return torch.cat([before, samples, after], dim=1)
