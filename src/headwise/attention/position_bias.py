"""Positions as an addition to the scores: a number for each head, and for each distance of query and key."""

import math
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from headwise.attention.rotary import most_precise_dtype
from headwise.checks import flag, position_ids, whole_number
from headwise.errors import InputError
from headwise.shapes import Float, Int


@runtime_checkable
class PositionBias(Protocol):
    """What is added to the scaled scores for where query and key stand."""

    def values(
        self,
        heads: int,
        query_positions: Int[Tensor, "#batch queries"],
        key_positions: Int[Tensor, "#batch keys"],
        dtype: torch.dtype,
    ) -> Float[Tensor, "#batch heads queries keys"]:
        """The addition to each score, in `dtype`. A token that stands nowhere may have any position, such as -1."""


@dataclass(frozen=True)
class ALiBi:
    """Attention with linear biases: minus a slope of the head's own times the distance (Press et al. 2022, section 3).

    The distance is taken without its sign, so keys after the query are as far as those before it.
    """

    def slopes(
        self, heads: int, *, dtype: torch.dtype = torch.float64, device: torch.device | None = None
    ) -> Float[Tensor, " heads"]:
        """2^(-8i / heads) for head i = 1, 2, ..., where `heads` is a power of two.

        Otherwise those of the next power below, and for the heads left over every other one of the next power
        above, beginning with its first (the authors' rule, which BLOOM follows).
        """
        whole = 2 ** (whole_number("heads", heads, least=1).bit_length() - 1)
        powers = torch.arange(1, whole + 1, dtype=dtype, device=device) / whole
        between = (torch.arange(heads - whole, dtype=dtype, device=device) + 0.5) / whole
        return 2.0 ** (-8 * torch.cat((powers, between)))

    def values(
        self,
        heads: int,
        query_positions: Int[Tensor, "#batch queries"],
        key_positions: Int[Tensor, "#batch keys"],
        dtype: torch.dtype,
    ) -> Float[Tensor, "#batch heads queries keys"]:
        wide = torch.promote_types(dtype, torch.float32)  # bfloat16 knows only every other number above 256
        distances = _key_minus_query(query_positions, key_positions).abs()[:, None]  # (batch, 1, queries, keys)
        slopes = self.slopes(heads, dtype=wide, device=distances.device)[:, None, None]
        return (-slopes * distances).to(dtype)


class RelativeBias(nn.Module):
    """A learned number for each head and each bucket of distances (Raffel et al. 2020, T5, section 2.1).

    Half the buckets of a direction hold one distance each, from 0 on; the other half are wider and wider, by equal
    ratios, up to `max_distance`, and the last holds everything beyond. Layers may share one: give it to each.

    Args:
        num_heads: heads.
        num_buckets: buckets; with `bidirectional` half of them for keys after the query.
        max_distance: tokens from which on all distances are in the last bucket.
        bidirectional: whether keys after the query have buckets of their own; otherwise they are at distance 0.
        device: where the table is.
        dtype: what it is made of.

    Raises:
        InputError: sizes that are not positive, buckets too few to share out, a `max_distance` within the buckets
            of one distance each.
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
        self.num_heads = whole_number("num_heads", num_heads, least=1)
        self.num_buckets = whole_number("num_buckets", num_buckets, least=2 * directions)
        if num_buckets % directions:
            raise InputError("num_buckets", expected="an even number, half for each direction", got=num_buckets)
        self._per_direction = num_buckets // directions
        self._single = self._per_direction // 2  # this many hold one distance each
        self.max_distance = whole_number("max_distance", max_distance, least=self._single + 1)
        self.weight = nn.Parameter(torch.empty(num_buckets, num_heads, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The table uniform after Glorot and Bengio 2010."""
        nn.init.xavier_uniform_(self.weight)

    def values(
        self,
        heads: int,
        query_positions: Int[Tensor, "#batch queries"],
        key_positions: Int[Tensor, "#batch keys"],
        dtype: torch.dtype,
    ) -> Float[Tensor, "#batch heads queries keys"]:
        if heads != self.num_heads:
            raise InputError("heads", expected=f"the {self.num_heads} of this RelativeBias", got=heads)
        # Buckets are worked out for each distance, of which there are few, and not for each query and key.
        far = self.max_distance
        distances = torch.arange(-far, far + 1, device=self.weight.device)
        of_distance = self.weight[self.buckets(distances)].t()  # (heads, distances)
        index = _key_minus_query(query_positions, key_positions).clamp(-far, far) + far
        # Cast last: the gradient of a bucket is a sum over all its queries and keys.
        return of_distance[:, index].transpose(0, 1).to(dtype)

    def buckets(self, distances: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
        """The bucket of each distance, position of the key minus position of the query."""
        size = distances.abs() if self.bidirectional else (-distances).clamp(min=0)
        ratio = size.clamp(min=self._single).to(most_precise_dtype(size.device)) / self._single
        wide = self._per_direction - self._single
        # A distance at the edge of two buckets is in the farther one, on whichever side of it the logarithm is rounded.
        steps = wide * ratio.log() / math.log(self.max_distance / self._single) + 1e-9
        bucket = torch.where(size < self._single, size, self._single + steps.long()).clamp(max=self._per_direction - 1)
        return bucket + (distances > 0) * self._per_direction if self.bidirectional else bucket

    def extra_repr(self) -> str:
        """The sizes, for `repr`."""
        return (
            f"num_heads={self.num_heads}, num_buckets={self.num_buckets}, max_distance={self.max_distance}, "
            f"bidirectional={self.bidirectional}"
        )


def _key_minus_query(
    query_positions: Int[Tensor, "#batch queries"], key_positions: Int[Tensor, "#batch keys"]
) -> Int[Tensor, "#batch queries keys"]:
    """How far after the query each key stands; negative before it."""
    position_ids("query_positions", query_positions)
    position_ids("key_positions", key_positions, device=query_positions.device)
    query_batch, key_batch = query_positions.shape[0], key_positions.shape[0]
    # Compared one by one: torch.jit.trace makes sizes tensors, which a set would never find equal.
    if query_batch != key_batch and 1 not in (query_batch, key_batch):
        expected = f"batch {query_batch} like query_positions, or 1"
        raise InputError("key_positions", expected=expected, got=f"batch {key_batch}")
    return key_positions[:, None, :] - query_positions[:, :, None]
