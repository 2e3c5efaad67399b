"""Copying of names by the OV matrices of heads (Wang et al. 2022, section 3.1)."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.circuits.module_maps import ModuleMaps, placed_module
from headwise.analysis.circuits.stream import NotLinearError, stream_factors, unembedding_matrix
from headwise.analysis.circuits.trace import RunTrace, double_copy
from headwise.analysis.head_tests.name_prompts import NamePrompt
from headwise.attention.autocast import without_autocast
from headwise.data.batches import device_of, with_cache_disabled
from headwise.errors import InputError
from headwise.shapes import Bool, Float

TOP = 5
"""Number of logits among which the name's must be."""


class NameCopying(NamedTuple):
    """Copying of names by the heads of one attention module.

    Attributes:
        highest: True if the logit of the name is among the 5 highest that the head's OV matrix produces.
        lowest: True if it is among the 5 lowest.
        templates: number of the template that each name is from.
    """

    highest: Bool[Tensor, "names heads"]
    lowest: Bool[Tensor, "names heads"]
    templates: list[int]


def name_copying(model: nn.Module, prompts: Sequence[NamePrompt]) -> tuple[dict[str, NameCopying], str | None]:
    """Return whether the heads of each attention module but the first copy names, by the path of the module; and the
    reason why that is unknown, or None.

    The state x of the residual stream at each name is that before the second attention module, which contains the first
    MLP. The logits are `U OV x`, with the OV matrices and the output embedding U of `hw.circuits`: without biases, and
    without the divisions by norms, which are positive factors.

    A copy of the model in float64 runs on the prompts. It needs 8 bytes per parameter.
    """
    try:
        copy = double_copy(model)
        with without_autocast(device_of(copy)), torch.no_grad():
            return _copying(copy, prompts), None
    except NotLinearError as error:
        return {}, str(error)
    except InputError as error:
        if error.argument != "model":
            raise
        return {}, str(error)


def _copying(copy: nn.Module, prompts: Sequence[NamePrompt]) -> dict[str, NameCopying]:
    """Return whether the heads of a model in float64 copy the names of prompts.

    Raises:
        NotLinearError: the model has no linear residual stream, or its output embedding is not linear.
        InputError: an attention module is of no known family, or computes something else than its weights say.
    """
    batch = _batch(copy, prompts[0])
    trace = RunTrace(copy, batch)
    placed = [placed_module(trace, site) for site in trace.attention.sites.values()]
    factors = stream_factors(trace, batch, placed)
    unembedding = unembedding_matrix(trace, factors.shape)
    if len(placed) < 2:
        return {}
    second, states, names, templates = placed[1].maps.path, [], [], []
    for prompt in prompts:
        stream = _stream_before(RunTrace(copy, _batch(copy, prompt)), second)
        for place, name in ((prompt.places[0], prompt.answer), (prompt.places[1], prompt.wrong)):
            states.append(stream[0, place])
            names.append(name)
            templates.append(prompt.template)
    inputs, ids = torch.stack(states, 1), torch.tensor(names, device=unembedding.device)
    return {
        module.maps.path: NameCopying(*_of_module(module.maps, factor, inputs, unembedding, ids), templates)
        for module, factor in zip(placed[1:], factors.of_modules[1:], strict=True)
    }


def _batch(model: nn.Module, prompt: NamePrompt) -> dict[str, Any]:
    """Return the arguments of a model for one prompt."""
    ids = prompt.ids[None].to(device_of(model))
    arguments: Mapping[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return with_cache_disabled(model, dict(arguments))


def _stream_before(trace: RunTrace, path: str) -> Float[Tensor, "1 length width"]:
    """Return the residual stream that the attention module at `path` reads, before a norm."""
    call = trace.call_of(path)
    assert call is not None
    assert call.input is not None
    norm = trace.norm_before(call.input)
    stream = call.input if norm is None else norm.input
    assert stream is not None
    return stream


def _of_module(
    maps: ModuleMaps,
    factor: float,
    inputs: Float[Tensor, "width names"],
    unembedding: Float[Tensor, "vocabulary width"],
    ids: Tensor,
) -> tuple[Bool[Tensor, "names heads"], Bool[Tensor, "names heads"]]:
    """Return whether the logit of each name is among the highest, and among the lowest, that each head of a module
    produces for it.
    """
    highest, lowest = [], []
    columns = torch.arange(len(ids), device=ids.device)
    for head in range(len(maps.output)):
        written = factor * (maps.output[head] @ (maps.value[maps.kv_head(head)] @ inputs))
        logits = unembedding @ written
        own = logits[ids, columns]
        highest.append((logits > own).sum(0) < TOP)
        lowest.append((logits < own).sum(0) < TOP)
    return torch.stack(highest, 1).cpu(), torch.stack(lowest, 1).cpu()
