"""Sources of the tokens at every attention call of a model: parts of a picture or sound, or token ids.

The sources are derived from gradients. While the outputs of all heads are zero, tokens exchange nothing, at any depth
of the model. A token then depends only on what it stands for: on the pixels of its patch, or on one token id.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.data.batches import call_by_names
from headwise.data.tokenization import input_embeddings
from headwise.errors import InputError, errors_of
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, Interceptor, SiteKey
from headwise.intercept.trace.tokens import LinearMapCall, NumberedTokens
from headwise.shapes import Bool, Float, Int

CONTRAST = 10.0
"""Standard deviation of the random inputs with which dependence is tested."""

BASE = 32
"""Number of values of one digit of a token's number. Gradients are multiplied by digits."""

STRIDES = (1, 3, 7, 13, 31, 61, 127)
"""Distances between the tokens of one row of `TokenStream.tokens_of`. One of them separates the tokens of most grids
whose parts of the input overlap.
"""

IDS = "input_ids"
"""End of the names of the arguments of `transformers` models that are token ids."""

TESTS = 6
"""Number of random changes of the input by which tokens at different attention calls are compared."""

SAMPLED = 4
"""Number of tokens that are tested for a dependence on most of the input, before many tokens are separated."""

MOST_SHARED = 0.005
"""Largest share of elements whose token is not derived although they have a gradient, because of rounding."""

LARGEST_ROUNDING = 1e-3
"""Largest difference, relative to the largest feature, of a token that does not depend on a changed input."""


class Place(NamedTuple):
    """Name of one attention call in a run of a model: its site, and its number among the calls of the site."""

    site: SiteKey
    call: int


class CallTokens(NamedTuple):
    """Tokens of the queries or of the keys of one attention call.

    Attributes:
        stream: index of the stream that has them.
        rows: index of each query or key among the tokens of the stream.
    """

    stream: int
    rows: Int[Tensor, "batch tokens"]


@dataclass(frozen=True, eq=False)
class TokenStream:
    """Tokens that modules with attention receive, with the elements of the model's inputs on which they depend.

    Attributes:
        size: number of tokens of the whole batch.
        tokens_of: for each input of the model, by name, the token that depends on each element of the input, or -1.
            There are several rows where several tokens depend on one element. Token ids are represented by their
            embeddings, with one element per id.
    """

    size: int
    tokens_of: Mapping[str, Int[Tensor, "rows elements"]]

    @property
    def ids_names(self) -> list[str]:
        """Names of the inputs of token ids of which some are tokens of this stream."""
        return [name for name, tokens in self.tokens_of.items() if name.endswith(IDS) and bool((tokens >= 0).any())]


@dataclass(frozen=True, eq=False)
class TokenSources:
    """Sources of the tokens at every attention call of a model.

    Attributes:
        streams: the different sequences of tokens to which modules attend.
        calls: the queries and the keys of each attention call.
        unknown: for the other attention calls, what is unknown.
    """

    streams: tuple[TokenStream, ...]
    calls: Mapping[Place, tuple[CallTokens, CallTokens]]
    unknown: Mapping[Place, str]


