"""Inputs of output projections, which are the outputs of all heads side by side, for each token except padding; and
derivatives with respect to the outputs of the projections.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from headwise.data.batches import count_sequences_and_tokens
from headwise.errors import InputError
from headwise.intercept.module_calls import module_calls
from headwise.shapes import Bool, Float


def with_slopes(output: Tensor, on_slopes: Callable[[Tensor], None]) -> Tensor:
    """Return a module's `output`, such that the backward pass calls the function `on_slopes` with the gradient of this
    output. If the output requires no gradient, a detached tensor that requires one is returned in its place.
    """
    output = output if output.requires_grad else output.detach().requires_grad_()
    output.register_hook(on_slopes)  # type: ignore[no-untyped-call]
    return output


SequenceVectors = tuple[int, Float[Tensor, "_ _"]]
"""Vectors `(tokens, width)` of the tokens of one sequence, except padding, with the number of the sequence in its
batch. If the sequences of a projection's input are unknown, there is one entry for the whole batch, with the number 0.
"""


@contextmanager
def projection_inputs(
    model: nn.Module, paths: Collection[str], batch: Mapping[str, Any]
) -> Iterator[dict[str, list[SequenceVectors]]]:
    """Record the inputs of the output projections at some paths while the context is open. Yield a dictionary with a
    list for each path. The list has one entry per sequence and call of the projection. Tokens that the batch's masks
    state as padding are left out.
    """
    recorded: dict[str, list[SequenceVectors]] = {path: [] for path in paths}

    def record(path: str, division: _Division, inputs: Tensor, output: Tensor) -> None:
        recorded[path].extend(division(inputs.detach()))

    with _projection_calls(model, paths, batch, record):
        yield recorded


@contextmanager
def projection_slopes(
    model: nn.Module, paths: Collection[str], batch: Mapping[str, Any]
) -> Iterator[dict[str, list[list[SequenceVectors]]]]:
    """Record the gradients of the outputs of the projections at `paths`, in backward passes while the context is open.
    Yield a dictionary with a list for each path. The list has one item per call of the projection. The item is a list
    with one entry per sequence; it is empty if the backward pass does not reach the call.
    """
    recorded: dict[str, list[list[SequenceVectors]]] = {path: [] for path in paths}

    def record(path: str, division: _Division, inputs: Tensor, output: Tensor) -> Tensor:
        slopes: list[SequenceVectors] = []
        recorded[path].append(slopes)
        return with_slopes(output, lambda slope: slopes.extend(division(slope)))

    with _projection_calls(model, paths, batch, record):
        yield recorded


_Division = Callable[[Tensor], list[SequenceVectors]]
"""Function that divides a tensor with one vector for each input of a projection into those of each sequence."""


@contextmanager
def _projection_calls(
    model: nn.Module,
    paths: Collection[str],
    batch: Mapping[str, Any],
    on_call: Callable[[str, _Division, Tensor, Tensor], Tensor | None],
) -> Iterator[None]:
    """Call `on_call` after each forward pass of an output projection while the context is open. The arguments of
    `on_call` are the path of the projection, a function that divides token vectors by sequence, the input, and the
    output. If `on_call` returns a tensor, this tensor replaces the output.
    """
    lengths: dict[str, Tensor] = {}
    sequences = count_sequences_and_tokens(batch)[0]
    attention_of = {path: model.get_submodule(path.rpartition(".")[0]) for path in paths}

    def note_lengths(path: str) -> Any:
        def hook(attention: nn.Module, arguments: tuple[Any, ...]) -> None:
            lengths.pop(path, None)
            if arguments and isinstance(arguments[0], Tensor) and arguments[0].is_nested:
                lengths[path] = torch.tensor([len(sequence) for sequence in arguments[0].unbind()])

        return hook

    def pass_on(path: str, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
        inputs = arguments[0]
        if path in lengths:  # a nested tensor, such as torch's encoders make, was padded after its tokens
            positions = torch.arange(inputs.shape[1], device=inputs.device)
            mask: Tensor | None = positions < lengths[path].to(inputs.device)[:, None]
        else:
            mask = padding_mask(inputs, batch)
        has_sequences_first = bool(getattr(attention_of[path], "batch_first", True))
        if mask is not None and not mask.all() and not has_sequences_first:
            expected = "batches without padding, or layers with batch_first=True"
            raise InputError("calibration", expected=expected, got=f"tokens first in {path}")
        is_divided = inputs.ndim == 3 and len(inputs) == sequences and has_sequences_first

        def division(vectors: Tensor) -> list[SequenceVectors]:
            if is_divided:
                rows = vectors if mask is None else (x[own] for x, own in zip(vectors, mask, strict=True))
                return list(enumerate(rows))
            return [(0, vectors.flatten(0, -2) if mask is None else vectors[mask])]

        return on_call(path, division, inputs, output)

    with ExitStack() as stack:
        for path, attention in attention_of.items():
            stack.callback(attention.register_forward_pre_hook(note_lengths(path)).remove)
        stack.enter_context(module_calls({path: model.get_submodule(path) for path in paths}, pass_on))
        yield


def padding_mask(inputs: Tensor, batch: Mapping[str, Any]) -> Bool[Tensor, "batch tokens"] | None:
    """Return the batch's padding mask in the shape of the tokens of `inputs`, True for tokens that are not padding.
    Return None if no mask has this shape. Raise `InputError` if padding is stated in another form: by a
    `key_padding_mask`, or by a mask with as many elements but another shape.
    """
    for name, value in batch.items():
        if name.endswith("key_padding_mask") and isinstance(value, Tensor) and bool(value.any()):
            raise InputError("calibration", expected="batches without padding", got=f"a {name} that hides tokens")
    shape, tokens = inputs.shape[:-1], inputs.shape[:-1].numel()
    for name, mask in padding_masks(batch).items():
        if mask.numel() == tokens and mask.shape != shape and not bool(mask.all()):
            expected = f"batches without padding, or inputs of a projection of shape {(*mask.shape, inputs.shape[-1])}"
            raise InputError("calibration", expected=expected, got=f"{tuple(inputs.shape)} with padding by {name}")
    return stated_padding(shape, batch)


def stated_padding(shape: Sequence[int], batch: Mapping[str, Any]) -> Bool[Tensor, "batch tokens"] | None:
    """Return the batch's padding mask of the shape `shape`, True for tokens that are not padding. Return None if no
    mask has this shape. Raise `InputError` if several masks have this shape and differ.
    """
    masks = {name: mask for name, mask in padding_masks(batch).items() if mask.shape == tuple(shape)}
    if not masks:
        return None
    first = next(iter(masks.values()))
    if any(not torch.equal(mask, first) for mask in masks.values()):
        remedy = "use sources and targets of different lengths, or without padding"
        expected = "one padding mask of each length"
        raise InputError("calibration", expected=expected, got=" and ".join(masks), remedy=remedy)
    return first


def padding_masks(batch: Mapping[str, Any]) -> dict[str, Bool[Tensor, "batch tokens"]]:
    """Return the padding masks among a batch's arguments, by argument name, as booleans: True for tokens that are not
    padding.
    """
    return {
        name: value.bool()
        for name, value in batch.items()
        if name.endswith("attention_mask") and name not in OF_OTHER_TOKENS
        if isinstance(value, Tensor) and value.ndim == 2
    }


OF_OTHER_TOKENS = ("encoder_attention_mask", "global_attention_mask")
"""Arguments that are masks of the keys of cross-attention alone, or no masks of padding."""
