"""Inputs of output projections: the outputs of all heads side by side, for each token except padding; and derivatives
with respect to the outputs of the projections.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.data.batches import count_sequences_and_tokens
from headwise.errors import InputError
from headwise.shapes import Bool, Float


class SequenceInputs(NamedTuple):
    """Inputs of a projection for the tokens of one sequence, or of a whole batch if these are unknown.

    Attributes:
        sequence: number of the sequence in the batch; 0 for a whole batch.
        x: inputs of its tokens except padding.
    """

    sequence: int
    x: Float[Tensor, "tokens width"]


@contextmanager
def projection_inputs(
    model: nn.Module, paths: Mapping[str, str], batch: Mapping[str, Any]
) -> Iterator[dict[str, list[SequenceInputs]]]:
    """Record the inputs of output projections while the context is open: for each name in `paths` those of each call of
    the module at its path, by sequence.

    Args:
        model: the model.
        paths: paths of the output projections, by name.
        batch: arguments of the model, whose padding masks tell which tokens count.
    """
    recorded: dict[str, list[SequenceInputs]] = {name: [] for name in paths}

    def record(name: str, division: "_Division", inputs: Tensor, output: Tensor) -> None:
        recorded[name].extend(division(inputs.detach()))

    with _projection_calls(model, paths, batch, record):
        yield recorded


@contextmanager
def projection_slopes(
    model: nn.Module, paths: Mapping[str, str], batch: Mapping[str, Any]
) -> Iterator[dict[str, list[list[SequenceInputs]]]]:
    """Record derivatives with respect to the outputs of projections, of calls of the model and backward passes while
    the context is open: for each name in `paths` those of each call of the module at its path, by sequence. A call of
    which no derivative is computed has an empty list.
    """
    recorded: dict[str, list[list[SequenceInputs]]] = {name: [] for name in paths}

    def record(name: str, division: "_Division", inputs: Tensor, output: Tensor) -> Tensor:
        slopes: list[SequenceInputs] = []
        recorded[name].append(slopes)
        output = output if output.requires_grad else output.detach().requires_grad_()
        output.register_hook(lambda slope: slopes.extend(division(slope)))  # type: ignore[no-untyped-call]
        return output

    with _projection_calls(model, paths, batch, record):
        yield recorded


_Division = Callable[[Tensor], list[SequenceInputs]]
"""Function that divides a tensor with one vector for each input of a projection into those of each sequence."""


@contextmanager
def _projection_calls(
    model: nn.Module,
    paths: Mapping[str, str],
    batch: Mapping[str, Any],
    on_call: Callable[[str, _Division, Tensor, Tensor], Tensor | None],
) -> Iterator[None]:
    """Pass each call of an output projection to a function while the context is open: its name, the division of its
    tokens into sequences, its input and its output, which the function may replace.
    """
    lengths: dict[str, list[int]] = {}
    sequences = count_sequences_and_tokens(batch)[0]

    def note_lengths(name: str) -> Any:
        def hook(attention: nn.Module, arguments: tuple[Any, ...]) -> None:
            lengths.pop(name, None)
            if arguments and isinstance(arguments[0], Tensor) and arguments[0].is_nested:
                lengths[name] = [len(sequence) for sequence in arguments[0].unbind()]

        return hook

    def pass_on(name: str) -> Any:
        def hook(module: nn.Module, arguments: tuple[Any, ...], output: Tensor) -> Tensor | None:
            inputs = arguments[0]
            mask = _first_tokens(inputs, lengths[name]) if name in lengths else padding_mask(inputs, batch)
            has_sequences_first = _has_sequences_first(model, paths[name])
            if mask is not None and not mask.all() and not has_sequences_first:
                expected = "batches without padding, or layers with batch_first=True"
                raise InputError("calibration", expected=expected, got=f"tokens first in {paths[name]}")
            is_divided = inputs.ndim == 3 and len(inputs) == sequences and has_sequences_first

            def division(vectors: Tensor) -> list[SequenceInputs]:
                if is_divided:
                    rows = vectors if mask is None else (x[own] for x, own in zip(vectors, mask, strict=True))
                    return [SequenceInputs(*row) for row in enumerate(rows)]
                return [SequenceInputs(0, vectors.flatten(0, -2) if mask is None else vectors[mask])]

            return on_call(name, division, inputs, output)

        return hook

    hooks = [model.get_submodule(path).register_forward_hook(pass_on(name)) for name, path in paths.items()]
    hooks += [_parent(model, path).register_forward_pre_hook(note_lengths(name)) for name, path in paths.items()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _has_sequences_first(model: nn.Module, projection: str) -> bool:
    """Return False if the attention module around an output projection says that it has tokens before sequences."""
    return bool(getattr(_parent(model, projection), "batch_first", True))


def _parent(model: nn.Module, path: str) -> nn.Module:
    """Return the module that contains the module at a path."""
    return model.get_submodule(path.rpartition(".")[0])


def _first_tokens(inputs: Tensor, lengths: Sequence[int]) -> Bool[Tensor, "batch tokens"]:
    """Return a mask that is True at the first tokens of each sequence, as many as its length: a nested tensor, such as
    torch's encoders make, was padded after these.
    """
    positions = torch.arange(inputs.shape[1], device=inputs.device)
    return positions < torch.tensor(lengths, device=inputs.device)[:, None]


def padding_mask(inputs: Tensor, batch: Mapping[str, Any]) -> Bool[Tensor, "batch tokens"] | None:
    """Return the padding mask of a batch that fits the tokens of `inputs`, True for tokens that count; None if none
    does.

    Raises:
        InputError: several masks fit that differ, so that it is not known which one is that of these tokens; or there
            is padding by a mask of torch's layers, which may have tokens before sequences, or the tokens of `inputs`
            are in another order than those of a mask that hides some.
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
    """Return the padding mask of a batch that has this shape, True for tokens that count; None if none has.

    Raises:
        InputError: several masks fit that differ.
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
    """Return the padding masks of a batch by name, True for tokens that count."""
    return {
        name: value.bool()
        for name, value in batch.items()
        if name.endswith("attention_mask") and name not in OF_OTHER_TOKENS
        if isinstance(value, Tensor) and value.ndim == 2
    }


OF_OTHER_TOKENS = ("encoder_attention_mask", "global_attention_mask")
"""Arguments that are masks of the keys of cross-attention alone, or no masks of padding."""
