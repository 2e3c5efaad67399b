"""Linear part of a norm: its weight and, for a layer norm, the centring. The division by the size is left out."""

from itertools import product
from typing import NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.circuits.trace import ModuleCall
from headwise.errors import InputError
from headwise.shapes import Float

TOLERANCE = 1e-5
"""Largest relative difference between a norm and its formula. Many norms compute in float32."""


class NormMap(NamedTuple):
    """Linear part of a layer norm, `x -> weight * (x - mean(x))`, or of an RMS norm, `x -> weight * x`. The full norm
    also divides by the root mean square of each token's (centred) vector, and adds a bias.

    Attributes:
        weight: factor of each feature.
        is_centred: True if the norm subtracts the mean.
    """

    weight: Float[Tensor, " width"]
    is_centred: bool

    def after(self, matrix: Float[Tensor, "*heads rows width"]) -> Float[Tensor, "*heads rows width"]:
        """Return `matrix @ N`, where N is the linear part of the norm. If a model first applies the norm and then
        `matrix`, the product maps the input of the norm directly to the result.
        """
        product = matrix * self.weight
        return product - product.mean(-1, keepdim=True) if self.is_centred else product

    def before(self, matrix: Float[Tensor, "*heads width columns"]) -> Float[Tensor, "*heads width columns"]:
        """Return `N @ matrix`, where N is the linear part of the norm. If a model first applies `matrix` and then the
        norm, the product maps the input of `matrix` directly to the result.
        """
        centred = matrix - matrix.mean(-2, keepdim=True) if self.is_centred else matrix
        return centred * self.weight[:, None]


def norm_map(call: ModuleCall) -> NormMap:
    """Return the linear part of a norm that the model called, in float64. It multiplies each feature by 1, by `weight`
    or by `1 + weight` (as in Gemma), whichever reproduces the outputs of the norm for random inputs. Raise `InputError`
    if none of the three does.
    """
    assert call.of_norm is not None
    norm, (read, returned) = call.module, call.of_norm
    width, device = read.shape[-1], read.device
    generator = torch.Generator().manual_seed(0)
    # Large, so that the number added under the root has no effect, and with a mean that is not 0.
    inputs = 1e3 * (torch.randn(1, 7, width, generator=generator, dtype=torch.float64) + 0.5).to(device)
    outputs, repeated = _output_of(norm, inputs), _output_of(norm, read)
    if outputs is not None and repeated is not None and _is_close(repeated, returned):
        ones = torch.ones(width, dtype=torch.float64, device=device)
        own = {name: value.detach() for name, value in norm.named_parameters() if value.shape == ones.shape}
        weights = [own["weight"], 1 + own["weight"]] if "weight" in own else [ones]
        for is_centred, weight in product((False, True), weights):
            centred = inputs - inputs.mean(-1, keepdim=True) if is_centred else inputs
            expected = weight * centred / centred.square().mean(-1, keepdim=True).sqrt() + own.get("bias", 0.0)
            if _is_close(outputs, expected):
                return NormMap(weight, is_centred)
    got = f"{call.path} of the class {type(norm).__name__}, which computes something else"
    raise InputError("model", expected="layer norms and RMS norms", got=got)


def _output_of(norm: nn.Module, inputs: Float[Tensor, "*axes width"]) -> Tensor | None:
    """Return the output of a norm for `inputs` as the only argument. Return None if the call fails, or the output has
    another shape than `inputs`.
    """
    try:
        with torch.no_grad():
            output = norm(inputs)
    except Exception:  # whatever a norm of unknown class raises for an input alone
        return None
    return output if isinstance(output, Tensor) and output.shape == inputs.shape else None


def _is_close(outputs: Tensor, expected: Tensor) -> bool:
    """Return True if the outputs of a norm and the expected outputs are equal up to rounding at every token."""
    return bool(((outputs - expected).norm(dim=-1) <= TOLERANCE * expected.norm(dim=-1)).all())
