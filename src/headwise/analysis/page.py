"""`write_page`: one HTML file with every head of a model, from views, profiles, ablations and importance scores."""

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from headwise.analysis.flow.relevance import Relevance
from headwise.analysis.profile import Profile
from headwise.analysis.roles import page_roles
from headwise.analysis.view_result import Focus, View, ViewSet, passages_of, title_role_word
from headwise.checks import collection_of
from headwise.errors import InputError
from headwise.intercept.heads import Heads
from headwise.page import contents as page
from headwise.page.columns import Columns, joined_estimates, sorted_by
from headwise.page.write import page_html
from headwise.runs.head_table import HeadTable


def write_page(
    path: str | Path,
    *results: Any,
    against: Sequence[Any] = (),
    foci: Sequence[Focus] = (),
    title: str | None = None,
    statistic: str | None = None,
) -> None:
    """Write one HTML file that shows every head of a model and works offline. It has an overview of the heads, the
    attention of each head on the viewed texts, and the numbers of all `results`.

    Args:
        path: the file.
        results: results for the heads of one model: views (`View`, `ViewSet`), profiles, ablations, other tables with
            one row per head, results of `watch`, and results of `relevance` for the views. All views together are the
            texts of the page. The page shows the heads of the views or, without views, those of the first table; all
            other results must have these heads, too.
        against: the same kinds of results of a second model with the same heads, or of another checkpoint, with which
            the page compares the first model. If there are views of one model, there must be views of the other one,
            of the same tokens.
        foci: results of `find` for the views in `results`.
        title: title of the page; by default the name of the model.
        statistic: statistic by which heads are coloured and sorted when the page opens. By default it is the main one
            of the first table without roles, such as the cost of an ablation. Other pages open on the roles. A page
            with `against` opens on the differences.

    Raises:
        InputError: there is no result, results are of other heads or of different models, the views of both models are
            of different texts, no result has the statistic, or the file cannot be written.
        MissingExtra: jinja2 is not installed.

    Example:
        >>> seen = headwise.view(model, tokenizer, "Coffee or tea?")  # doctest: +SKIP
        >>> headwise.write_page("page.html", seen, headwise.ablate(model, texts, loss))  # doctest: +SKIP
    """
    contents = page_contents(results, against=against, foci=foci, title=title, statistic=statistic)
    try:
        Path(path).write_text(page_html(contents), encoding="utf-8", errors="replace")
    except OSError as error:
        expected = "a file in an existing, writable folder"
        raise InputError("path", expected=expected, got=f"{error.strerror}: {str(path)!r}") from error


def page_contents(
    results: Sequence[Any],
    *,
    against: Sequence[Any] = (),
    foci: Sequence[Focus] = (),
    title: str | None = None,
    statistic: str | None = None,
) -> page.Contents:
    """Return the contents of the HTML page that `write_page` writes, with results for the heads of a model. The
    arguments are those of `write_page`.
    """
    if not results:
        raise InputError("results", expected="at least one view or table of heads", got="none")
    against = list(collection_of("against", against, of="results"))
    foci = list(collection_of("foci", foci, of="results of find"))
    for focus in foci:
        if not isinstance(focus, Focus):
            raise InputError("foci", expected="results of find", got=type(focus).__name__)
    groups = [_ModelResults(results)]
    for each in groups[0].relevances:
        if not any(each.view.run is view.run for view in groups[0].views):
            got = f"maps for {each.word!r} of another view"
            raise InputError("results", expected="maps of relevance together with their view", got=got)
    if against:
        groups.append(_ModelResults(against))
        groups[1].require_heads_of(groups[0])
    statistics = groups[0].statistics
    if against:
        statistics = tuple(each for each in statistics if each in groups[1].statistics)
        if not statistics:
            raise InputError("against", expected="results with some of the same statistics", got="none")
    models = [
        page.PageModel(name, group.with_roles.page_heads(), joined_estimates(group.columns, statistics))
        for name, group in zip(_names(groups), groups, strict=True)
    ]
    views = groups[0].views
    notes = [note for group in groups for note in group.notes]
    data_of = {each.source: each.data for each in groups[0].columns}
    notes += [
        f"The two models have a {each.source} of different texts."
        for each in groups[-1].columns
        if None not in (each.data, data_of.get(each.source)) and each.data != data_of[each.source]
    ]
    return page.Contents(
        title=title or " and ".join(dict.fromkeys(group.name for group in groups)),
        notes=tuple(dict.fromkeys(notes)),
        roles=page_roles(
            (role for group in groups for role in group.with_roles.roles),
            title_role_word(views) if groups[0].with_roles is groups[0].columns[0] else None,
        ),
        statistics=statistics,
        models=tuple(models),
        passages=tuple(
            replace(passage, maps=tuple(shown for each in of_view for shown in each.page_maps()))
            for passage, of_view in zip(
                passages_of([(group.views, group.columns[0].source) for group in groups], statistics),
                [[each for each in groups[0].relevances if each.view.run is view.run] for view in views],
                strict=True,
            )
        ),
        foci=tuple(_page_focus(each, groups[0]) for each in foci),
        opening=_opening(groups, statistics, statistic),
    )


