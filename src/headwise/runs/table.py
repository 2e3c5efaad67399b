"""Tables of what was measured: one row a head, each number with its standard error; saved, reloaded, drawn.

A profile, an ablation and scores of importance are such tables. Their first columns say which head a row is of, so that
they join on `(layer, head)`.
"""

import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, NamedTuple, TypeVar

from headwise.errors import InputError, require
from headwise.runs.heatmap import draw_heatmap

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMAT = 1
"""Of the files of a table."""

SEM_SUFFIX, COUNT_SUFFIX = "_sem", "_n"
"""What is added to a statistic's name for the column of its standard error, and of its number of sequences."""


class MeanEstimate(NamedTuple):
    """A mean over sequences, its standard error (NaN of fewer than two), and how many sequences had a value."""

    value: float
    sem: float
    n: int

    @staticmethod
    def of(values: Iterable[float]) -> "MeanEstimate":
        """The mean of values, those that are NaN left out."""
        there = [value for value in values if not math.isnan(value)]
        if not there:
            return NO_ESTIMATE
        mean = math.fsum(there) / len(there)
        squares = math.fsum((value - mean) ** 2 for value in there)
        sem = math.sqrt(squares / (len(there) - 1) / len(there)) if len(there) > 1 else math.nan
        return MeanEstimate(mean, sem, len(there))


NO_ESTIMATE = MeanEstimate(math.nan, math.nan, 0)


@dataclass(frozen=True)
class Row:
    """A row of a table; what stands before its statistics says what it is of."""

    statistics: Mapping[str, MeanEstimate]

    @property
    def identifiers(self) -> dict[str, Any]:
        """What the row is of: the first columns."""
        return {name: getattr(self, name) for name in self.identifier_columns()}

    @classmethod
    def identifier_columns(cls) -> list[str]:
        """The names of these columns."""
        return [each.name for each in fields(cls) if each.name != "statistics"]


@dataclass(frozen=True, kw_only=True)
class HeadRow(Row):
    """One head: its place in the model, and what was measured of it, by name."""

    layer: int
    head: int
    kv_head: int
    module: str
    kind: str

    @property
    def name(self) -> str:
        """`layer.head`, zero-based."""
        return f"{self.layer}.{self.head}"


RowT = TypeVar("RowT", bound=Row)
TableT = TypeVar("TableT", bound="Table[Any]")


