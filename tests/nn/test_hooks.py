"""Forward hooks of a layer run once per call, with the arguments and the result of that call."""

import pytest
import torch

import headwise as hw
from headwise.compat import MultiheadAttention

BATCH, LENGTH, EMBED, HEADS = 2, 8, 24, 6


def text():
    """Return a random batch of sequences of equal length."""
    return torch.randn(BATCH, LENGTH, EMBED)


def jagged():
    """Return a nested tensor of two sequences of 3 and 8 tokens."""
    return torch.nested.nested_tensor_from_jagged(torch.randn(11, EMBED), torch.tensor([0, 3, 11]))


LAYERS = {
    "multi-head": lambda: hw.MultiHeadAttention(EMBED, HEADS),
    "differential": lambda: hw.DifferentialAttention(EMBED, HEADS),
    "latent": lambda: hw.LatentAttention(EMBED, HEADS, kv_rank=5, head_dim=4, rotary_dim=2),
}
CALLS = {
    "batch": (text, {}),
    "weights": (text, {"return_weights": True}),
    "unbatched": (lambda: text()[0], {}),
    "cache": (text, {"cache": None}),
    "padded and packed": (text, {"lengths": [8, 2]}),
    "padded and masked": (text, {"lengths": [8, 8]}),
    "padded, with weights": (text, {"lengths": [8, 2], "return_weights": True}),
    "packed": (lambda: text()[0], {"offsets": [0, 3, 8]}),
    "nested": (jagged, {}),
}
ONLY_MULTI_HEAD = {name for name in CALLS if name.startswith(("padded", "packed", "nested"))}


def count_calls(layer):
    """Register hooks that count their calls, "before" and "after" the forward pass, and record input and result.

    Returns the counts and a list of pairs (first argument, result), both updated by later calls.
    """
    counts, recorded = {"before": 0, "after": 0}, []

    def before(module, arguments, options):
        counts["before"] += 1

    def after(module, arguments, options, result):
        counts["after"] += 1
        recorded.append((arguments[0], result))

    layer.register_forward_pre_hook(before, with_kwargs=True)
    layer.register_forward_hook(after, with_kwargs=True)
    return counts, recorded


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", LAYERS)
def test_hooks_run_once_per_call(kind, call):
    if kind == "latent" and call in ONLY_MULTI_HEAD:
        call = "batch"
    make_x, options = CALLS[call]
    options = {name: hw.DynamicCache() if name == "cache" else value for name, value in options.items()}
    layer, x = LAYERS[kind](), make_x()
    counts, recorded = count_calls(layer)
    result = layer(x, **options)
    assert counts == {"before": 1, "after": 1}
    assert recorded[0][0] is x
    assert recorded[0][1] is result


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_hooks_of_the_replacement_of_torchs_layer_run_once():
    layer = MultiheadAttention(EMBED, HEADS, batch_first=True)
    nested = torch.nested.nested_tensor([torch.randn(3, EMBED), torch.randn(5, EMBED)])
    for x in (text(), nested):
        counts, recorded = count_calls(layer)
        result = layer(x, x, x)
        assert counts == {"before": 1, "after": 1}
        assert recorded[0][1] is result
        layer._forward_hooks.clear()
        layer._forward_pre_hooks.clear()


def test_a_hook_may_replace_the_output_of_a_padded_batch():
    layer, x = hw.MultiHeadAttention(EMBED, HEADS), text()
    expected = layer(x, lengths=[8, 2]) + 1
    layer.register_forward_hook(lambda module, arguments, y: y + 1)
    assert torch.equal(layer(x, lengths=[8, 2]), expected)