def _names(groups: Sequence["_ModelResults"]) -> list[str]:
    """Return the names of the one or two models of a page. Two models of the same name are distinguished by the first
    detail in which they differ, such as the dtype, or else by A and B.
    """
    names, details = [group.name for group in groups], [group.details for group in groups]
    if len(set(names)) == len(names):
        return names
    for key, value in details[0].items():
        if details[1].get(key, value) != value:
            return [f"{name}, {of_model[key]}" for name, of_model in zip(names, details, strict=True)]
    return [f"{name} ({letter})" for name, letter in zip(names, "AB", strict=True)]


def _opening(
    groups: Sequence["_ModelResults"], statistics: Sequence[page.PageStatistic], statistic: str | None
) -> dict[str, str]:
    """Return the display settings of a page when it opens. They select the statistic by which heads are coloured and
    sorted: `statistic`, or by default the one that the results name, if they name one. With two models, the settings
    also select the view of the differences.
    """
    opening = {"model": "difference"} if len(groups) == 2 else {}
    columns = groups[0].columns
    shown = [(each.source, each.shown) for each in columns if each.shown is not None]
    if statistic is not None:
        # A statistic of a table is over more data than that of the texts on the page, whose columns come first.
        shown = [(each.source, statistic) for each in reversed(columns)]
    index_of = {(each.source, each.name): index for index, each in enumerate(statistics)}
    indices = [index_of[key] for key in shown if key in index_of]
    if statistic is not None and not indices:
        raise InputError(
            "statistic",
            expected=f"one of {', '.join(dict.fromkeys(each.name for each in statistics))}",
            got=repr(statistic),
        )
    return opening | (sorted_by(indices[0]) if indices else {})


