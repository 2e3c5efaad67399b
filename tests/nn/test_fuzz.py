"""Random combinations of the layer's options: each equals the oracle, or is refused for the predicted reason."""

import os
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, seed, settings
from hypothesis import strategies as st

import headwise as hw
from oracles import plain_layer
from strategies import biases, masks

COMBINATIONS = int(os.environ.get("HEADWISE_FUZZ", "400"))
"""Number of random combinations for each way of calling the layer; without the slow tests, at most 100."""


def combinations(number: int, first: int = 0):
    """Decorate a check of hypothesis data to a test of combinations from `first` to `number`, the same in every run.

    Every 10 combinations have another seed, since hypothesis varies the first choices of one seed little.
    """

    def decorate(check):
        def test():
            for start in range(first, number, 10):
                part = settings(max_examples=min(10, number - start), deadline=None, derandomize=True)
                seed(start)(part(given(st.data())(check)))()

        test.__name__, test.__doc__, test.check = check.__name__, check.__doc__, check
        return test

    return decorate


FEW = min(COMBINATIONS, 100)
few = combinations(FEW)

EXACT = {"rtol": 0.0, "atol": 1e-10}
"""Tolerances for float64; random scales can make scores as large as a hundred."""


@dataclass
class DrawnLayer:
    """Random layer in float64, and the options with which `plain_layer` computes the same.

    Attributes:
        layer: the layer.
        oracle: keyword arguments for `plain_layer`.
        refusals: parts of error messages; if any, every call must be refused with one of them.
    """

    layer: hw.MultiHeadAttention
    oracle: dict
    refusals: list[str] = field(default_factory=list)

    def expected(self, x, context=None, values=None, *, at_q, at_k, **call):
        """Return the output and weights that `plain_layer` computes from the layer's parameters.

        Both can be differentiated with respect to the parameters. `at_q` and `at_k` are the positions.
        """
        context = x if context is None else context
        values = context if values is None else values
        return plain_layer(dict(self.layer.named_parameters()), x, context, values, at_q, at_k, **(self.oracle | call))


