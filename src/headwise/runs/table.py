"""Result tables with one row per head or other unit, saved as one Parquet file each.

Profiles, ablations, importance scores and studies are such tables. The first columns of a table identify its rows, so
tables of heads join on `(layer, head)`. The settings of the run are stored in the Parquet file's own metadata.
"""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Generic, TypeVar

from headwise.checks import folder_path
from headwise.errors import InputError, require
from headwise.intercept.model_name import short_name
from headwise.page.columns import Columns, HeadPlace, ModelIdentity, estimates_of
from headwise.page.contents import Contents
from headwise.page.notebook import notebook_html
from headwise.plots.head_numbers import HeadNumbers
from headwise.plots.kinds import plot_kind
from headwise.runs.files import writable_folder, write_atomically
from headwise.runs.rows import HeadRow, MeanEstimate, Row
from headwise.statistics.meanings import page_statistic
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

METADATA_KEY = b"headwise"
"""Key of the run's settings, as JSON, in the metadata of a Parquet file."""

FORMAT = 2
"""Version of the file format; version 1 had the settings in a separate JSON file."""

SEM_SUFFIX, COUNT_SUFFIX = "_sem", "_n"
"""Suffixes of the columns with a statistic's standard error and number of samples."""

RowT = TypeVar("RowT", bound=Row)
TableT = TypeVar("TableT", bound="Table[Any]")
HeadRowT = TypeVar("HeadRowT", bound=HeadRow)


