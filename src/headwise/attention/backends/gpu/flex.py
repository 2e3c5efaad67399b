"""The backend `flex`: torch's FlexAttention, compiled, for masks, biases and options that SDPA would need a matrix for.

FlexAttention (Dong et al. 2024) compiles the rule of a mask and of the scores into its kernel, and leaves out blocks in
which no key is visible. It has the log-sum-exp and gradients on a GPU. Sinks follow from the log-sum-exp. On a CPU it
has neither, and is slower than the other backends; there it serves to test the rules.

A rule reads tensors. Numbers that differ between calls, such as the width of a window, would each need a kernel of
their own, so a mask is passed as the ranges of keys of each query wherever it is ranges. The blocks of the block mask
follow from the first and the last key of each range. Everything is computed by tensor operations, and nothing is read
on the host, so that a GPU is not waited for.

Each combination of options is compiled once. Past a number of compiled kernels, torch would run FlexAttention without a
kernel, with the whole matrix in memory; here that is an error.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends import fused, reference
from headwise.attention.backends.gpu.spans import in_blocks, spans_of_rows
from headwise.attention.backends.native.backend import why_no_derivative
from headwise.attention.masks.base import Mask, OfParts
from headwise.attention.masks.grid import Grid
from headwise.attention.masks.key_ranges import VisibleKeys, visible_keys
from headwise.attention.masks.kinds import InRanges, Padding, Segments
from headwise.attention.problem import Answer, Problem
from headwise.attention.tensors import KeyRanges
from headwise.checks import has_values
from headwise.errors import InputError
from headwise.shapes import Bool, Int

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

name = "flex"

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Dtypes that FlexAttention's kernels compute in."""

DEVICES = ("cuda", "cpu")
"""Types of devices that the backend knows."""

LEAST_WIDTH = 16
"""Least number of features of a head for FlexAttention; narrower heads are padded with zeros."""

MOST_COMPILED = 128
"""Number of kernels that torch may compile before it raises an error."""

STAGES_WITH_BIAS = 2
"""Number of tiles that a kernel in half precision loads ahead if there is a bias. Torch's own choice of 3 does not
count the tiles of the bias: with those, an H100 has too little shared memory.
"""

Kernel = Literal["auto", "triton", "flash"]


def why_not(problem: Problem, kernel: Kernel = "auto") -> str | None:
    """Return the reason that a kernel of FlexAttention cannot compute an attention problem (the tensors and options of
    one call), in one sentence; None if it can.
    """
    device, is_compiling = problem.q.device, torch.compiler.is_compiling()
    if problem.talking is not None:
        reason = "FlexAttention keeps heads apart, and talking_heads mixes them"
    elif problem.dropout > 0:
        reason = "FlexAttention has no dropout"
    elif device.type not in DEVICES:
        reason = f"FlexAttention is used on a GPU and a CPU, and q is on {device}"
    elif problem.q.dtype not in DTYPES:
        reason = f"FlexAttention's kernels compute in float16, bfloat16 and float32, and q is in {problem.q.dtype}"
    elif no_derivative := why_no_derivative():
        reason = no_derivative
    elif not is_compiling and torch._C._is_tracing():
        reason = "FlexAttention cannot be recorded by torch.jit.trace"
    elif not is_compiling and torch._C._functorch.peek_interpreter_stack() is not None:
        reason = "FlexAttention has no rules for transforms of torch.func"
    else:
        return _why_not_on_cpu(problem, kernel) if device.type == "cpu" else _why_not_on_gpu(problem, kernel)
    return reason


def _why_not_on_cpu(problem: Problem, kernel: Kernel) -> str | None:
    """Return the reason that FlexAttention cannot compute an attention problem (one call) on a CPU; None if it can."""
    if kernel != "auto":
        return f"FlexAttention's kernel {kernel!r} is for GPUs, and q is on {problem.q.device}"
    if _needs_lse(problem):
        return "FlexAttention returns no log-sum-exp on a CPU, which sinks need too"
    if problem.needs_grad:
        return "FlexAttention has no gradients on a CPU"
    if torch.compiler.is_compiling() and problem.mask is not None:
        return "while compiling for a CPU, FlexAttention cannot read the ranges of a mask that the program computes"
    return None


def _why_not_on_gpu(problem: Problem, kernel: Kernel) -> str | None:
    """Return the reason that FlexAttention cannot compute an attention problem (one call) on a GPU; None if it can."""
    learns = [each for each in (problem.bias, problem.scale) if isinstance(each, Tensor) and each.requires_grad]
    if torch.is_grad_enabled() and learns:
        if torch.are_deterministic_algorithms_enabled():
            return "FlexAttention adds up the gradient of a bias or of scales in no fixed order"
        if kernel == "flash":
            return "FlashAttention has no gradients of a bias or of scales"
    return _why_no_flash(problem) if kernel == "flash" else None


