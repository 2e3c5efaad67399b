"""Sites of plain models: the truth of all calls of one attention layer, matched with the rows of `hw.watch`."""

from dataclasses import dataclass
from typing import Any

from research.plain_models.continuations import has_other_keys, joined
from research.plain_models.registry import Built
from research.plain_models.statistics import POSITIONAL, mean_statistics, positions_of_queries, statistics_of
from research.plain_models.truth import Attention


@dataclass
class Site:
    """Truth of the calls that belong to one site.

    Attributes:
        path: path of the innermost module.
        is_cross: True for cross-attention, None where unknown.
        attentions: its attention calls in each run.
    """

    path: str
    is_cross: bool | None
    attentions: list[Attention]

    def statistics(self) -> list[dict[str, float]]:
        """Return the mean statistics of each head over all sequences."""
        heads = len(self.attentions[0].heads)
        by_head = []
        for head in range(heads):
            by_sequence = []
            for attention in joined(self.attentions):
                projection = attention.projection[head] if attention.projection else None
                by_sequence += [
                    statistics_of(sequence, projection, is_cross=bool(self.is_cross))
                    for sequence in attention.heads[head]
                ]
            if any("distance" not in each for each in by_sequence if each):  # keys of an earlier call, for example
                for each in by_sequence:
                    for name in (*POSITIONAL, "first") if self.is_cross is False else POSITIONAL:
                        each.pop(name, None)
            by_head.append(mean_statistics(by_sequence))
        return by_head


def sites_of(runs: list[list[Attention]], built: Built) -> list[Site]:
    """Group the attention calls of all runs by path and kind."""
    sites: dict[tuple[str, bool | None, int], Site] = {}
    for run in runs:
        for index, attention in enumerate(run):
            if any(part in attention.path for part in built.not_attention):
                continue
            earlier = [other for other in run[:index] if other.path == attention.path]
            cross = True if has_other_keys(attention, earlier) else _is_cross(attention, built)
            key = (attention.path, cross, len(attention.heads))
            sites.setdefault(key, Site(attention.path, cross, [])).attentions.append(attention)
    return list(sites.values())


def _is_cross(attention: Attention, built: Built) -> bool | None:
    """Return whether an attention call is cross-attention: it is if the model's entry says so; it is not if each query
    is one of the keys' tokens; otherwise it is unknown.
    """
    if any(part in attention.path for part in built.cross):
        return True
    if not attention.heads or not attention.heads[0]:
        return None
    positions = [positions_of_queries(sequence) for sequence in attention.heads[0]]
    return None if any(position is None for position in positions) else False


Matched = dict[tuple[str, str], tuple[list[dict[str, Any]], Site | None]]


def match_rows(rows: list[dict[str, Any]], sites: list[Site], runs: int) -> Matched:
    """Return, by module path and kind, the rows of each site of `hw.watch`, and the truth of this site.

    Args:
        rows: rows of `hw.watch`.
        sites: truth of all sites.
        runs: number of runs of the model that the truth is derived from.
    """
    by_site: dict[tuple[str, str], list[dict[str, Any]]] = {}
    for row in rows:
        by_site.setdefault((row["module"], row["kind"]), []).append(row)
    matched: Matched = {}
    for (label, kind), labels in by_site.items():
        path, part = _path_and_part(label)
        parts = sum(_path_and_part(other)[0] == path and kind == other_kind for other, other_kind in by_site)
        fitting = _fitting(path, kind, len(labels), sites)
        site = fitting[0] if fitting else None
        if len(fitting) > 1:
            same_size = [each for each in fitting if len(each.attentions[0].heads) == len(labels)]
            attentions = [attention for each in same_size for attention in each.attentions]
            site = Site(path, fitting[0].is_cross, attentions) if attentions else fitting[0]
        if site is not None and parts > 1 and len(site.attentions) == parts * runs:  # each part is called once
            site = Site(path, site.is_cross, site.attentions[part::parts])
        matched[label, kind] = (labels, site)
    return matched


def _path_and_part(label: str) -> tuple[str, int]:
    """Return the path of the module and the number of its layer, from a label such as `blocks[1]`."""
    path, bracket, number = label.rpartition("[")
    return (path, int(number[:-1])) if bracket else (label, 0)


def _fitting(path: str, kind: str, heads: int, sites: list[Site]) -> list[Site]:
    """Return the sites at or next to the module at `path`; of these, those of the same kind and number of heads, if
    there are any.
    """
    related = [
        site
        for site in sites
        if site.path == path or site.path.startswith(f"{path}." if path else "") or path.startswith(f"{site.path}.")
    ]
    equal = [site for site in related if site.path == path] or related
    inside = [site for site in equal if site.is_cross is (kind == "cross")] or equal
    return [site for site in inside if len(site.attentions[0].heads) == heads] or inside