def token_sources(
    model: nn.Module,
    inputs: Mapping[str, Any],
    parts: Mapping[str, Bool[Tensor, " elements"]],
    embeddings: Mapping[str, str] | None = None,
) -> TokenSources:
    """Return the elements of the inputs of a model on which each token depends, at every attention call.

    All heads are switched off (their outputs are zeros), so that tokens exchange nothing. The tokens of two attention
    calls belong to the same stream if they change together under random changes of the inputs. For each stream, the
    gradients of the tokens state on which elements of the input they depend. Where both do not agree, the sources are
    unknown.

    Args:
        model: a model in evaluation mode.
        inputs: the arguments with which the model is called, with a batch of one prompt.
        parts: for floating-point inputs by name, such as "pixel_values", the elements that come from pictures. Other
            elements, such as padding, are not changed. Token ids are found by their embeddings. If a module subtracts a
            mean of a time series and divides it by a scale, so that all tokens depend on all of it, its output is
            changed in place of the series.
        embeddings: inputs that are embeddings or encodings of token ids, one per token. Their names are the values, and
            the keys are the names under which the result has the token ids.

    Raises:
        InputError: the tokens depend on the inputs in another way in each call, as in a model that masks at random.
    """
    if any(each.is_inference() for each in (*model.parameters(), *model.buffers())):
        got = "some that were made in torch.inference_mode"
        raise InputError("model", expected="weights with which gradients can be computed", got=got)
    generator = torch.Generator().manual_seed(0)
    runs = _Runs(model, inputs, parts, embeddings or {})
    before, again = runs.features(), runs.features()
    if any(bool(_changed(features, again.get(side)).any()) for side, features in before.items()):
        got = "other tokens in a second call, as of a model that masks patches at random"
        raise InputError("model", expected="the same tokens for the same input", got=got)
    tests = [runs.random_subsets(generator) for _ in range(TESTS)]
    changed = [runs.features(subsets, generator) for subsets in tests]
    signatures = {
        side: torch.stack([_changed(features, after.get(side)) for after in changed])
        for side, features in before.items()
    }
    streams: list[TokenStream] = []
    first_of: list[tuple[Place, bool]] = []
    contradicted: set[int] = set()
    calls: dict[Place, list[CallTokens]] = {}
    for (place, is_key), signature in signatures.items():
        alike = [number for number, first in enumerate(first_of) if torch.equal(signatures[first], signature)]
        number = alike[0] if alike else len(streams)
        if not alike:
            first_of.append((place, is_key))
            streams.append(runs.stream(place, is_key, generator))
            predicted = torch.stack([_predicted(streams[-1], subsets) for subsets in tests])
            if not torch.equal(predicted, signature):
                contradicted.add(number)
        if number in contradicted:
            runs.unknown[place] = f"the sources of the tokens in {place.site.label}"
            continue
        calls.setdefault(place, []).append(CallTokens(number, runs.rows[place, is_key]))
    for place, sides in calls.items():
        if not place.site.cross and sides[0].stream != sides[-1].stream:
            runs.unknown[place] = f"the keys of {place.site.label}, which are of other tokens than its queries"
    known = {place: (sides[0], sides[-1]) for place, sides in calls.items() if place not in runs.unknown}
    return TokenSources(tuple(streams), known, runs.unknown)


def _changed(before: Float[Tensor, "tokens features"], after: Float[Tensor, "_ _"] | None) -> Bool[Tensor, " tokens"]:
    """Return True for each token whose features differ by more than rounding. All differ if there are other tokens, or
    none (`after` is None), in the second run.
    """
    if after is None or before.shape != after.shape:
        return torch.ones(len(before), dtype=torch.bool)
    scale = before.abs().amax().clamp(min=torch.finfo(before.dtype).tiny)
    return ~((before - after).abs().amax(-1) <= LARGEST_ROUNDING * scale)


def _predicted(stream: TokenStream, subsets: Mapping[str, Bool[Tensor, " elements"]]) -> Bool[Tensor, " tokens"]:
    """Return True for each token of a stream that depends on an element of `subsets`."""
    is_changed = torch.zeros(stream.size + 1, dtype=torch.bool)
    for name, subset in subsets.items():
        for tokens in stream.tokens_of.get(name, ()):
            is_changed[tokens[subset]] = True  # -1 is the additional last element
    return is_changed[:-1]


class _Reached(Exception):
    """Exception that stops a run of a model at a certain attention call."""


class _Probe(Interceptor):
    """Interceptor that replaces the outputs of all heads by zeros, and passes each attention call to a function."""

    def __init__(self, on_call: Callable[[Call], None]) -> None:
        self._on_call = on_call

    def change(self, call: Call) -> Change:
        """Return a function that replaces the outputs by zeros."""
        self._on_call(call)
        return lambda attended: attended.out.new_zeros(attended.out.shape)


