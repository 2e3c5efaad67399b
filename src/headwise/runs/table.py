"""Result tables with one row per head or other unit, saved as one Parquet file each.

Profiles, ablations, importance scores and studies are such tables. The first columns of a table identify its rows, so
tables of heads join on `(layer, head)`. The settings of the run are stored in the Parquet file's own metadata.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from headwise.checks import folder_path
from headwise.errors import InputError, require
from headwise.intercept.model_name import short_name
from headwise.runs.files import FORCE_REMEDY, writable_folder, write_atomically
from headwise.runs.rows import SEM_SUFFIX, HeadRow, MeanEstimate, Row
from headwise.runs.significance import zero_tests
from headwise.statistics.columns import Column, column_named
from headwise.wording import counted

METADATA_KEY = b"headwise"
"""Key of the run's settings, as JSON, in the metadata of a Parquet file."""

FORMAT = 3
"""Version of the file format; version 2 had no degrees of freedom, and version 1 the settings in a separate file."""

SAMPLES_COLUMN, SAMPLES_KEY = "samples", b"headwise_samples"
"""Name of the column with the numbers of single samples, a list for each row, and key of what all rows share, in the
metadata of a Parquet file.
"""


RowT = TypeVar("RowT", bound=Row)
TableT = TypeVar("TableT", bound="Table[Any]")
HeadRowT = TypeVar("HeadRowT", bound=HeadRow)