def _why_no_flash(problem: Problem) -> str | None:
    """Return the reason that FlexAttention cannot compute an attention problem with the kernels of FlashAttention 4;
    None if it can.
    """
    if problem.q.dtype == torch.float32:
        return "FlashAttention computes in float16 and bfloat16, and q is in torch.float32"
    if _needs_lse(problem):
        return "the log-sum-exp of FlexAttention's flash kernel was wrong in some versions of torch, and sinks need it"
    if find_spec("flash_attn") is None or find_spec("flash_attn.cute") is None:
        return "the package of FlashAttention 4 is not installed: pip install --pre flash-attn-4"
    if torch.cuda.get_device_capability(problem.q.device)[0] not in (9, 10):
        return "FlashAttention 4 is for GPUs of compute capability 9 and 10"
    return None


def run(problem: Problem, kernel: Kernel = "auto") -> Answer:
    """Compute an attention problem with FlexAttention. If the weights are asked for, the reference backend computes it
    instead.
    """
    if problem.return_weights:
        return reference.run(problem)  # the caller asks for the matrix that kernels avoid
    if 0 in (*problem.q.shape, *problem.k.shape, *problem.v.shape):
        return fused.empty_result(problem)
    q, k, v = (fused.widen(tensor, max(tensor.shape[-1], LEAST_WIDTH)) for tensor in (problem.q, problem.k, problem.v))
    block_mask = None if problem.mask is None else block_mask_of(problem.mask, problem.grid)
    options: dict[str, Any] = {
        "score_mod": score_rule(problem),
        "block_mask": block_mask,
        "scale": 1.0 if isinstance(problem.scale, Tensor) else problem.scale,
        "enable_gqa": q.shape[1] != k.shape[1],
        "kernel_options": _kernel_options(problem, kernel),
    }
    lse = None
    if _needs_lse(problem):
        from torch.nn.attention.flex_attention import AuxRequest

        out, others = _call(q, k, v, options | {"return_aux": AuxRequest(lse=True)})
        lse = others.lse
    else:
        out = _call(q, k, v, options)
    return fused.finished(problem, out, lse)


def _call(q: Tensor, k: Tensor, v: Tensor, options: dict[str, Any]) -> Any:
    """Return the result of FlexAttention for the given options. FlexAttention is compiled by `torch.compile`, unless
    the calling code is being compiled already.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if torch.compiler.is_compiling():
        return flex_attention(q, k, v, **options)
    # A scale or softcap that is a variable of the kernel cannot be compiled.
    changes = {"recompile_limit": MOST_COMPILED, "accumulated_recompile_limit": MOST_COMPILED, "specialize_float": True}
    with torch._dynamo.config.patch(changes):
        return compiled()(q, k, v, **options)


@cache
def compiled() -> Callable[..., Any]:
    """Return FlexAttention, compiled by `torch.compile`. With `fullgraph`, torch raises an error when it has compiled
    too many kernels, instead of running FlexAttention without a kernel.
    """
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, fullgraph=True)


def _kernel_options(problem: Problem, kernel: Kernel) -> dict[str, Any] | None:
    """Return the options of FlexAttention's kernel; None to use its defaults. If a bias or the scales of heads require
    a gradient, the Triton kernel is used: FlexAttention's kernel for few queries has no gradient of a bias.
    """
    if problem.q.device.type == "cpu":
        return None
    if kernel == "flash":
        return {"BACKEND": "FLASH"}
    options: dict[str, Any] = {}
    if kernel == "triton" or any(
        isinstance(each, Tensor) and each.requires_grad for each in (problem.bias, problem.scale)
    ):
        options["BACKEND"] = "TRITON"
    if problem.bias is not None and problem.q.dtype != torch.float32:
        options["num_stages"] = STAGES_WITH_BIAS
    return options or None


def _needs_lse(problem: Problem) -> bool:
    """Return True if the log-sum-exp must be computed: if the caller asks for it, or to include attention sinks."""
    return problem.return_lse or problem.sinks is not None


@dataclass(frozen=True)
class Flex:
    """Backend `flex` with a chosen kernel of torch's FlexAttention. Pass it as `backend=` to `attend`.

    Attributes:
        kernel: "auto" for FlexAttention's own choice, "triton" for its Triton kernel, or "flash" for FlashAttention 4
            on GPUs of the generations Hopper and Blackwell, which needs the package `flash-attn-4`.

    Raises:
        InputError: any other kernel.

    Example:
        >>> out = hw.attend(q, k, v, mask=hw.window(4096), backend=hw.Flex("flash"))
    """

    kernel: Kernel = "auto"
    name: str = field(default=name, init=False)

    def __post_init__(self) -> None:
        if self.kernel not in get_args(Kernel):
            raise InputError("kernel", expected=f"one of {', '.join(get_args(Kernel))}", got=repr(self.kernel))

    def why_not(self, problem: Problem) -> str | None:
        """Return the reason that FlexAttention cannot compute an attention problem (one call) with the kernel
        `self.kernel`, in one sentence; None if it can.
        """
        return why_not(problem, self.kernel)

    def run(self, problem: Problem) -> Answer:
        """Compute an attention problem with the kernel of FlexAttention that `self.kernel` names."""
        return run(problem, self.kernel)


# -- rules of the visible keys and of the scores -----------------------------------------------------------------------

Rule = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of the indices of a sequence, head, query and key; True if the query attends to the key."""

