"""Changes of the heads in the parameters of an attention module, in place: their order, and linear maps of features."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from headwise.errors import InputError
from headwise.families.head_module import HeadBlocks, HeadModule, HeadPart
from headwise.shapes import Float


def check_parameters(model: nn.Module, modules: Sequence[HeadModule]) -> None:
    """Raise `InputError` if the heads of attention modules cannot be changed in place. Parameters prevent a change in
    place if their sizes differ from those that the heads imply, if they are quantised, or if several modules share
    them.
    """
    owner_of: dict[int, str] = {}
    for module in modules:
        for parameter, (blocks, *_) in module.parameters(model):
            if not parameter.is_floating_point():
                got = f"{parameter.dtype} in {blocks.parameter}"
                raise InputError("model", expected="weights in floating point", got=got)
            first = owner_of.setdefault(id(parameter), blocks.parameter)
            if first != blocks.parameter:
                got = f"one for {first} and {blocks.parameter}"
                raise InputError("model", expected="a separate parameter for each projection", got=got)


def reorder_heads(model: nn.Module, module: HeadModule, kv_order: Sequence[int]) -> None:
    """Reorder the key/value heads of an attention module in place, together with their query heads and the columns of
    the output projection. `kv_order[i]` is the present number of the head that moves to place i. The output of the
    module does not change.
    """
    group = module.num_heads // module.num_kv_heads
    query_order = [kv * group + member for kv in kv_order for member in range(group)]

    def reordered(rows: Tensor, blocks: HeadBlocks) -> Tensor:
        return rows[list(kv_order) if blocks.kind == "kv" else query_order]

    _change(model, module, reordered)


def multiply_features(
    model: nn.Module,
    module: HeadModule,
    keys: Float[Tensor, "kv_heads head_dim head_dim"],
    values: Float[Tensor, "kv_heads value_dim value_dim"],
) -> None:
    """Multiply the keys and values of each key/value head by orthogonal matrices, in place, by changes of the
    projections. Queries are multiplied by the matrix of their keys. Columns of the output projection are multiplied by
    the inverse of the matrix of their values. The module's output stays the same if the matrices belong to the sets
    that `key_freedom` and `value_freedom` return.
    """
    group = module.num_heads // module.num_kv_heads
    matrices: dict[HeadPart | None, Tensor] = {
        "query": keys.repeat_interleave(group, 0),
        "key": keys,
        "value": values,
        "output": values.repeat_interleave(group, 0),  # columns of W R^T are R times the columns of W
    }

    def multiplied(rows: Tensor, blocks: HeadBlocks) -> Tensor:
        return rows if blocks.part is None else torch.einsum("hab,hbn->han", matrices[blocks.part].to(rows), rows)

    _change(model, module, multiplied)


def average_heads(
    model: nn.Module,
    module: HeadModule,
    key_weights: Float[Tensor, "groups members"],
    value_weights: Float[Tensor, "groups members"],
) -> None:
    """Replace the key and value projections of each key/value head by a weighted mean over a group of consecutive
    heads, in place. All heads of a group then have equal projections. The weights of each group sum to 1.
    """
    weights: dict[HeadPart | None, Tensor] = {"key": key_weights, "value": value_weights}

    def averaged(rows: Tensor, blocks: HeadBlocks) -> Tensor:
        if blocks.part not in weights:
            return rows
        own = weights[blocks.part].to(rows)
        grouped = rows.reshape(*own.shape, *rows.shape[1:])  # groups, members, width, other
        means = torch.einsum("gm,gmwn->gwn", own, grouped)
        return means.repeat_interleave(own.shape[1], 0)

    _change(model, module, averaged)


@torch.no_grad()
def _change(model: nn.Module, module: HeadModule, change: Callable[[Tensor, HeadBlocks], Tensor]) -> None:
    """Change the weights of all heads of an attention module in place, in float64. The function `change` is called once
    for each `HeadBlocks`, such as those of the queries. Its arguments are the weights there, as `(heads, width, other)`
    with all other axes of the parameter in one, and the `HeadBlocks`. It returns the new weights.
    """
    for blocks in module.blocks:
        part = blocks.view(model.get_parameter(blocks.parameter))
        rows = part.double().reshape(blocks.heads, blocks.width, -1)
        part.copy_(change(rows, blocks).reshape(part.shape))
