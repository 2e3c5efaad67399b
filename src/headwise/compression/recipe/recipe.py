"""Recipes of a compression: TOML files that state model, data and steps, checked before anything runs."""

import tomllib
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields, is_dataclass, replace
from pathlib import Path
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

import torch

from headwise.checks import finite_number, require_one_of, whole_number
from headwise.compression.healing.heal import HealingOptions
from headwise.compression.report.times import LEAST_ROUNDS
from headwise.data.models import is_existing_folder
from headwise.errors import InputError
from headwise.packaged_models import PACKAGED
from headwise.settings import CONSTRAINTS, DOCUMENT_MODES, PRUNING_SCORES, MergeGrouping, MergeMethod

DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}

SectionT = TypeVar("SectionT")


@dataclass(frozen=True)
class DataSection:
    """Section of a compression recipe that names a file or folder of texts, with options of `Texts`. An option that the
    recipe does not state is None.
    """

    path: str
    context: int | None = None
    documents: str | None = None
    batch: int | None = None
    limit: int | None = None
    column: str | None = None

    def __post_init__(self) -> None:
        _require_path("path", self.path)
        for name in ("context", "batch", "limit"):
            if getattr(self, name) is not None:
                whole_number(name, getattr(self, name), least=1)
        if self.documents is not None:
            require_one_of("documents", self.documents, DOCUMENT_MODES)

    def options(self) -> dict[str, Any]:
        """Return the options of `Texts` that the section states, by name."""
        return {name: value for name, value in vars(self).items() if name != "path" and value is not None}


@dataclass(frozen=True)
class PruneSection:
    """Section [prune] of a compression recipe. It has either `keep`, the share of heads that a new pruning plan keeps,
    or `plan`, the path of a saved plan.
    """

    keep: float | None = None
    plan: str | None = None
    constraint: str = "uniform"
    scores: str = "least-squares"
    rounds: int | None = None
    fit: bool = True

    def __post_init__(self) -> None:
        if (self.keep is None) == (self.plan is None):
            got = "neither" if self.plan is None else "both"
            raise InputError("keep", expected="one of keep and plan", got=got)
        if self.plan is not None:
            _require_path("plan", self.plan)
        if self.keep is not None and not 0 < finite_number("keep", self.keep) <= 1:
            raise InputError("keep", expected="a share above 0 and at most 1", got=self.keep)
        require_one_of("constraint", self.constraint, CONSTRAINTS)
        require_one_of("scores", self.scores, PRUNING_SCORES)
        if self.rounds is not None:
            whole_number("rounds", self.rounds, least=1)


@dataclass(frozen=True)
class MergeSection:
    """Section [merge] of a compression recipe: the number of key/value heads after merging, and options of
    `hw.merge_kv`.
    """

    kv_heads: int
    method: str = "procrustes"
    grouping: str = "adjacent"

    def __post_init__(self) -> None:
        whole_number("kv_heads", self.kv_heads, least=1)
        require_one_of("method", self.method, get_args(MergeMethod))
        require_one_of("grouping", self.grouping, get_args(MergeGrouping))


@dataclass(frozen=True)
class HealSection(HealingOptions):
    """Section [heal] of a compression recipe: options of `hw.heal`, which trains the compressed model. If `batch` is
    None, the batch size is that of the data.

    Attributes:
        batch: sequences per batch; None for that of the data.
    """

    batch: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.batch is not None:
            whole_number("batch", self.batch, least=1)


@dataclass(frozen=True)
class ReportSection:
    """Section [report] of a compression recipe: options of `hw.compression_report`, which compares the dense and the
    compressed model.
    """

    prompt: int = 128
    new_tokens: int = 32
    batches: tuple[int, ...] = (1, 8)
    rounds: int = 12

    def __post_init__(self) -> None:
        whole_number("prompt", self.prompt, least=1)
        whole_number("new_tokens", self.new_tokens, least=2)
        for size in self.batches:
            whole_number("batches", size, least=1)
        whole_number("rounds", self.rounds, least=LEAST_ROUNDS)