@dataclass(frozen=True)
class Table(Generic[RowT]):
    """Table of results of one run: rows with the same statistics, and the settings of the run.

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

    COLUMNS: ClassVar[tuple[Column, ...]] = ()
    """Descriptions of the statistics, except those of attention weights alone."""

    PARTS: ClassVar[tuple[tuple[str, "type[Table[Any]]"], ...]] = ()
    """Further tables of the result, which are saved in files of their own: the attribute and the class of each."""

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
        """Short name of the model (or, for a study, of its data) for display; empty if it is unknown."""
        return short_name(self.metadata.get("model", {}).get("name", ""))

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the statistics that the table has for each row; empty if the table has no rows."""
        return tuple(self.rows[0].statistics) if self.rows else ()

    def table(self) -> Any:
        """Return the means of all statistics as a pandas DataFrame, with one row per row of this table. The first
        columns identify the row (such as layer and head); then there is one column per statistic. Columns of
        `summaries()` and `tests()`, if the table has any, come last.

        Raises:
            MissingExtra: pandas or scipy is not installed.
        """
        return self._data_frame(lambda estimate: estimate.value).assign(**self.summaries(), **self.tests())

    def summaries(self) -> dict[str, list[Any]]:
        """Return additional columns of the table, each with one number per row, by name. Subclasses define them; by
        default there are none.
        """
        return {}

    def column(self, name: str) -> Column:
        """Return the description of the table's statistic called `name`: its meaning, its unit, and whether its means
        are tested for significance.
        """
        return next((column for column in self.COLUMNS if column.name == name), column_named(name))

    def tests(self) -> dict[str, list[float]]:
        """Test each statistic that is an effect (such as a difference), and return two columns for it. The column with
        the suffix `_p` has the p-value of the mean by Student's t-test against the value that means no effect. The one
        with `_q` has the p-values adjusted for the number of rows (Benjamini and Hochberg 1995). Among rows with an
        adjusted value of at most 0.05, the expected share without an effect is at most 5 %. A mean of one sample has no
        p-value.

        Raises:
            MissingExtra: scipy is not installed.
        """
        found: dict[str, list[float]] = {}
        for column in map(self.column, self.statistics):
            if column.is_tested:
                estimates = (row.statistics[column.name] for row in self.rows)
                found |= zero_tests(column.name, [each._replace(value=each.value - column.null) for each in estimates])
        return found

    def sem(self) -> Any:
        """Return the standard errors of the means as a pandas DataFrame, with the same rows and columns as the
        DataFrame of means that `table()` returns.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return self._data_frame(lambda estimate: estimate.sem)

    def _data_frame(self, part: Callable[[MeanEstimate], float]) -> Any:
        """Return a pandas DataFrame with one row per row of this table. It has the columns that identify the row, and
        for each statistic the number that `part` returns for its estimate, such as the mean.
        """
        pandas = require("pandas", purpose="a table", extra="tables")
        return pandas.DataFrame(
            [
                {**row.identifiers, **{name: part(estimate) for name, estimate in row.statistics.items()}}
                for row in self.rows
            ]
        )

    def records(self) -> list[dict[str, Any]]:
        """Return the rows of this table as dictionaries. The first keys identify the row. Then come, for each
        statistic, its mean, its standard error (`_sem`), its sample size (`_n`) and the degrees of freedom of the
        standard error (`_df`). The columns of `summaries()` and `tests()` come last.

        Raises:
            MissingExtra: the table has summaries or tests, and scipy is not installed.
        """
        further = {**self.summaries(), **self.tests()}
        return [
            row.identifiers
            | {
                column: number
                for name, estimate in row.statistics.items()
                for column, number in estimate.columns(name).items()
            }
            | {name: values[index] for name, values in further.items()}
            for index, row in enumerate(self.rows)
        ]

    def save(self, folder: str | Path, *, force: bool = False) -> None:
        """Write the table and its metadata to a Parquet file in a folder, which is created if it does not exist. The
        class attribute `NAME` determines the file's name, such as `profile.parquet` for profiles. An existing file is
        replaced with `force=True`; otherwise `InputError` is raised. If the result has further tables, each has a file
        of its own.

        Each statistic becomes four columns: its mean, its standard error (`_sem`), its sample size (`_n`), and the
        degrees of freedom of the standard error (`_df`).

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

        for part, _ in self.PARTS:
            getattr(self, part).save(folder, force=force)
        path = table_path(writable_folder(folder), self.NAME)
        if path.exists() and not force:
            raise InputError(
                "out", expected=f"a folder without {path.name}", got=repr(str(folder)), remedy=FORCE_REMEDY
            )
        records = self.records()
        names = records[0] if records else self.ROW_TYPE.identifier_columns()
        columns = {name: [record[name] for record in records] for name in names}
        metadata = {METADATA_KEY: json.dumps({"format": FORMAT, **self.metadata})}
        samples = self._samples()
        if samples is not None:
            columns[SAMPLES_COLUMN], metadata[SAMPLES_KEY] = samples
        buffer = pyarrow.BufferOutputStream()
        parquet.write_table(pyarrow.table(columns, metadata=metadata), buffer)
        write_atomically(path, buffer.getvalue().to_pybytes())

    @classmethod
    def load(cls: type[TableT], folder: str | Path) -> TableT:
        """Return the table that `save` wrote to a folder, with its metadata.

        Raises:
            InputError: the folder has no such file, or the file cannot be read.
            MissingExtra: pyarrow is not installed.
        """
        metadata = cls.load_metadata(folder)
        import pyarrow
        from pyarrow import parquet

        path = table_path(Path(folder), cls.NAME)
        try:
            with path.open("rb") as file:  # pyarrow would expand a path, and cannot open some names
                stored = parquet.read_table(file)
            columns = stored.to_pydict()
            names = [name.removesuffix(SEM_SUFFIX) for name in columns if name.endswith(SEM_SUFFIX)]
            rows = [
                cls.ROW_TYPE(
                    **{name: columns[name][row] for name in cls.ROW_TYPE.identifier_columns()},
                    statistics={name: MeanEstimate.from_columns(columns, name, row) for name in names},
                )
                for row in range(len(next(iter(columns.values()))))
            ]
            shared = (stored.schema.metadata or {}).get(SAMPLES_KEY)
            samples = {} if shared is None else cls._from_samples(columns[SAMPLES_COLUMN], shared.decode())
        except (OSError, ValueError, KeyError, TypeError, StopIteration, pyarrow.ArrowException) as error:
            raise _unreadable(cls.NAME, path) from error
        parts = {name: table.load(folder) for name, table in cls.PARTS}
        return cls(tuple(rows), metadata, **samples, **parts)

    def _samples(self) -> tuple[list[Any], str] | None:
        """Return the data of single samples, such as documents, that `save` must write: a list of numbers for each row,
        and one text for the whole table. By default a table has no such data, and None is returned.
        """
        return None

    @classmethod
    def _from_samples(cls, lists: list[Any], shared: str) -> dict[str, Any]:
        """Return keyword arguments for creating the table again from the stored data of single samples: a list of
        numbers for each row (`lists`), and one text (`shared`). By default there are none.
        """
        return {}

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
                expected=f"a file {str(path)!r} in the format of this version",
                got="another format, as older versions of headwise wrote it",
                remedy="measure again, with --force (force=True) in the same folder",
            )
        return metadata


def table_path(folder: Path, name: str) -> Path:
    """Return the path of the Parquet file that stores the table `name` in a folder."""
    return folder / f"{name}.parquet"


def require_parquet(name: str) -> None:
    """Raise `MissingExtra` if the package pyarrow, which reads and writes result tables, is not installed. `name` is
    the name of the table in the error message. Long runs call this first, so that their results can be saved.
    """
    require("pyarrow.parquet", purpose=f"{name} in a folder", extra="tables")


def _unreadable(name: str, path: Path) -> InputError:
    """Return the `InputError` for a table file that is damaged or that headwise did not write."""
    return InputError(name, expected=f"a {path.name} as headwise writes it", got=f"unreadable content in {str(path)!r}")
