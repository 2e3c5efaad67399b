"""Views of several texts: the attention of the same heads on each."""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from headwise.analysis.focus import Focus, find_heads
from headwise.analysis.roles import Role
from headwise.analysis.view_contents import columns_of, estimate, role_over, statistics_of, view_html
from headwise.analysis.view_result import View
from headwise.errors import InputError, require
from headwise.page.columns import Columns
from headwise.runs.rows import MeanEstimate
from headwise.wording import counted


@dataclass(frozen=True, eq=False)
class ViewSet:
    """Attention of every head of a model on several texts.

    Attributes:
        views: one view for each text, all of the same heads.

    Raises:
        InputError: the views are of different heads or models.
    """

    views: tuple[View, ...]

    def __post_init__(self) -> None:
        first = self.views[0]
        for view in self.views[1:]:
            pairs = zip(view.heads, first.heads, strict=False)
            if len(view.heads) != len(first.heads) or not all(each.place.is_same(other.place) for each, other in pairs):
                got = f"other heads for {view.text[:40]!r} than for {first.text[:40]!r}"
                raise InputError("views", expected="the same heads for all texts", got=got)
            if view.identity is not None and first.identity is not None and view.identity.is_other(first.identity):
                got = f"another model for {view.text[:40]!r} than for {first.text[:40]!r}"
                raise InputError("views", expected="the same model for all texts", got=got)

    def __repr__(self) -> str:
        return (
            f"ViewSet({counted(len(self.views[0].heads), 'head')} of {self.title}, {counted(len(self.views), 'text')})"
        )

    def __len__(self) -> int:
        return len(self.views)

    def __iter__(self) -> Iterator[View]:
        return iter(self.views)

    def __getitem__(self, index: int) -> View:
        return self.views[index]

    @property
    def title(self) -> str:
        """Name of the model, for display."""
        return self.views[0].title

    def select(self, layers: Collection[int] = (), heads: Collection[Any] = ()) -> "ViewSet":
        """Return views with only these layers and heads, as `View.select` does."""
        return ViewSet(tuple(view.select(layers, heads) for view in self.views))

    def columns(self) -> Columns:
        """Return the statistics of each head, means over the texts, as columns of a page."""
        return columns_of(self.views)

    def estimate(self, statistic: str, index: int) -> MeanEstimate:
        """Return the mean of a statistic over the texts for the head with this index."""
        return estimate(self.views, statistic, index)

    def role(self, index: int) -> Role:
        """Return the role of the head with this index, by the means of its statistics over texts."""
        return role_over(self.views, index)

    def records(self) -> list[dict[str, Any]]:
        """Return one dictionary per head: layer, head, module, kind, role, and for every statistic its mean over texts,
        its standard error (`_sem`), the number of texts that have a value (`_n`), and the degrees of freedom (`_df`).
        """
        names = statistics_of(self.views)
        return [
            {**head.identifiers, "role": self.role(index).name}
            | {column: number for name in names for column, number in self.estimate(name, index).columns(name).items()}
            for index, head in enumerate(self.views[0].heads)
        ]

    def table(self) -> Any:
        """Return the records as a pandas DataFrame with one row per head.

        Raises:
            MissingExtra: pandas is not installed.
        """
        return require("pandas", purpose="a table", extra="tables").DataFrame(self.records())

    def find(self, focus: Sequence[Any], *, kind: str = "received", name: str | None = None) -> Focus:
        """Rank the heads by how much more attention given words receive, or exchange, than under uniform attention over
        the same keys: means over texts, with standard errors and a test.

        The module `headwise.analysis.focus` has the formulas, and the rule by which a head has a focus.

        Args:
            focus: words that occur in every text, or one list of words (or of indices of words) for each text.
            kind: "received" from other words, or "exchanged" between the words.
            name: name of the focus, for display; by default the words.

        Raises:
            InputError: a word does not occur, no word is left to compare with, or the weights of a long text were not
                kept.
            MissingExtra: scipy, which tests several texts, is not installed.
        """
        return find_heads(self.views, focus, kind, name)

    def _repr_html_(self) -> str:
        """Return a table of the heads and their page for a notebook."""
        return view_html(self.views)