@dataclass(frozen=True)
class CompressionRecipe:
    """Content of a compression recipe: a TOML file that states a model, its data, and the steps that make it smaller.
    Steps that are left out are None. The held-out data (`verify`) have the options of `data` by default.

    Attributes:
        model: name of the model, as in `hw.load`.
        data: texts for scores, fitting and healing.
        verify: held-out texts; options that are not stated are those of `data`.
        prune, merge, heal: the steps; None for one that is left out.
        report: report of the dense and the smaller model; None for none.
        revision, dtype, device: as the options of the command line.
    """

    model: str
    data: DataSection
    verify: DataSection
    prune: PruneSection | None = None
    merge: MergeSection | None = None
    heal: HealSection | None = None
    report: ReportSection | None = None
    revision: str | None = None
    dtype: str | None = None
    device: str | None = None

    def __post_init__(self) -> None:
        if self.prune is None and self.merge is None:
            raise InputError("recipe", expected="a section [prune] or [merge]", got="neither")
        if self.dtype is not None:
            require_one_of("dtype", self.dtype, DTYPES)
        if (self.verify.documents or self.data.documents) == "pack":
            expected = "whole, truncate or cut in [verify], whose standard errors need separate documents"
            raise InputError("documents", expected=expected, got="'pack'")

    @property
    def stages(self) -> list[str]:
        """Names of the steps in the recipe, in their order: some of "pruned", "merged" and "healed". The folders of the
        models have these names.
        """
        steps = (("pruned", self.prune), ("merged", self.merge), ("healed", self.heal))
        return [name for name, section in steps if section is not None]


def read_recipe(file: str | Path) -> CompressionRecipe:
    """Return the compression recipe in a TOML file. Relative paths in the recipe start at the folder of this file."""
    try:
        path = Path(file)
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, TypeError) as error:  # not UTF-8 and not TOML are ValueErrors
        reason = getattr(error, "strerror", None) or str(error)
        raise InputError("recipe", expected=f"a TOML file {str(file)!r} that can be read", got=reason) from None
    recipe = _section(CompressionRecipe, content, "")
    folder, prune = path.parent, recipe.prune
    if prune is not None and prune.plan is not None:
        prune = replace(prune, plan=str(folder / prune.plan))
    is_folder = recipe.model not in PACKAGED and is_existing_folder(folder / recipe.model)
    return replace(
        recipe,
        model=str(folder / recipe.model) if is_folder else recipe.model,
        data=replace(recipe.data, path=str(folder / recipe.data.path)),
        verify=replace(recipe.verify, path=str(folder / recipe.verify.path)),
        prune=prune,
    )


def _section(section: type[SectionT], content: Any, name: str) -> SectionT:
    """Return the parsed content of a recipe section as an object of the dataclass `section`. An empty `name` stands for
    the whole recipe.
    """
    place = f"[{name}]" if name else "the recipe"
    if not isinstance(content, Mapping):
        raise InputError("recipe", expected=f"a section {place}", got=repr(content))
    known: dict[str, Any] = {field.name: field for field in fields(section)}  # type: ignore[arg-type]
    types = get_type_hints(section)
    for key in content:
        if key not in known:
            raise InputError("recipe", expected=f"only the keys {', '.join(known)} in {place}", got=repr(key))
    missing = [key for key, field in known.items() if field.default is MISSING and key not in content]
    if missing:
        raise InputError("recipe", expected=f"a key {missing[0]} in {place}", got="none")
    values = {key: _value(content[key], types[key], key, place) for key in content}
    try:
        return section(**values)
    except InputError as error:
        if name:
            error.args = (f"{error.args[0]}, in {place}",)
        raise


def _value(value: Any, hint: Any, key: str, place: str) -> Any:
    """Return the parsed value of a key after a check of its type against the annotation `hint`. A whole number becomes
    a float where the annotation is float, and a table becomes the dataclass of its section.
    """
    if hint == tuple[int, ...]:
        if not isinstance(value, list) or not value or any(type(item) is not int for item in value):
            raise InputError("recipe", expected=f"whole numbers such as [1, 8] for {key} in {place}", got=repr(value))
        return tuple(value)
    (kind,) = (kind for kind in (get_args(hint) or (hint,)) if kind is not NoneType)
    if is_dataclass(kind) and isinstance(kind, type):
        return _section(kind, value, key)
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        names = {str: "a text", int: "a whole number", float: "a number", bool: "true or false"}
        raise InputError("recipe", expected=f"{names[kind]} for {key} in {place}", got=repr(value))
    return value


def _require_path(argument: str, value: str) -> None:
    """Raise `InputError` if the path that a recipe states is empty or contains a null character."""
    if not value.strip() or "\0" in value:
        raise InputError(argument, expected="a path", got=repr(value))
