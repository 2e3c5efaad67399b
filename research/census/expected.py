"""Expected statistics of every attention module, from attention recorded at the dispatcher."""

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from research.census.batches import Batch
from research.census.definitions import Sequence, is_visibility_certain, statistics
from research.dispatcher_truth.recorder import Record, TruthCall

Values = dict[str, list[Tensor]]
"""For each statistic, the values `(heads,)` of all sequences."""


@dataclass
class Expected:
    """Expected statistics of one module, in one kind of attention.

    Attributes:
        path: innermost module that ran at the softmax.
        is_self: queries and keys come from the same tensors; None if unknown.
        heads: number of heads.
        by_shape: values of the statistics, by the numbers of queries and keys of a call.
        uncertain: what is not known about the module: "padding", "visible" keys, "positions", or more. Weights were
            "changed" between softmax and values, outputs "rescaled" before the projection, real tokens attend to
            padding ("unmasked"), or weights are "not finite".
        weights: `(sequences, heads, queries, keys)` of every call.
        form: "bmm", or "sum" for weights whose values are not shared by queries.
        layers: the same for each layer that the module computes, by the address of its output projection, in order.
    """

    path: str
    is_self: bool | None
    heads: int
    by_shape: dict[tuple[int, int], Values] = field(default_factory=dict)
    uncertain: set[str] = field(default_factory=set)
    form: str = "bmm"
    weights: list[Tensor] = field(default_factory=list)
    layers: dict[int, "Expected"] = field(default_factory=dict)

    def add(self, shape: tuple[int, int], values: dict[str, Tensor]) -> None:
        """Add the statistics of one sequence, each `(heads,)`."""
        for name, by_head in values.items():
            self.by_shape.setdefault(shape, {}).setdefault(name, []).append(by_head)

    @property
    def has_known_kind(self) -> bool:
        """False if the kind is open: the queries may be a selection of the tokens of the keys in every call."""
        return self.is_self is False or (self.is_self is True and any(len({*shape}) == 1 for shape in self.by_shape))

    def layer_of(self, call: TruthCall) -> "Expected":
        """Return the layer of a call of the module."""
        path = f"{self.path}[{len(self.layers)}]" if self.layers else self.path
        layer = Expected(path, self.is_self, self.heads, uncertain=self.uncertain, form=self.form)
        return self.layers.setdefault(call.projection.operand.data_ptr(), layer)

    def merge(self, other: "Expected") -> None:
        """Add the sequences of another run."""
        for shape, values in other.by_shape.items():
            for name, parts in values.items():
                self.by_shape.setdefault(shape, {}).setdefault(name, []).extend(parts)
        self.uncertain |= other.uncertain
        self.weights.extend(other.weights)
        for address, layer in other.layers.items():
            if address in self.layers:
                self.layers[address].merge(layer)
            else:
                self.layers[address] = layer

    def means(self) -> dict[str, Tensor]:
        """Return the mean of each statistic over all sequences that have it, `(heads,)`."""
        total: Values = {}
        for values in self.by_shape.values():
            for name, parts in values.items():
                total.setdefault(name, []).extend(parts)
        return _means(total)

    def possible_means(self) -> list[dict[str, Tensor]]:
        """Return the means over all calls, and over the calls of each shape alone, for a module of which only some
        calls were reported.
        """
        return [self.means(), *(_means(values) for values in self.by_shape.values())]


def _means(values: Values) -> dict[str, Tensor]:
    return {name: torch.stack(parts).nanmean(0) for name, parts in values.items()}


Sites = dict[tuple[str, bool | None, int], Expected]
"""Expected statistics by module path, kind and number of heads."""


def sites_of(record: Record, batch: Batch, special: set[int]) -> Sites:
    """Return the expected statistics of every attention module in a run."""
    sites: Sites = {}
    streams = _streams(record, batch)
    for call in record.calls:
        key = (call.path, _kind(call), call.heads)
        site = sites.setdefault(key, Expected(*key, form=call.form))
        _add_call(site, call, batch, special, streams)
    unmasked = {length for site in sites.values() if "unmasked" in site.uncertain for length in site.by_shape}
    for site in sites.values():
        if any(set(shape) & set(other) for shape in site.by_shape for other in unmasked):
            site.uncertain.add("unmasked")
    return sites


def merged(runs: list[Sites]) -> Sites:
    """Return the expected statistics over the sequences of several runs."""
    total: Sites = {}
    for sites in runs:
        for key, site in sites.items():
            if key in total:
                total[key].merge(site)
            else:
                total[key] = site
    return total


def agree(sites: Sites, alone: Sites) -> bool | None:
    """Return whether the truth of a padded batch is that of every sequence alone, wherever the padding is known. If so,
    replace the modules in `sites` whose padding is not known by those of the sequences alone, if the rows of these are
    among theirs. Return None if there is nothing to compare.
    """
    certain = [key for key, site in sites.items() if "padding" not in site.uncertain]
    if not certain:
        return None
    for key in certain:
        if key not in alone:
            return False
        means, others = sites[key].means(), alone[key].means()
        for name in means.keys() & others.keys():
            if not torch.allclose(means[name], others[name], atol=1e-5, rtol=1e-5, equal_nan=True):
                return False
    for key in sites.keys() & alone.keys():
        if "padding" in sites[key].uncertain and _has_rows(sites[key], alone[key]):
            sites[key] = alone[key]
    return True


