"""Views of texts as the contents of a page."""

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

from headwise.analysis.head_view import HeadView, ViewedText, shortened
from headwise.analysis.roles import Role, page_roles, role_of
from headwise.page import contents as page
from headwise.page.columns import Columns, ModelIdentity, estimates_of
from headwise.page.notebook import notebook_html
from headwise.runs.rows import MeanEstimate
from headwise.shapes import Float
from headwise.statistics.columns import column_named

LONGEST_TITLE = 120
"""Number of characters of a text that name it on a page."""


@runtime_checkable
class Viewed(Protocol):
    """View of a text: the text, or source and target, and the attention of each head."""

    @property
    def title(self) -> str:
        """Name of the model."""

    @property
    def identity(self) -> ModelIdentity | None:
        """Identity of the model."""

    @property
    def texts(self) -> Sequence[ViewedText]:
        """The texts."""

    @property
    def head_count(self) -> int:
        """Number of heads of the model."""

    @property
    def heads(self) -> Sequence[HeadView]:
        """The heads."""


def statistics_of(views: Sequence[Viewed]) -> tuple[str, ...]:
    """Return the names of the statistics that some heads have."""
    return tuple(dict.fromkeys(name for head in views[0].heads for name in head.means))


def estimate(views: Sequence[Viewed], statistic: str, index: int) -> MeanEstimate:
    """Return the mean of a statistic over texts for the head with this index, with its standard error."""
    return MeanEstimate.of(view.heads[index].means.get(statistic, math.nan) for view in views)


def role_over(views: Sequence[Viewed], index: int) -> Role:
    """Return the role of the head with this index: on one text its role there, on several texts by the means of its
    statistics over the texts that have a value, and by the query rows of all texts.
    """
    heads = [view.heads[index] for view in views]
    if len(heads) == 1:
        return heads[0].role
    means = {name: estimate(views, name, index).value for name in heads[0].means}
    return role_of(means, {name: sum(head.rows.get(name, 0) for head in heads) for name in means})


def columns_of(views: Sequence[Viewed]) -> Columns:
    """Return the statistics of each head, means over texts, as columns of a page."""
    heads = views[0].heads
    source = "this text" if len(views) == 1 else f"{len(views)} texts"
    statistics = tuple(column_named(name).on_page(source) for name in statistics_of(views))
    places = tuple(head.place for head in heads)
    roles = tuple(role_over(views, index).name for index in range(len(heads)))
    table = [[estimate(views, each.name, index) for index in range(len(heads))] for each in statistics]
    return Columns(views[0].title, source, places, statistics, estimates_of(table), roles, views[0].identity)


def title_role_word(views: Sequence[Viewed]) -> str | None:
    """Return the word that takes the place of "the first token" in titles of roles: the first word of a single text, in
    quotes unless it is a special token.
    """
    if len(views) != 1 or views[0].texts[0].picture is not None:
        return None
    word = views[0].texts[0].words[0]
    return shortened(word.text) if word.special else f"“{shortened(word.text)}”"


def view_html(views: Sequence[Viewed]) -> str:
    """Return views of one model for a notebook: a table of the heads, and their page."""
    columns = columns_of(views)
    contents = page.Contents(
        title=columns.model,
        notes=(),
        roles=page_roles(columns.roles, title_role_word(views)),
        statistics=columns.statistics,
        models=(page.PageModel(columns.model, columns.page_heads(), columns.estimates),),
        passages=passages_of([(views, columns.source)], columns.statistics),
    )
    return notebook_html(f"{len(columns.places)} heads of {columns.model}", columns, contents)


def passages_of(
    models: Sequence[tuple[Sequence[Viewed], str]], statistics: Sequence[page.PageStatistic]
) -> tuple[page.Passage, ...]:
    """Return the texts of a page, with the attention of every head of each model.

    Args:
        models: for each model its views, and the source of the statistics on their texts.
        statistics: the page's statistics.
    """
    sources = [source for _, source in models]
    return tuple(
        page.Passage(
            title=_title(views[0]),
            sides=tuple(_side(text) for text in views[0].texts),
            heads=tuple(tuple(head.attention for head in view.heads) for view in views),
            means=tuple(_means(view, source, statistics) for view, source in zip(views, sources, strict=True)),
        )
        for views in zip(*(views for views, _ in models), strict=True)
    )


def _means(
    view: Viewed, source: str, statistics: Sequence[page.PageStatistic]
) -> Float[torch.Tensor, "statistics heads"]:
    """Return the page's statistics on one text, NaN for those that were not measured on it."""
    rows = [
        [head.means.get(each.name, math.nan) if each.source == source else math.nan for head in view.heads]
        for each in statistics
    ]
    return torch.tensor(rows, dtype=torch.float64).view(len(statistics), len(view.heads))


def _title(view: Viewed) -> str:
    """Return the first characters of a text, on one line."""
    line = " ".join(view.texts[0].text.split()) or view.texts[0].name
    return line if len(line) <= LONGEST_TITLE else line[: LONGEST_TITLE - 1] + "…"


def _side(text: ViewedText) -> page.Side:
    """Return the tokens of a viewed text as the page shows them, at the queries or the keys of an attention."""
    return page.Side(
        name=text.name,
        tokens=tuple(token.text for token in text.tokens),
        follows_blank=tuple(token.follows_blank for token in text.tokens),
        line_starts=tuple(index for index, token in enumerate(text.tokens) if token.starts_line),
        special=tuple(token.special for token in text.tokens),
        words=tuple(word.text for word in text.words),
        word_of=tuple(text.word_of.tolist()),
        first_generated=text.first_generated,
        picture=text.picture,
    )
