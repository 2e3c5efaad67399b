"""A profile as data: every head's statistics with their standard errors, saved, reloaded, drawn."""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headwise.errors import InputError, MissingExtra
from headwise.heads.grid import draw
from headwise.heads.roles import ROLES

if TYPE_CHECKING:
    from matplotlib.figure import Figure

TABLE, ABOUT = "profile.parquet", "profile.json"
"""The files of a profile in its folder."""

FORMAT = 1
"""Of these files."""

ERROR, NUMBER = "_sem", "_n"
"""What is added to a statistic's name for the column of its standard error, and of its number of sequences."""


RANDOM = "_random"
"""What is added to a statistic's name where it was measured on random tokens."""


class Measured(NamedTuple):
    """A mean over sequences, its standard error (NaN of fewer than two), and how many sequences had a value."""

    value: float
    sem: float
    n: int


NOTHING = Measured(math.nan, math.nan, 0)


@dataclass(frozen=True)
class ProfiledHead:
    """One head: its place in the model, its role, and its statistics by name."""

    layer: int
    head: int
    kv_head: int
    module: str
    kind: str
    role: str
    statistics: Mapping[str, Measured]

    @property
    def name(self) -> str:
        """`layer.head`, zero-based."""
        return f"{self.layer}.{self.head}"

    @property
    def place(self) -> dict[str, Any]:
        """Where it is and what it is called: the first columns of every table."""
        return {name: getattr(self, name) for name in PLACE}


PLACE = ("layer", "head", "kv_head", "module", "kind", "role")


@dataclass(frozen=True)
class Profile:
    """What every head of a model does over a data set.

    Attributes:
        heads: in the order of the model.
        about: model, data, versions and settings, as they are saved.
    """

    heads: tuple[ProfiledHead, ...]
    about: Mapping[str, Any]

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of what was measured."""
        return tuple(self.heads[0].statistics) if self.heads else ()

    def head(self, layer: int, head: int) -> ProfiledHead:
        """One head, zero-based. `InputError` where there is none."""
        for candidate in self.heads:
            if (candidate.layer, candidate.head) == (layer, head):
                return candidate
        raise InputError("head", expected="a (layer, head) of this profile", got=(layer, head))

    def role_share(self, head: ProfiledHead) -> float:
        """The number that gave a head its role: of the data or of random tokens, whichever is larger."""
        statistic = next(role.statistic for role in ROLES if role.name == head.role)
        found = [head.statistics[name].value for name in (statistic, statistic + RANDOM) if name in head.statistics]
        return max((value for value in found if not math.isnan(value)), default=math.nan)

    def roles(self) -> dict[str, list[tuple[int, int]]]:
        """The heads `(layer, head)` of each role that any has, those roles first that say most about a head."""
        found = {role.name: [(h.layer, h.head) for h in self.heads if h.role == role.name] for role in ROLES}
        return {role: heads for role, heads in found.items() if heads}

    def table(self) -> Any:
        """A pandas DataFrame, one row a head: layer, head, kv_head, module, kind, role, and every statistic's mean."""
        return self._frame(lambda measured: measured.value)

    def sem(self) -> Any:
        """The standard errors of the means of `table`, in the same rows and columns."""
        return self._frame(lambda measured: measured.sem)

    def _frame(self, part: Any) -> Any:
        try:
            import pandas
        except ImportError as error:
            raise MissingExtra("pandas", extra="tables", purpose="a table") from error
        return pandas.DataFrame(
            [{**head.place, **{name: part(each) for name, each in head.statistics.items()}} for head in self.heads]
        )

    def plot(self, statistic: str = "entropy") -> "Figure":
        """A matplotlib figure: layers down, heads across, one statistic as colour.

        Raises:
            InputError: a statistic that was not measured.
            MissingExtra: matplotlib is not installed.
        """
        require_statistic(statistic, self.statistics)
        cells = {(head.layer, head.head): head.statistics[statistic].value for head in self.heads}
        return draw(cells, f"{statistic}, {self.about['model']['name']}")

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write `profile.parquet` (one row a head) and `profile.json` into a folder, which is made.

        Raises:
            InputError: a profile that is there already, without `force`; a folder that cannot be written.
            MissingExtra: pyarrow is not installed.
        """
        require_parquet()
        folder = writable(folder)
        if not force and any((folder / name).exists() for name in (TABLE, ABOUT)):
            remedy = "--force (force=True) replaces it"
            raise InputError("out", expected="a folder without a profile", got=repr(str(folder)), remedy=remedy)
        import pyarrow
        from pyarrow import parquet

        columns: dict[str, list[Any]] = {name: [head.place[name] for head in self.heads] for name in PLACE}
        for name in self.statistics:
            value, sem, n = zip(*(head.statistics[name] for head in self.heads), strict=True)
            columns |= {name: list(value), name + ERROR: list(sem), name + NUMBER: list(n)}
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.table(columns), sink)
        replace_file(folder / TABLE, sink.getvalue().to_pybytes())
        written = json.dumps({"format": FORMAT, **self.about}, indent=2, ensure_ascii=False)
        replace_file(folder / ABOUT, written.encode() + b"\n")


def load_profile(folder: str | Path) -> Profile:
    """The profile that was saved in a folder.

    Raises:
        InputError: no profile there, or one that cannot be read.
        MissingExtra: pyarrow is not installed.
    """
    require_parquet()
    import pyarrow
    from pyarrow import parquet

    path = Path(folder)
    try:
        about = json.loads((path / ABOUT).read_text(encoding="utf-8"))
        columns = parquet.read_table(path / TABLE).to_pydict()
        if about.pop("format") != FORMAT:
            raise ValueError("another format")
        names = [name.removesuffix(ERROR) for name in columns if name.endswith(ERROR)]
        heads = [
            ProfiledHead(
                **{name: columns[name][row] for name in PLACE},
                statistics={
                    name: Measured(*(columns[name + end][row] for end in ("", ERROR, NUMBER))) for name in names
                },
            )
            for row in range(len(columns["layer"]))
        ]
    except OSError as error:
        reason = f"{error.strerror or error}: {error.filename or TABLE}"
        raise InputError("profile", expected=f"a folder with {TABLE} and {ABOUT}", got=reason) from None
    except (ValueError, KeyError, TypeError, AttributeError, pyarrow.ArrowException) as error:
        reason = f"what cannot be read as one in {str(path)!r}"
        raise InputError("profile", expected=f"{TABLE} and {ABOUT} as they were saved", got=reason) from error
    return Profile(tuple(heads), about)


def require_statistic(name: str, known: Iterable[str]) -> None:
    """Refuse a statistic that was not measured."""
    if name not in (names := tuple(known)):
        raise InputError("statistic", expected=f"one of {', '.join(names)}", got=repr(name))


def require_parquet() -> None:
    """Say what is missing before anything is measured."""
    try:
        import pyarrow.parquet  # noqa: F401
    except ImportError as error:
        raise MissingExtra("pyarrow", extra="tables", purpose="a profile in a folder") from error


def writable(folder: str | Path) -> Path:
    """The folder, which is made where there is none."""
    path = Path(folder)
    try:
        path.mkdir(parents=True, exist_ok=True)
        able = os.access(path, os.W_OK)
    except OSError:
        able = False
    if not able:
        raise InputError("out", expected="a folder that can be made and written", got=repr(str(folder)))
    return path


def replace_file(path: Path, data: bytes) -> None:
    """Write a file so that at every moment, also of a crash, either the old or the new one is there whole."""
    beside = path.with_name(f"{path.name}.part")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)
    if os.name == "posix":
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