def _has_rows(padded: Expected, alone: Expected) -> bool:
    """Return whether every row of weights of the sequences alone is among those of the padded batch, without zeros."""
    longest = max(weights.shape[-1] for weights in (*padded.weights, *alone.weights))
    rows, others = (_sorted_rows(site.weights, longest) for site in (alone, padded))
    return all(bool((torch.cdist(row, other).amin(-1) < 1e-6).all()) for row, other in zip(rows, others, strict=True))


def _sorted_rows(weights: list[Tensor], longest: int) -> list[Tensor]:
    """Return for each head the rows of all calls, sorted and filled with zeros, `(rows, longest)`."""
    rows = [F.pad(call.sort(-1, descending=True).values, (0, longest - call.shape[-1])) for call in weights]
    return list(torch.cat([call.transpose(0, 1).flatten(1, 2) for call in rows], 1))


def _kind(call: TruthCall) -> bool | None:
    """Return whether a call is self-attention; None where a reduction of the keys leaves that open."""
    is_self = call.scores.is_self
    return None if is_self and not call.scores.is_direct and call.weights.shape[2] != call.weights.shape[3] else is_self


Streams = dict[tuple[int, int], list[Tensor]]
"""For each number of sequences and tokens, the tokens `(sequences, tokens)` that are not padding, by each call."""


def _streams(record: Record, batch: Batch) -> Streams:
    """Return the padding of streams of tokens that the census does not pad itself, from their self-attention: a token
    is padding if its own key is hidden from every query, unless that is so for all tokens.
    """
    streams: Streams = {}
    for call in record.calls:
        weights = _without_empty_places(call)
        sequences, _, queries, keys = weights.shape
        is_known = queries in batch.real and sequences == batch.sequences
        if is_known or call.scores.is_self is False or queries != keys:
            continue
        visible = (weights > 0).any(1)
        is_causal = ~visible.diagonal(dim1=-2, dim2=-1).any(-1, keepdim=True)
        real = visible.any(-2) | is_causal
        known = streams.setdefault((sequences, queries), [])
        if not any(torch.equal(real, other) for other in known):
            known.append(real)
    return streams


def _without_empty_places(call: TruthCall) -> Tensor:
    """Return the weights of a call without keys at the end that no query sees: empty places of a cache, or padding to a
    whole block whose queries are cut off.
    """
    weights = call.weights
    queries, keys = weights.shape[2:]
    if call.scores.is_self is False or queries >= keys:
        return weights
    seen = (weights != 0).flatten(0, 2).any(0).nonzero()
    return weights[..., : max(queries, int(seen.max()) + 1 if len(seen) else 0)]


def _add_call(site: Expected, call: TruthCall, batch: Batch, special: set[int], streams: Streams) -> None:
    """Add every sequence of a call."""
    weights = _without_empty_places(call)
    sequences, _, queries, keys = weights.shape
    if call.softmax.has_underflow or not is_visibility_certain(weights):
        site.uncertain.add("visible")
    if any("changed" in note for note in call.notes):
        site.uncertain.add("changed")
    real_rows, real_keys = (
        batch.real.get(length) if sequences == batch.sequences else None for length in (queries, keys)
    )
    found = streams.get((sequences, queries), []) if real_rows is None else []
    if found:
        real_rows = found[0]
    if len(found) > 1:
        site.uncertain.add("padding")
    if not call.is_direct:
        site.uncertain.add("rescaled")
    if _may_be_padded(batch, sequences, queries) or _may_be_padded(batch, sequences, keys):
        site.uncertain.add("padding")
    site.weights.append(weights)
    offset = None if call.scores.is_self is False or keys < queries else keys - queries
    if call.scores.is_self is not False and offset != 0:
        site.uncertain.add("positions")
    projections = _projections(call)
    for index in range(sequences):
        rows = torch.ones(queries, dtype=torch.bool) if real_rows is None else real_rows[index]
        visible = ((weights[index] > 0) & rows[:, None]).any(0).any(0)
        tokens = batch.tokens.get(keys) if sequences == batch.sequences and offset == 0 else None
        sequence = Sequence(
            weights=weights[index],
            outputs=call.outputs[index],
            rows=rows,
            keys=visible if real_keys is None else real_keys[index],
            tokens=None if tokens is None else tokens[index],
            offset=offset,
        )
        if bool((sequence.weights[:, rows][..., ~sequence.keys] > 0).any()):
            site.uncertain.add("unmasked")
        if not bool(sequence.weights[:, rows].isfinite().all()):
            site.uncertain.add("not finite")
        values = statistics(sequence, special, projections)
        site.add((queries, keys), values)
        site.layer_of(call).add((queries, keys), values)


def _may_be_padded(batch: Batch, sequences: int, length: int) -> bool:
    """Return whether an axis of a call may have padding at places that are not known: the batch has padding, and the
    axis is none of its streams.
    """
    if all(bool(real.all()) for real in batch.real.values()):
        return False
    return not (length in batch.real and sequences == batch.sequences)


def _projections(call: TruthCall) -> list[Tensor] | None:
    """Return each head's slice of the output projection, `(value_dim, width)`; None if there is no plain matrix or the
    heads reach it other than as they left attention.
    """
    matrix = call.projection.matrix
    if matrix is None or call.projection.operator not in ("mm", "addmm", "linear", "bmm"):
        return None
    if any(len(columns) != call.outputs.shape[-1] for columns in call.columns):
        return None
    return [matrix.detach().double()[columns] for columns in call.columns]
