"""Options of one blockwise attention call, and what the forward and the backward pass derive from them alike."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from headwise.attention.backends.blockwise.plan import BlockwisePlan
from headwise.attention.backends.blockwise.row_block_emitter import RowBlockEmitter
from headwise.attention.backends.blockwise.scores_bf16 import BFloat16Scores
from headwise.attention.backends.blockwise.scores_fp32 import Float32Scores
from headwise.attention.backends.blockwise.tiles import Pool, Tile, iterate_tiles
from headwise.shapes import Float


class CallOptions(NamedTuple):
    """Options of one blockwise attention call: the blocks of the score matrix to compute; the dtype, scale and softcap
    of the scores; the dropout; and, if a function observes the call, the object that passes the attention weights to
    that function.

    Attributes:
        plan: the blocks to compute.
        bfloat16_scores: True for scores in bfloat16, False for scores in the dtype of q.
        scale: factor of the scores.
        softcap: cap of the scores; None without.
        bias_hides: True if the bias is -inf somewhere.
        dropout: probability with which a weight is dropped.
        threads: number of threads that tiles are made for.
        seed: seed of the dropout.
        emitter: object that sends the weights of each tile to an observer; None if nothing is observed.
    """

    plan: BlockwisePlan
    bfloat16_scores: bool
    scale: float
    softcap: float | None
    bias_hides: bool
    dropout: float
    threads: int
    seed: int
    emitter: RowBlockEmitter | None

    def prepare_scores(
        self,
        q: Tensor,
        k: Tensor,
        bias: Tensor | None,
        pool: Pool,
        shifts: Float[Tensor, "batch heads queries 1"],
    ) -> BFloat16Scores | Float32Scores:
        """Return the object that computes the scores of each tile (rectangle of the score matrix) and their gradient,
        in bfloat16 or in the dtype of q. In the forward pass the object chooses one number for each query row,
        subtracts it from the row's scores, and writes it to `shifts`. In the backward pass it reads the numbers from
        `shifts`.
        """
        if self.bfloat16_scores:
            return BFloat16Scores(q, k, self.scale, self.plan, pool, shifts)
        options = (self.scale, self.softcap, self.bias_hides)
        return Float32Scores(q, k, bias, *options, pool, shifts, finds_uncapped=self.emitter is not None)

    def tiles(self, q: Tensor, k: Tensor, bias: Tensor | None) -> Iterator[Tile]:
        """Yield the tiles of the plan."""
        return iterate_tiles(self.plan, q, k, bias if self.bias_hides else None, self.threads)

    def dropout_factors(
        self, number: int, tile: Tile, weights: Float[Tensor, "kv stacked columns"], pool: Pool
    ) -> Float[Tensor, "kv stacked columns"] | None:
        """Return one random factor for each weight of a tile, a rectangle of the score matrix: 0 with probability
        `dropout`, otherwise 1 / (1 - dropout). None without dropout. The factors depend on the call's seed and on
        `number`, the index of the tile, so they are the same in the forward and the backward pass.
        """
        if self.dropout == 0:
            return None
        generator = torch.Generator(weights.device).manual_seed(self.seed + number)
        factors = pool.buffer("dropout", tile, weights)
        return factors.bernoulli_(1 - self.dropout, generator=generator).div_(1 - self.dropout)
