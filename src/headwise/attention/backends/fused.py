"""The fused backend: torch's attention kernels, and the operator under them if the log-sum-exp is needed.

The output comes from `scaled_dot_product_attention`, which chooses a kernel for the device. Memory is linear in length,
except with dropout on CPU and with a bias that requires grad: there torch computes the whole matrix. A mask other than
plain causal is passed as a tensor of queries x keys. Torch does not implement the second derivative;
`backend="reference"` has one.

One query row of grouped heads is passed as the rows of one head, so that keys are read once for the group. On CPU, one
row of bfloat16 is passed twice: the kernel is slow for products with one vector, and fast for those with two.

On CPU the log-sum-exp comes from the flash operator, which returns it but cannot differentiate it; `_FlashWithLse` adds
that gradient. If weights are asked for, the matrix that kernels avoid is needed, and the reference computes the result.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from headwise.attention.backends import reference
from headwise.attention.backends.sinks_gradient import OnlyFirstDerivative
from headwise.attention.masks.factories import causal
from headwise.attention.masks.key_ranges import unexpanded
from headwise.attention.problem import Answer, Problem
from headwise.attention.tensors import Bias, PerRow
from headwise.checks import known_to_be_true, records_program
from headwise.shapes import Bool, Float

name = "fused"

FEWEST_KEYS_WITHOUT_MASK = 16
"""Number of keys below which torch's kernel on a CPU gets a mask tensor, even if nothing is hidden or its causal flag
could replace the mask. Without a tensor, the kernel returns 0 for a row whose scores are NaN, as for a row without a
key, if the row does not fill one of its registers, which have up to 16 numbers of float32.
"""

_flash = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
_flash_backward = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


def why_not(problem: Problem) -> str | None:
    """Return the reason that torch's fused kernels cannot compute an attention problem (the tensors and options of one
    call), in one sentence; None if they can.
    """
    if problem.softcap is not None:
        return "torch's fused operators have no softcap"
    if problem.talking is not None:
        return "torch's fused operators keep heads apart, and talking_heads mixes them"
    if _needs_lse(problem):
        if problem.q.device.type != "cpu":
            return f"torch's operators are read for the log-sum-exp on cpu only, and q is on {problem.q.device}"
        if _bias_needs_grad(problem):
            return "torch's operator has no gradient of the log-sum-exp for a bias, and bias requires one"
    return None


def run(problem: Problem) -> Answer:
    """Compute an attention problem with torch's fused kernels. If the weights are asked for, the reference backend
    computes it instead.
    """
    if problem.return_weights:
        return reference.run(problem)  # the caller asks for the matrix that kernels avoid
    q, k, v, scale = problem.q, problem.k, problem.v, problem.scale
    if 0 in (*q.shape, *k.shape, *v.shape):
        return empty_result(problem)
    if isinstance(scale, Tensor):
        # The kernels have one scale for all heads, so q is multiplied, in float32 so that no score is rounded.
        dtype = problem.score_dtype
        q, k, v, scale = q.to(dtype) * scale, k.to(dtype), v.to(dtype), 1.0
    # The kernels need equal widths of keys and values, and rows of unit stride. Zeros change no product.
    width = max(q.shape[-1], v.shape[-1])
    q, k, v = (widen(tensor, width) for tensor in (q, k, v))
    attn_mask, is_causal = mask_arguments(problem)
    needs_lse = _needs_lse(problem)
    if problem.sinks is not None and not needs_lse:
        k, v, attn_mask, is_causal = _with_sink_key(problem, k, v, attn_mask)
    q, attn_mask = _as_rows(q, k.shape[1], attn_mask)

    lse = None
    if needs_lse:
        out, lse = _with_lse(problem, q, k, v, attn_mask, is_causal, scale)
        lse = lse.reshape(problem.q.shape[:3])
    if not needs_lse or problem.dropout > 0:
        out = _without_lse(q, k, v, attn_mask, is_causal, scale, problem.dropout)
    return finished(problem, out.reshape(*problem.q.shape[:3], width), lse)


def finished(problem: Problem, out: Float[Tensor, "batch heads queries width"], lse: Tensor | None) -> Answer:
    """Return the result of an attention problem, given the output and the log-sum-exp of a kernel. If the log-sum-exp
    is passed, attention sinks are included in it and in the output. Padded features of the output are removed, and it
    is cast to the dtype of q.
    """
    if problem.sinks is not None and lse is not None:
        out, lse = reference.with_sinks(out, lse, problem.sinks)
    out = out[..., : problem.v.shape[-1]].to(problem.q.dtype)
    return Answer(out, lse if problem.return_lse else None, None)


def _without_lse(
    q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float, dropout: float
) -> Float[Tensor, "batch heads queries width"]:
    """Return the output of torch's `scaled_dot_product_attention`. On a CPU, a single bfloat16 query row is passed
    twice, which is faster. In programs that torch exports or traces, the output of rows without a visible key is set to
    0.
    """
    if q.shape[2] == 1 and q.device.type == "cpu" and q.dtype == torch.bfloat16:
        return _without_lse(q.repeat(1, 1, 2, 1), k, v, attn_mask, False, scale, dropout)[:, :, :1]
    grouped = {"enable_gqa": True} if q.shape[1] != k.shape[1] else {}  # while compiling, != may be a symbol
    out = F.scaled_dot_product_attention(
        q, k, v, attn_mask=attn_mask, dropout_p=dropout, is_causal=is_causal, scale=scale, **grouped
    )
    if records_program() and attn_mask is not None:
        # Other runtimes return NaN for rows without a key.
        hidden = ~attn_mask if attn_mask.dtype == torch.bool else attn_mask == -torch.inf
        out = out.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return out


def _with_lse(
    problem: Problem, q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Float[Tensor, "batch heads queries width"], PerRow]:
    """Return the output and the log-sum-exp of torch's flash attention operator for the CPU, computed in float32 at
    least. In half precision, the operator would be no faster, and its exponentials would have errors of up to 6e-5.
    """
    q, k, v = (tensor.to(problem.score_dtype) for tensor in (q, k, v))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, q.new_zeros(()), -torch.inf)
    out, lse = _FlashWithLse.apply(q, k, v, attn_mask, is_causal, scale)  # type: ignore[no-untyped-call]
    if attn_mask is not None:
        # The operator returns 0 for a row without a key.
        lse = lse.masked_fill((attn_mask == -torch.inf).all(-1), -torch.inf)
    return out, lse


def uses_is_causal(problem: Problem) -> bool:
    """Return True if torch's flag `is_causal` can replace the mask of a problem. This requires a plain causal mask, as
    many queries as keys, a positive scale and no bias. Return False for few keys on a CPU, where the kernel needs a
    mask tensor.

    The flag aligns the first query with the first key. On CPU the kernel multiplies scores by the scale after it has
    set hidden ones to -inf, so a scale that is not positive in float32 would give NaN.
    """
    is_positive = isinstance(problem.scale, Tensor) or problem.scale_is_positive  # a tensor multiplies q instead
    is_square = problem.grid.queries == problem.grid.keys
    is_causal = problem.mask == causal() and problem.bias is None and is_square and is_positive
    return is_causal and not _has_few_keys(problem)


def keeps_matrix(problem: Problem) -> bool:
    """Return True if torch's kernel keeps the matrix of all weights in memory on a CPU: with dropout, or with a bias
    that needs a gradient.
    """
    return problem.dropout > 0 or _bias_needs_grad(problem)


def _needs_lse(problem: Problem) -> bool:
    """Return True if the log-sum-exp must be computed: if the caller asks for it or, on a CPU, to include attention
    sinks.
    """
    sinks_from_lse = problem.q.device.type == "cpu" and not records_program() and not _bias_needs_grad(problem)
    return problem.return_lse or (problem.sinks is not None and sinks_from_lse)


def _has_few_keys(problem: Problem) -> bool:
    """Return True if there are so few keys that torch's kernel on a CPU, called without a mask tensor, returns 0 for a
    row of NaN scores; with a mask tensor, it returns NaN. Return False on other devices, in recorded programs, and if
    the number of keys is unknown.
    """
    if problem.q.device.type != "cpu" or records_program():
        return False
    return known_to_be_true(problem.grid.keys < FEWEST_KEYS_WITHOUT_MASK)


def _bias_needs_grad(problem: Problem) -> bool:
    """Return True if there is a bias that requires a gradient, and gradients are enabled."""
    return problem.bias is not None and problem.bias.requires_grad and torch.is_grad_enabled()


def _with_sink_key(
    problem: Problem, k: Tensor, v: Tensor, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor, Tensor, bool]:
    """Return keys, values, mask and causal flag, with the attention sinks as one additional key. The features of this
    key and its value are 0. Its entry in the mask, a tensor that is added to the scores, is the sink logit of each
    head.
    """
    assert problem.sinks is not None
    dtype, grid = k.dtype if k.device.type != "cpu" else problem.score_dtype, problem.grid
    if attn_mask is None:
        mask = None if problem.mask is None else problem.mask.block(grid)  # the causal flag stood for it
        attn_mask = k.new_ones(1, 1, 1, grid.keys, dtype=torch.bool) if mask is None else mask
    if attn_mask.dtype == torch.bool:
        attn_mask = torch.where(attn_mask, torch.zeros((), dtype=dtype, device=k.device), -torch.inf)
    sinks = problem.sinks.to(dtype)[None, :, :, None]
    batch, _, queries, _ = attn_mask.shape
    attn_mask = torch.cat(
        [attn_mask.expand(-1, grid.heads, -1, grid.keys), sinks.expand(batch, -1, queries, -1)], dim=-1
    )
    return F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1)), attn_mask, False


class _FlashWithLse(torch.autograd.Function):
    """Torch's flash attention operator for the CPU, with a gradient for its log-sum-exp as well as for its output.

    With dS the gradient of the scores, A the weights, dO and g those of the output and the log-sum-exp, and
    delta_i = dO_i . O_i, the backward pass is

        dS_ij = A_ij (dO_i . v_j - delta_i + g_i)

    The operator computes delta itself from dO and O. One more column, which holds 1 in dO, -g in O and 0 in
    q, k and v, turns its delta into delta - g and leaves every other product unchanged.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(
        q: Float[Tensor, "batch heads queries width"],
        k: Float[Tensor, "batch kv_heads keys width"],
        v: Float[Tensor, "batch kv_heads keys width"],
        added: Bias | None,
        is_causal: bool,
        scale: float,
    ) -> tuple[Float[Tensor, "batch heads queries width"], PerRow]:
        """Return the output and the log-sum-exp. `added` combines mask and bias in one tensor that is added to the
        scores; it is None without both.
        """
        out, lse = _flash(q, k, v, 0.0, is_causal, attn_mask=added, scale=scale)
        return out, lse

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
        """Save the inputs and results that the backward pass needs."""
        q, k, v, added, ctx.is_causal, ctx.scale = inputs
        ctx.save_for_backward(q, k, v, added, *output)
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(
        ctx: Any, grad_out: Float[Tensor, "batch heads queries width"] | None, grad_lse: PerRow | None
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v, given the gradients of the output and the log-sum-exp."""
        inputs = (grad_out, grad_lse, *ctx.saved_tensors, ctx.is_causal, ctx.scale)
        grads = _FlashWithLseBackward.apply(*inputs)  # type: ignore[no-untyped-call]
        return *grads, None, None, None


class _FlashWithLseBackward(OnlyFirstDerivative):
    """Backward pass of `_FlashWithLse`, computed by torch's operator. It cannot be differentiated again."""

    attention = "fused attention"
    generate_vmap_rule = True

    @staticmethod
    def forward(
        grad_out: Float[Tensor, "batch heads queries width"] | None,
        grad_lse: PerRow | None,
        q: Float[Tensor, "batch heads queries width"],
        k: Float[Tensor, "batch kv_heads keys width"],
        v: Float[Tensor, "batch kv_heads keys width"],
        added: Bias | None,
        out: Float[Tensor, "batch heads queries width"],
        lse: PerRow,
        is_causal: bool,
        scale: float,
    ) -> tuple[Tensor, ...]:
        """Return the gradients of q, k and v, given the gradients of the output and the log-sum-exp."""
        width = q.shape[-1]
        if grad_out is None:
            grad_out = torch.zeros_like(out)
        if grad_lse is not None:
            q, k, v, out, grad_out = (widen(tensor, width + 1) for tensor in (q, k, v, out, grad_out))
            grad_out[..., width], out[..., width] = 1.0, -grad_lse
        grads = _flash_backward(grad_out, q, k, v, out, lse, 0.0, is_causal, attn_mask=added, scale=scale)
        return tuple(grad[..., :width] for grad in grads)


def mask_arguments(problem: Problem) -> tuple[Bool[Tensor, "#batch #heads queries keys"] | Bias | None, bool]:
    """Return a problem's mask and bias as the arguments `attn_mask` and `is_causal` of torch's attention. Without a
    bias, `attn_mask` is boolean. With a bias, `attn_mask` is the bias, set to -inf at hidden keys. With neither mask
    nor bias, or if `is_causal` replaces the mask, `attn_mask` is None, except for few keys on a CPU: then all its
    elements are True.
    """
    mask, bias, grid = problem.mask, problem.bias, problem.grid
    if uses_is_causal(problem):
        return None, True
    allowed = None if mask is None else mask.block(grid)
    if grid.device.type != "cpu":
        # Torch converts a boolean mask to the dtype of q, so axes that repeat must not be expanded.
        allowed = None if allowed is None else unexpanded(allowed)
        bias = None if bias is None else bias.to(problem.q.dtype)  # other kernels need the dtype of q
    elif bias is not None and not (
        bias.dtype == problem.q.dtype
        and not isinstance(problem.scale, Tensor)
        and not _needs_lse(problem)
        and not keeps_matrix(problem)
        and not records_program()
    ):
        # The kernel for the CPU reads a bias in the dtype of the queries. Where torch keeps the whole matrix, it would
        # round scores to this dtype instead. Recorded programs are the same with and without gradients.
        bias = bias.to(problem.score_dtype)
    if bias is None and allowed is None and _has_few_keys(problem):
        allowed = problem.q.new_ones(1, 1, 1, grid.keys, dtype=torch.bool)
    if bias is None or allowed is None:
        return (allowed if bias is None else bias), False
    return bias.masked_fill(~allowed, -torch.inf), False


def _as_rows(
    q: Float[Tensor, "batch heads queries width"], kv_heads: int, attn_mask: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    """Return q and the mask for torch's attention. If there is one query, and several query heads share a key/value
    head, these query heads become the query rows of one head. Torch then reads the keys that they share only once.
    """
    batch, heads, queries, width = q.shape
    if queries != 1 or heads == kv_heads:
        return q, attn_mask
    if attn_mask is not None and attn_mask.shape[1] != 1:
        attn_mask = attn_mask.reshape(attn_mask.shape[0], kv_heads, heads // kv_heads, attn_mask.shape[3])
    return q.reshape(batch, kv_heads, heads // kv_heads, width), attn_mask


def widen(tensor: Float[Tensor, "*axes have"], width: int) -> Float[Tensor, "*axes want"]:
    """Return a tensor whose last axis is padded with zeros to `width` and has stride 1. The tensor is copied only if
    necessary.
    """
    if tensor.shape[-1] < width:
        tensor = F.pad(tensor, (0, width - tensor.shape[-1]))  # may keep a channels-last layout
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def empty_result(problem: Problem) -> Answer:
    """Return the result, an output of zeros, if q, k or v has an axis of length 0. Torch's operator would crash on such
    tensors. The zeros are computed from q, k and v, so that all three get gradients.
    """
    q, k, v = problem.q, problem.k, problem.v
    zeros = q[..., :0].sum(-1, keepdim=True) + k[..., :0].sum() + v[..., :0].sum()
    lse = torch.full(q.shape[:-1], -torch.inf, dtype=problem.score_dtype, device=q.device)
    if problem.sinks is not None:
        lse = reference.logaddexp(lse, problem.sinks)
    return Answer(zeros.expand(-1, -1, -1, v.shape[-1]).clone(), lse if problem.return_lse else None, None)
