"""A training step with dropout, with everything that must be the same under `hw.watch`."""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from research.dispatcher_truth.element_tags import tensors_in

SEED, DROPOUT = 5, 0.3


@dataclass(frozen=True)
class TrainingStep:
    """Result of a training step: outputs, gradients by parameter, and the state of the random number generator."""

    outputs: list[Tensor]
    gradients: dict[str, Tensor]
    random_state: Tensor

    def difference(self, other: "TrainingStep", tolerance: float) -> str:
        """Return what differs from another step, or ""."""
        if not torch.equal(self.random_state, other.random_state):
            return "the random stream differs"
        for mine, theirs in zip(self.outputs, other.outputs, strict=True):
            if not is_close(mine, theirs, tolerance):
                return f"an output differs by {float((mine - theirs).abs().max()):.2g}"
        if self.gradients.keys() != other.gradients.keys():
            return "other parameters have gradients"
        for name, gradient in self.gradients.items():
            if not is_close(gradient, other.gradients[name], tolerance):
                return f"the gradient of {name} differs by {float((gradient - other.gradients[name]).abs().max()):.2g}"
        return ""


def is_close(one: Tensor, other: Tensor, tolerance: float) -> bool:
    """Return whether two tensors differ by at most `tolerance` of the largest entry; bit for bit if it is 0."""
    if one.shape != other.shape:
        return False
    if tolerance == 0:
        return torch.equal(one.nan_to_num(), other.nan_to_num())
    one, other = one.nan_to_num(posinf=0.0, neginf=0.0), other.nan_to_num(posinf=0.0, neginf=0.0)
    scale = max(1.0, float(other.abs().max())) if other.numel() else 1.0
    return bool(((one - other).abs() <= tolerance * scale).all())


def with_dropout(model: nn.Module) -> nn.Module:
    """Return a copy in training mode whose attention has dropout, wherever a module has a number for it."""
    model = copy.deepcopy(model).train()
    config: Any = model.config
    if getattr(config, "apply_spec_augment", False):
        config.apply_spec_augment = False  # it needs longer audio
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, float) and value == 0.0 and "attention" in name and "drop" in name:
                setattr(module, name, DROPOUT)
    return model


def step(model: nn.Module, inputs: dict[str, Any]) -> TrainingStep:
    """Run one training step of a model, without an optimizer."""
    model.zero_grad()
    torch.manual_seed(SEED)
    outputs = floating(model(**inputs))
    total = torch.stack([(output * _ramp(output)).sum() for output in outputs if output.requires_grad]).sum()
    total.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None}
    return TrainingStep([output.detach() for output in outputs], gradients, torch.get_rng_state())


def floating(result: Any) -> list[Tensor]:
    """Return the floating tensors of a model's output."""
    values = dict(result) if hasattr(result, "keys") else result
    return [tensor for tensor in tensors_in(values) if tensor.is_floating_point()]


def _ramp(output: Tensor) -> Tensor:
    return torch.linspace(-1.0, 1.0, output.numel(), dtype=output.dtype).view(output.shape)
