"""Softmaxes in attention modules whose results have not been multiplied with the values yet."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from headwise.intercept.additive_masks import hides_all_keys, with_infinite
from headwise.intercept.module_call import ModuleCall
from headwise.intercept.origin import Origin
from headwise.shapes import Float

HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead", "num_heads_per_partition")
"""Names under which modules store their number of heads."""


@dataclass(eq=False)
class PendingSoftmax:
    """Attention weights that a module computed with softmax and has not multiplied with the values yet, with the data
    needed to track them until then.

    Attributes:
        weights: the weights by head; None where it is unknown which axis is the heads'.
        tensor: tensor of the model that holds the weights now: the softmax's result, or what followed from it.
        module_calls: the running module calls at the softmax, outermost first.
        scores: argument of the softmax.
        zeroed: True where the module filled weights with zeros; None where it did not.
        origin: sources of the scores.
        is_dropped: True if dropout was applied to `tensor`; `weights` are those before dropout.
    """

    weights: Float[Tensor, "batch heads queries keys"] | None
    tensor: Tensor
    module_calls: list[ModuleCall]
    scores: Tensor
    origin: Origin
    zeroed: Tensor | None = None
    is_dropped: bool = False

    def fill(self, result: Tensor, mask: Tensor, value: Tensor | float) -> None:
        """Replace the tracked weights by `result`, which a call of `masked_fill` on them returned after writing `value`
        where `mask` is True. If `value` is 0, also record these positions, since their keys count as hidden.
        """
        if self.is_dropped and self.weights is not None:
            filled = self.weights.reshape(self.tensor.shape).masked_fill(mask, value)
        else:
            filled = result
        self.tensor, self.weights = result, weights_by_head(filled, self.module_calls[-1].module)
        if not bool(value):
            self.zeroed = mask if self.zeroed is None else self.zeroed | mask

    def weights_of_visible_rows(self) -> Float[Tensor, "batch heads queries keys"]:
        """Return the weights by head, with 0 in the rows in which minus infinity hides all keys. The softmax of torch
        returns NaN there, which is not a defect of the model: such rows have no weights.
        """
        assert self.weights is not None
        if not bool(self.weights[..., 0].isnan().any()):
            return self.weights
        hides_all = self.scores.amax(-1) == -torch.inf
        return self.weights.masked_fill(hides_all.reshape(*self.weights.shape[:3], 1), 0.0)

    def uniform_weights(self) -> Tensor:
        """Return uniform attention weights in the shape of the model's own (the attribute `tensor`): in each query row,
        equal weights with sum 1 for all visible keys, and 0 for hidden keys.

        Keys that were filled with zeros are not visible. A row whose scores are all hidden by a finite number sees all
        keys, as in torch's softmax.
        """
        hidden = with_infinite(self.scores) == -torch.inf
        hidden = hidden & ~(hides_all_keys(self.scores) & (self.scores.amax(-1, keepdim=True) > -torch.inf))
        hidden = hidden.reshape(self.tensor.shape)
        visible = (hidden if self.zeroed is None else hidden | self.zeroed).logical_not().to(self.tensor.dtype)
        return visible / visible.sum(-1, keepdim=True).clamp(min=1)


def weights_by_head(result: Tensor, module: nn.Module) -> Float[Tensor, "batch heads queries keys"] | None:
    """Return `result`, which a softmax in `module` returned, reshaped to `(batch, heads, queries, keys)`. If `result`
    has three axes, the first is split into batch and heads by the number of heads that the module stores. Return None
    if that number is needed but missing, or does not fit the shape.
    """
    counts = [getattr(module, name, None) for name in HEAD_COUNTS]
    heads = [count for count in counts if isinstance(count, int) and count > 0]
    if result.ndim == 4:
        return result if not heads or result.shape[1] in heads else None
    if result.ndim != 3 or not heads or len(result) % heads[0]:
        return None
    return result.view(-1, heads[0], *result.shape[1:])
