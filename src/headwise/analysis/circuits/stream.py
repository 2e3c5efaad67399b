"""Linear residual stream of a model: whether heads write into a sum that later heads and the logits read.

A second run of the model shows it. All norms return what they returned in the first run. What each attention module
adds, and the token embedding, are shifted by random vectors. In a linear stream, the input of every attention module
and of the final norm is then shifted by the vectors of all modules before it, each times a constant factor.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.circuits.module_maps import PlacedModule
from headwise.analysis.circuits.norms import norm_map
from headwise.analysis.circuits.trace import ModuleCall, RunTrace, is_norm, is_same
from headwise.data.tokenization import input_embeddings, output_embeddings
from headwise.intercept.module_calls import module_calls
from headwise.intercept.trace.projection import linear_map
from headwise.shapes import Float

TOLERANCE = 1e-6
"""Largest relative difference between the shift of a stream and the sum of the shifts that were added."""

TOKENS_AT_ONCE = 4096
"""Number of tokens whose embeddings are computed at a time."""


@dataclass(frozen=True, eq=False)
class StreamFactors:
    """Constant factors by which a model multiplies vectors before it adds them to the residual stream. There is one for
    the output of each attention module, and one for the token embedding.

    Attributes:
        shape: shape of the stream in the run, `(1, length, width)`.
        of_modules: factor of what each attention module writes, in the order of the modules; 1 in most models.
        of_embedding: factor of the token embedding; None if the model does not name it or it is not in the stream.
    """

    shape: torch.Size
    of_modules: tuple[float, ...]
    of_embedding: float | None


class NotLinearError(Exception):
    """Error whose message states why a model has no linear residual stream, or no linear token embedding or logits. The
    message completes "the model has ...".
    """


def stream_factors(trace: RunTrace, batch: Any, modules: Sequence[PlacedModule]) -> StreamFactors:
    """Raise `NotLinearError` unless the residual stream of a model is linear. Return the factors by which the model
    multiplies vectors before it adds them to the stream. For this check, the model runs a second time, with random
    vectors added to the output of each attention module.
    """
    ends = [module.input for module in modules]
    shape = ends[0].shape
    shapes = [end.shape for end in ends] + [getattr(module.written.result, "shape", None) for module in modules]
    if any(other != shape for other in shapes):
        raise NotLinearError("attention modules of different widths")
    if (end := _stream_end(trace, shape)) is not None:
        ends.append(end[0])
    writers = [module.written for module in modules]
    embedding = input_embeddings(trace.model)
    embedded = next((call for call in trace.calls if call.module is embedding), None)
    if embedded is not None and getattr(embedded.result, "shape", None) == shape:
        writers.insert(0, embedded)
    if 2 * len(writers) > shape.numel():
        raise NotLinearError(f"{len(writers)} modules, too many for a text of {shape[1]} tokens of width {shape[2]}")
    generator = torch.Generator().manual_seed(1)
    shifts = [torch.randn(shape, generator=generator, dtype=torch.float64).to(ends[0].device) for _ in writers]
    # What a norm after attention reads must reach the stream through this norm alone, which is held constant.
    read = [module.projection for module in modules if module.projection is not module.written]
    noise = [torch.randn(shape, generator=generator, dtype=torch.float64).to(ends[0].device) for _ in read]
    with _replayed(trace, list(zip([*writers, *read], [*shifts, *noise], strict=True))):
        second = RunTrace(trace.model, batch, is_replay=True)
    if [call.path for call in second.calls] != [call.path for call in trace.calls]:
        raise NotLinearError("modules that run in another order when their inputs change")
    changes = [_tensor_like(trace, second, end) - end for end in ends]
    return _factors([module.maps.path for module in modules], shifts, changes)


def _factors(paths: Sequence[str], shifts: Sequence[Tensor], changes: Sequence[Tensor]) -> StreamFactors:
    """Fit by least squares the factors with which the outputs of modules reach the residual stream, and return them.
    `shifts` are random vectors that were added to these outputs. `changes` are the resulting changes of the stream: at
    the input of each module in `paths` and, if known, at the end of the stream. If there is one shift more than paths,
    the first shift was added to the token embedding.
    """
    offset, size = len(shifts) - len(paths), float(shifts[0].norm())
    table = torch.full((len(changes), len(shifts)), torch.nan, dtype=torch.float64)
    for index, change in enumerate(changes):
        before = [shift.flatten() for shift in shifts[: index + offset]]
        remaining = change.flatten()
        if before:
            matrix = torch.stack(before, 1)
            table[index, : len(before)] = (fitted := torch.linalg.lstsq(matrix, remaining[:, None]).solution[:, 0])
            remaining = remaining - matrix @ fitted
        if not float(remaining.norm()) <= TOLERANCE * size:
            where = paths[index] if index < len(paths) else "the output embedding"
            raise NotLinearError(f"an input of {where} that is not the sum of what heads before it wrote")
    factors, of_modules = [column[~column.isnan()] for column in table.mT], []
    for path, of_module in zip(paths, factors[offset:], strict=True):
        if not len(of_module):
            raise NotLinearError(f"heads of {path} whose outputs nothing reads")
        if (factor := _common(of_module)) is None:
            reason = f"heads of {path} whose outputs reach later modules through a norm, or with different factors"
            raise NotLinearError(reason)
        of_modules.append(factor)
    return StreamFactors(shifts[0].shape, tuple(of_modules), _common(factors[0]) if offset else None)


def _common(factors: Tensor) -> float | None:
    """Return the common value of some factors, exactly 1 if it is nearly 1. Return None if the factors are not
    positive, or differ by more than rounding.
    """
    smallest, largest, factor = float(factors.min()), float(factors.max()), float(factors[0])
    if smallest <= TOLERANCE or largest - smallest > TOLERANCE * largest:
        return None
    return 1.0 if abs(factor - 1.0) <= TOLERANCE else factor


def _tensor_like(trace: RunTrace, second: RunTrace, end: Tensor) -> Tensor:
    """Find the module call in the first run (`trace`) whose input or result is the tensor `end`. Return the input or
    result of the same call in the second run. Raise `NotLinearError` if there is no such call.
    """
    for call, other in zip(trace.calls, second.calls, strict=True):
        for one, counterpart in ((call.input, other.input), (call.result, other.result)):
            if is_same(one, end) and counterpart is not None:
                return counterpart
    raise NotLinearError("a residual stream that no module receives")


@contextmanager
def _replayed(trace: RunTrace, shifted: Sequence[tuple[ModuleCall, Tensor]]) -> Iterator[None]:
    """While the context is active, make each norm of a model return its outputs from a recorded run, in the order of
    its calls. `shifted` has pairs of a recorded module call and a tensor. The module of such a call returns the
    recorded output plus the tensor.
    """
    outputs: dict[nn.Module, list[Any]] = {}
    for call in trace.calls:
        shift, output = next((shift for other, shift in shifted if other is call), None), call.output
        if shift is not None:
            output = (output[0] + shift, *output[1:]) if isinstance(output, tuple) else output + shift
        if shift is not None or is_norm(call.module):
            outputs.setdefault(call.module, []).append(output)
    remaining = {module: iter(stored) for module, stored in outputs.items()}
    with module_calls({module: module for module in outputs}, lambda module, *_: next(remaining[module], None)):
        yield


def _stream_end(trace: RunTrace, shape: torch.Size) -> tuple[Tensor, ModuleCall | None, ModuleCall | None] | None:
    """Return the last tensor of the residual stream, which has the given `shape`: the input of the final norm or,
    without such a norm, of the output embedding. Also return the recorded calls of the final norm and of the output
    embedding. A missing call is None. If no such tensor is found, return None in place of all three.

    If the model does not name its output embedding, the tensor is derived from the output of the model, or else from
    the input of the last norm.
    """
    module = output_embeddings(trace.model)
    unembedding = None if module is None else next((call for call in trace.calls if call.module is module), None)
    last = getattr(trace.output, "last_hidden_state", trace.output) if unembedding is None else unembedding.input
    if isinstance(last, Tensor) and last.shape == shape:
        norm = trace.norm_before(last)
        return last if norm is None or norm.input is None else norm.input, norm, unembedding
    norms = (call for call in reversed(trace.calls) if is_norm(call.module))
    norm = next((call for call in norms if call.input is not None and call.input.shape == shape), None)
    return None if norm is None or norm.input is None else (norm.input, norm, None)


def embedding_product(trace: RunTrace, factors: StreamFactors, *, with_logits: bool) -> Float[Tensor, "width width"]:
    """Return `E^T E`, or `E^T U` if `with_logits` is True. Row t of E is the vector that token t adds to the residual
    stream. Row t of U maps the stream to the logit of token t, without bias and without the division by the final norm.
    """
    unembedding = unembedding_matrix(trace, factors.shape) if with_logits else None
    embedding = input_embeddings(trace.model)
    if embedding is None or not isinstance(getattr(embedding, "weight", None), Tensor):
        raise NotLinearError("no token embedding that it names (get_input_embeddings)")
    device, vocabulary = embedding.weight.device, len(embedding.weight)
    if unembedding is not None and len(unembedding) != vocabulary:
        raise NotLinearError(f"embeddings of {vocabulary} tokens, and logits of {len(unembedding)}")
    if factors.of_embedding is None:
        raise NotLinearError("a token embedding that is not added to what the heads read, such as one with a norm")
    product = torch.zeros(factors.shape[-1], factors.shape[-1], dtype=torch.float64, device=device)
    for start in range(0, vocabulary, TOKENS_AT_ONCE):
        stop = min(start + TOKENS_AT_ONCE, vocabulary)
        ids = torch.arange(start, stop, device=device)[None]
        with torch.no_grad():
            rows, reversed_rows = embedding(ids)[0], embedding(ids.flip(1))[0].flip(0)
        if not torch.allclose(rows, reversed_rows, rtol=TOLERANCE, atol=TOLERANCE * float(rows.abs().max())):
            raise NotLinearError("a token embedding that depends on the places of the tokens")
        rows = rows * factors.of_embedding
        if unembedding is None:
            product.addmm_(rows.mT, rows)
        else:
            product += rows.mT @ unembedding[start:stop]
    return product


def unembedding_matrix(trace: RunTrace, shape: torch.Size) -> Float[Tensor, "vocabulary width"]:
    """Return the matrix that maps the residual stream, a tensor of the given `shape`, to logits. It is the weight of
    the output embedding, times the linear part of the final norm if there is one.
    """
    _, norm, unembedding = _stream_end(trace, shape) or (None, None, None)
    if unembedding is None or unembedding.input is None or unembedding.result is None:
        raise NotLinearError("no output embedding that it names (get_output_embeddings)")
    inputs, results = unembedding.input, unembedding.result
    found = linear_map(unembedding.module, inputs.shape[-1])
    is_linear = False
    if found is not None:
        expected = inputs @ found.weight.mT + (0.0 if found.bias is None else found.bias)
        limit = TOLERANCE * float(results.abs().max())
        is_linear = expected.shape == results.shape and not float((expected - results).abs().max()) > limit
    if found is None or not is_linear:
        raise NotLinearError("an output embedding that is not linear")
    outputs = trace.output if isinstance(trace.output, tuple) else (getattr(trace.output, "logits", trace.output),)
    logits = next((each for each in outputs if isinstance(each, Tensor) and each.shape == results.shape), None)
    is_increasing = False
    if logits is not None:
        # In the order of the results, no logit is below the one before it. So are a positive factor and a cap.
        ordered = logits.double().gather(-1, results.argsort(-1))
        steps, span = ordered.diff(dim=-1), ordered[..., -1] - ordered[..., 0]
        is_increasing = bool((steps >= -TOLERANCE * span[..., None].abs()).all()) and bool((span > 0).all())
    if not is_increasing:
        raise NotLinearError("logits that are no increasing function of the results of the output embedding")
    return found.weight if norm is None else norm_map(norm).after(found.weight)
