"""History of a monitored training: the statistics of every head in each observed step, in memory and in a run folder.

A run folder has one Parquet file for each observed step, which appears at once when it is complete, so a process that
is killed loses at most the step that it was writing. `monitor.json` has the settings of the run.
"""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwise.checks import folder_path, require_one_of
from headwise.errors import InputError, require
from headwise.plots.curves import draw_history
from headwise.runs.files import replaced_file, writable_folder, write_atomically
from headwise.statistics.registry import unit_of
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SETTINGS_FILE, STEPS_FOLDER, ABANDONED_FOLDER, FORMAT = "monitor.json", "steps", "abandoned", 1
"""Names in a run folder, and version of its format. Steps that a training made again after it resumed from an earlier
checkpoint are in the folder of abandoned ones.
"""

IDENTIFIERS = ("step", "layer", "head", "kv_head", "module", "kind", "sequences", "nonfinite_rows")
"""Columns that come before the statistics."""

PICTURE_DPI = 150
"""Resolution of saved pictures."""

Row = dict[str, Any]


class History:
    """Statistics of every attention head in the observed steps of a monitored training, in memory and in a run folder.

    Attributes:
        settings: settings of the run, JSON-compatible: the class of the model, and the statistics.
        folder: the run folder; None if the history is in memory alone.
        latest: number of the step that was added last, or in a history that was loaded, of the last step. None if a
            training that writes to the folder has not added a step yet, whatever the folder has from before.
        begins_unobserved: True if the first step of a training that writes to the history is not observed, as where it
            resumed between observed steps.
    """

    def __init__(self, settings: Mapping[str, Any], folder: Path | None = None) -> None:
        self.settings, self.folder = dict(settings), folder
        self._rows: dict[int, list[Row]] = {}
        self.latest: int | None = None
        self.begins_unobserved = False

    def __repr__(self) -> str:
        heads = counted(max((len(rows) for rows in self._rows.values()), default=0), "head")
        last = f", the last is {self.steps[-1]}" if self.steps else ""
        return f"History({counted(len(self._rows), 'step')}{last}, {heads})"

    @property
    def steps(self) -> list[int]:
        """Numbers of the observed steps, in ascending order."""
        return sorted(self._rows)

    @property
    def statistics(self) -> tuple[str, ...]:
        """Names of the head statistics that were recorded, such as "entropy"."""
        names = (name for rows in self._rows.values() for row in rows for name in row if name not in IDENTIFIERS)
        return tuple(dict.fromkeys(names))

    def rows(self, step: int | None = None) -> list[Row]:
        """Return one dict for each head and step, ordered by step, layer and head. It has the step, the layer, the
        numbers of the head and of its key/value head, the module's path, and the kind of attention. It also has the
        number of sequences, the number of the module's query rows with NaN or infinite values, and every statistic.

        Args:
            step: the step; by default all.

        Raises:
            InputError: the step was not observed.
        """
        if step is not None and step not in self._rows:
            observed = f"one of {len(self.steps)} observed steps"
            raise InputError("step", expected=observed, got=step, remedy="history.steps has their numbers")
        return [dict(row) for number in (self.steps if step is None else [step]) for row in self._rows[number]]

    def table(self, step: int | None = None) -> Any:
        """Return a pandas DataFrame with one row per head and observed step.

        Args:
            step: the step; by default all.

        Raises:
            InputError: the step was not observed.
            MissingExtra: pandas is not installed.
        """
        return require("pandas", purpose="a table", extra="tables").DataFrame(self.rows(step))

    def changes(self, statistic: str, step: int | None = None) -> list[tuple[int, int, float]]:
        """Return `(layer, head, change)` for each head, with the largest absolute change first. The change is the value
        of `statistic` in an observed step, by default the last one, minus its value in the first observed step.

        Raises:
            InputError: there is no such statistic, or fewer than two steps were observed.
        """
        require_one_of("statistic", statistic, self.statistics or ["none, since no step was observed"])
        if step is None and len(self.steps) < 2:
            raise InputError("history", expected="at least 2 observed steps", got=len(self.steps))
        first, last = (
            {head_of(row): row for row in self._rows[step] if row.get(statistic) is not None}
            for step in (self.steps[0], self.steps[-1] if step is None else step)
        )
        changes = [
            (row["layer"], row["head"], row[statistic] - first[head][statistic])
            for head, row in last.items()
            if head in first
        ]
        return sorted((each for each in changes if each[2] == each[2]), key=lambda each: -abs(each[2]))

    def append(self, step: int, rows: Iterable[Row]) -> None:
        """Add the statistics of a step, one row per head, and write them to the run folder if there is one. Earlier
        rows of the same step are replaced.
        """
        rows = [{"step": step, **row} for row in rows]
        if self.folder is not None:
            parquet, pyarrow = _parquet(), require("pyarrow", purpose="a run folder", extra="tables")
            columns = dict.fromkeys(name for row in rows for name in row)  # pyarrow reads those of the first row alone
            table = pyarrow.Table.from_pylist([dict.fromkeys(columns) | row for row in rows])
            with replaced_file(self._file(step)) as file:
                parquet.write_table(table, file, write_page_checksum=True)
        self._rows[step], self.latest = rows, step

    def abandon(self, step: int) -> None:
        """Remove the step `step` and all later steps from the history, since a resumed training repeats them. The files
        of these steps are moved to another folder.
        """
        for number in [each for each in self.steps if each >= step]:
            if self.folder is not None:
                (self.folder / ABANDONED_FOLDER).mkdir(exist_ok=True)
                self._file(number).replace(self.folder / ABANDONED_FOLDER / self._file(number).name)
            del self._rows[number]

    def _file(self, step: int) -> Path:
        assert self.folder is not None
        return self.folder / STEPS_FOLDER / f"{step:012d}.parquet"

    @staticmethod
    def load(folder: str | Path) -> "History":
        """Return the history that is stored in a run folder. A training may write to the folder meanwhile.

        Raises:
            InputError: the folder has no history, or a step in it cannot be read.
            MissingExtra: pyarrow is not installed.
        """
        path = folder_path("folder", folder)
        try:
            settings = json.loads((path / SETTINGS_FILE).read_text(encoding="utf-8"))
            if settings.pop("format") != FORMAT:
                raise ValueError("another format")
        except (OSError, ValueError, KeyError, TypeError, AttributeError):
            raise InputError("folder", expected="a run folder of monitor", got=repr(str(folder))) from None
        history = History(settings, path)
        for file in sorted((path / STEPS_FOLDER).glob("*.parquet")):
            try:
                history._rows[int(file.stem)] = _rows_of_file(file)
            except (OSError, ValueError, TypeError, NotImplementedError):  # Arrow's errors are among these
                raise InputError("folder", expected="readable steps", got=f"a damaged file {str(file)!r}") from None
        history.latest = max(history.steps, default=None)
        return history

    @staticmethod
    def create(folder: Path, settings: Mapping[str, Any]) -> "History":
        """Return the history in a run folder, to which a training will write. The history is created if the folder has
        none.

        Raises:
            InputError: the folder has a run with other settings.
            MissingExtra: pyarrow is not installed.
        """
        _parquet()
        if (folder / SETTINGS_FILE).exists():
            history = History.load(folder)
            for name, value in settings.items():
                if history.settings.get(name) != value:
                    got = f"a run with another {name} in {str(folder)!r}"
                    raise InputError("out", expected="an empty folder, or one of the same run", got=got)
            history.latest = None
            return history
        (folder / STEPS_FOLDER).mkdir(exist_ok=True)
        write_atomically(folder / SETTINGS_FILE, json.dumps({"format": FORMAT, **settings}, indent=1).encode())
        return History(settings, folder)

    def plot(self, statistic: str, *, heads: Sequence[tuple[int, int]] | None = None, ax: "Axes | None" = None) -> Any:
        """Draw a statistic against the training step, with one line for each head, coloured by layer. The heads that
        changed most are labelled.

        Args:
            statistic: name of the statistic.
            heads: heads `(layer, head)` to draw; all by default.
            ax: axes to draw on; new ones by default.

        Returns:
            the axes.

        Raises:
            InputError: there is no such statistic or head.
            MissingExtra: matplotlib is not installed.
        """
        require_one_of("statistic", statistic, self.statistics or ["none, since no step was observed"])
        model = str(self.settings.get("model", ""))
        return draw_history(self.series(statistic), statistic, unit_of(statistic), model, heads, ax)

    def save_pictures(self, folder: str | Path) -> list[Path]:
        """Save a plot of each statistic as a PNG file in a folder, and return the paths of the files. A file has the
        name of its statistic, such as `entropy.png`, and replaces an earlier one.

        Raises:
            InputError: no step was observed, or the folder cannot be written.
            MissingExtra: matplotlib is not installed.
        """
        if not self.steps:
            raise InputError("history", expected="at least 1 observed step", got=0)
        path, files = writable_folder(folder), []
        for statistic in self.statistics:
            figure = self.plot(statistic).figure
            files.append(path / f"{statistic}.png")
            with replaced_file(files[-1]) as file:
                figure.savefig(file, format="png", dpi=PICTURE_DPI)
        return files

    def series(self, statistic: str) -> Iterator[tuple[tuple[int, int], list[int], list[float]]]:
        """Yield, for each head, the pair of its layer and number, the list of steps in which `statistic` has a value,
        and the list of the values.
        """
        places: dict[tuple[str, str, int], tuple[int, int]] = {}
        points: dict[tuple[str, str, int], tuple[list[int], list[float]]] = {}
        for row in self.rows():
            if row.get(statistic) is not None:
                places[head_of(row)] = row["layer"], row["head"]  # the number of the layer in the last step
                steps, values = points.setdefault(head_of(row), ([], []))
                steps.append(row["step"])
                values.append(row[statistic])
        for head, place in places.items():
            yield (place, *points[head])


def head_of(row: Mapping[str, Any]) -> tuple[str, str, int]:
    """Return a key that identifies a head in all steps: module path, kind of attention and head number. The number of
    its layer may differ between steps.
    """
    return row["module"], row["kind"], row["head"]


def _rows_of_file(file: Path) -> list[Row]:
    """Return the rows of one step, one per head, from its Parquet file. Raise an error of Arrow or a `ValueError` if
    the file is damaged or belongs to another step.
    """
    rows: list[Row] = _parquet().ParquetFile(file, page_checksum_verification=True).read().to_pylist()
    for row in rows:
        numbers = [value for name, value in row.items() if name not in ("module", "kind") and value is not None]
        is_row = row.get("step") == int(file.stem) and all(row.get(name) is not None for name in IDENTIFIERS)
        if not is_row or not all(isinstance(number, int | float) for number in numbers):
            raise ValueError("not a row of this step")
    if not rows:
        raise ValueError("no rows")
    # Statistics that other heads have, and the head of a row has not, are missing in the row.
    return [{name: value for name, value in row.items() if value is not None or name in IDENTIFIERS} for row in rows]


def _parquet() -> Any:
    return require("pyarrow.parquet", purpose="a run folder", extra="tables")
