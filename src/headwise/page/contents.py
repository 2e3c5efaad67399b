"""Contents of a page: heads, their statistics, and their attention weights on texts and pictures, as plain values."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from headwise.shapes import Float, Int


@dataclass(frozen=True)
class PageRole:
    """Role of heads (name for what they attend to) as a page shows it. `name` determines the colour, `title` is the
    displayed name, `rule` states which heads have the role, and `statistic` names the statistic that decides.
    """

    name: str
    title: str
    rule: str
    statistic: str


@dataclass(frozen=True)
class PageHead:
    """Head of a model, as an HTML page shows it: name, layer, index in the layer, module, kind of attention and role.

    Attributes:
        name: name of the head, such as `3.5`; no two heads of a model have the same.
        layer, head: zero-based number of the layer, and of the head in this layer.
        module: path of the attention module.
        kind: "self" or "cross" attention.
        role: name of the head's role; None if it is unknown.
    """

    name: str
    layer: int
    head: int
    module: str
    kind: str
    role: str | None


@dataclass(frozen=True)
class PageStatistic:
    """Description of a statistic of every head, such as the entropy of attention weights or the ablation effect. Its
    field `meaning` is one sentence. `source` states where the values come from, such as "this text" or "profile". No
    two statistics of one source have the same name.
    """

    name: str
    unit: str
    meaning: str
    source: str


class Estimates(NamedTuple):
    """Estimates of each statistic for each head: the mean (NaN where it was not measured), its standard error (NaN
    where it is unknown), and the number of samples (0 where it is unknown).
    """

    means: Float[Tensor, "statistics heads"]
    errors: Float[Tensor, "statistics heads"]
    counts: Float[Tensor, "statistics heads"]


@dataclass(frozen=True)
class PageModel:
    """One model shown on an HTML page: its name, its heads, and the statistics of its heads. If a page compares two
    models, both have the same heads.

    Attributes:
        name: name for display.
        heads: the heads, in the order of `estimates`.
        estimates: estimates of the page's statistics for each head.
    """

    name: str
    heads: tuple[PageHead, ...]
    estimates: Estimates


@dataclass(frozen=True)
class Picture:
    """Picture on an HTML page of which tokens of a model are patches: an image, a frame of a video, the spectrogram of
    a sound, or the curve of a time series.

    Attributes:
        name: name for display, such as "picture 1".
        source: the picture as a `data:` address.
        width, height: size of the picture in pixels.
    """

    name: str
    source: str
    width: int
    height: int


class Patch(NamedTuple):
    """Rectangle of a picture that a token stands for. `picture` is the index of the picture among those of its side;
    the other numbers are fractions of the picture's width and height.
    """

    picture: int
    left: float
    top: float
    width: float
    height: float


@dataclass(frozen=True)
class Side:
    """Text on an HTML page, as tokens and words. These tokens are the queries or the keys of the attention that the
    page shows; in self-attention, they are both. Some or all of the tokens can be patches of pictures.

    Attributes:
        name: name for display, such as "text" or "source".
        tokens: characters of each token, on one line.
        follows_blank: True at tokens that have white space before them in the text.
        line_starts: indices of the tokens before which the text has a line break.
        special: True at special tokens such as `[CLS]`.
        words: the words of the text.
        word_of: for each token, the index in `words` of the word that the token is a part of.
        first_generated: index of the first token that the model generated; None if it generated none.
        pictures: pictures of which tokens are patches.
        patches: the patch of each token; None for a token that is no part of a picture. Empty without pictures.
    """

    name: str
    tokens: tuple[str, ...]
    follows_blank: tuple[bool, ...]
    line_starts: tuple[int, ...]
    special: tuple[bool, ...]
    words: tuple[str, ...]
    word_of: tuple[int, ...]
    first_generated: int | None = None
    pictures: tuple[Picture, ...] = ()
    patches: tuple[Patch | None, ...] = ()


@dataclass(frozen=True, eq=False)
class VisibleKeys:
    """Keys that each query may attend to, as runs (ranges of neighbouring keys). `runs` is the number of runs of each
    query. `starts` has the first key of every run, and `stops` the key after the last key of every run. Both list the
    runs of query 0 first, then those of query 1, and so on.
    """

    runs: Int[Tensor, " queries"]
    starts: Int[Tensor, " all_runs"]
    stops: Int[Tensor, " all_runs"]


@dataclass(frozen=True, eq=False)
class AllWeights:
    """All attention weights of one head on a passage (one or more texts)."""

    weights: Float[Tensor, "queries keys"]


@dataclass(frozen=True, eq=False)
class LargestWeights:
    """Largest attention weights of each query, of one head on a passage (one or more texts).

    Attributes:
        keys: keys of the largest weights, largest first.
        weights: weights of these keys; 0 where a query sees fewer keys.
        totals: sum of each query's weights over all keys; below 1 if the query sees no key, or if the
            head has a sink.
    """

    keys: Int[Tensor, "queries listed"]
    weights: Float[Tensor, "queries listed"]
    totals: Float[Tensor, " queries"]


@dataclass(frozen=True, eq=False)
class HeadAttention:
    """Attention of one head on one passage (one or more texts), as a page shows it.

    Attributes:
        queries, keys: indices of the sides with the queries and with the keys, among the passage's sides.
        tiles: weights pooled to few rows and columns: means over the queries of a row of sums over the keys of a
            column. Query q is in row q * rows // queries.
        weights: all weights, or the largest of each query.
        number_of_keys: number of tokens of the side with the keys.
        visible: keys that each query may attend to.
    """

    queries: int
    keys: int
    number_of_keys: int
    tiles: Float[Tensor, "rows columns"]
    weights: AllWeights | LargestWeights
    visible: VisibleKeys


@dataclass(frozen=True, eq=False)
class RelevanceMap:
    """Relevance of each token of a text of a page (a `Side`) for the prediction of one token, by one method.

    Attributes:
        method: name of the method, such as "gradient-weighted attention" or "occlusion".
        meaning: one sentence that states what a value is.
        side: index of the side whose tokens have the values.
        target_side, target: side and index of the predicted token. For a class, it is the token from which the model
            predicts the class.
        values: relevance of each token; NaN at tokens without a value, as at words if only patches are measured.
        agreement: Spearman correlation with occlusion, and the limits of its confidence interval; NaN if it is unknown,
            and None for occlusion.
        curves: probability of the predicted token, or its score, against the share of the patches that are removed
            ("deletion") or shown ("insertion") in the order of the values, from none to all in equal steps, and the
            means over random orders ("random deletion", "random insertion"); all of the same length.
    """

    method: str
    meaning: str
    side: int
    target_side: int
    target: int
    values: Float[Tensor, " tokens"]
    agreement: tuple[float, float, float] | None
    curves: Mapping[str, Sequence[float]]


@dataclass(frozen=True)
class Passage:
    """One or more texts on a page, with or without pictures, and the attention of every head on them.

    Attributes:
        sides: the texts.
        heads: for each model, the attention of each of its heads; None for a head that did not attend on this passage.
        means: for each model, the page's statistics for its heads on this passage alone; NaN where not measured.
        maps: maps of relevance for predicted tokens, those of one token together.
    """

    title: str
    sides: tuple[Side, ...]
    heads: tuple[tuple[HeadAttention | None, ...], ...]
    means: tuple[Float[Tensor, "statistics heads"], ...]
    maps: tuple[RelevanceMap, ...] = ()


@dataclass(frozen=True)
class FocusScore:
    """Attention that one head pays to a set of words (the focus of a search with `find`), compared with uniform
    attention.

    Attributes:
        model, head: index of the model, and of the head among its heads.
        share: mean share of attention on the words.
        uniform: mean share of uniform attention over the same keys on the words.
        error: standard error of `share - uniform` over texts; None for one text.
        p: p-value of the test that the difference is not positive, adjusted for the number of heads; None for one text.
        has_focus: True if the head has the focus, by the rule that the verdict states.
    """

    model: int
    head: int
    share: float
    uniform: float
    error: float | None
    p: float | None
    has_focus: bool


@dataclass(frozen=True)
class PageFocus:
    """Result of a search with `find`, as a page shows it: a set of words, and the attention that every head pays to
    them.

    Attributes:
        kind: "received" or "exchanged".
        words: for each passage, the indices of the words.
        queries: for each passage, the indices of the words whose attention counts; None for all other words.
        scores: the heads, the one with the most attention above uniform attention first.
        verdict: which heads have the focus, in a sentence.
    """

    name: str
    kind: str
    words: tuple[tuple[int, ...], ...]
    scores: tuple[FocusScore, ...]
    verdict: str
    queries: tuple[tuple[int, ...], ...] | None = None


@dataclass(frozen=True)
class Contents:
    """Everything that one HTML page shows: models, heads, statistics, and texts with attention.

    Attributes:
        notes: sentences below the title, such as what was cut off.
        roles: the roles that occur, in the order of display.
        statistics: descriptions of the statistics that the page shows for each head.
        models: one model, or two that are compared.
        passages: texts; none for a page of tables alone.
        foci: words whose attention was measured.
        opening: settings of the page when it opens, by their names in `page/script/state.js`; others have the page's
            defaults.
    """

    title: str
    notes: tuple[str, ...]
    roles: tuple[PageRole, ...]
    statistics: tuple[PageStatistic, ...]
    models: tuple[PageModel, ...]
    passages: Sequence[Passage] = ()
    foci: tuple[PageFocus, ...] = ()
    opening: Mapping[str, str] = field(default_factory=dict)
