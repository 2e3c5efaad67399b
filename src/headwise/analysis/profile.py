"""Profile: statistics of every head of a model over a data set, with standard errors and roles."""

import math
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from headwise.analysis.head_pass import (
    head_rows,
    measure_heads,
    merged_registry,
    pass_data,
    require_finite_outputs,
    table_of_pass,
)
from headwise.analysis.roles import COPYING_ROLES, MIN_ROWS, ROLES, page_roles, role_of
from headwise.data.batches import POSITIONAL, call_model, device_of, digest_of
from headwise.data.random_repeats import repeats_for_model
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.intercept.watch import watch
from headwise.page.contents import Contents
from headwise.progress import progress_bar, shown_progress
from headwise.runs.data_pass import SiteProgress
from headwise.runs.fingerprint import attention_digest
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.shapes import Int
from headwise.statistics.columns import RANDOM_SUFFIX
from headwise.statistics.moments import separate_clusters

ATTENTION_DIGEST = "attention_weights"
"""Name of the hash of the attention modules' weights in the metadata of a profile."""


@dataclass(frozen=True, kw_only=True, repr=False)
class ProfiledHead(HeadRow):
    """Row of a profile: the statistics of one head over a data set, and the head's role. The role is a name for what
    the head attends to, decided by these statistics.

    Attributes:
        role: name of the head's role, such as "induction".
    """

    role: str

    def _described(self) -> list[str]:
        return [self.name, self.role]


class Profile(HeadTable[ProfiledHead]):
    """Table of the attention statistics of every head of a model over a data set, one row per head. Each row also has
    the head's role, a name for what the head attends to.
    """

    NAME = "profile"
    ROW_TYPE = ProfiledHead
    PLOTTED = "entropy"

    def role_share(self, head: ProfiledHead) -> float:
        """Return the mean of the statistic that decides a head's role (name for what the head attends to). If it was
        measured both on the data and on random tokens, return the larger of the two means.

        For most roles this is the share of attention on one kind of position. It is NaN if it was not measured.
        """
        statistic = next(role.statistic for role in ROLES if role.name == head.role)
        names = (statistic, statistic + RANDOM_SUFFIX)
        shares = [head.statistics[name].value for name in names if name in head.statistics]
        return max((share for share in shares if not math.isnan(share)), default=math.nan)

    def roles(self) -> dict[str, list[tuple[int, int]]]:
        """Return the heads of each role that occurs in the profile, as lists of `(layer, head)` by the role's name. A
        role is a name for what heads attend to. Roles for attention to related tokens, such as the previous one, come
        first, and attention sinks last.
        """
        heads = {
            role.name: [(head.layer, head.head) for head in self.heads if head.role == role.name] for role in ROLES
        }
        return {role: members for role, members in heads.items() if members}

    def contents(self) -> Contents:
        """Return the contents of an HTML page that shows this profile alone."""
        return self.columns().contents(page_roles(head.role for head in self.heads))


def load_profile(folder: str | Path) -> Profile:
    """Read the profile (table of attention statistics of every head) that `profile(..., out=folder)` or `Profile.save`
    wrote to a folder.

    Raises:
        InputError: the folder has no profile, or the profile cannot be read.
        MissingExtra: pyarrow is not installed.
    """
    return Profile.load(folder)


