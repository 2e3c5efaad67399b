"""Agreement of the tokens that two causal models generate greedily from the same prompts."""

from collections.abc import Collection, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.compression.report.cached_decoding import decode, last_logits
from headwise.compression.report.report_data import ModelPair
from headwise.shapes import Bool, Int

LARGEST_BATCH = 8
"""Largest number of prompts that are continued at once."""


class Agreement(NamedTuple):
    """Agreement of two models on the continuation of one prompt.

    Attributes:
        until_difference: share of the first model's tokens before the first one that the second model does not
            generate.
        same_prefix: share of the first model's tokens that the second model ranks first too, given the same tokens
            before them.
    """

    until_difference: float
    same_prefix: float


@torch.no_grad()
def greedy_agreements(
    models: ModelPair, prompts: Sequence[Tensor], new_tokens: int, end_tokens: Collection[int]
) -> list[Agreement]:
    """Return the agreement of two models on the continuation of each prompt.

    The first model continues a prompt by its most likely token, up to a number of tokens or an end token, which counts.
    The second model reads the same tokens one by one; as long as it ranks the same tokens first, it generates them.

    Args:
        models: two causal models with a cache.
        prompts: token ids of each prompt.
        new_tokens: number of tokens to generate.
        end_tokens: ids of tokens after which a continuation ends.
    """
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
    agreements: dict[int, Agreement] = {}
    for _, same_length in groupby(order, key=lambda index: len(prompts[index])):
        indices = list(same_length)
        for start in range(0, len(indices), LARGEST_BATCH):
            part = indices[start : start + LARGEST_BATCH]
            ids = torch.stack([prompts[index] for index in part]).long()
            generated = _most_likely(models[0], ids, None, new_tokens)
            is_equal = generated == _most_likely(models[1], ids, generated, new_tokens)
            agreements |= zip(part, _agreements(generated, is_equal, end_tokens), strict=True)
    return [agreements[index] for index in range(len(prompts))]


def _most_likely(
    model: nn.Module, ids: Int[Tensor, "batch tokens"], forced: Int[Tensor, "batch new"] | None, count: int
) -> Int[Tensor, "batch new"]:
    """Return the most likely next token after prompts, and after each token that follows them: those in `forced`, or
    the most likely tokens themselves.
    """
    output: Any = decode(model, ids)
    tokens = [last_logits(output).argmax(-1)]
    for number in range(count - 1):
        previous = tokens[-1] if forced is None else forced[:, number]
        output = decode(model, previous[:, None], output.past_key_values)
        tokens.append(last_logits(output).argmax(-1))
    return torch.stack(tokens, 1)


def _agreements(
    generated: Int[Tensor, "batch new"], is_equal: Bool[Tensor, "batch new"], end_tokens: Collection[int]
) -> list[Agreement]:
    """Return the agreement on each continuation, up to its end token."""
    found = []
    for tokens, equal in zip(generated.tolist(), is_equal.tolist(), strict=True):
        end = next((index for index, token in enumerate(tokens, 1) if token in end_tokens), len(tokens))
        until = next((index for index, same in enumerate(equal[:end]) if not same), end)
        found.append(Agreement(until / end, sum(equal[:end]) / end))
    return found