@dataclass(frozen=True)
class Table(Generic[RowT]):
    """Rows with the same statistics.

    Attributes:
        rows: in the order of the model.
        metadata: model, data, versions and settings, as they are saved.
    """

    rows: tuple[RowT, ...]
    metadata: Mapping[str, Any]

    NAME: ClassVar[str]
    """Of the files `NAME.parquet` and `NAME.json`, and in messages."""

    ROW_TYPE: ClassVar[type[Any]]
    """What its rows are."""

    @property
    def statistics(self) -> tuple[str, ...]:
        """The names of what was measured."""
        return tuple(self.rows[0].statistics) if self.rows else ()

    def table(self) -> Any:
        """A pandas DataFrame, one row each: what it is of, and the mean of every statistic."""
        return self._frame(lambda measured: measured.value)

    def sem(self) -> Any:
        """The standard errors of the means of `table`, in the same rows and columns."""
        return self._frame(lambda measured: measured.sem)

    def _frame(self, part: Any) -> Any:
        pandas = require("pandas", purpose="a table", extra="tables")
        return pandas.DataFrame(
            [{**row.identifiers, **{name: part(each) for name, each in row.statistics.items()}} for row in self.rows]
        )

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write `NAME.parquet` (one row each) and `NAME.json` into a folder, which is made.

        Raises:
            InputError: files of that name that are there already, without `force`; a folder that cannot be written.
            MissingExtra: pyarrow is not installed.
        """
        require_parquet(self.NAME)
        folder = writable_folder(folder)
        table, metadata = files(folder, self.NAME)
        if not force and (table.exists() or metadata.exists()):
            remedy = "--force (force=True) replaces it"
            raise InputError("out", expected=f"a folder without {table.name}", got=repr(str(folder)), remedy=remedy)
        import pyarrow
        from pyarrow import parquet

        columns = {name: [row.identifiers[name] for row in self.rows] for name in self.ROW_TYPE.identifier_columns()}
        for name in self.statistics:
            value, sem, n = zip(*(row.statistics[name] for row in self.rows), strict=True)
            columns |= {name: list(value), name + SEM_SUFFIX: list(sem), name + COUNT_SUFFIX: list(n)}
        sink = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.table(columns), sink)
        write_atomically(table, sink.getvalue().to_pybytes())
        written = json.dumps({"format": FORMAT, **self.metadata}, indent=2, ensure_ascii=False)
        write_atomically(metadata, written.encode() + b"\n")

    @classmethod
    def load(cls: type[TableT], folder: str | Path) -> TableT:
        """The table that was saved in a folder.

        Raises:
            InputError: none there, or one that cannot be read.
            MissingExtra: pyarrow is not installed.
        """
        require_parquet(cls.NAME)
        import pyarrow
        from pyarrow import parquet

        path = Path(folder)
        table, written = files(path, cls.NAME)
        try:
            metadata = json.loads(written.read_text(encoding="utf-8"))
            columns = parquet.read_table(table).to_pydict()
            if metadata.pop("format") != FORMAT:
                raise ValueError("another format")
            names = [name.removesuffix(SEM_SUFFIX) for name in columns if name.endswith(SEM_SUFFIX)]
            rows = [
                cls.ROW_TYPE(
                    **{name: columns[name][row] for name in cls.ROW_TYPE.identifier_columns()},
                    statistics={
                        name: MeanEstimate(*(columns[name + end][row] for end in ("", SEM_SUFFIX, COUNT_SUFFIX)))
                        for name in names
                    },
                )
                for row in range(len(next(iter(columns.values()))))
            ]
        except OSError as error:
            reason = f"{error.strerror or error}: {error.filename or table.name}"
            raise InputError(cls.NAME, expected=f"a folder with {table.name} and {written.name}", got=reason) from None
        except (ValueError, KeyError, TypeError, AttributeError, StopIteration, pyarrow.ArrowException) as error:
            reason = f"what cannot be read as one in {str(path)!r}"
            raise InputError(
                cls.NAME, expected=f"{table.name} and {written.name} as they were saved", got=reason
            ) from error
        return cls(tuple(rows), metadata)


HeadT = TypeVar("HeadT", bound=HeadRow)


class HeadTable(Table[HeadT]):
    """One row a head."""

    @property
    def heads(self) -> tuple[HeadT, ...]:
        """The rows, in the order of the model."""
        return self.rows

    def head(self, layer: int, head: int) -> HeadT:
        """One head, zero-based. `InputError` where there is none."""
        for candidate in self.rows:
            if (candidate.layer, candidate.head) == (layer, head):
                return candidate
        raise InputError("head", expected=f"a (layer, head) of this {self.NAME}", got=(layer, head))

    def plot(self, statistic: str | None = None) -> "Figure":
        """A matplotlib figure: layers down, heads across, one statistic (the first, by default) as colour.

        Raises:
            InputError: a statistic that was not measured.
            MissingExtra: matplotlib is not installed.
        """
        chosen = self.statistics[0] if statistic is None else statistic
        require_statistic(chosen, self.statistics)
        cells = {(head.layer, head.head): head.statistics[chosen].value for head in self.rows}
        return draw_heatmap(cells, f"{chosen}, {self.metadata['model']['name']}")


def files(folder: Path, name: str) -> tuple[Path, Path]:
    """Where a table is kept: its rows, and what is said about them."""
    return folder / f"{name}.parquet", folder / f"{name}.json"


def require_statistic(name: str, known: Iterable[str]) -> None:
    """Refuse a statistic that was not measured."""
    if name not in (names := tuple(known)):
        raise InputError("statistic", expected=f"one of {', '.join(names)}", got=repr(name))


def require_parquet(name: str) -> None:
    """Say what is missing before anything is measured."""
    require("pyarrow.parquet", purpose=f"{name} in a folder", extra="tables")


def writable_folder(folder: str | Path) -> Path:
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


def write_atomically(path: Path, data: bytes) -> None:
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