class _Runs:
    """Runs of a model with all heads switched off, on its own and on changed inputs.

    Attributes:
        rows: for each attention call, and for its queries (False) or keys (True), the index of each token among those
            that the module receives.
        unknown: for attention calls whose tokens are unknown, the reason.
    """

    def __init__(
        self, model: nn.Module, inputs: Mapping[str, Any], parts: Mapping[str, Tensor], embeddings: Mapping[str, str]
    ) -> None:
        self._model, self._inputs, self._parts, self._embeddings = model, inputs, parts, embeddings
        self.rows: dict[tuple[Place, bool], Tensor] = {}
        self.unknown: dict[Place, str] = {}
        self._shapes: dict[str, torch.Size] = {}
        self._rescaled: set[str] = set()  # names of the series that a module rescales; complete after the first run

    def features(
        self, subsets: Mapping[str, Tensor] | None = None, generator: torch.Generator | None = None
    ) -> dict[tuple[Place, bool], Float[Tensor, "tokens features"]]:
        """Run the model, and return some features of the tokens of every attention call: of its queries (False) and, if
        these are other tokens, of its keys (True). The elements of the inputs in `subsets` are changed at random.
        """
        features: dict[tuple[Place, bool], Tensor] = {}

        def on_call(call: Call) -> None:
            place = Place(call.site, call.index)
            sides = _tokens_of_call(call)
            if sides is None:
                self.unknown[place] = f"the tokens of {call.grid.queries} queries and {call.grid.keys} keys"
                return
            for is_key, (tokens, rows) in enumerate(sides):
                self.rows[place, bool(is_key)] = rows
                factors = torch.rand(
                    tokens.shape[1], 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64
                )
                features[place, bool(is_key)] = tokens.detach().double().cpu() @ (factors - 0.5)

        def media(name: str, values: Tensor) -> Tensor:
            if subsets is None:
                return values
            subset = subsets[name].to(values.device)
            subset = subset.view(values.shape) if name in self._parts else subset.view(*values.shape[:-1], 1)
            scale = CONTRAST if name in self._parts else CONTRAST * values.std()
            noise = scale * torch.randn(values.shape, generator=generator).to(values)
            return torch.where(subset, noise, values)

        with torch.no_grad():
            self._run(on_call, media)
        return features

    def random_subsets(self, generator: torch.Generator) -> dict[str, Bool[Tensor, " elements"]]:
        """Return for each input a random part of its elements: a rectangle of a picture, or some of the token ids."""
        subsets = {}
        for name, shape in self._shapes.items():
            if name not in self._parts:
                subsets[name] = torch.rand(prod(shape), generator=generator) < 0.5
                continue
            subset = torch.ones(shape, dtype=torch.bool)
            axes = [axis for axis, size in enumerate(shape) if size > 4]
            for axis in axes:
                size, share = shape[axis], 0.5 ** (1 / len(axes))
                start = int(torch.randint(size, (), generator=generator)) - int(size * share / 2)
                inside = (torch.arange(size) >= start) & (torch.arange(size) < start + size * share)
                subset &= inside.view([-1 if other == axis else 1 for other in range(len(shape))])
            subsets[name] = subset.flatten() & self._parts[name]
        return subsets

    def stream(self, place: Place, is_key: bool, generator: torch.Generator) -> TokenStream:
        """Return the tokens of the queries or keys of an attention call, with the elements of the inputs on which they
        depend. A token depends on an element if its gradient is not zero, on the given input or on random ones, for
        which units that are off on the given input are on.
        """
        noise = {name: torch.randn(self._inputs[name].shape, generator=generator) for name in self._parts}
        found: dict[str, Tensor] = {}
        size = 0
        for scale in (0.0, CONTRAST, -CONTRAST):
            tokens, leaves = self._tokens_at(place, is_key, {name: scale * each for name, each in noise.items()})
            size = len(tokens)
            for name, elements in tokens_by_element(tokens, leaves, generator).items():
                if name not in self._parts:  # one element per token id
                    ids = prod(self._shapes[name])
                    found_ids = elements.view(len(elements), ids, elements.shape[1] // ids).amax(-1)
                    found[name] = _merged(found.get(name, found_ids[:0]), found_ids)
                else:
                    found[name] = _merged(found.get(name, elements[:0]), elements)
        return TokenStream(size, found)

    def _tokens_at(
        self, place: Place, is_key: bool, noise: Mapping[str, Tensor]
    ) -> tuple[Float[Tensor, "tokens width"], dict[str, Tensor]]:
        """Return the tokens of the queries or keys of an attention call, and the inputs and embeddings on which their
        gradients depend. Parts of the inputs are replaced by `noise`, unless it is zero.
        """
        leaves: dict[str, Tensor] = {}
        reached: list[Tensor] = []

        def media(name: str, values: Tensor) -> Tensor:
            if name in noise and bool(noise[name].any()):
                part = self._parts[name].view(values.shape).to(values.device)
                values = torch.where(part, noise[name].to(values), values)
            leaves[name] = values.detach().clone().requires_grad_()
            return leaves[name].clone()  # which the model may change in place

        def on_call(call: Call) -> None:
            if (call.site, call.index) == place:
                sides = _tokens_of_call(call)
                assert sides is not None
                reached.append(sides[is_key][0])
                raise _Reached

        with torch.enable_grad():
            self._run(on_call, media)
        return reached[0], leaves

    def _run(self, on_call: Callable[[Call], None], media: Callable[[str, Tensor], Tensor]) -> None:
        """Run the model with all heads switched off. `media` returns the values to use for an input, and for the
        embeddings of token ids.
        """
        inputs = dict(self._inputs)
        for name in self._parts:
            self._shapes[name] = inputs[name].shape
            if name not in self._rescaled:
                inputs[name] = media(name, inputs[name])
        replaced: set[str] = set()

        def of_ids(name: str, embedded: Tensor) -> Tensor:
            self._shapes[name] = embedded.shape[:-1]
            return media(name, embedded)

        inputs |= {name: of_ids(ids_name, inputs[name]) for ids_name, name in self._embeddings.items()}

        def on_module(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
            values = output[0] if isinstance(output, tuple) and output else output
            for name in self._parts.keys() - replaced:
                if not _is_rescaled(values, self._inputs[name]):
                    continue
                replaced.add(name)
                self._rescaled.add(name)
                values = media(name, values)
                return (values, *output[1:]) if isinstance(output, tuple) else values
            return output

        hooks = [module.register_forward_hook(on_module) for module in self._model.modules()]
        try:
            with (
                errors_of("model", expected="a model that reads these inputs"),
                hooked_embeddings(self._model, self._inputs, of_ids),
                intercepted(self._model, _Probe(on_call)),
                suppress(_Reached),
            ):
                call_by_names(self._model, inputs)
        finally:
            for hook in hooks:
                hook.remove()


@contextmanager
def hooked_embeddings(
    model: nn.Module, inputs: Mapping[str, Any], change: Callable[[str, Tensor], Tensor]
) -> Iterator[set[str]]:
    """Replace the embeddings of the token ids among the inputs of a model while it runs. `change` is a function from
    the name of the input and its embeddings to the embeddings that take their place. The context is the set of the
    inputs whose embeddings were replaced, by name.
    """
    replaced: set[str] = set()

    def on_embedding(module: nn.Module, arguments: tuple[Any, ...], output: Any) -> Any:
        ids = arguments[0] if arguments else None
        name = _ids_among(inputs, ids, is_main=module is input_embeddings(model))
        if name is None or not isinstance(output, Tensor):
            return output
        replaced.add(name)
        return change(name, output)

    tables = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    hooks = [module.register_forward_hook(on_embedding) for module in tables]
    try:
        yield replaced
    finally:
        for hook in hooks:
            hook.remove()


def _is_rescaled(values: Any, series: Tensor) -> bool:
    """Return True if `values` are a time series `(1, time)` or `(1, time, channels)` of which each channel was
    multiplied by a number and shifted by another one.
    """
    if not isinstance(values, Tensor) or values.shape != series.shape or len(values) != 1 or values.ndim > 3:
        return False
    if not values.is_floating_point() or torch.equal(values, series):
        return False
    x, y = (each.detach().double() - each.detach().double().mean(1, keepdim=True) for each in (series, values))
    slope = (x * y).sum(1, keepdim=True) / (x**2).sum(1, keepdim=True).clamp(min=torch.finfo(x.dtype).tiny)
    return bool((y - slope * x).abs().max() <= 1e-4 * y.abs().max()) and bool(y.any())


def tokens_by_element(
    tokens: Float[Tensor, "tokens width"],
    leaves: Mapping[str, Tensor],
    generator: torch.Generator,
    strides: tuple[int, ...] = (),
) -> dict[str, Int[Tensor, "rows elements"]]:
    """Return for each input the token that depends on each of its elements, or -1; in several rows where several tokens
    do.

    The gradient of a sum over tokens is compared with that of a sum in which each token is multiplied by a digit of its
    number. Where a single token depends on an element, the ratio of both gradients is this digit. If too many elements
    have other ratios, the tokens are divided into groups of tokens that are further apart, at the distances `strides`.
    """
    size, named = len(tokens), {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    nothing = {name: torch.full((0, leaf.numel()), -1) for name, leaf in named.items()}
    if not tokens.requires_grad:
        return nothing
    with torch.enable_grad():
        # With random factors, contributions of an element do not cancel.
        values = tokens @ (torch.rand(tokens.shape[1], generator=generator).to(tokens) + 0.5)
    base = BASE if torch.finfo(tokens.dtype).eps < 1e-5 else 4

    def gradients(factors: Tensor) -> list[Float[Tensor, " elements"]]:
        """Return the gradients of the sum of the tokens, each multiplied by its factor, for each input."""
        of_values, inputs = factors.to(values), list(named.values())
        found = torch.autograd.grad(values, inputs, of_values, retain_graph=True, allow_unused=True)
        return [
            torch.zeros(leaf.numel(), dtype=torch.float64) if gradient is None else gradient.flatten().double().cpu()
            for gradient, leaf in zip(found, inputs, strict=True)
        ]

    def are_mixed() -> bool:
        """Return True if some tokens each depend on most of the elements, as after a norm over all tokens."""
        sample = torch.randperm(size, generator=torch.Generator().manual_seed(0))[:SAMPLED]
        counts = [[int((each != 0).sum()) for each in gradients(torch.arange(size) == token)] for token in sample]
        return all(
            max(count / leaf.numel() for count, leaf in zip(each, named.values(), strict=True)) > 0.5 for each in counts
        )

    for stride in strides or (*(stride for stride in STRIDES if stride < size), size):
        result, elements, shared = dict(nothing), 0, 0
        for offset in range(stride):
            is_tested = torch.arange(size) % stride == offset
            ranks = is_tested.cumsum(0) - 1
            digits = [
                ranks // base**power % base
                for power in range(max(int(ranks[-1]), 1).bit_length())
                if base**power <= int(ranks[-1])
            ]
            # Another random number of each token shows a number that is wrong because of rounding.
            codes = torch.randint(base, (int(ranks[-1]) + 1,), generator=generator)
            totals = gradients(is_tested)
            ratios = [gradients(is_tested * (digit + 1) / base) for digit in [*digits, codes[ranks.clamp(min=0)]]]
            for place, (name, total) in enumerate(zip(named, totals, strict=True)):
                # Where contributions cancel, rounding changes the ratio.
                depends, rank = total.abs() > 1e-3 * _median(total.abs()), torch.zeros(len(total), dtype=torch.long)
                is_single, digit = depends.clone(), rank
                for power, of_digit in enumerate(ratios):
                    scaled = of_digit[place] / total.where(depends, torch.ones_like(total)) * base - 1
                    digit = scaled.round()
                    is_single &= ((scaled - digit).abs() < 0.1) & (digit >= 0) & (digit < base)
                    digit = digit.nan_to_num().clamp(0, base - 1).long()
                    rank += digit * base**power if power < len(digits) else 0
                is_single &= (rank <= int(ranks[-1])) & (digit == codes[rank.clamp(max=int(ranks[-1]))])
                elements, shared = elements + int(depends.sum()), shared + int((depends & ~is_single).sum())
                token = torch.where(is_single, offset + stride * rank, -1)
                result[name] = _merged(result[name], token[None])
        if shared <= MOST_SHARED * elements or (stride == 1 and size > STRIDES[-1] and are_mixed()):
            break
    return result


def _median(values: Float[Tensor, " elements"]) -> float:
    """Return the median of the values that are not 0; 0 if all are."""
    values = values[values > 0]
    return float(values.median()) if len(values) else 0.0


def _merged(one: Int[Tensor, "rows elements"], other: Int[Tensor, "other_rows elements"]) -> Int[Tensor, "_ elements"]:
    """Return the tokens of both tensors for each element, each of them once, in as few rows as possible."""
    joined = torch.cat([one, other]).sort(0, descending=True).values
    joined[1:][joined[1:] == joined[:-1]] = -1
    joined = joined.sort(0, descending=True).values
    return joined[(joined >= 0).any(-1)]


def _tokens_of_call(call: Call) -> list[tuple[Float[Tensor, "_ _"], Int[Tensor, "_ _"]]] | None:
    """Return the tokens that the module of an attention call received, with the index of each query among them. If the
    keys are of other tokens than the queries, return the same for the keys, too. Return None if they are unknown.
    """
    grid, compared = call.grid, call.sources.tokens
    received = [
        value
        for arguments in call.module_arguments
        for value in arguments.values()
        if isinstance(value, Tensor) and value.is_floating_point() and value.ndim > 1
    ]

    def rows_of(numbered: NumberedTokens | None, count: int) -> tuple[Sequence[LinearMapCall], Tensor]:
        """Return the linear maps that computed the tokens, and the index of each query or key among their results."""
        if numbered is None or not bool((numbered.numbers > 0).all()) or numbered.are_sums:
            unknown = LinearMapCall((grid.batch, count))
            return unknown.parts, torch.arange(grid.batch * count).view(grid.batch, count)
        return numbered.linear_map.parts, (numbered.numbers.cpu().reshape(grid.batch, -1, count) - 1)[:, 0]

    def tokens_among(tensors: list[Tensor], maps: Sequence[LinearMapCall]) -> list[Tensor]:
        """Return for each linear map the tensor that it was called with; nothing if one of them is unknown."""
        chosen = []
        for each in maps:
            fitting = [
                tensor
                for tensor in tensors
                if tensor.numel() == each.size * tensor.shape[-1]
                and not (tensor.ndim == 4 and tensor.shape[-2:] == (grid.queries, grid.keys))  # a mask
            ]
            mapped = [tensor for tensor in fitting if each.mapped is tensor]
            is_only = sum(other.size == each.size for other in maps) == 1
            chosen += mapped[:1] or (fitting[:1] if is_only else [])
        return chosen if len(chosen) == len(maps) else []

    def joined(tensors: list[Tensor]) -> Tensor:
        """Return the tokens of tensors that the module concatenates; additional features are zeros."""
        width = max(each.shape[-1] for each in tensors)
        return torch.cat([F.pad(each.flatten(0, -2), (0, width - each.shape[-1])) for each in tensors])

    maps, rows = rows_of(None if compared is None else compared.queries, grid.queries)
    queries = tokens_among(received, maps)
    if not queries:
        return None
    sides = [(joined(queries), rows)]

    def is_other(tensor: Tensor) -> bool:
        return all(tensor is not each for each in queries)

    key_maps, key_rows = rows_of(None if compared is None else compared.keys, grid.keys)
    if call.site.cross:
        keys = tokens_among([each for each in received if is_other(each)], key_maps)
        if not keys:
            return None
        sides.append((joined(keys), key_rows))
    elif compared is not None and (others := compared.tensors_of_keys(received)):
        # Keys of a tensor of their own may be other tokens.
        if len(others) < len(key_maps):
            return None
        sides.append((joined(others), key_rows))
    elif [each.size for each in key_maps] != [each.size for each in maps]:
        return None
    elif not torch.equal(key_rows, rows):
        sides.append((sides[0][0], key_rows))
    return sides


def _ids_among(inputs: Mapping[str, Any], ids: Any, *, is_main: bool) -> str | None:
    """Return the name of the input that an embedding table reads, or None. The ids of the model's main table may differ
    from the input, since models replace those of pictures.
    """
    for name, value in inputs.items():
        is_like = isinstance(ids, Tensor) and isinstance(value, Tensor) and value.shape == ids.shape
        if name.endswith(IDS) and is_like and (torch.equal(value, ids) or (is_main and name == IDS)):
            return name
    return None