ScoreRule = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""Function of a score and the same indices that returns the score as it enters the softmax."""


def visibility_rule(visible: VisibleKeys) -> Rule:
    """Return a function that states the mask of an attention call: True where a query may attend to a key.
    FlexAttention compiles the function into its kernel. `visible` has the mask as ranges of keys for each query and
    further masks, which must all allow the key.
    """
    masks = [*([] if visible.ranges is None else [InRanges(visible.ranges)]), *visible.others]
    rules = [partial(on_device(mask, visible.grid.device).allows, visible.grid) for mask in masks]
    if len(rules) == 1:
        return rules[0]

    def allows(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        allowed = rules[0](b, h, i, j)
        for rule in rules[1:]:
            allowed = allowed & rule(b, h, i, j)
        return allowed

    return allows


def on_device(mask: Mask, device: torch.device) -> Mask:
    """Return a mask whose stored lengths and document ids are on `device`, since a kernel reads them from there and
    cannot copy them.
    """
    if isinstance(mask, OfParts):
        return mask.with_parts(lambda part: on_device(part, device))
    if isinstance(mask, Padding):
        return replace(mask, lengths=mask.lengths_on(device))
    if isinstance(mask, Segments):
        return replace(mask, ids=mask.ids_on(device))
    return mask


def score_rule(problem: Problem) -> ScoreRule | None:
    """Return the function with which FlexAttention changes each score: it applies the scale of the head, the softcap
    and the bias, as far as the problem has them. Return None if the problem has none of the three.
    """
    scale = problem.scale.flatten() if isinstance(problem.scale, Tensor) else None
    softcap, bias = problem.softcap, problem.bias
    if bias is not None:
        bias = bias.to(problem.score_dtype)  # the kernel adds up its gradient in its dtype
    if scale is None and softcap is None and bias is None:
        return None
    sizes = None if bias is None else bias.shape

    def finish(score: Tensor, b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        if scale is not None:
            score = score * scale[h]
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if bias is not None and sizes is not None:
            # An axis of size 1 repeats.
            indices = [n if size > 1 else n * 0 for n, size in zip((b, h, i, j), sizes, strict=True)]
            score = score + bias[tuple(indices)]
        return score

    return finish


# -- blocks with a visible key -----------------------------------------------------------------------------------------

BLOCK = 128
"""Number of queries and of keys of a block."""

MOST_EVALUATED = 2**28
"""Largest number of elements of a mask that is no ranges for which blocks are found by evaluating it."""

EVALUATED_AT_ONCE = 2**24
"""Largest number of elements that are evaluated at a time, unless one row of blocks has more."""

Blocks = Bool[Tensor, "#batch #heads row_blocks key_blocks"]


def block_mask_of(mask: Mask, grid: Grid) -> "BlockMask":
    """Return FlexAttention's block mask for a mask: it lists the blocks of the score matrix to compute. If the mask is
    made of numbers alone and no positions are passed, the block mask is cached for the other layers of the model.
    """
    if not (mask.is_constant and grid.uses_default_positions and has_values(torch.empty(0, device=grid.device))):
        return _block_mask(mask, grid)
    with torch.inference_mode(False), torch.no_grad():
        return _constant_block_mask(mask, grid)


def _block_mask(mask: Mask, grid: Grid) -> "BlockMask":
    """Return FlexAttention's block mask for a mask, without a matrix of queries x keys in memory. A block of the score
    matrix is left out if no query may attend to any of its keys. It is full if every query may attend to all of them.
    In other blocks, FlexAttention evaluates the mask for each query and key.
    """
    from torch.nn.attention.flex_attention import BlockMask  # takes long to import

    visible = visible_keys(mask, grid)
    some, every = visible_blocks(visible)
    return BlockMask.from_kv_blocks(
        *_ordered(some & ~every),
        *_ordered(every),
        BLOCK_SIZE=BLOCK,
        mask_mod=visibility_rule(visible),
        seq_lengths=(grid.queries, grid.keys),
    )


_constant_block_mask = lru_cache(maxsize=32)(_block_mask)


def visible_blocks(visible: VisibleKeys) -> tuple[Blocks, Blocks]:
    """Return two boolean tensors with one element for each block of the score matrix. The first is True where some
    query-key pair may be visible, the second where every pair is. The second is False for a last block that the queries
    or keys do not fill.
    """
    grid = visible.grid
    row_blocks, key_blocks = -(-grid.queries // BLOCK), -(-grid.keys // BLOCK)
    some = torch.ones(1, 1, row_blocks, key_blocks, dtype=torch.bool, device=grid.device)
    whole_rows, whole_keys = (
        torch.arange(blocks, device=grid.device) < length // BLOCK
        for blocks, length in ((row_blocks, grid.queries), (key_blocks, grid.keys))
    )
    every = (whole_rows[:, None] & whole_keys)[None, None]
    if visible.ranges is not None:
        some_in_ranges, every_in_ranges = _blocks_of_ranges(visible.ranges, grid.keys)
        some, every = some & some_in_ranges, every & every_in_ranges
    if visible.others:
        evaluated = _evaluated_blocks(visible)
        some, every = (some, every & False) if evaluated is None else (some & evaluated[0], every & evaluated[1])
    return some, every


def _blocks_of_ranges(ranges: KeyRanges, keys: int) -> tuple[Blocks, Blocks]:
    """Return two boolean tensors with one element for each block of the score matrix. The first is True where the
    ranges of some query may contain a key of the block. The second is True where, for some index r, range r of every
    query contains the whole block.
    """
    key_blocks = -(-keys // BLOCK)
    block = torch.arange(key_blocks, device=ranges.device)
    first, stop = spans_of_rows(ranges, keys, BLOCK, BLOCK)[..., None].unbind(-2)
    some = ((block >= first) & (block < stop)).any(3)
    starts, stops = ranges.clamp(0, keys).unbind(-1)
    missing = -starts.shape[2] % BLOCK
    latest = in_blocks(F.pad(starts, (0, 0, 0, missing)), 2, BLOCK).amax(3)[..., None]
    earliest = in_blocks(F.pad(stops, (0, 0, 0, missing), value=keys), 2, BLOCK).amin(3)[..., None]
    every = ((block * BLOCK >= latest) & ((block + 1) * BLOCK <= earliest)).any(3)
    return some, every


def _evaluated_blocks(visible: VisibleKeys) -> tuple[Blocks, Blocks] | None:
    """Evaluate those masks that are not stated as ranges of keys. Return two boolean tensors with one element for each
    block of the score matrix. The first is True where the masks allow some query-key pair of the block, the second
    where they allow every pair. Return None while compiling, or if evaluating the masks would take long.
    """
    grid = visible.grid
    first = visible.evaluate(range(min(2, grid.queries)))
    batch, heads, rows, _ = first.shape
    per_row = batch * heads * grid.keys
    if not has_values(first) or per_row * grid.queries > MOST_EVALUATED:
        return None
    if rows == 1:  # the same for all queries
        blocks = in_blocks(_with_whole_blocks(first, grid.keys), 3, BLOCK)
        return blocks.any(4), blocks.all(4)
    step = max(EVALUATED_AT_ONCE // per_row // BLOCK, 1) * BLOCK
    parts = []
    for start in range(0, grid.queries, step):
        matrix = visible.evaluate(range(start, min(start + step, grid.queries)))
        matrix = F.pad(_with_whole_blocks(matrix, grid.keys), (0, 0, 0, -matrix.shape[2] % BLOCK))
        blocks = in_blocks(in_blocks(matrix, 3, BLOCK), 2, BLOCK)
        parts.append((blocks.any(5).any(3), blocks.all(5).all(3)))
    some, every = (torch.cat(each, 2) for each in zip(*parts, strict=True))
    return some, every


def _with_whole_blocks(
    matrix: Bool[Tensor, "#batch #heads rows #keys"], keys: int
) -> Bool[Tensor, "#batch #heads rows padded_keys"]:
    """Return a boolean matrix of the visible keys with False columns appended, so that the number of columns is a
    multiple of the block size. A matrix with one column is first repeated for all `keys`.
    """
    return F.pad(matrix.expand(-1, -1, -1, keys), (0, -keys % BLOCK))


def _ordered(
    blocks: Blocks,
) -> tuple[Int[Tensor, "#batch #heads row_blocks"], Int[Tensor, "#batch #heads row_blocks key_blocks"]]:
    """Return two tensors for each row of blocks: the number of blocks that are True, and the indices of all blocks in
    the row, first those of the True blocks.
    """
    numbers = blocks.to(torch.int8)
    return numbers.sum(-1, dtype=torch.int32), numbers.argsort(dim=-1, descending=True, stable=True).int()
