"""OV and QK matrices of the heads of a model, kept as products of two factors, which are multiplied only on request."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headwise.analysis.circuits.module_maps import ModuleMaps
from headwise.analysis.circuits.stream import StreamFactors
from headwise.checks import LARGEST_SIZE, whole_number
from headwise.errors import InputError
from headwise.settings import COMPOSITION_KINDS
from headwise.shapes import Float
from headwise.wording import counted

SCORES = ("copying", "matching", "ov_norm", "ov_largest", "qk_norm", "qk_largest")
"""Names of the scores of a head."""


def distance_argument(distance: Any) -> int:
    """Return the distance from a key to a query after checking it."""
    return whole_number("distance", distance, least=0, most=LARGEST_SIZE)


@dataclass(frozen=True, eq=False, repr=False)
class FactoredMatrix:
    """A matrix `left @ right` of low rank. All results are computed from the factors, except `matrix()`,
    which multiplies them.

    Attributes:
        left: first factor, `(rows, rank)`, or one for each of several matrices, `(..., rows, rank)`.
        right: second factor, `(rank, columns)`, or as many.

    Example:
        >>> FactoredMatrix(torch.ones(4, 1), torch.ones(1, 4)).norm()
        tensor(4.)
    """

    left: Float[Tensor, "*matrices rows rank"]
    right: Float[Tensor, "*matrices rank columns"]

    def __repr__(self) -> str:
        rows, columns = self.shape
        return f"FactoredMatrix({rows} x {columns}, rank {self.left.shape[-1]} or less)"

    @property
    def shape(self) -> tuple[int, int]:
        """Numbers of rows and columns of the product."""
        return self.left.shape[-2], self.right.shape[-1]

    def transposed(self) -> "FactoredMatrix":
        """Return the transposed matrix, with the same factors in reverse order."""
        return FactoredMatrix(self.right.mT, self.left.mT)

    def matrix(self) -> Float[Tensor, "*matrices rows columns"]:
        """Return the product of the factors, a dense matrix."""
        return self.left @ self.right

    def singular_values(self) -> Float[Tensor, "*matrices values"]:
        """Return the largest singular values in descending order, `rank` of them or as many as the matrix has. All
        others are 0.
        """
        # With left = Q R and right^T = P S, the product Q (R S^T) P^T has the singular values of R S^T.
        core = torch.linalg.qr(self.left, mode="r").R @ torch.linalg.qr(self.right.mT, mode="r").R.mT
        values: Tensor = torch.linalg.svdvals(core)
        return values

    def norm(self) -> Float[Tensor, "*matrices"]:
        """Return the Frobenius norm: the root of the sum of the squared singular values."""
        norm: Tensor = self.singular_values().norm(dim=-1)
        return norm

    def eigenvalues(self) -> Tensor:
        """Return the complex eigenvalues of a square matrix, `rank` of them; all others are 0.

        The matrices `left @ right` and `right @ left` have the same eigenvalues other than 0.
        """
        values: Tensor = torch.linalg.eigvals(self.right @ self.left)
        return values


def positive_share(eigenvalues: Tensor) -> Float[Tensor, "*matrices"]:
    """Return the real part of the sum of the eigenvalues `(..., values)` of each matrix, divided by the sum of their
    absolute values: 1 if all are positive, -1 if all are negative, and NaN if all are 0 (Elhage et al. 2021, section
    "Summarizing OV/QK Matrices").
    """
    share: Tensor = eigenvalues.sum(-1).real / eigenvalues.abs().sum(-1)
    return share


@dataclass(frozen=True, eq=False, repr=False)
class CircuitMatrices:
    """OV and QK matrices of all heads of a model, from residual stream to residual stream `(width, width)`, kept as
    factors of rank head_dim.

        OV = f P W_O W_V N          QK = s (R(i) W_Q N)^T (R(j) W_K N)

    W_Q, W_K, W_V and W_O are the head's slices of the projections; with grouped heads, W_K and W_V are those of its
    key/value head. N is the linear part of the norm before attention: its weight and, in a layer norm, the subtraction
    of the mean. P is that of a norm after attention (Gemma 2), otherwise 1. s is the scale of the scores, and f the
    factor with which heads write into the stream (1 in most models). R is the rotation by the positions i of the query
    and j of the key, which matters through the distance i - j only.

    In a model without a linear residual stream (`has_linear_stream`), such as BERT, whose norms follow each sum, no
    norm is folded in: x is the input of the attention module, and OV x is a part of its output.

    Left out are the divisions by norms, which multiply what a head reads at each token by a positive number; all
    biases; and caps of scores and logits.

    Attributes:
        heads: labels of each head: layer, head, kv_head, module, kind.
        metadata: model, versions and settings.
    """

    heads: tuple[Mapping[str, Any], ...]
    metadata: Mapping[str, Any]
    _modules: list[ModuleMaps]
    _stream: StreamFactors | str
    _products: Mapping[str, Tensor | str]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({counted(len(self.heads), 'head')} of {self.metadata['model']['name']})"

    @property
    def has_linear_stream(self) -> bool:
        """True if heads write into a sum that all later heads read, through one norm at most."""
        return isinstance(self._stream, StreamFactors)

    def ov(self, layer: int, head: int) -> FactoredMatrix:
        """Return the OV matrix of a head, by zero-based layer and head: what the head writes into the residual stream,
        for what it reads from it, with an attention weight of 1.

        Raises:
            InputError: there is no such head.
        """
        maps, index = self._find(layer, head)
        output, value = self.ov_factors(maps)
        return FactoredMatrix(output[index], value[index])

    def qk(self, layer: int, head: int, distance: int = 0) -> FactoredMatrix:
        """Return the QK matrix of a head, by zero-based layer and head: the score of query i and key j is
        `x_i^T QK x_j`.

        Args:
            layer: zero-based layer.
            head: zero-based head in the layer.
            distance: number of tokens from the key to the query, for models with rotary positions: their QK matrix
                depends on it. At 0 queries and keys are not rotated against each other, so that the score is that of a
                token with itself. Without rotary positions, QK is the same at all distances.

        Raises:
            InputError: there is no such head; the scores of the module are not of this form, as with norms of queries
                and keys (Qwen3, Gemma 3), or biases by position (T5); or the distance is not a whole number of 0 or
                more.
        """
        maps, index = self._find(layer, head)
        query, key = self.qk_factors(maps, distance)
        return FactoredMatrix(query[index], key[index])

    def modules(self) -> list[ModuleMaps]:
        """Return the linear maps of each attention module, in the order of their calls."""
        return list(self._modules)

    def why_not(self, score: str) -> str | None:
        """Return what stands against a score, or against a kind of composition, in this model; None if it has it.

        Raises:
            InputError: the name is none of a score, such as "copying", or of a kind of composition, such as "q".
        """
        if score not in (*SCORES, *COMPOSITION_KINDS):
            raise InputError("score", expected=f"one of {', '.join((*SCORES, *COMPOSITION_KINDS))}", got=repr(score))
        if score in ("q", "k", "v", "copying", "matching") and isinstance(self._stream, str):
            return self._stream
        product = self._products.get(score)
        if isinstance(product, str):
            return product
        if score in ("q", "k", "matching", "qk_norm", "qk_largest"):
            return next((maps.why_no_qk for maps in self._modules if maps.why_no_qk is not None), None)
        return None

    def vocabulary_product(self, score: str) -> Float[Tensor, "width width"]:
        """Return the sum over tokens of what a token adds to the stream times what is read for it: its embedding for
        the score "matching", its output embedding for "copying".
        """
        product = self._products[score]
        assert isinstance(product, Tensor)
        return product

    def _find(self, layer: int, head: int) -> tuple[ModuleMaps, int]:
        """Return the maps of the module with a head, and the head's index in it."""
        for labels in self.heads:
            if (labels["layer"], labels["head"]) == (layer, head):
                return next(maps for maps in self._modules if maps.path == labels["module"]), labels["head"]
        raise InputError("head", expected="a (layer, head) of the model", got=(layer, head))

    def ov_factors(self, maps: ModuleMaps) -> tuple[Tensor, Tensor]:
        """Return the factors of the OV matrices of a module, `(heads, width, value_dim)` and `(heads, value_dim,
        width)`.
        """
        factor = 1.0
        if isinstance(self._stream, StreamFactors):
            factor = self._stream.of_modules[self._modules.index(maps)]
        group = len(maps.query) // len(maps.value)
        return maps.output * factor, maps.value.repeat_interleave(group, 0)

    def qk_factors(self, maps: ModuleMaps, distance: int) -> tuple[Tensor, Tensor]:
        """Return the factors of the QK matrices of a module, `(heads, width, head_dim)` and `(heads, head_dim, width)`,
        for queries `distance` tokens after their keys.

        Raises:
            InputError: the scores of the module are not bilinear.
        """
        distance = distance_argument(distance)
        if maps.why_no_qk is not None:
            expected = "scores that are a bilinear form of the residual stream"
            raise InputError("model", expected=expected, got=maps.why_no_qk, remedy="use OV matrices, copying or v")
        positions = torch.zeros(maps.query.shape[-1], dtype=torch.int64, device=maps.query.device)
        query = maps.rotation.rotate(maps.query.mT, positions + distance) * maps.scale[:, None, None]
        key = maps.rotation.rotate(maps.key.mT, positions).mT
        return query, key.repeat_interleave(len(maps.query) // len(maps.key), 0)