def profile(
    model: nn.Module,
    dataset: Texts | Iterable[Any],
    *,
    special: Collection[int] | None = None,
    repeats: Int[Tensor, "samples length"] | bool | None = None,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> Profile:
    """Measure attention statistics of every head over a data set, and derive each head's role, a name for what it
    attends to. Return a `Profile`: a table with one row per head, with the mean and standard error of each statistic.
    With `repeats` (the default for `Texts`), attention to earlier copies of a token, and to what followed these copies,
    is also measured on random tokens that repeat.

    Sequences have equal weight. The model runs in evaluation mode without gradients and is unchanged afterwards. With
    torch.distributed, the processes share the batches, and each returns the same profile.

    Args:
        model: any module that `watch` can observe. For texts, an encoder-decoder is reduced to its encoder.
        dataset: `Texts`, or batches in the same order each time: mappings of the model's arguments, or tensors.
        special: ids of special tokens; by default those of the tokenizer.
        repeats: also measure *induction* and *duplicate* on random tokens that repeat (Olsson et al. 2022). True, or
            ids of shape `(samples, length)`; by default True for `Texts` and False for other data.
        out: folder for the profile; a stopped run resumes there with the same arguments, and returns the same numbers.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: the model's name for display.

    Raises:
        InputError: the data or the folder is unusable, or no attention of the model can be observed.
        MissingExtra: a package that `out`, `progress` or the data needs is not installed.

    Example:
        >>> texts = headwise.Texts("corpus.jsonl", tokenizer)  # doctest: +SKIP
        >>> headwise.profile(model, texts, out="corpus-profile").roles()  # doctest: +SKIP
    """
    data = pass_data(model, dataset, special, out=out, shown=progress)
    if repeats is True or (repeats is None and data.texts is not None):
        repeats = repeats_for_model(data.model, data.special, None if data.texts is None else data.texts.tokenizer)
    random_ids: Any = None if repeats is False else repeats
    is_matrix = isinstance(random_ids, Tensor) and random_ids.ndim == 2 and not random_ids.is_floating_point()
    if random_ids is not None and not is_matrix:
        got = f"shape {tuple(repeats.shape)}, {repeats.dtype}" if isinstance(repeats, Tensor) else repr(repeats)
        raise InputError("repeats", expected="True, False, or token ids of shape (samples, length)", got=got)
    of_repeats = None if random_ids is None else {"shape": list(random_ids.shape), "digest": digest_of([random_ids])}

    def make_table(parts: list[SiteProgress], metadata: dict[str, Any]) -> Profile:
        random_records: list[SiteRecord] = []
        if random_ids is not None:
            bar = progress_bar("repeated tokens", 1, "batches")
            with shown_progress(progress), watch(data.model, special=data.special) as heads, bar as shown:
                heads.clusters = separate_clusters(range(len(random_ids)))
                for batch in shown.track([{POSITIONAL: random_ids.to(device_of(data.model))}], step=1):
                    call_model(data.model, batch)
                    require_finite_outputs(heads.nonfinite, data.model, batch)
            random_records = heads.records
        rows = tuple(_profiled_heads(merged_registry(data.model, parts), random_records))
        weights = attention_digest(data.model, dict.fromkeys(row.module for row in rows))
        return Profile(rows, {**metadata, ATTENTION_DIGEST: weights})

    options: dict[str, Any] = {"out": out, "force": force, "progress": progress, "title": title}
    return table_of_pass(
        data,
        Profile,
        SiteProgress,
        lambda data_pass: measure_heads(data, watch(data.model, special=data.special), data_pass),
        make_table,
        special=data.special,
        repeats=of_repeats,
        **options,
    )


def _profiled_heads(registry: SiteRegistry, random_records: list[SiteRecord]) -> Iterator[ProfiledHead]:
    """Yield the row of each head in a profile: its statistics on the data, and the role that they decide.
    `random_records` are measurements on random tokens that repeat, if there are any; the statistics of the roles
    "induction" and "duplicate token" are added from them. All rows have the same statistics, NaN where one was not
    measured.
    """
    sites = {record.site: record for record in registry.records}
    names = dict.fromkeys(name for record in sites.values() for name in record.statistics)
    copying = {role.statistic: role.statistic + RANDOM_SUFFIX for role in COPYING_ROLES} if random_records else {}
    for record in random_records:
        if record.site in sites:
            measured = record.statistics
            sites[record.site].merge({copying[name]: measured[name] for name in copying if name in measured})
    for row in head_rows(registry, {name: name for name in (*names, *copying.values())}):
        yield ProfiledHead(**row.identifiers, role=_role_name(row.statistics), statistics=row.statistics)


def _role_name(statistics: Mapping[str, MeanEstimate]) -> str:
    """Return the name of a head's role (what it attends to), decided by the means of its statistics on the data and, if
    measured, on random tokens.
    """
    means = {name: estimate.value for name, estimate in statistics.items()}
    # Each sequence that has a value of a statistic has at least one query row behind it. So two such sequences suffice;
    # a data set of one sequence has to be enough.
    rows = {name: float(estimate.n) for name, estimate in statistics.items()}
    if max(rows.values()) < MIN_ROWS:
        rows = {name: MIN_ROWS * n for name, n in rows.items()}
    columns = {role.statistic: role.statistic + RANDOM_SUFFIX for role in COPYING_ROLES}
    on_random = {name: means[column] for name, column in columns.items() if column in means}
    return role_of(means, rows, on_random).name


def require_profile_of(profile: Profile, model: nn.Module, name: str) -> None:
    """Raise `InputError` if a profile was measured on another model than `model`. The attention weights of the two
    models are compared. Weights of different data types cannot be compared; then the names of the models are compared.
    `name` is the name of `model`.

    The model may have another language-model head than the profiled one, which adds a prefix to the paths of its
    modules. If the attention modules have the same weights, the models are the same. Weights of different data types
    cannot be compared; then the names decide.
    """
    metadata: Any = profile.metadata
    profiled, own_paths = metadata["model"], [path for path, _ in model.named_modules()]
    matches = {
        path: [own for own in own_paths if own == path or own.endswith(f".{path}") or path.endswith(f".{own}")]
        for path in dict.fromkeys(head.module for head in profile.heads)
    }
    reason = "whose attention modules have other names"
    if all(matches.values()):
        closest = [min(fitting, key=lambda own: abs(len(own) - len(path))) for path, fitting in matches.items()]
        dtype = next((str(weight.dtype) for weight in model.parameters() if weight.is_floating_point()), "")
        is_comparable = ATTENTION_DIGEST in metadata and dtype == f"torch.{profiled['dtype']}"
        if is_comparable and attention_digest(model, closest) == metadata[ATTENTION_DIGEST]:
            return
        if not is_comparable and profiled["name"] == name:
            return
        reason = "whose attention weights differ"
    raise InputError("roles", expected=f"a profile of the model {name!r}", got=f"one of {profiled['name']!r}, {reason}")