class _ModelResults:
    """All results for the heads of one model that an HTML page shows: views, profiles, ablations and importance scores.
    The heads have the same order in all of them.

    Attributes:
        columns: numbers of each head, one object for each source; those of the views come first.
        relevances: maps of relevance for the views.
        with_roles: columns that decide the roles of the heads: those of a profile, if there is one.
        details: facts about the model and its results in words, by which models of the same name are distinguished.
        notes: sentences about the model's texts and roles.
    """

    def __init__(self, results: Sequence[Any]) -> None:
        self.views: list[View] = []
        self.relevances = [result for result in results if isinstance(result, Relevance)]
        tables: list[Columns] = []
        for result in results:
            if isinstance(result, View | ViewSet):
                self.views += [result] if isinstance(result, View) else result.views
            elif isinstance(result, HeadTable | Heads):
                tables.append(result.columns())
            elif not isinstance(result, Relevance):
                expected = "views, profiles, ablations, importance scores, maps of relevance or watched heads"
                remedy = "unpack it: write_page(path, *results)" if isinstance(result, list | tuple) else None
                raise InputError("results", expected=expected, got=type(result).__name__, remedy=remedy)
        if not self.views:  # maps of relevance have the view that they are of
            self.views = list({id(each.view): each.view for each in self.relevances}.values())
        identities = [(f"the view of {view.title}", view.identity) for view in self.views]
        identities += [(f"the {each.source} of {each.model}", each.identity) for each in tables]
        known = [(name, identity) for name, identity in identities if identity is not None]
        for name, identity in known[1:]:
            if identity.is_other(known[0][1]):
                remedy = "pass the results of another model as against=[...]"
                raise InputError("results", expected=f"results of one model, as {known[0][0]}", got=name, remedy=remedy)
        columns = [*([ViewSet(tuple(self.views)).columns()] if self.views else []), *tables]
        self.columns = [each.in_order(columns[0].places) for each in columns]
        sources = [each.source for each in self.columns]
        if len(set(sources)) < len(sources):
            raise InputError("results", expected="one table of each kind", got=", ".join(sources))
        self.name = self.columns[0].model
        self.statistics = tuple(statistic for each in self.columns for statistic in each.statistics)
        self.with_roles = max(self.columns, key=lambda each: (each.source == Profile.NAME, each.roles[0] is not None))
        self.details = {name: text for each in self.columns for name, text in each.details.items()}
        for _, identity in known:
            self.details |= {"dtype": identity.dtype, "weights": f"weights {identity.digest[:8]}"}
        self.notes = []
        if any(view.truncated for view in self.views):
            self.notes.append("The end of a text was cut off.")
        if self.views and self.with_roles.source == Profile.NAME:
            self.notes.append("Roles are those of the profile, not of the texts on this page.")
        if len({None if identity is None else identity[:2] for _, identity in identities}) > 1:
            self.notes.append("It could not be checked that all results are of the same model.")

    def require_heads_of(self, other: "_ModelResults") -> None:
        """Raise `InputError` if `other`, the results of another model, are for other heads than these results. Raise it
        also if the viewed texts have other tokens. Module paths may differ.
        """
        if [place[:3] for place in self.columns[0].places] != [place[:3] for place in other.columns[0].places]:
            expected, got = (f"{len(each.columns[0].places)} heads of {each.name}" for each in (other, self))
            raise InputError("against", expected=f"the same heads as the {expected}", got=f"the {got}")
        if [_token_texts(view) for view in self.views] != [_token_texts(view) for view in other.views]:
            remedy = "view the same texts with both, which must have the same tokens"
            raise InputError("against", expected="views of the same tokens", got="other tokens", remedy=remedy)
        sources = [
            [[picture.source for text in view.texts for picture in text.pictures] for view in each.views]
            for each in (self, other)
        ]
        if sources[0] != sources[1]:
            raise InputError("against", expected="views of the same pictures", got="other pictures")


def _token_texts(view: View) -> list[tuple[str, ...]]:
    """Return the tokens of each text in a view, as strings."""
    return [tuple(token.text for token in text.tokens) for text in view.texts]


def _page_focus(focus: Focus, group: _ModelResults) -> page.PageFocus:
    """Return a focus (result of `find`: chosen words, and heads ranked by the attention on these words) in the form
    that the page shows. Raise `InputError` if the texts, model or heads of the focus differ from those of the page.
    """
    texts = [_token_texts(view)[0] for view in group.views]
    if [tuple(token.text for token in text.tokens) for text in focus.texts] != texts:
        raise InputError("foci", expected="foci of the texts of the page", got=f"a focus of other texts: {focus.name}")
    for view, identity in zip(group.views, focus.identities, strict=True):
        if identity is not None and view.identity is not None and identity.is_other(view.identity):
            raise InputError("foci", expected=f"foci of {group.name}", got=f"a focus of another model: {focus.name}")
    index_of = {place: index for index, place in enumerate(group.columns[0].places)}
    places = [each.head.place for each in focus.heads]
    missing = [place for place in places if place not in index_of]
    if missing:
        got = f"a focus of head {missing[0].layer}.{missing[0].head} in {missing[0].module}"
        raise InputError("foci", expected="foci of the heads of the page", got=got)
    scores = tuple(
        page.FocusScore(
            model=0,
            head=index_of[place],
            share=each.share,
            uniform=each.uniform,
            error=None if math.isnan(each.excess.sem) else each.excess.sem,
            p=None if math.isnan(each.p) else each.p,
            has_focus=each.has_focus,
        )
        for each, place in zip(focus.heads, places, strict=True)
    )
    return page.PageFocus(focus.name, focus.kind, focus.words, scores, focus.verdict, focus.queries)
