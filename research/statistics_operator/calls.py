"""Calls of the operator of attention with statistics, drawn at random. The seed determines all."""

from dataclasses import replace
from random import Random

import torch

from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.backends.gpu.statistics import tiles_of
from headwise.attention.backends.native import backend as native
from headwise.attention.backends.plain_statistics import StatisticsCall
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.key_ranges import Part, visible_keys
from headwise.attention.problem import Problem
from headwise.statistics.kernel_statistics import kernel_inputs
from research.native_kernels.problems import Draw, draw_problem

MOST_TILES = 40
"""Largest number of tiles of a call by default, since Triton's interpreter takes milliseconds for each."""


def draw_call(seed: int, dtype: torch.dtype, most_tiles: int = MOST_TILES) -> StatisticsCall | None:
    """Return the arguments of the operator for a drawn problem, with queries, keys and values in `dtype`. Some calls
    have tokens, special tokens, padding and an output projection. None for a problem without a row or key, with
    positions that the operator does not read, or with more than `most_tiles` tiles.
    """
    drawn = draw_problem(seed)
    if drawn.sizes.queries * drawn.sizes.keys * drawn.sizes.heads * drawn.sizes.batch == 0:
        return None
    tensors = drawn.tensors(dtype, Draw(0))[:3]
    problem = Problem.checked(*tensors, **drawn.attend_options, scale=drawn.scale, sinks=drawn.sinks)
    random = Random(seed)
    inputs = kernel_inputs(_draw_context(random, problem.grid, drawn.positions is None), problem)
    if inputs is None or problem.talking is not None:
        return None
    visible = visible_keys(problem.mask, problem.grid)
    whole = Part(range(problem.grid.queries), range(problem.grid.keys))
    arguments = native.arguments(problem, visible.ranges, visible.matrix())
    gram = None
    if random.random() < 0.5:
        width = drawn.sizes.value_dim
        projection = torch.randn(drawn.sizes.heads, width, 5, generator=torch.Generator().manual_seed(seed))
        gram = projection @ projection.mT
    call = StatisticsCall(*(*arguments, *inputs.arguments(whole)))._replace(gram=gram)
    return call if _tile_count(call) <= most_tiles else None


def _draw_context(random: Random, grid: Grid, has_default_positions: bool) -> CallContext:
    """Return tokens, special tokens and padding on the left, each in some of the calls."""
    generator = torch.Generator().manual_seed(random.randrange(2**31))
    context = CallContext()
    if has_default_positions and random.random() < 0.6:
        tokens = torch.randint(0, random.choice([2, 5, 40]), (grid.batch, grid.keys), generator=generator)
        context = replace(context, token_ids=tokens, is_special=tokens == 1)
    if has_default_positions and random.random() < 0.4 and grid.keys >= grid.queries:
        padded = torch.randint(0, grid.keys, (grid.batch, 1), generator=generator)
        real = torch.arange(grid.keys) >= padded
        context = replace(context, real_keys=real, real_queries=real[:, grid.keys - grid.queries :])
    return context


def _tile_count(call: StatisticsCall) -> int:
    """Return the number of tiles that both Triton kernels compute if nothing is hidden."""
    batch, heads, queries, head_dim = call.q.shape
    reads_matrix = call.dense is not None or call.bias is not None
    tiles = tiles_of(head_dim, call.q.dtype, reads_matrix=reads_matrix, has_softcap=bool(call.softcap))
    return 2 * batch * heads * -(-queries // tiles.rows) * -(-call.k.shape[2] // tiles.keys)
