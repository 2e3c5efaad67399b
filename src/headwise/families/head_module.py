"""Places of the heads of one attention module: in its parameters, and in the numbers that it stores."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from headwise.errors import InputError
from headwise.shapes import Float

HeadKind = Literal["query", "kv"]
"""Query heads, or key/value heads, which several query heads may share."""

HeadPart = Literal["query", "rotated query", "key", "value", "output"]
"""Features of heads that a projection computes or, for "output", reads. Latent attention rotates only a part of each
query, "rotated query"."""

HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "n_head", "heads", "nhead", "num_heads_per_partition")
"""Names under which modules store their number of query heads."""

COUNTS: Mapping[str, Callable[[int, int, int], int]] = {
    **dict.fromkeys(HEAD_COUNTS, lambda heads, kv_heads, head_dim: heads),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), lambda heads, kv_heads, head_dim: kv_heads),
    "num_key_value_groups": lambda heads, kv_heads, head_dim: heads // kv_heads,
    **dict.fromkeys(("all_head_size", "inner_dim", "split_size"), lambda heads, kv_heads, head_dim: heads * head_dim),
}
"""Attributes of attention modules that follow from their numbers of heads: functions of the numbers of query heads and
key/value heads and of head_dim."""


@dataclass(frozen=True)
class KeptHeads:
    """Numbers of the query heads and of the key/value heads that remain in one attention module after other heads are
    removed.

    Attributes:
        query: indices of the query heads, ascending.
        kv: indices of the key/value heads, ascending; each remaining one is attended with by equally many query heads.
    """

    query: tuple[int, ...]
    kv: tuple[int, ...]


@dataclass(frozen=True)
class HeadBlocks:
    """Location of heads in a parameter: blocks of consecutive indices along one axis, one block per head. Examples are
    output rows of a query projection, and input columns of an output projection.

    Attributes:
        parameter: path of the parameter in the model.
        axis: axis of the parameter.
        part: features of the heads; None for other numbers of a query head, such as gates and sinks.
        heads: number of heads.
        width: length of one block.
        start: first index of the first block.
        step: distance from the first index of a block to that of the next one. It exceeds `width` where the parts of
            one head stand together, as in GPT-NeoX.
    """

    parameter: str
    axis: int
    part: HeadPart | None
    heads: int
    width: int
    start: int
    step: int

    @property
    def kind(self) -> HeadKind:
        """Kind of the heads whose weights are in these blocks: "kv" for key/value heads, otherwise "query"."""
        return "kv" if self.part in ("key", "value") else "query"

    def view(self, parameter: Tensor) -> Float[Tensor, "heads width *others"]:
        """Return a view of a parameter in which the first axis is the head, and the second one the indices in the
        head's block.
        """
        length = (self.heads - 1) * self.step + self.width
        rows = parameter.movedim(self.axis, 0).narrow(0, self.start, length)
        return rows.unfold(0, self.width, self.step).movedim(-1, 1)


@dataclass(frozen=True)
class HeadModule:
    """Attention module, described by its numbers of query heads and key/value heads, the widths of these heads, and the
    rows and columns of its weights that belong to each head.

    Attributes:
        path: path of the module in the model.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        head_dim: width of a query head and of a key head.
        value_dim: width of a value head.
        blocks: places of the heads in the parameters.
        output: path of the output projection, whose input is all head outputs side by side.
    """

    path: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    blocks: tuple[HeadBlocks, ...]
    output: str

    def parameters(self, model: nn.Module) -> list[tuple[nn.Parameter, list[HeadBlocks]]]:
        """Return each parameter of the module that contains heads, with the blocks of indices of these heads. All
        blocks of a parameter are along the same axis. Raise `InputError` if the parameter's length along this axis
        differs from the length of all blocks together.
        """
        blocks_of: dict[str, list[HeadBlocks]] = {}
        for each in self.blocks:
            blocks_of.setdefault(each.parameter, []).append(each)
        parameters = []
        for path, blocks in blocks_of.items():
            parameter, length = model.get_parameter(path), sum(each.heads * each.width for each in blocks)
            if parameter.shape[blocks[0].axis] != length:
                got = f"length {parameter.shape[blocks[0].axis]} of {path}"
                raise InputError("model", expected=f"{length} numbers for {self.num_heads} heads", got=got)
            parameters.append((parameter, blocks))
        return parameters

    def kept(self, query: Iterable[int]) -> KeptHeads:
        """Return the heads of this module that remain if it keeps the query heads `query`: these, and the key/value
        heads that they use. Raise `InputError` unless remaining key/value heads keep equally many query heads.
        """
        heads = sorted(set(query))
        if not heads or not 0 <= heads[0] <= heads[-1] < self.num_heads:
            expected = f"heads from 0 to {self.num_heads - 1}, at least one, for {self.path}"
            raise InputError("heads", expected=expected, got=heads or "none")
        group = self.num_heads // self.num_kv_heads
        sizes = [sum(head // group == kv for head in heads) for kv in range(self.num_kv_heads)]
        if len({size for size in sizes if size}) != 1:
            expected = f"equally many query heads of each remaining key/value head in {self.path}"
            raise InputError("heads", expected=expected, got=heads)
        return KeptHeads(tuple(heads), tuple(kv for kv, size in enumerate(sizes) if size))

    def set_counts(self, module: nn.Module, kept: KeptHeads) -> None:
        """Set the attributes of an attention module that state numbers of heads, or widths that follow from them, to
        their values for the remaining heads.
        """
        for name, count in COUNTS.items():
            if name not in vars(module):
                continue
            dense = count(self.num_heads, self.num_kv_heads, self.head_dim)
            if getattr(module, name) != dense:
                got = f"{name} = {getattr(module, name)}"
                raise InputError("model", expected=f"{name} = {dense} in {self.path}", got=got)
            setattr(module, name, count(len(kept.query), len(kept.kv), self.head_dim))


Part = tuple[HeadPart | None, int, int]
"""Features of heads, the number of heads, and the width of each."""


def blocks_along(parameter: str, axis: int, parts: Sequence[Part], *, is_joint: bool = False) -> list[HeadBlocks]:
    """Return the blocks of indices of each head along an axis of a parameter. `parts` lists what the axis contains,
    such as queries, keys and values, without gaps. If `is_joint`, all parts of a head precede those of the next head;
    otherwise, all heads of a part precede the next part.
    """
    start, joint_width = 0, sum(width for _, _, width in parts)
    blocks: list[HeadBlocks] = []
    for part, heads, width in parts:
        blocks.append(HeadBlocks(parameter, axis, part, heads, width, start, joint_width if is_joint else width))
        start += width if is_joint else heads * width
    return blocks


def projection_blocks(
    model: nn.Module, path: str, axis: int, parts: Sequence[Part], *, is_joint: bool = False
) -> list[HeadBlocks]:
    """Return the blocks of indices of each head in the weight of a projection, along `axis`, and in its bias, if it has
    one. `parts` lists what the axis contains, such as queries, keys and values.
    """
    blocks = blocks_along(f"{path}.weight", axis, parts, is_joint=is_joint)
    if getattr(model.get_submodule(path), "bias", None) is not None:
        blocks += blocks_along(f"{path}.bias", 0, parts, is_joint=is_joint)
    return blocks
