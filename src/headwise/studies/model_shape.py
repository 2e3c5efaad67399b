"""Shape of a study's models: everything but their heads, at a fixed number of parameters."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headwise.errors import InputError
from headwise.studies.space import Setting

MAX_COMMON_MULTIPLE = 96
"""Largest common multiple of the numbers of heads to which the width of a model is rounded."""

WIDTH_PER_LAYER = 40
"""embed_dim / layers of a model of which only the number of parameters is given. GPT-2 small has 64; deeper models have
less."""


@dataclass(frozen=True)
class ModelShape:
    """Properties that all models of a study share: width, depth, vocabulary, intended number of parameters, and the
    kind (decoder, encoder or classifier).

    Attributes:
        vocabulary: number of tokens.
        embed_dim: width of the model.
        layers: number of layers.
        parameters: intended number of parameters, which the width of the MLP is chosen to match.
        causal: True for a decoder, False for an encoder.
        classes: number of classes of a classifier; None for logits over the vocabulary.
    """

    vocabulary: int
    embed_dim: int
    layers: int
    parameters: int
    causal: bool = True
    classes: int | None = None

    def mlp_dim(self, setting: Setting) -> int:
        """Return the hidden width of each layer's MLP with which a model with the heads of `setting` comes closest to
        the intended number of parameters.

        Raises:
            InputError: the heads leave no parameters for the MLP.
        """
        width = round((self.parameters - self._parameters_outside_mlp(setting)) / (3 * self.embed_dim * self.layers))
        if width < 1:
            smallest = self._parameters_outside_mlp(setting) + 3 * self.embed_dim * self.layers
            expected = f"at least {smallest:,} for {setting} at this width and depth"
            raise InputError("params", expected=expected, got=f"{self.parameters:,}")
        return width

    def _parameters_outside_mlp(self, setting: Setting) -> int:
        """Return the number of parameters that a model with the heads of `setting` has outside its MLPs: embedding,
        attention, norms and classifier.
        """
        attention = 2 * self.embed_dim * setting.head_dim * (setting.num_heads + setting.num_kv_heads)
        norms = self.embed_dim * (2 * self.layers + 1)
        top = 0 if self.classes is None else self.embed_dim**2 + self.embed_dim + (self.embed_dim + 1) * self.classes
        return self.vocabulary * self.embed_dim + self.layers * attention + norms + top

    @staticmethod
    def of_size(
        parameters: int,
        vocabulary: int,
        heads: Sequence[int],
        *,
        embed_dim: int | None = None,
        layers: int | None = None,
        **other: Any,
    ) -> "ModelShape":
        """Return the shape whose depth (1 to 48 layers) and width give a number of parameters closest to `parameters`.
        The width is about 40 features per layer, divisible by all numbers of heads where possible. `layers` or
        `embed_dim`, if set, is used unchanged.

        With heads of `embed_dim / heads`, a layer has about 12 embed_dim^2 parameters, and its MLP a width of 2.7
        embed_dim (Shazeer 2020).

        Args:
            parameters: intended number of parameters.
            vocabulary: number of tokens.
            heads: numbers of query heads that are compared.
            embed_dim: width of the model, if it is given.
            layers: number of layers, if it is given.
            other: further attributes of the shape.
        """
        common = 2 * math.lcm(*heads)
        step = common if common <= MAX_COMMON_MULTIPLE else 2

        def shape_with(layers: int) -> ModelShape:
            """Return the shape with this number of layers and with the width `embed_dim` if that is set, otherwise a
            width of about 40 features per layer.
            """
            width = embed_dim or step * max(1, round(WIDTH_PER_LAYER * layers / step))
            return ModelShape(vocabulary, width, layers, parameters, **other)

        def deviation(shape: ModelShape) -> float:
            """Return |log(n / parameters)|. Here `parameters` is the intended number of parameters, and n estimates the
            number of a model with the depth and width of `shape`: 12 x layers x embed_dim^2, plus the embedding.
            """
            usual = vocabulary * shape.embed_dim + 12 * shape.layers * shape.embed_dim**2
            return abs(math.log(usual / parameters))

        return min((shape_with(number) for number in ((layers,) if layers else range(1, 49))), key=deviation)