@dataclass(frozen=True)
class Table(Generic[RowT]):
    """Table of results: rows that share the same statistics, and the settings of the run that measured them.

    Attributes:
        rows: in the order of the model's layers, or in that of the units that were compared.
        metadata: model, data, versions and settings of the run, as JSON-compatible values.
    """

    rows: tuple[RowT, ...]
    metadata: Mapping[str, Any]

    NAME: ClassVar[str]
    """Name of the file, `NAME.parquet`, and of the table in messages."""

    ROW_TYPE: ClassVar[type[Any]]
    """Class of the rows."""

    UNIT: ClassVar[str] = "row"
    """Noun for a row in `repr`, in the singular."""

    SAMPLES: ClassVar[str] = "sequence"
    """Noun for one of the samples over which the statistics are means, in the singular."""

    def __repr__(self) -> str:
        most = max((estimate.n for row in self.rows for estimate in row.statistics.values()), default=0)
        samples = self.metadata.get("measured", {}).get("sequences", most)
        measured = f"{counted(len(self.statistics), 'statistic')} over {counted(samples, self.SAMPLES)}"
        model = f" of {self.model_name}" if self.model_name else ""
        return f"{type(self).__name__}({counted(len(self.rows), self.UNIT)}{model}, {measured})"

    @property
    def model_name(self) -> str:
        """Short name of the model, or of the data of a study, for display; empty if it is unknown."""
        return short_name(self.metadata.get("model", {}).get("name", ""))

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics that the table has for each row; empty if the table has no rows."""
        return tuple(self.rows[0].statistics) if self.rows else ()

    def table(self) -> Any:
        """Return the means of all statistics as a pandas DataFrame, with one row per row of this table: first the
        columns that identify the row (such as layer and head), then one column per statistic.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return self._data_frame(lambda estimate: estimate.value)

    def sem(self) -> Any:
        """Return the standard errors of the means as a pandas DataFrame, with the same rows and columns as the
        DataFrame of means that `table()` returns.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return self._data_frame(lambda estimate: estimate.sem)

    def _data_frame(self, part: Callable[[MeanEstimate], float]) -> Any:
        """Return a pandas DataFrame with one row per row of this table. It has the columns that identify the row, and
        for each statistic the number that `part` returns for the row's `MeanEstimate`, such as the mean or the standard
        error.
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        return pandas.DataFrame(
            [
                {**row.identifiers, **{name: part(estimate) for name, estimate in row.statistics.items()}}
                for row in self.rows
            ]
        )

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of this table as dictionaries: first the columns that identify the row, then for each
        statistic its mean, its standard error (`_sem`) and its sample size (`_n`).
        """
        suffixes = ("", SEM_SUFFIX, COUNT_SUFFIX)
        return [
            row.identifiers
            | {
                name + suffix: number
                for name, estimate in row.statistics.items()
                for suffix, number in zip(suffixes, estimate, strict=True)
            }
            for row in self.rows
        ]

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write the table and its metadata to a Parquet file in a folder; the folder is created if it does not exist.
        The class attribute `NAME` determines the file's name, such as `profile.parquet` for profiles. If the file
        exists, it is replaced with `force=True`; otherwise `InputError` is raised.

        Each statistic becomes three columns: its mean, its standard error (`_sem`) and its sample size (`_n`).

        Args:
            folder: where the file is written.
            force: replace a file that exists.

        Raises:
            InputError: the file exists and `force` is off, or the folder cannot be written.
            MissingExtra: pyarrow is not installed.
        """
        require_parquet(self.NAME)
        import pyarrow
        from pyarrow import parquet

        path = table_path(writable_folder(folder), self.NAME)
        if path.exists() and not force:
            remedy = "--force (force=True) replaces it"
            raise InputError("out", expected=f"a folder without {path.name}", got=repr(str(folder)), remedy=remedy)
        records = self.records()
        names = records[0] if records else self.ROW_TYPE.identifier_columns()
        columns = {name: [record[name] for record in records] for name in names}
        metadata = json.dumps({"format": FORMAT, **self.metadata})
        buffer = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.table(columns, metadata={METADATA_KEY: metadata.encode()}), buffer)
        write_atomically(path, buffer.getvalue().to_pybytes())

    @classmethod
    def load(cls: type[TableT], folder: str | Path) -> TableT:
        """Return the table that `save` wrote to a folder, with its metadata.

        Raises:
            InputError: the folder has no such file, or the file cannot be read.
            MissingExtra: pyarrow is not installed.
        """
        require_parquet(cls.NAME)
        import pyarrow
        from pyarrow import parquet

        path = table_path(folder_path(cls.NAME, folder), cls.NAME)
        metadata = cls.load_metadata(folder)
        try:
            with path.open("rb") as file:  # pyarrow would expand a path, and cannot open some names
                columns = parquet.read_table(file).to_pydict()
            names = [name.removesuffix(SEM_SUFFIX) for name in columns if name.endswith(SEM_SUFFIX)]
            rows = [
                cls.ROW_TYPE(
                    **{name: columns[name][row] for name in cls.ROW_TYPE.identifier_columns()},
                    statistics={
                        name: MeanEstimate(*(columns[name + suffix][row] for suffix in ("", SEM_SUFFIX, COUNT_SUFFIX)))
                        for name in names
                    },
                )
                for row in range(len(next(iter(columns.values()))))
            ]
        except (OSError, ValueError, KeyError, StopIteration, pyarrow.ArrowException) as error:
            raise _unreadable(cls.NAME, path) from error
        return cls(tuple(rows), metadata)

    @classmethod
    def load_metadata(cls, folder: str | Path) -> dict[str, Any]:
        """Return the metadata of the table in a folder: model, data, versions and settings of the run that measured it.

        Raises:
            InputError: the folder has no such file, or an older version of headwise wrote it, or it cannot be read.
            MissingExtra: pyarrow is not installed.
        """
        require_parquet(cls.NAME)
        import pyarrow
        from pyarrow import parquet

        path = table_path(folder_path(cls.NAME, folder), cls.NAME)
        try:
            with path.open("rb") as file:
                encoded = (parquet.read_schema(file).metadata or {}).get(METADATA_KEY)
            metadata = None if encoded is None else json.loads(encoded)
        except (ValueError, pyarrow.ArrowException) as error:
            raise _unreadable(cls.NAME, path) from error
        except OSError as error:
            if error.strerror is None:  # pyarrow's own, for content that is no Parquet file
                raise _unreadable(cls.NAME, path) from error
            reason = f"{error.strerror}: {str(path)!r}"
            raise InputError(cls.NAME, expected=f"a folder with a readable {path.name}", got=reason) from None
        if not isinstance(metadata, dict) or metadata.pop("format", None) != FORMAT:
            raise InputError(
                cls.NAME,
                expected=f"a file {str(path)!r} with the metadata of its run",
                got="a file without it, as older versions of headwise wrote them",
                remedy="measure again, with --force (force=True) in the same folder",
            )
        return metadata


