"""Position biases: numbers added to the scores for each head and each distance between query and key."""

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.attention.tensors import KeyPositions, PerHead, QueryPositions
from headwise.checks import (
    LARGEST_SIZE,
    flag,
    float_dtype,
    makes_plain_tensors,
    position_ids,
    size_argument,
    whole_number,
)
from headwise.errors import InputError
from headwise.shapes import Float, Int


@runtime_checkable
class PositionBias(Protocol):
    """Interface of position biases: numbers added to the scaled scores, which depend on positions of query and key."""

    def values(
        self, heads: int, query_positions: QueryPositions, key_positions: KeyPositions, dtype: torch.dtype
    ) -> Float[Tensor, "#batch heads queries keys"]:
        """Return the number to add to each score, `(batch, heads, queries, keys)` or with a batch of 1, in `dtype`.

        Padding and empty slots of a cache may have any position, such as -1.
        """


@dataclass(frozen=True)
class ALiBi:
    """ALiBi, attention with linear biases (Press et al. 2022, section 3). The bias of a score is minus the distance
    between query and key, multiplied by the slope of the head.

    The distance has no sign: a key after the query gets the same bias as one equally far before it.
    """

    def slopes(self, heads: int, *, dtype: torch.dtype = torch.float64, device: torch.device | None = None) -> PerHead:
        """Return the slope of each head: 2^(-8i / heads) for head i = 1, 2, ... if `heads` is a power of two.
        Otherwise, with p the largest power of two below `heads`, the first p heads have the slopes that p heads would
        have. The remaining heads have the first, third, fifth, ... of the slopes that 2p heads would have.

        This is the authors' rule, which BLOOM follows.
        """
        power = 2 ** (size_argument("heads", heads).bit_length() - 1)
        exponents = torch.arange(1, power + 1, dtype=dtype, device=device) / power
        remaining = (torch.arange(heads - power, dtype=dtype, device=device) + 0.5) / power
        return 2.0 ** (-8 * torch.cat((exponents, remaining)))

    def values(
        self, heads: int, query_positions: QueryPositions, key_positions: KeyPositions, dtype: torch.dtype
    ) -> Float[Tensor, "#batch heads queries keys"]:
        """Return the bias of each head, query and key in `dtype`: minus the head's slope times the distance between
        query and key.
        """
        # bfloat16 represents only every other whole number above 256.
        compute_dtype = torch.promote_types(dtype, torch.float32)
        distances = _key_minus_query(query_positions, key_positions).abs()[:, None]  # (batch, 1, queries, keys)
        slopes = self.slopes(heads, dtype=compute_dtype, device=distances.device)[:, None, None]
        return (-slopes * distances).to(dtype)


LARGEST_DISTANCE = 2**24
"""Largest `max_distance` of a `RelativeBias`, which computes the bias of every distance up to that in each call."""


