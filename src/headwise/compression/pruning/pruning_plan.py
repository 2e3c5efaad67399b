"""Plans of pruning: which heads of each attention module remain, in a form that can be read, saved and applied."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from headwise.errors import InputError, require
from headwise.page.columns import ModelIdentity
from headwise.runs.files import write_atomically
from headwise.wording import counted

FORMAT = 1
"""Version of the JSON format."""

Head = tuple[int, int]
"""Layer and number of a head, both zero-based."""


@dataclass(frozen=True)
class PlannedModule:
    """Attention module of a plan.

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
    def kept_kv_heads(self) -> int:
        """Number of key/value heads that remain."""
        group = self.num_heads // self.num_kv_heads
        return len({head // group for head in self.kept})


@dataclass(frozen=True)
class PruningPlan:
    """Heads of a model that remain after pruning.

    Attributes:
        modules: the attention modules, in the order of the model.
        constraint: "uniform", "groups" or "free".
        keep: share of the heads that should remain.
        scores: what decided which heads remain.
        rounds: number of times that the remaining heads were scored.
        loader: what loads the pruned model: "transformers", or "headwise" where only `headwise.load` can; None if the
            model was not known.
        identity: identity of the model; None if it is unknown.
    """

    modules: tuple[PlannedModule, ...]
    constraint: str
    keep: float
    scores: str
    rounds: int
    loader: str | None = None
    identity: ModelIdentity | None = None

    @property
    def heads(self) -> int:
        """Number of heads before pruning."""
        return sum(each.num_heads for each in self.modules)

    @property
    def kept_heads(self) -> int:
        """Number of heads that remain."""
        return sum(len(each.kept) for each in self.modules)

    @property
    def removed(self) -> tuple[Head, ...]:
        """Heads that are removed."""
        return tuple(
            (each.layer, head) for each in self.modules for head in range(each.num_heads) if head not in each.kept
        )

    def __repr__(self) -> str:
        return f"PruningPlan({self.kept_heads} of {counted(self.heads, 'head')} remain, {self.constraint})"

    def __str__(self) -> str:
        loads = {
            "transformers": "plain transformers loads the pruned model",
            "headwise": "only headwise.load loads the pruned model",
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
        """Return a pandas DataFrame with one row per attention module.

        Raises:
            MissingExtra: pandas is not installed.
        """
        rows = [{**asdict(each), "kept_kv_heads": each.kept_kv_heads} for each in self.modules]
        return require("pandas", purpose="a table", extra="tables").DataFrame(rows)

    def to_json(self) -> str:
        """Return the plan as JSON."""
        content = asdict(self) | {"identity": None if self.identity is None else self.identity.as_json()}
        return json.dumps({"format": FORMAT, **content}, indent=1)

    @staticmethod
    def from_json(text: str) -> "PruningPlan":
        """Return the plan that `to_json` wrote.

        Raises:
            InputError: the text is no such plan.
        """
        try:
            content = json.loads(text)
            if content.pop("format") != FORMAT:
                raise ValueError("another format")
            modules = tuple(
                PlannedModule(**{**module, "kept": tuple(module["kept"])}) for module in content.pop("modules")
            )
            identity = content.pop("identity")
            return PruningPlan(modules, **content, identity=None if identity is None else ModelIdentity(*identity))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InputError("plan", expected="JSON of a PruningPlan", got=repr(text[:60])) from error

    def save(self, path: str | Path) -> None:
        """Write the plan to a JSON file."""
        write_atomically(Path(path), self.to_json().encode())

    @staticmethod
    def load(path: str | Path) -> "PruningPlan":
        """Return the plan in a JSON file.

        Raises:
            InputError: the file cannot be read, or contains no plan.
        """
        try:
            return PruningPlan.from_json(Path(path).read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError) as error:
            raise InputError("plan", expected="a file with a plan", got=repr(str(path))) from error


def planned_modules(rows: Sequence[Any], removed: Mapping[Head, Any] | frozenset[Head]) -> tuple[PlannedModule, ...]:
    """Return the modules of a plan from the rows of a table of heads, without the removed heads.

    Args:
        rows: one row per head, with `layer`, `head`, `kv_head`, `module` and `kind`.
        removed: heads that are removed.
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
