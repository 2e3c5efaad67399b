"""Distance of a student's outputs from those of its teacher, over the tokens that are not padding.

Distributions over a vocabulary are compared by the Kullback-Leibler divergence (Hinton et al. 2015, section 2), and
everything else by the squared error relative to the teacher's squares, which has no unit.
"""

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.data.batches import is_encoder_decoder
from headwise.errors import InputError
from headwise.shapes import Bool, Float


def distillation_loss(
    student: Any, teacher: Any, model: nn.Module, batch: Mapping[str, Any], temperature: float = 1.0
) -> Float[Tensor, ""]:
    """Return the distance between the outputs of a student and of its teacher on the same batch, averaged over tokens
    that are not padding. For logits, it is a Kullback-Leibler divergence; otherwise, a relative squared error.

    Logits `(batch, tokens, vocabulary)`: the Kullback-Leibler divergence of the student's distribution from the
    teacher's, in nats, times `temperature` squared. Other logits, embeddings and plain tensors: the summed squared
    error, divided by the summed squares of the teacher's numbers.
    """
    name, of_student = _compared(student)
    other, of_teacher = _compared(teacher)
    if (name, of_student.shape) != (other, of_teacher.shape):
        expected = f"{other} of shape {tuple(of_teacher.shape)} like the teacher's"
        raise InputError("model", expected=expected, got=f"{name} of shape {tuple(of_student.shape)}")
    counts = counted_tokens(model, batch, of_student) if of_student.ndim == 3 else None
    rows, targets = (
        output.flatten(0, -2) if counts is None else output[counts.to(output.device)]
        for output in (_at_least_float32(of_student), _at_least_float32(of_teacher).to(of_student.device))
    )
    if not len(rows):
        raise InputError("data", expected="at least one token that is not padding in each batch", got="none")
    if name == "logits" and of_student.ndim == 3 and of_student.shape[-1] > 1:
        log_student, log_teacher = (F.log_softmax(logits / temperature, -1) for logits in (rows, targets))
        return F.kl_div(log_student, log_teacher, reduction="batchmean", log_target=True) * temperature**2
    return (rows - targets).square().sum() / targets.square().sum()


def _compared(output: Any) -> tuple[str, Float[Tensor, "batch *others"]]:
    """Return the part of a model's output that distillation compares, and its name: "logits", "embeddings" (the last
    hidden state), or "tensor" (the output itself).
    """
    for name, part in (
        ("logits", getattr(output, "logits", None)),
        ("embeddings", getattr(output, "last_hidden_state", None)),
        ("tensor", output),
    ):
        if isinstance(part, Tensor) and part.is_floating_point() and part.ndim >= 2:
            return name, part
    expected = "one that returns logits, a last_hidden_state or a tensor, of a batch of examples"
    raise InputError("model", expected=expected, got=type(output).__name__)


def counted_tokens(
    model: Any, batch: Mapping[str, Any], output: Float[Tensor, "batch tokens width"]
) -> Bool[Tensor, "batch tokens"] | None:
    """Return a mask `(batch, tokens)` for a model's output that is True where a token is not padding. Return None if no
    token is padding. Raise `InputError` if the batch has padding, but no mask of this shape.
    """
    is_pair = is_encoder_decoder(model)
    mask = batch.get("decoder_attention_mask" if is_pair else "attention_mask")
    labels = batch.get("labels")
    if mask is None and is_pair and isinstance(labels, Tensor):
        mask = labels != -100
    if mask is None:
        others = [value for name, value in batch.items() if name.endswith("mask") and isinstance(value, Tensor)]
        if all(bool(value.bool().all()) for value in others):
            return None
    if isinstance(mask, Tensor) and mask.shape == output.shape[:2]:
        return mask.bool()
    if isinstance(mask, Tensor) and mask.ndim == 2 and bool(mask.bool().all()):
        return None  # outputs of other tokens, none of which are padding
    got = "none" if mask is None else type(mask).__name__
    if isinstance(mask, Tensor):
        got = f"a mask of shape {tuple(mask.shape)}"
    expected = f"a padding mask for the {tuple(output.shape[:2])} tokens of the output in each batch with padding"
    raise InputError("data", expected=expected, got=got)


def _at_least_float32(output: Float[Tensor, "..."]) -> Float[Tensor, "..."]:
    """Return an output converted to float32; an output in float64 stays in float64."""
    return output.to(torch.promote_types(output.dtype, torch.float32))
