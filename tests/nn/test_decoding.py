"""A text read token by token, in pieces or at once has the same output, for all caches, position schemes and masks."""

import contextlib
import copy
import itertools

import pytest
import torch

import headwise as hw
from shape_checks import shapes_unchecked

BATCH, LENGTH, EMBED, HEADS = 2, 13, 24, 6

POSITIONS = {
    "none": {},
    "rotary": {"rotary": hw.Rotary()},
    "partial rotary": {"rotary": hw.Rotary(width=2, interleaved=True)},
    "linear": {"rotary": hw.Rotary(scaling=hw.LinearScaling(2.0))},
    "yarn": {"rotary": hw.Rotary(scaling=hw.YaRN(4.0, 8))},
    "llama3": {"rotary": hw.Rotary(scaling=hw.Llama3(8.0, 8))},
    "alibi": {"position_bias": hw.ALiBi()},
    "relative": {"position_bias": hw.RelativeBias(HEADS, 8, 10, bidirectional=False, dtype=torch.float64)},
}
MASKS = {
    "causal": hw.causal(),
    "window": hw.window(4),
    "window and sinks": hw.window(3) | hw.causal() & hw.prefix(2),
    "dilated": hw.window(3, dilation=2),
    "a window per head": hw.window([1, 2, 3, 5, 8, None]),
    "chunked": hw.causal() & hw.chunked(4),
    "mask rule": hw.mask_rule(lambda b, h, q, k: (q >= k) & ((q + k + h) % 3 != b)),
}
SOME_PAIRS = [
    pytest.param(positions, mask, marks=() if mask == "causal" or positions == "none" else pytest.mark.slow)
    for positions in POSITIONS
    for mask in MASKS
]
"""Pairs of positions and masks. Those that are neither without positions nor causal belong to the long tests."""

CACHES = {
    "dynamic": lambda layer: hw.DynamicCache(),
    "static": lambda layer: layer.static_cache(BATCH, LENGTH + 2),
    "sliding": lambda layer: hw.SlidingCache(LENGTH),
}
PIECES = ([1] * LENGTH, [5, 1, 1, 6], [LENGTH])


def filled(layer):
    """Return the layer in float64 and evaluation mode, with random parameters."""
    layer = layer.double().eval()
    for parameter in layer.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return layer


def layers(mask, positions):
    """Yield a layer of each kind with this mask and these position options: multi-head, differential and latent.

    The latent layer is left out with a position bias, which it does not take.
    """
    common = {"mask": mask, **positions, "dtype": torch.float64}
    options = {"num_kv_heads": 2, "qk_norm": hw.QKNorm(), "output_gate": "head", "scores": hw.Scores(sinks=True)}
    yield hw.MultiHeadAttention(EMBED, HEADS, **common, **options)
    yield hw.DifferentialAttention(EMBED, HEADS, num_kv_heads=3, value_dim=7, **common)
    if "position_bias" not in positions:
        yield hw.LatentAttention(EMBED, HEADS, kv_rank=5, head_dim=4, rotary_dim=4, **common)