@st.composite
def layers(draw, *, cross: bool, mask=None) -> DrawnLayer:
    """Draw a layer with random widths, options and parameters; for `cross`, with random widths of the contexts."""
    kv_heads, group = draw(st.integers(1, 3)), draw(st.integers(1, 3))
    heads = kv_heads * group
    head_dim, value_dim = draw(st.integers(1, 7)), draw(st.none() | st.integers(1, 7))
    embed = draw(st.integers(1, 11))
    made = {"num_kv_heads": kv_heads, "head_dim": head_dim, "value_dim": value_dim, "mask": mask}
    made |= {"bias": draw(st.booleans()), "out_bias": draw(st.none() | st.booleans())}
    made["out_dim"] = draw(st.none() | st.integers(1, 7))
    if cross:
        made["context_dim"] = draw(st.none() | st.integers(1, 7))
        made["value_context_dim"] = draw(st.none() | st.integers(1, 7))
    else:
        made["fused_qkv"] = draw(st.booleans())
    oracle = {"heads": heads, "kv_heads": kv_heads, "value_width": kv_heads * (value_dim or head_dim)}

    if head_dim >= 2 and draw(st.booleans()):
        theta, width = draw(st.floats(2.0, 1e5)), 2 * draw(st.integers(1, head_dim // 2))
        interleaved = draw(st.booleans())
        is_default_width = width == head_dim and draw(st.booleans())
        made["rotary"] = hw.Rotary(theta, None if is_default_width else width, interleaved)
        oracle["rotary"] = (theta, width, interleaved)
    kind = draw(st.sampled_from([None, "alibi", "learned"]))
    if kind == "alibi":
        made["position_bias"], oracle["alibi"] = hw.ALiBi(), True
    elif kind == "learned":
        oracle["max_distance"] = draw(st.integers(5, 20))
        made["position_bias"] = hw.RelativeBias(heads, 8, oracle["max_distance"], dtype=torch.float64)
    if draw(st.booleans()):
        oracle["scale"], oracle["softcap"] = draw(st.none() | st.floats(0.05, 1.0)), draw(st.none() | st.floats(1, 30))
        learned = {name: draw(st.booleans()) for name in ("sinks", "temperature", "talking_heads")}
        made["scores"] = hw.Scores(oracle["scale"], oracle["softcap"], **learned)
    if draw(st.booleans()):
        norm = hw.QKNorm(
            draw(st.sampled_from(["rms", "layer"])),
            draw(st.sampled_from(["head", "heads"])),
            draw(st.floats(1e-6, 0.1)),
        )
        made["qk_norm"], oracle["norm_over"], oracle["eps"] = norm, norm.over, norm.eps
    made["output_gate"] = draw(st.sampled_from([None, "head", "element"]))
    made["backend"] = draw(st.sampled_from([None, "fused", "blockwise", "reference"]))

    layer = hw.MultiHeadAttention(embed, heads, dtype=torch.float64, **made)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            parameter.copy_(0.5 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
            if name == "temperature":
                parameter.abs_().add_(0.5)
    refusals = []
    if made["backend"] != "reference":
        scores = made.get("scores", hw.Scores())
        if scores.softcap is not None and made["backend"] == "fused":
            refusals.append("have no softcap")
        if scores.talking_heads:
            refusals += ["keep heads apart", "talking_heads mixes all"]
    return DrawnLayer(layer, oracle, refusals)


def random(draw, *shape):
    """Draw a float64 tensor of normally distributed numbers."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    return torch.randn(shape, generator=generator, dtype=torch.float64)


def equals_oracle_unless_refused(drawn, call, expected):
    """Check that a call is refused if it must be, and that it equals the oracle otherwise.

    Returns:
        True if the call was not refused.
    """
    if drawn.refusals:
        with pytest.raises(hw.InputError) as caught:
            call()
        assert any(reason in str(caught.value) for reason in drawn.refusals), caught.value
        return False
    for result, exact in zip(call(), expected(), strict=True):
        assert not result.isnan().any()
        torch.testing.assert_close(result, exact, **EXACT)
    return True


def check_gradients(drawn, y, expected):
    """Check that two outputs have the same gradient for every parameter, from the same random upstream gradient."""
    parameters = list(drawn.layer.parameters())
    direction = torch.randn(expected.shape, dtype=torch.float64)
    ours, theirs = (
        torch.autograd.grad(output, parameters, direction, allow_unused=True, materialize_grads=True)
        for output in (y, expected)
    )
    for (name, _), mine, right in zip(drawn.layer.named_parameters(), ours, theirs, strict=True):
        scale = max(1.0, right.abs().max().item())
        assert not mine.isnan().any(), name
        torch.testing.assert_close(
            mine / scale, right / scale, rtol=0, atol=1e-9, msg=lambda m, name=name: f"{name}: {m}"
        )


@few
def test_calls_with_random_options_equal_the_oracle(data):
    draw = data.draw
    cross = draw(st.booleans())
    batch, queries = draw(st.integers(1, 3)), draw(st.integers(1, 6))
    keys = draw(st.integers(1, 6)) if cross else queries
    drawn = draw(layers(cross=cross))
    layer = drawn.layer
    full = (batch, layer.num_heads, queries, keys)
    mask, allowed = draw(st.none() | masks(*full)) or (None, torch.ones(full, dtype=torch.bool))
    bias = draw(st.none() | biases(*full))
    full_bias = None if bias is None else bias.double().expand(full)
    given_gate = random(draw, *draw(st.sampled_from([full[1:2], full[:2], full[:3]]))) if draw(st.booleans()) else None
    gate = None
    if given_gate is not None:
        gate = given_gate[(None,) * (given_gate.ndim == 1)]
        gate = gate[(...,) + (None,) * (4 - gate.ndim)]
    x = random(draw, batch, queries, layer.embed_dim)
    inputs = [x]
    if cross:
        inputs.append(random(draw, batch, keys, layer.context_dim))
        if layer.value_context_dim != layer.context_dim or draw(st.booleans()):
            inputs.append(random(draw, batch, keys, layer.value_context_dim))
    at_k = torch.arange(keys).expand(batch, -1)
    at_q = torch.arange(keys - queries, keys).expand(batch, -1)
    positions = None
    if not cross and draw(st.booleans()):
        positions = torch.randint(0, 50, draw(st.sampled_from([(queries,), (batch, queries)])))
        at_q = at_k = positions.expand(batch, -1)
    unbatched = batch == 1 and draw(st.booleans())
    arguments = [tensor[0] for tensor in inputs] if unbatched else inputs
    return_weights = draw(st.booleans())

    def call():
        result = layer(
            *arguments, mask=mask, bias=bias, gate=given_gate, positions=positions, return_weights=return_weights
        )
        results = result if return_weights else (result,)
        return [tensor[None] for tensor in results] if unbatched else results

    def expected():
        y, weights = drawn.expected(*inputs, at_q=at_q, at_k=at_k, allowed=allowed, bias=full_bias, gate=gate)
        return (y, weights) if return_weights else (y,)

    if equals_oracle_unless_refused(drawn, call, expected):
        check_gradients(drawn, call()[0], expected()[0])


@st.composite
def causal_masks(draw, heads: int):
    """Draw a causal mask whose rule for a query and a key does not depend on the length of the text.

    Returns the mask and its values for 9 sequences of 20 tokens, `(9, heads, 20, 20)`.
    """
    kind = draw(st.sampled_from(["causal", "window", "dilated", "chunked", "prefix", "mask_rule", "per head"]))
    size = draw(st.integers(1, 5))
    rules = {
        "causal": (hw.causal(), lambda q, k: k <= q),
        "window": (hw.window(size), lambda q, k: q - k < size),
        "dilated": (hw.window(size, dilation=2), lambda q, k: (q - k < 2 * size) & ((q - k) % 2 == 0)),
        "chunked": (hw.chunked(size), lambda q, k: q // size == k // size),
        "prefix": (hw.window(1) | hw.prefix(size), lambda q, k: (q == k) | (k < size)),
        "mask_rule": (hw.mask_rule(lambda b, h, q, k: (b + h + q * k) % 3 > 0), None),
        "per head": (hw.window([size + head for head in range(heads)]), None),
    }
    mask, rule = rules[kind]
    batch, head = torch.arange(9)[:, None, None, None], torch.arange(heads)[:, None, None]
    position = torch.arange(20)
    q, k = position[:, None], position[None, :]
    if kind == "mask_rule":
        allowed = (batch + head + q * k) % 3 > 0
    elif kind == "per head":
        allowed = (q - k < size + head)[None].expand(9, -1, -1, -1)
    else:
        allowed = rule(q, k).expand(9, heads, -1, -1)
    return hw.causal() & mask, allowed & (k <= q)


def pieces(draw, total: int) -> list[int]:
    """Draw lengths of pieces that add up to `total`."""
    cuts = sorted(draw(st.sets(st.integers(1, max(total - 1, 1)))) - {total})
    return [stop - start for start, stop in zip([0, *cuts], [*cuts, total], strict=True)]


@few
def test_a_text_in_pieces_with_a_cache_equals_the_oracle(data):
    draw = data.draw
    drawn = draw(layers(cross=False))
    layer, heads = drawn.layer, drawn.layer.num_heads
    batch, total = draw(st.integers(1, 3)), draw(st.integers(1, 8))
    layer.mask, allowed = draw(causal_masks(heads))
    allowed = allowed[:batch, :, :total, :total]
    kind = draw(st.sampled_from(["dynamic", "static", "sliding"]))
    if kind == "sliding":
        window, sinks = draw(st.integers(1, 5)), draw(st.integers(0, 3))
        cache = hw.SlidingCache(window, sinks=sinks)
        position = torch.arange(total)
        near = (position[:, None] - position[None, :] < window) | (position[None, :] < sinks)
        allowed = allowed & near
    else:
        cache = hw.DynamicCache() if kind == "dynamic" else layer.static_cache(batch, total + draw(st.integers(0, 2)))
    x = random(draw, batch, total, layer.embed_dim)
    at = torch.arange(total).expand(batch, -1)
    cut = pieces(draw, total)

    def call():
        cache.reset()
        with torch.no_grad():
            return [torch.cat([layer(piece, cache=cache) for piece in x.split(cut, dim=1)], dim=1)]

    equals_oracle_unless_refused(
        drawn, call, lambda: [drawn.expected(x, at_q=at, at_k=at, allowed=allowed)[0].detach()]
    )


@few
def test_texts_of_different_lengths_share_a_static_cache(data):
    draw = data.draw
    drawn = draw(layers(cross=False))
    layer, heads = drawn.layer, drawn.layer.num_heads
    batch = draw(st.integers(1, 3))
    layer.mask, allowed = draw(causal_masks(heads))
    calls = draw(st.lists(st.lists(st.integers(0, 4), min_size=batch, max_size=batch), min_size=1, max_size=3))
    totals = [sum(counts) for counts in zip(*calls, strict=True)]
    cache = layer.static_cache(batch, max(*totals, 1))
    texts = [random(draw, total, layer.embed_dim) for total in totals]

    def call():
        out, starts = [[] for _ in range(batch)], [0] * batch
        for counts in calls:
            x = torch.full((batch, max(counts), layer.embed_dim), 1e3, dtype=torch.float64)  # large padding
            for row, (text, start, count) in enumerate(zip(texts, starts, counts, strict=True)):
                x[row, :count] = text[start : start + count]
            with torch.no_grad():
                y = layer(x, cache=cache, lengths=counts)
            assert not y.isnan().any()
            for row, count in enumerate(counts):
                out[row].append(y[row, :count])
                starts[row] += count
        return [torch.cat(rows) for rows in out]

    def expected():
        for row, (text, total) in enumerate(zip(texts, totals, strict=True)):
            at = torch.arange(total)[None]
            y, _ = drawn.expected(text[None], at_q=at, at_k=at, allowed=allowed[row : row + 1, :, :total, :total])
            yield y[0].detach()

    equals_oracle_unless_refused(drawn, call, lambda: list(expected()))


@few
def test_packed_sequences_equal_the_oracle(data):
    draw = data.draw
    cross = draw(st.booleans())
    drawn = draw(layers(cross=cross))
    layer, heads = drawn.layer, drawn.layer.num_heads
    lengths = draw(st.lists(st.integers(0, 4), min_size=1, max_size=4))
    of_keys = draw(st.lists(st.integers(0, 4), min_size=len(lengths), max_size=len(lengths))) if cross else lengths
    sequences = len(lengths)
    x = random(draw, sum(lengths), layer.embed_dim)
    inputs = [x]
    if cross:
        inputs += [random(draw, sum(of_keys), width) for width in (layer.context_dim, layer.value_context_dim)]
    kind = draw(st.sampled_from([None, "causal", "mask_rule", "padding"]))
    counts = [draw(st.integers(0, length)) for length in of_keys]
    mask = {
        None: None,
        "causal": hw.causal(),
        "mask_rule": hw.mask_rule(lambda b, h, q, k: (b + 2 * h + q * k) % 3 > 0),
        "padding": hw.padding(counts),
    }[kind]
    gate = random(draw, sequences, heads) if draw(st.booleans()) else None
    nested = draw(st.booleans()) and not cross and min(lengths) > 0

    def bounds(lengths):
        return torch.tensor([0, *lengths]).cumsum(0)

    def call():
        if nested:
            jagged = torch.nested.nested_tensor_from_jagged(x, bounds(lengths))
            return [layer(jagged, mask=mask, gate=gate).values()]
        offsets = {"offsets": bounds(lengths)} | ({"context_offsets": bounds(of_keys)} if cross else {})
        return [layer(*inputs, mask=mask, gate=gate, **offsets)]

    def expected():
        parts = [x.split(lengths), *(tensor.split(of_keys) for tensor in inputs[1:])]
        out = []
        for s, sequence in enumerate(zip(*parts, strict=True)):
            queries, keys = lengths[s], of_keys[s]
            at_q, at_k = torch.arange(keys - queries, keys)[None], torch.arange(keys)[None]
            q, k, h = at_q[0, :, None], at_k[0, None, :], torch.arange(heads)[:, None, None]
            allowed = {
                None: torch.ones(queries, keys, dtype=torch.bool),
                "causal": k <= q,
                "mask_rule": (s + 2 * h + q * k) % 3 > 0,
                "padding": (k < counts[s]).expand(queries, -1),
            }[kind].expand(1, heads, queries, keys)
            call = {"at_q": at_q, "at_k": at_k, "allowed": allowed}
            call["gate"] = None if gate is None else gate[s][None, :, None, None]
            out.append(drawn.expected(*(tensor[None] for tensor in sequence), **call)[0][0])
        return [torch.cat(out)]

    if equals_oracle_unless_refused(drawn, call, expected):
        check_gradients(drawn, call()[0], expected()[0])


@pytest.mark.usefixtures("as_user")
@few
def test_contradictory_arguments_are_refused_with_any_options(data):
    """The error names the argument, whatever the options of the layer are."""
    draw = data.draw
    drawn = draw(layers(cross=False))
    layer = drawn.layer
    batch, length = draw(st.integers(1, 3)), draw(st.integers(1, 5))
    x = random(draw, batch, length, layer.embed_dim)
    cases = {
        "offsets": ({"offsets": [0, length]}, r"^offsets: expected x of shape \(tokens, "),
        "lengths": ({"lengths": [length] * (batch + 1)}, f"^lengths: expected one for each of {batch} sequences"),
        "context_offsets": ({"context_offsets": [0, length]}, "^context_offsets: expected offsets of x and"),
        "lengths too long": (
            {"cache": layer.static_cache(batch, length), "lengths": [length + 1] * batch},
            f"^lengths: expected numbers from 0 to {length}",
        ),
        "room": (
            {"cache": layer.static_cache(batch, length), "again": True},
            f"^cache: expected room for {2 * length}",
        ),
        "batch": ({"cache": layer.static_cache(batch + 1, length)}, f"^x: expected the batch of {batch + 1}"),
        "ragged": ({"cache": hw.DynamicCache(), "lengths": [length] * batch}, "^lengths: expected a StaticCache"),
        "gate": ({"gate": torch.ones(layer.num_heads + 1)}, r"^gate: expected a shape of \(heads\)"),
        "positions": ({"positions": torch.arange(length + 1)}, "^positions: expected shape"),
        "bias": ({"bias": torch.ones(length, length + 1)}, "^bias: expected a shape that broadcasts"),
    }
    options, message = cases[draw(st.sampled_from(sorted(cases)))]
    if drawn.refusals and "again" in options:
        return  # the first call would be refused
    with torch.no_grad():
        if options.pop("again", False):
            layer(x, **options)
        with pytest.raises(hw.InputError, match=message):
            layer(x, **options)


WAYS = [
    test_calls_with_random_options_equal_the_oracle,
    test_a_text_in_pieces_with_a_cache_equals_the_oracle,
    test_texts_of_different_lengths_share_a_static_cache,
    test_packed_sequences_equal_the_oracle,
]


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
def test_all_combinations(way):
    combinations(COMBINATIONS, FEW)(way.check)()


@pytest.mark.slow
@pytest.mark.usefixtures("as_user")
def test_contradictory_arguments_are_refused_with_all_combinations():
    combinations(COMBINATIONS, FEW)(test_contradictory_arguments_are_refused_with_any_options.check)()
