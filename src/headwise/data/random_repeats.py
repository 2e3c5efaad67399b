"""Random tokens that repeat: the protocol that shows whether a head copies.

On real text a copying head may find nothing to copy, and a head that prefers frequent words may look as if it copied.
In random tokens that are repeated, attention to the token after an earlier copy is induction (Olsson et al. 2022,
"In-context Learning and Induction Heads").
"""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks import LARGEST_INTEGER, size_argument, token_ids, whole_number
from headwise.data.tokenization import SpecialTokens, input_embeddings
from headwise.errors import InputError
from headwise.shapes import Int

TOKENS, TIMES, SAMPLES = 25, 4, 10
"""Distinct tokens, repetitions and samples of the protocol by Olsson et al. (2022)."""


def random_repeats(
    vocabulary: int,
    *,
    tokens: int = TOKENS,
    times: int = TIMES,
    samples: int = SAMPLES,
    avoid: Collection[int] = (),
    seed: int = 0,
) -> Int[Tensor, "samples length"]:
    """Return `samples` sequences that each repeat random tokens: `tokens` distinct token ids, drawn at random, then the
    same ids in the same order again, `times` times in total. Ids are from 0 to `vocabulary - 1`, without those in
    `avoid`.

    Args:
        vocabulary: ids are drawn from 0 up to and without this number.
        tokens: number of distinct tokens in a sample.
        times: number of repetitions.
        samples: number of sequences.
        avoid: ids that are never drawn, such as those of special tokens.
        seed: seed of the random numbers.

    Returns:
        ids of shape `(samples, tokens * times)`.

    Raises:
        InputError: a number is below 1, or fewer ids are available than `tokens`.
    """
    for name, number in (("tokens", tokens), ("times", times), ("samples", samples)):
        size_argument(name, number)
    size_argument("vocabulary", vocabulary)
    whole_number("seed", seed, least=0, most=LARGEST_INTEGER)
    is_allowed = torch.ones(vocabulary, dtype=torch.bool)
    is_allowed[[token for token in token_ids("avoid", avoid) if 0 <= token < vocabulary]] = False
    ids = is_allowed.nonzero()[:, 0]
    if len(ids) < tokens:
        raise InputError("vocabulary", expected=f"at least {tokens} ids to draw from", got=len(ids))
    generator = torch.Generator().manual_seed(seed)
    drawn = [ids[torch.randperm(len(ids), generator=generator)[:tokens]] for _ in range(samples)]
    return torch.stack(drawn).repeat(1, times)


def repeats_for_model(model: nn.Module, avoid: Collection[int], tokenizer: Any = None) -> Int[Tensor, "samples length"]:
    """Return sequences that each repeat random token ids several times (`random_repeats`). The ids are from a model's
    vocabulary, without those in `avoid`. With a tokenizer, each sequence is enclosed in the special tokens that the
    tokenizer adds.
    """
    embeddings = input_embeddings(model)
    if not isinstance(embeddings, nn.Embedding):
        remedy = "repeats=hw.random_repeats(vocabulary), or repeats=False"
        raise InputError("model", expected="a model with input embeddings", got=type(model).__name__, remedy=remedy)
    vocabulary = embeddings.num_embeddings if tokenizer is None else min(embeddings.num_embeddings, len(tokenizer))
    special_tokens = SpecialTokens([], []) if tokenizer is None else SpecialTokens.of(tokenizer)
    length = TOKENS * TIMES + special_tokens.size
    positions = getattr(getattr(model, "config", None), "max_position_embeddings", None)
    if positions is not None and positions < length:
        remedy = "--no-repeats (repeats=False) leaves out the random tokens"
        raise InputError("model", expected=f"room for {length} random tokens", got=positions, remedy=remedy)
    ids = random_repeats(vocabulary, avoid=avoid)
    before, after = (torch.tensor(part, dtype=torch.int64).expand(SAMPLES, -1) for part in special_tokens)
    return torch.cat([before, ids, after], dim=1)