def in_pieces(layer, x, cache, pieces):
    """Return the outputs of a text that is fed to the layer and its cache in pieces of these lengths."""
    with torch.no_grad():
        return torch.cat([layer(piece, cache=cache) for piece in x.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize(("positions", "mask"), SOME_PAIRS)
def test_cached_decoding_equals_one_forward_pass(positions, mask):
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    for layer in layers(MASKS[mask], POSITIONS[positions]):
        expected = filled(layer)(x).detach()
        for (name, make), pieces in itertools.product(CACHES.items(), PIECES):
            # The other pieces contain single tokens too, so that all shapes are checked.
            with shapes_unchecked() if pieces is PIECES[0] else contextlib.nullcontext():
                y = in_pieces(layer, x, make(layer), pieces)
            torch.testing.assert_close(y, expected, rtol=0, atol=1e-12, msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("cache", ["dynamic", "static", "sliding"])
def test_dynamic_angles_in_each_step_equal_those_of_a_forward_pass_so_far(cache):
    """With dynamic scaling, each token changes all angles; each step equals the last row of a forward pass so far.

    Beyond the trained length, the base is theta * (1 + factor * (length / trained - 1)) ^ (width / (width - 2)).
    """
    layer = filled(
        hw.MultiHeadAttention(EMBED, HEADS, rotary=hw.Rotary(scaling=hw.DynamicNTK(2.0, 6)), mask=hw.causal())
    )
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    layer_cache = CACHES[cache](layer)
    with torch.no_grad():
        for t in range(LENGTH):
            y = layer(x[:, t : t + 1], cache=layer_cache)
            torch.testing.assert_close(y, layer(x[:, : t + 1])[:, -1:], rtol=0, atol=1e-12)
    static_angles = copy.deepcopy(layer)
    static_angles.rotary = hw.Rotary(1e4 * (1 + 2.0 * (LENGTH / 6 - 1)) ** (4 / 2))
    torch.testing.assert_close(layer(x), static_angles(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize(("window", "sinks"), [(1, 0), (4, 0), (3, 2), (1, 3)])
def test_a_sliding_cache_is_a_window_with_sinks(window, sinks):
    layer = filled(hw.MultiHeadAttention(EMBED, HEADS, rotary=hw.Rotary(), position_bias=hw.ALiBi()))
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    expected = layer(x, mask=hw.window(window) | hw.causal() & hw.prefix(sinks)).detach()
    for pieces in PIECES:
        y = in_pieces(layer, x, hw.SlidingCache(window, sinks=sinks), pieces)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("kind", ["layer", "differential", "latent"])
def test_a_batch_of_different_lengths_shares_a_static_cache(kind):
    *all_layers, latent = layers(hw.causal() & hw.chunked(5), POSITIONS["rotary"])
    layer = filled({"layer": all_layers[0], "differential": all_layers[1], "latent": latent}[kind])
    texts = torch.randn(2, LENGTH, EMBED, dtype=torch.float64)
    expected = layer(texts).detach()
    cache = layer.static_cache(2, LENGTH)
    starts, got = [0, 0], [[], []]
    for counts in ([6, 2], [0, 3], [1, 1], [2, 4]):
        x = torch.full((2, max(counts), EMBED), 1e6, dtype=torch.float64)  # large padding
        for row, count in enumerate(counts):
            x[row, :count] = texts[row, starts[row] : starts[row] + count]
        with torch.no_grad():
            y = layer(x, cache=cache, lengths=counts)
        for row, count in enumerate(counts):
            got[row].append(y[row, :count])
            starts[row] += count
    for row in range(2):
        torch.testing.assert_close(torch.cat(got[row]), expected[row, : starts[row]], rtol=0, atol=1e-12)


@pytest.mark.parametrize("cache", CACHES)
def test_decoding_after_crop_and_reorder_equals_a_forward_pass_of_the_new_text(cache):
    """Speculated tokens are removed with crop, and a beam is duplicated with reorder."""
    layer = filled(hw.MultiHeadAttention(EMBED, HEADS, rotary=hw.Rotary(), mask=hw.causal()))
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    wrong = torch.randn(BATCH, 3, EMBED, dtype=torch.float64)
    layer_cache = CACHES[cache](layer)
    in_pieces(layer, x[:, :5], layer_cache, [5])
    in_pieces(layer, wrong, layer_cache, [3])
    layer_cache.crop(5)
    beams = torch.tensor([1, 1])
    layer_cache.reorder(beams)
    y = in_pieces(layer, x[:, 5:], layer_cache, [1] * (LENGTH - 5))
    text = torch.cat([x[beams, :5], x[:, 5:]], dim=1)
    torch.testing.assert_close(y, layer(text)[:, 5:].detach(), rtol=0, atol=1e-12)


def test_positions_of_a_left_padded_text_can_be_passed_with_a_cache():
    """Position 0 is that of the first token after the padding."""
    layer = filled(hw.MultiHeadAttention(EMBED, HEADS, rotary=hw.Rotary(), mask=hw.causal()))
    words = torch.randn(1, 6, EMBED, dtype=torch.float64)
    padded = torch.cat([torch.full((1, 3, EMBED), 1e3, dtype=torch.float64), words], dim=1)
    cache, out = hw.DynamicCache(), []
    with torch.no_grad():
        for start, stop in ((0, 5), (5, 6), (6, 9)):
            positions = (torch.arange(start, stop) - 3).clamp(min=0)
            mask = hw.padding([max(stop - 3, 0)], side="left")
            out.append(layer(padded[:, start:stop], cache=cache, positions=positions, mask=mask))
    torch.testing.assert_close(torch.cat(out, dim=1)[:, 3:], layer(words).detach(), rtol=0, atol=1e-12)


def test_gradients_go_through_a_dynamic_cache():
    layer = filled(hw.MultiHeadAttention(EMBED, HEADS, rotary=hw.Rotary(), mask=hw.causal()))
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    cache = hw.DynamicCache()
    pieces = torch.cat([layer(piece, cache=cache) for piece in x.split([4, 4, 5], dim=1)], dim=1)
    upstream = torch.randn(pieces.shape, dtype=torch.float64)
    ours, expected = (torch.autograd.grad(y, list(layer.parameters()), upstream) for y in (pieces, layer(x)))
    torch.testing.assert_close(ours, expected, rtol=0, atol=1e-11)


@pytest.mark.parametrize("cache", ["dynamic", "sliding"])
def test_later_steps_do_not_change_the_gradient_of_earlier_queries(cache):
    """The gradient of queries depends on the keys in the cache, also when these need no gradient themselves."""
    layer = filled(hw.MultiHeadAttention(EMBED, HEADS, num_kv_heads=2, rotary=hw.Rotary(), mask=hw.causal()))
    layer.requires_grad_(False)
    layer.q_proj.requires_grad_(True)
    x = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    upstream = torch.randn(BATCH, LENGTH, EMBED, dtype=torch.float64)
    layer_cache, loss, rows = CACHES[cache](layer), 0.0, []
    for t, piece in enumerate(x.split(1, dim=1)):
        with torch.set_grad_enabled(t % 3 == 1):
            y = layer(piece, cache=layer_cache)
        if t % 3 == 1:
            loss, rows = loss + (y * upstream[:, t : t + 1]).sum(), [*rows, t]
    got = torch.autograd.grad(loss, list(layer.q_proj.parameters()))
    wanted = torch.autograd.grad((layer(x) * upstream)[:, rows].sum(), list(layer.q_proj.parameters()))
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-11)


@pytest.mark.parametrize("kind", ["layer", "latent"])
def test_key_axes_cover_the_capacity_of_a_static_cache(kind):
    """The key axis of weights, biases and boolean masks has the capacity of the cache as its length."""
    first, _, latent = layers(hw.causal(), POSITIONS["none"])
    layer = filled({"layer": first, "latent": latent}[kind])
    capacity, length = 17, 5
    x = torch.randn(BATCH, length, EMBED, dtype=torch.float64)
    bias, allowed = torch.randn(length, capacity, dtype=torch.float64), torch.rand(length, capacity) > 0.3
    expected = layer(x, bias=bias[:, :length], mask=hw.dense(allowed[:, :length]))
    with torch.no_grad():
        y = layer(x, bias=bias, mask=hw.dense(allowed), cache=layer.static_cache(BATCH, capacity))
        separate = [
            layer(x, cache=layer.static_cache(BATCH, capacity), **options)
            for options in ({"bias": bias}, {"mask": allowed})
        ]
        _, cached_weights = layer(x, cache=layer.static_cache(BATCH, capacity), return_weights=True)
    torch.testing.assert_close(y, expected.detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(separate[0], layer(x, bias=bias[:, :length]).detach(), rtol=0, atol=1e-12)
    torch.testing.assert_close(separate[1], layer(x, mask=allowed[:, :length]).detach(), rtol=0, atol=1e-12)
    _, weights = layer(x, return_weights=True)
    torch.testing.assert_close(
        cached_weights, torch.nn.functional.pad(weights.detach(), (0, capacity - length)), rtol=0, atol=1e-12
    )