class HeadTable(Table[HeadRowT]):
    """Table with one row per attention head. A row can be looked up by layer and head,
    and the statistics of all heads can be plotted.
    """

    UNIT: ClassVar[str] = "head"

    SIGNED: ClassVar[Collection[str]] = ()
    """Statistics that are effects or differences, for which 0 means no effect."""

    PLOTTED: ClassVar[str | None] = None
    """Statistic that is plotted by default; the first one if None."""

    @property
    def heads(self) -> tuple[HeadRowT, ...]:
        """Rows of the table, one per head, in the order of the model's layers."""
        return self.rows

    def head(self, layer: int, head: int) -> HeadRowT:
        """Return the row of one head, by zero-based layer and head.

        Raises:
            InputError: the table has no such head.
        """
        for row in self.rows:
            if (row.layer, row.head) == (layer, head):
                return row
        raise InputError("head", expected=f"a (layer, head) of this {self.NAME}", got=(layer, head))

    def columns(self) -> Columns:
        """Return the numbers of each head as columns of a page."""
        statistics = tuple(page_statistic(name, self.NAME) for name in self.statistics)
        estimates = estimates_of([[row.statistics[each.name] for row in self.rows] for each in statistics])
        places = tuple(HeadPlace(row.layer, row.head, row.kind, row.module) for row in self.rows)
        roles = tuple(getattr(row, "role", None) for row in self.rows)
        stored = self.metadata.get("model", {}).get("attention")
        identity = None if stored is None else ModelIdentity(*stored)
        return Columns(self.model_name, self.NAME, places, statistics, estimates, roles, identity)

    def contents(self) -> Contents:
        """Return the contents of a page with this table alone."""
        return self.columns().contents()

    def _repr_html_(self) -> str:
        """Return the table and its page for a notebook."""
        columns = self.columns()
        return notebook_html(f"{self.NAME} of {len(self.rows)} heads of {columns.model}", columns, self.contents())

    def plot(
        self,
        statistic: str | None = None,
        *,
        kind: str = "heatmap",
        against: str | None = None,
        errors: float | None = None,
        top: int | None = None,
        ax: Any = None,
    ) -> "Axes":
        """Draw a plot of the heads, and return its matplotlib axes. Notebooks display these;
        `ax.figure.savefig("x.svg")` saves the plot as SVG, PDF or PNG. The docs (docs/plots.md) show every kind.

        | kind          | plot                                                                   |
        | ------------- | ---------------------------------------------------------------------- |
        | "heatmap"     | the mean of `statistic` for every head, layers down and heads across   |
        | "ranking"     | heads in descending order of `statistic`, with error bars              |
        | "scatter"     | one point per head, `statistic` against another one                    |
        | "roles"       | the role of every head, layers down and heads across; of profiles only |
        | "role_counts" | the number of heads of each role in every layer; of profiles only      |

        Args:
            statistic: name of a statistic of the table; a default of the table if None.
            kind: the kind of plot.
            against: statistic along the x-axis of "scatter"; the entropy by default, if the table has it.
            errors: length of error bars to each side, in standard errors: 1.96 by default for "ranking", 0 for
                "scatter".
            top: number of heads that "ranking" (10 by default) and "scatter" (0) name.
            ax: matplotlib axes to draw on; those of a new figure by default, which pyplot does not keep in memory.

        Raises:
            InputError: the table has no such statistic or kind, the kind has no such option, or there is nothing to
                draw.
            MissingExtra: matplotlib is not installed.

        Example:
            >>> table.plot("entropy").figure.savefig("entropy.svg")  # doctest: +SKIP
            >>> table.plot("entropy", kind="ranking", top=5, ax=axes)  # doctest: +SKIP
        """
        options = {"statistic": statistic, "against": against, "errors": errors, "top": top}
        return plot_kind(self._head_numbers().kinds(), kind, ax, **options)

    def _head_numbers(self) -> HeadNumbers:
        """Return the statistics of all heads in the form that plots take."""
        return HeadNumbers(
            heads=[(row.layer, row.head) for row in self.rows],
            values={name: [row.statistics[name].value for row in self.rows] for name in self.statistics},
            sems={name: [row.statistics[name].sem for row in self.rows] for name in self.statistics},
            title=self.model_name,
            signed=[name for name in self.statistics if name.removesuffix("_per_layer") in self.SIGNED],
            default=self.PLOTTED if self.PLOTTED in self.statistics else None,
        )


def table_path(folder: Path, name: str) -> Path:
    """Return the path of the Parquet file that stores the table `name` in a folder."""
    return folder / f"{name}.parquet"


def require_statistic(name: str, available: Iterable[str]) -> None:
    """Raise an `InputError` if the statistic called `name` is not among the available names."""
    if name not in (names := tuple(available)):
        raise InputError("statistic", expected=f"one of {', '.join(names)}", got=repr(name))


def require_parquet(name: str) -> None:
    """Raise `MissingExtra` if pyarrow, which is needed to read and write tables, is not installed. The message states
    the name of the table, `name`.

    Long runs call this first, so that a missing package does not cost their results.
    """
    require("pyarrow.parquet", purpose=f"{name} in a folder", extra="tables")


def _unreadable(name: str, path: Path) -> InputError:
    """Return the error for a table file that is damaged or was not written by headwise."""
    return InputError(name, expected=f"a {path.name} as headwise writes it", got=f"unreadable content in {str(path)!r}")
