"""Tensors of attention in a running model: scores, weights and outputs, from their computation to their use."""

from typing import Any
from weakref import WeakSet

from headwise.intercept.tensor_map import TensorMap


class FollowedAttention:
    """Records of the attention scores, weights and outputs in a running model, from their computation to their use, in
    one thread. The description of each attribute names the file that defines its records.

    Attributes:
        scores: products of queries and keys, and what was computed from them (`score_products`).
        factors: broadcast products of two tensors, with the two (`broadcast_products`).
        places: places of the elements of scores and weights (`score_places`).
        next_place: number of the next place, unique among all products.
        weights: results of softmax, and what was computed from them (`softmax_weights`).
        kept_scores: scores of these weights, which are copied before the model overwrites them (`softmax_weights`).
        softmaxes: softmaxes whose innermost module still runs (`eager_softmax`).
        outputs: attention outputs, and what was computed from them (`output_tracking`).
        may_change: True if an interceptor may change one of these outputs.
        pending: attention outputs whose calls were not reported to the interceptors yet (`output_tracking`).
        unchanged: module calls of reported attention whose output an interceptor changes at its first use, until then;
            the key stands for the change (`attention_output`).
    """

    def __init__(self) -> None:
        self.scores: TensorMap[Any] = TensorMap()
        self.factors: TensorMap[Any] = TensorMap()
        self.places: TensorMap[Any] = TensorMap()
        self.next_place = 1
        self.weights: TensorMap[Any] = TensorMap()
        self.kept_scores: WeakSet[Any] = WeakSet()
        self.softmaxes: list[Any] = []
        self.outputs: TensorMap[Any] = TensorMap()
        self.may_change = False
        self.pending: list[Any] = []
        self.unchanged: dict[object, list[Any]] = {}
