"""Result tables with one row per attention head: rows by layer and head, plots, and pages."""

from typing import TYPE_CHECKING, Any, ClassVar

from headwise.errors import InputError
from headwise.intercept.model_name import short_name
from headwise.page.columns import Columns, HeadPlace, ModelIdentity, estimates_of
from headwise.page.contents import Contents
from headwise.page.write import notebook_html
from headwise.plots.kinds import HeadNumbers, plot_kind
from headwise.runs.rows import HeadRow
from headwise.runs.table import HeadRowT, Table
from headwise.wording import counted

if TYPE_CHECKING:
    from matplotlib.axes import Axes


class HeadTable(Table[HeadRowT]):
    """Result table with one row per attention head. Rows can be looked up by layer and head, plotted, and shown as an
    HTML page.
    """

    ROW_TYPE: ClassVar[type[Any]] = HeadRow
    UNIT: ClassVar[str] = "head"

    PLOTTED: ClassVar[str | None] = None
    """Statistic that is plotted by default; the first one if None."""

    @property
    def heads(self) -> tuple[HeadRowT, ...]:
        """Rows of the table, one per head, in the order of the model's layers."""
        return self.rows

    @property
    def identity(self) -> ModelIdentity | None:
        """Identity of the model that was measured, by which comparisons of results check that two results are of the
        same model. None if the table does not state it.
        """
        stored = self.metadata.get("model", {}).get("attention")
        return None if stored is None else ModelIdentity(*stored)

    def head(self, layer: int, head: int) -> HeadRowT:
        """Return the row of one head. `layer` and `head` are zero-based numbers.

        Raises:
            InputError: the table has no such head.
        """
        for row in self.rows:
            if (row.layer, row.head) == (layer, head):
                return row
        raise InputError("head", expected=f"a (layer, head) of this {self.NAME}", got=(layer, head))

    def no_effect(self, statistic: str) -> float:
        """Return the value that a statistic has for a head without an effect, such as 0 for a difference."""
        return self.column(statistic).null

    def columns(self) -> Columns:
        """Return the statistics of all heads in the form that HTML pages and plots need."""
        statistics = tuple(self.column(name).on_page(self.NAME) for name in self.statistics)
        estimates = estimates_of([[row.statistics[each.name] for row in self.rows] for each in statistics])
        places = tuple(HeadPlace(row.layer, row.head, row.kind, row.module) for row in self.rows)
        roles = tuple(getattr(row, "role", None) for row in self.rows)
        data = self.metadata.get("measured", {}).get("digest")
        default = self.PLOTTED if self.PLOTTED in self.statistics else next(iter(self.statistics), None)
        shown = None if any(roles) else default
        return Columns(
            self.model_name,
            self.NAME,
            places,
            statistics,
            estimates,
            roles,
            self.identity,
            data,
            shown,
            self._details(),
        )

    def _details(self) -> dict[str, str]:
        """Return short texts about the model, the data and the settings of the run, for display, by the name of each
        text.
        """
        model, settings = self.metadata.get("model", {}), self.metadata.get("settings", {})
        source = short_name((self.metadata.get("data") or {}).get("source", ""))
        sequences = self.metadata.get("measured", {}).get("sequences")
        details = {
            "name": model.get("name"),
            "data": source and f"on {source}",
            "sequences": sequences and f"on {counted(sequences, 'sequence')}",
            "dtype": model.get("dtype"),
            **{name: f"{name} {value}" for name, value in settings.items() if isinstance(value, str | int | float)},
        }
        return {name: value for name, value in details.items() if value}

    def contents(self) -> Contents:
        """Return the contents of an HTML page that shows only this table."""
        return self.columns().contents()

    def _repr_html_(self) -> str:
        """Return the HTML that notebooks display for the table: a line of text, and an interactive page of heads."""
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
        """Draw a plot of the heads, and return its matplotlib axes. Notebooks display the axes;
        `ax.figure.savefig("x.svg")` saves the plot as SVG, PDF or PNG. The page docs/plots.md shows every kind of plot.

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
            against: statistic along the x-axis of "scatter"; by default "entropy", or the first other one.
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
        """Return the statistics of all heads in the form that the plotting functions accept."""
        signed = [name for name in self.statistics if self.column(name).is_signed]
        default = self.PLOTTED if self.PLOTTED in self.statistics else None
        return HeadNumbers.of_columns(self.columns(), signed=signed, default=default)
