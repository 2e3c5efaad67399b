"""Attention modules whose heads can be removed: where parameters, attributes and configuration state the heads."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from torch import nn

from headwise.errors import InputError
from headwise.removal.head_axes import HeadAxis, KeptHeads, kept_heads

COUNTS: Mapping[str, Callable[[int, int, int], int]] = {
    **dict.fromkeys(("num_heads", "num_attention_heads", "n_heads"), lambda heads, kv_heads, head_dim: heads),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), lambda heads, kv_heads, head_dim: kv_heads),
    "num_key_value_groups": lambda heads, kv_heads, head_dim: heads // kv_heads,
    **dict.fromkeys(("all_head_size", "inner_dim", "split_size"), lambda heads, kv_heads, head_dim: heads * head_dim),
}
"""Attributes of attention modules that follow from their numbers of heads: functions of the numbers of query heads and
key/value heads and of head_dim."""


@dataclass(frozen=True)
class HeadModule:
    """Attention module whose heads can be removed.

    Attributes:
        path: path of the module in the model.
        num_heads: number of query heads.
        num_kv_heads: number of key/value heads.
        head_dim: width of a query head and of a key head.
        value_dim: width of a value head.
        axes: places of the heads in the parameters.
        output: path of the output projection, whose input is all head outputs side by side.
        config_fields: field of the module's configuration for each of "heads", "kv_heads" and "head_dim", where it has
            one that states this number alone.
        reads_config: True if the module reads the number of heads from the configuration of all layers.
    """

    path: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    value_dim: int
    axes: tuple[HeadAxis, ...]
    output: str
    config_fields: Mapping[str, str]
    reads_config: bool = False

    def kept(self, query: Iterable[int]) -> KeptHeads:
        """Return the remaining heads of this module, of which the query heads `query` remain.

        Raises:
            InputError: there are none; a head is not in the module; remaining key/value heads would serve different
                numbers of query heads.
        """
        heads = sorted(set(query))
        if not heads or not 0 <= heads[0] <= heads[-1] < self.num_heads:
            expected = f"heads from 0 to {self.num_heads - 1}, at least one, for {self.path}"
            raise InputError("heads", expected=expected, got=heads or "none")
        kept = kept_heads(heads, self.num_heads, self.num_kv_heads)
        if kept is None:
            expected = f"equally many query heads of each remaining key/value head in {self.path}"
            raise InputError("heads", expected=expected, got=heads)
        return kept

    def set_counts(self, module: nn.Module, kept: KeptHeads) -> None:
        """Set the attributes of the module that follow from its numbers of heads.

        Raises:
            InputError: such an attribute has another value than the heads imply.
        """
        for name, count in COUNTS.items():
            if name not in vars(module):
                continue
            dense = count(self.num_heads, self.num_kv_heads, self.head_dim)
            if getattr(module, name) != dense:
                got = f"{name} = {getattr(module, name)}"
                raise InputError("model", expected=f"{name} = {dense} in {self.path}", got=got)
            setattr(module, name, count(len(kept.query), len(kept.kv), self.head_dim))
