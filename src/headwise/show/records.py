"""Results as JSON and CSV, for other programs."""

import csv
import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TextIO

from headwise.analysis.compare import Comparison
from headwise.analysis.view_result import Focus, View, ViewSet
from headwise.studies.study_result import Study

LONGEST_WORD = 300
"""Number of characters from which on a word is cut."""

LINKS = 6
"""Number of links of each head in a view."""


@dataclass(frozen=True)
class Records:
    """Result of an analysis for JSON or CSV: rows (dictionaries with the same columns) and metadata. The rows of a
    table have the columns of its Parquet file. These identify the row, and state for each statistic the mean, standard
    error (`_sem`), sample size (`_n`) and degrees of freedom (`_df`).

    Attributes:
        rows: one mapping from column names to values per row; all rows have the same columns.
        metadata: model, data, versions and settings of the result.
    """

    rows: Sequence[Mapping[str, Any]]
    metadata: Mapping[str, Any]


def study_records(study: Study) -> Records:
    """Return the rows of a study's table, with the column `frontier` (True on the Pareto frontier). The metadata has
    the recommendation.
    """
    frontier = study.frontier
    rows = [
        {**record, "frontier": row.setting in frontier} for record, row in zip(study.records(), study.rows, strict=True)
    ]
    chosen = study.recommendation
    setting = None if chosen.setting is None else chosen.setting.name
    return Records(rows, {**study.metadata, "recommendation": {"setting": setting, "sentence": chosen.sentence}})


def comparison_records(comparison: Comparison, statistics: Sequence[str]) -> Records:
    """Return the differences between two profiles, one row per head and statistic, the largest difference first. If
    `statistics` is empty, all are included.
    """
    rows = [comparison.record(difference) for difference in comparison.largest(statistics)]
    return Records(rows, {"a": comparison.a.metadata, "b": comparison.b.metadata})


def view_records(seen: View | ViewSet, foci: Sequence[Focus] = ()) -> Records:
    """Return one row per head of a view. The metadata has the texts and the results of `find`. For a view of one text,
    rows have the value of every statistic, and the strongest links between words. Positions of words are counted from
    1. For several texts, rows have means with standard errors. Very long words of the texts are shortened.
    """
    texts = [
        {
            "text": re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: cut(word[0]), view.text),
            "truncated": view.truncated,
            "tokens": view.tokens,
            "parts": [
                {
                    "name": part.name,
                    "words": [cut(word.text) for word in part.words],
                    "first_generated": part.first_generated,
                }
                for part in view.texts
            ],
        }
        for view in ([seen] if isinstance(seen, View) else seen)
    ]
    described = [{"name": each.name, "kind": each.kind, "verdict": each.verdict, "heads": each.rows()} for each in foci]
    metadata = {"model": {"name": seen.title}, "texts": texts, "foci": described}
    if not isinstance(seen, View):
        return Records(seen.records(), metadata)
    rows = []
    for head in seen.heads:
        queries, keys = seen.query_words(head), seen.key_words(head)
        links = [
            {
                "query": cut(queries[link.query].text),
                "query_position": link.query + 1,
                "key": cut(keys[link.key].text),
                "key_position": link.key + 1,
                "weight": link.weight,
                "back": link.back,
            }
            for link in seen.strongest_links(head, LINKS)
        ]
        rows.append({**head.identifiers, "role": head.role.name, **head.means, "links": links})
    return Records(rows, metadata)


def cut(word: str) -> str:
    """Return a word. If it has more than 300 characters, an ellipsis replaces its middle."""
    return word if len(word) <= LONGEST_WORD else f"{word[: LONGEST_WORD // 2]}…{word[-LONGEST_WORD // 2 :]}"


def write_json(records: Records, stream: TextIO) -> None:
    """Write a result to a stream as a JSON object with the keys `metadata` and `rows`, followed by a line break. NaN
    and infinite numbers become null.
    """
    value = {"metadata": _finite(records.metadata), "rows": _finite(records.rows)}
    json.dump(value, stream, indent=1, allow_nan=False)
    stream.write("\n")


def write_csv(records: Records, stream: TextIO) -> None:
    """Write the rows of a result as CSV, below a line with the column names. NaN and None become empty cells, and lists
    become JSON.
    """
    writer = csv.writer(stream, lineterminator="\n")
    columns = list(records.rows[0]) if records.rows else []
    writer.writerow(columns)
    writer.writerows([_cell(row[column]) for column in columns] for row in records.rows)


def _finite(value: Any) -> Any:
    """Convert a value to a JSON-compatible one, also inside of mappings and lists. NaN and infinite numbers become
    None.
    """
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(name): _finite(part) for name, part in value.items()}
    if isinstance(value, Iterable) and not isinstance(value, str):
        return [_finite(part) for part in value]
    return value


def _cell(value: Any) -> Any:
    """Convert a value to a cell of a CSV file: lists become JSON, and NaN and None an empty cell."""
    if isinstance(value, list):
        return json.dumps(_finite(value))
    is_nan = isinstance(value, float) and math.isnan(value)
    return "" if value is None or is_nan else value
