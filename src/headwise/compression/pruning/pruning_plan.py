"""Plans of pruning: which heads of each attention module remain, in a form that can be read, saved and applied."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from headwise.checks import is_whole
from headwise.errors import InputError, require
from headwise.page.columns import ModelIdentity, is_identity
from headwise.runs.json_result import JsonResult, is_number, require_each
from headwise.settings import CONSTRAINTS
from headwise.wording import counted

LOADERS = ("transformers", "headwise", "none")
"""Packages that load a pruned model; "none" if no package does."""

DEFAULT_ROUNDS = 8
"""Number of times that scores by measurement, or a function, score the heads."""

Head = tuple[int, int]
"""Layer and number of a head, both zero-based."""


@dataclass(frozen=True)
class PlannedModule:
    """Attention module in a pruning plan, with its numbers of query and key/value heads before pruning, and the query
    heads that remain (`kept`). Its `kind` is "self" or "cross" attention.

    Attributes:
        layer: number of the layer.
        module: path of the module in the model.
        kind: "self" or "cross" attention.
        num_heads: number of query heads before pruning.
        num_kv_heads: number of key/value heads before pruning.
        kept: query heads that remain.
    """

    layer: int
    module: str
    kind: str
    num_heads: int
    num_kv_heads: int
    kept: tuple[int, ...]

    @property
    def kept_of_groups(self) -> list[int]:
        """Number of query heads that remain in each group of query heads with the same key/value head."""
        group = self.num_heads // self.num_kv_heads
        return [sum(head // group == number for head in self.kept) for number in range(self.num_kv_heads)]

    @property
    def kept_kv_heads(self) -> int:
        """Number of key/value heads that remain: those with at least one remaining query head."""
        return sum(number > 0 for number in self.kept_of_groups)

    def require_consistent(self) -> None:
        """Raise `InputError` if a field has the wrong type, or if the remaining heads are not distinct, ascending,
        valid head numbers of this module.
        """
        numbers = (self.layer, 0), (self.num_heads, 1), (self.num_kv_heads, 1)
        if not isinstance(self.module, str) or self.kind not in ("self", "cross"):
            raise InputError("plan", expected="a path and a kind of attention", got=f"{self.module!r}, {self.kind!r}")
        if not all(is_whole(*each) for each in numbers) or self.num_heads % self.num_kv_heads:
            got = f"layer {self.layer!r} with {self.num_heads!r} heads and {self.num_kv_heads!r} key/value heads"
            raise InputError("plan", expected=f"whole numbers that fit each other for {self.module}", got=got)
        are_heads = all(is_whole(head, 0) and head < self.num_heads for head in self.kept)
        if not self.kept or not are_heads or list(self.kept) != sorted(set(self.kept)):
            expected = f"distinct, ascending heads from 0 to {self.num_heads - 1}, at least one, for {self.module}"
            raise InputError("plan", expected=expected, got=list(self.kept))


@dataclass(frozen=True)
class PruningPlan(JsonResult):
    """Pruning plan: the attention heads that remain in each attention module of a model after pruning.

    Attributes:
        modules: the attention modules, in the order of the model.
        constraint: "uniform", "groups" or "free".
        keep: share of the heads that should remain.
        scores: what decided which heads remain.
        rounds: number of times that the remaining heads were scored.
        loader: what loads the pruned model: "transformers", or "headwise" where only `headwise.load` can; "none" for a
            model that is not of `transformers`; None if the model was not known.
        identity: identity of the model; None if it is unknown.
    """

    ARGUMENT, NOUN = "plan", "a plan"

    modules: tuple[PlannedModule, ...]
    constraint: str
    keep: float
    scores: str
    rounds: int
    loader: str | None = None
    identity: ModelIdentity | None = None

    @property
    def heads(self) -> int:
        """Number of query heads in all modules of the plan before pruning."""
        return sum(each.num_heads for each in self.modules)

    @property
    def kept_heads(self) -> int:
        """Number of query heads that remain in all modules of the plan."""
        return sum(len(each.kept) for each in self.modules)

    @property
    def removed(self) -> tuple[Head, ...]:
        """Query heads that pruning removes, as pairs of layer and head number."""
        return tuple(
            (each.layer, head) for each in self.modules for head in range(each.num_heads) if head not in each.kept
        )

    def __repr__(self) -> str:
        return f"PruningPlan({self.kept_heads} of {counted(self.heads, 'head')} remain, {self.constraint})"

    def __str__(self) -> str:
        loads = {
            "transformers": "plain transformers loads the pruned model",
            "headwise": "only headwise.load loads the pruned model",
            "none": "the pruned model is not of transformers, and no loader knows it",
            None: "whether plain transformers loads the pruned model depends on the model: pass it as model=",
        }
        lines = [
            f"{self.kept_heads} of {counted(self.heads, 'head')} remain ({self.kept_heads / self.heads:.0%}), "
            f"constraint {self.constraint}, by {self.scores}, scored {counted(self.rounds, 'time')}",
            loads[self.loader],
            "",
            "layer  heads    key/value  removed",
        ]
        for each in self.modules:
            removed = [str(head) for head in range(each.num_heads) if head not in each.kept]
            heads, kv_heads = f"{len(each.kept)}/{each.num_heads}", f"{each.kept_kv_heads}/{each.num_kv_heads}"
            lines.append(f"{each.layer:5}  {heads:7}  {kv_heads:9}  {' '.join(removed) or 'none'}")
        return "\n".join(lines)

    def table(self) -> Any:
        """Return a pandas DataFrame with one row per attention module of the plan.

        Raises:
            MissingExtra: pandas is not installed.
        """
        rows = [{**asdict(each), "kept_kv_heads": each.kept_kv_heads} for each in self.modules]
        return require("pandas", purpose="a table", extra="tables").DataFrame(rows)

    def require_consistent(self) -> None:
        """Raise `InputError` if a field has the wrong type, modules repeat, or the remaining heads are not valid
        numbers of their module or contradict the constraint.
        """
        require_each(
            self.ARGUMENT,
            (
                (self.modules, len(self.modules) > 0, "at least one attention module"),
                (self.constraint, self.constraint in CONSTRAINTS, f"a constraint of {', '.join(CONSTRAINTS)}"),
                (self.keep, is_number(self.keep) and 0 < self.keep <= 1, "a share keep above 0 and at most 1"),
                (self.scores, isinstance(self.scores, str), "the name of the scores"),
                (self.rounds, is_whole(self.rounds, 0), "a whole number of rounds"),
                (self.loader, self.loader in (*LOADERS, None), f"a loader of {', '.join(LOADERS)}, or null"),
                (self.identity, is_identity(self.identity), "an identity of the model, or null"),
            ),
        )
        for each in self.modules:
            each.require_consistent()
        paths, layers = [each.module for each in self.modules], [each.layer for each in self.modules]
        counts = [len(each.kept) for each in self.modules]
        require_each(
            self.ARGUMENT,
            (
                (paths, len(set(paths)) == len(paths), "each module once"),
                (layers, len(set(layers)) == len(layers), "a layer of its own for each module"),
                (counts, self._is_kept_constraint, f"numbers of heads that the constraint {self.constraint} allows"),
            ),
        )

    @property
    def _is_kept_constraint(self) -> bool:
        """True if the numbers of remaining heads satisfy the plan's constraint. A group is the set of query heads with
        the same key/value head. With "uniform", all groups of a module must keep equally many heads; otherwise, each
        group must remain or be removed as a whole. Unless the constraint is "free", modules of the same size must keep
        equally many heads.
        """
        for each in self.modules:
            group, remaining = each.num_heads // each.num_kv_heads, set(each.kept_of_groups)
            are_equal, are_whole = group == 1 or len(remaining) == 1, remaining <= {0, group}
            if not (are_equal if self.constraint == "uniform" else are_whole):
                return False
        kept = {(each.num_heads, each.num_kv_heads, len(each.kept)) for each in self.modules}
        return self.constraint == "free" or len({sizes[:2] for sizes in kept}) == len(kept)


def planned_modules(rows: Sequence[Any], removed: Mapping[Head, Any] | frozenset[Head]) -> tuple[PlannedModule, ...]:
    """Return the attention modules of a pruning plan. In each module, all heads except those in `removed` remain.
    `rows` has one object per head of the model, with the attributes `layer`, `head`, `kv_head`, `module` and `kind`.
    """
    by_module: dict[tuple[int, str, str], list[Any]] = {}
    for row in rows:
        by_module.setdefault((row.layer, row.module, row.kind), []).append(row)
    return tuple(
        PlannedModule(
            layer=layer,
            module=module,
            kind=kind,
            num_heads=len(heads),
            num_kv_heads=len({row.kv_head for row in heads}),
            kept=tuple(sorted(row.head for row in heads if (layer, row.head) not in removed)),
        )
        for (layer, module, kind), heads in by_module.items()
    )