class RelativeBias(nn.Module):
    """Learned position bias of T5: for each head, one number for each range of distances between query and key is added
    to the scores. Such a range is called a bucket (Raffel et al. 2020, section 2.1).

    Half the buckets of a direction contain one distance each, from 0 on. The widths of the other half grow
    geometrically up to `max_distance`, and the last one contains all larger distances. Several layers may share one
    `RelativeBias`: pass the same object to each.

    Args:
        num_heads: number of query heads.
        num_buckets: number of buckets; with `bidirectional`, half of them are for keys after the query.
        max_distance: number of tokens from which on all distances are in the last bucket.
        bidirectional: whether keys after the query have separate buckets; otherwise they count as distance 0.
        device: of the table.
        dtype: of the table.

    Attributes:
        weight: table of biases, `(num_buckets, num_heads)`.

    Raises:
        InputError: sizes that are not positive, too few or an odd number of buckets, a `max_distance` that the
            buckets of one distance each already reach.
    """

    def __init__(
        self,
        num_heads: int,
        num_buckets: int = 32,
        max_distance: int = 128,
        bidirectional: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.bidirectional = flag("bidirectional", bidirectional)
        directions = 2 if bidirectional else 1
        self.num_heads = size_argument("num_heads", num_heads)
        self.num_buckets = whole_number("num_buckets", num_buckets, least=2 * directions, most=LARGEST_SIZE)
        if num_buckets % directions:
            raise InputError("num_buckets", expected="an even number, half for each direction", got=num_buckets)
        self._per_direction = num_buckets // directions
        self._exact = self._per_direction // 2  # number of buckets of one distance each
        self.max_distance = whole_number(
            "max_distance", max_distance, least=self._exact + 1, most=max(LARGEST_DISTANCE, self._exact + 1)
        )
        dtype = float_dtype("dtype", dtype)
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the learned biases with random numbers from the uniform distribution of Glorot and Bengio 2010."""
        nn.init.xavier_uniform_(self.weight)

    def values(
        self, heads: int, query_positions: QueryPositions, key_positions: KeyPositions, dtype: torch.dtype
    ) -> Float[Tensor, "#batch heads queries keys"]:
        """Return the learned bias of each head for the bucket of each query-key distance, in `dtype`.

        Raises:
            InputError: another number of heads than `num_heads`.
        """
        if heads != self.num_heads:
            raise InputError("heads", expected=f"the {self.num_heads} of this RelativeBias", got=heads)
        # Buckets are computed once for each distance: there are far fewer distances than query-key pairs.
        limit = self.max_distance
        distances = torch.arange(-limit, limit + 1, device=self.weight.device)
        bias_by_distance = self.weight[self.buckets(distances)].t()  # (heads, distances)
        index = _key_minus_query(query_positions, key_positions).clamp(-limit, limit) + limit
        # Cast last: the gradient of a bucket is a sum over all its query-key pairs.
        return bias_by_distance[:, index].transpose(0, 1).to(dtype)

    def buckets(self, distances: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """Return the index of the bucket of each signed distance, which is key position minus query position. All
        distances in one bucket have the same learned bias.
        """
        size = distances.abs() if self.bidirectional else (-distances).clamp(min=0)
        key = self._exact, self._per_direction, self.max_distance, size.device
        if makes_plain_tensors():
            with torch.inference_mode(False):
                edges = _kept_first_distances(*key)
        else:
            edges = _first_distances(*key)
        bucket = size.clamp(max=self._exact) + torch.bucketize(size, edges, right=True)
        return bucket + (distances > 0) * self._per_direction if self.bidirectional else bucket

    def extra_repr(self) -> str:
        """Return the sizes of this module as text, for `repr`."""
        return (
            f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


def _first_distances(exact: int, per_direction: int, max_distance: int, device: torch.device) -> Int[Tensor, " edges"]:
    """Return the smallest distance of each bucket that contains several distances. The first of these buckets, which
    begins at `exact`, is left out. `per_direction` is the number of all buckets for keys before the query, or for keys
    after it.

    Python computes them: exported programs contain them as constants, which no runtime rounds in another way. A
    distance at the edge of two buckets belongs to the farther one, however the power is rounded.
    """
    logarithmic = per_direction - exact
    ratio = max_distance / exact
    edges = [math.ceil(exact * ratio ** ((step - 1e-9) / logarithmic)) for step in range(1, logarithmic)]
    # Each is filled in: torch warns of a tensor that is made from numbers while it traces, and would copy it to a GPU.
    parts = [torch.full((1,), edge, dtype=torch.int64, device=device) for edge in edges]
    return torch.cat([torch.zeros(0, dtype=torch.int64, device=device), *parts])


_kept_first_distances = lru_cache(maxsize=64)(_first_distances)


def _key_minus_query(
    query_positions: QueryPositions, key_positions: KeyPositions
) -> Int[Tensor, "#batch queries keys"]:
    """Return the position of each key minus that of each query; raise `InputError` for positions that are not whole
    numbers, on different devices, or in batches that do not broadcast.
    """
    position_ids("query_positions", query_positions)
    position_ids("key_positions", key_positions, device=query_positions.device)
    query_batch, key_batch = query_positions.shape[0], key_positions.shape[0]
    # Compared one by one: torch.jit.trace makes sizes tensors, which a set would never find equal.
    if query_batch != key_batch and 1 not in (query_batch, key_batch):
        expected = f"batch {query_batch} like query_positions, or 1"
        raise InputError("key_positions", expected=expected, got=f"batch {key_batch}")
    return key_positions[:, None, :] - query_positions[:, :, None]
