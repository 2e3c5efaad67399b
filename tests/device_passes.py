"""Forward and backward passes of attention and of the layers, to run on another device than the CPU.

    python tests/device_passes.py attend|layers|all-layers|masks [fake|with-a-read]

Each pass is computed on the CPU and on the pretended device, which refuses reads of values. With `fake` it is computed
on fake tensors of that device, which have no values. The script prints each pass that fails, then the number of passes.
A process of its own runs it, since torch registers the device for good.
"""

import contextlib
import copy
import sys
import traceback
from collections.abc import Callable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

import headwise as hw
import pretend_device
from headwise.attention import attend
from headwise.compat import MultiheadAttention

BATCH, HEADS, KV_HEADS, LENGTH, WIDTH = 2, 6, 3, 13, 24

IDS = torch.tensor([[0] * 4 + [1] * 6 + [2] * 3, [5] * 13])
SCATTERED_IDS = torch.tensor([[0, 1] * 6 + [0]])


def random(*shape: int) -> Tensor:
    """Return random numbers that depend on the shape alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


MASKS: dict[str, Callable[[Callable], hw.Mask | Tensor | None]] = {
    "none": lambda move: None,
    "causal": lambda move: hw.causal(),
    "window": lambda move: hw.window(3, ahead=1),
    "dilated window": lambda move: hw.window(3, dilation=2),
    "window per head": lambda move: hw.window([1, 2, 3, 5, 8, None]),
    "prefix": lambda move: hw.causal() | hw.prefix(4),
    "prefixes": lambda move: hw.causal() | hw.prefix(move(torch.tensor([2, 20]))),
    "padding": lambda move: hw.causal() & hw.padding(move(torch.tensor([9, 13]))),
    "padding, full": lambda move: hw.padding(move(torch.tensor([13, 13]))),
    "left padding": lambda move: hw.padding(move(torch.tensor([0, 13])), side="left"),
    "documents": lambda move: hw.segments(move(IDS)),
    "causal documents": lambda move: hw.causal() & hw.segments(move(IDS)),
    "documents in pieces": lambda move: hw.segments(move(SCATTERED_IDS)),
    "chunks": lambda move: hw.chunked(4),
    "rule": lambda move: hw.mask_rule(lambda b, h, q, k: (q >= k) & ((q + k + h) % 3 != b)),
    "dense": lambda move: hw.dense(move(random(LENGTH, LENGTH) > -0.5)),
    "boolean tensor": lambda move: move(random(BATCH, 1, LENGTH, LENGTH) > -0.5),
    "float tensor": lambda move: move(torch.zeros(LENGTH, LENGTH).masked_fill(random(LENGTH) > 0.5, -torch.inf)),
    "per head": lambda move: hw.per_head([hw.causal(), hw.window(2), ~hw.causal()] * 2),
    "not": lambda move: ~(hw.segments(move(IDS)) | hw.window(2)),
}
"""Masks by name, made from tensors that `move` brings to the device, where they contain numbers."""

FROM_THE_DEVICE = ("dense", "boolean tensor", "float tensor")
"""Masks that must be on the device of q."""

ATTEND: dict[str, dict[str, object]] = {
    "bias": {"bias": random(1, HEADS, LENGTH, LENGTH)},
    "hiding bias": {"bias": random(LENGTH, LENGTH).masked_fill(random(LENGTH, LENGTH) > 0.7, -torch.inf)},
    "softcap": {"softcap": 5.0, "mask": hw.causal()},
    "sinks": {"sinks": random(HEADS), "mask": hw.window(3)},
    "sinks without mask": {"sinks": random(HEADS)},
    "scale per head": {"scale": random(HEADS).abs(), "mask": hw.causal()},
    "talking heads": {"talking_heads": (torch.eye(HEADS), random(HEADS, HEADS))},
    "gate": {"gate": random(BATCH, HEADS), "mask": hw.causal()},
    "positions": {
        "query_positions": torch.arange(LENGTH).roll(1),
        "key_positions": torch.stack([torch.arange(LENGTH), torch.arange(LENGTH) - 4]),
        "mask": hw.causal(),
    },
    "log-sum-exp": {"return_lse": True, "mask": hw.causal()},
    "log-sum-exp with documents": {"return_lse": True, "mask_of": MASKS["causal documents"]},
    "weights": {"return_weights": True, "mask": hw.window(3)},
    "dropout": {"dropout": 0.4, "mask": hw.window(3)},
}
"""Options of `attend` by name; tensors are brought to the device."""

ROTARIES = {
    "rotary": hw.Rotary(),
    "interleaved rotary": hw.Rotary(width=2, interleaved=True),
    "linear": hw.Rotary(scaling=hw.LinearScaling(2.0)),
    "dynamic": hw.Rotary(scaling=hw.DynamicNTK(2.0, 6)),
    "yarn": hw.Rotary(scaling=hw.YaRN(4.0, 8)),
    "llama3": hw.Rotary(scaling=hw.Llama3(8.0, 8)),
}

CAUSAL = {"mask": hw.causal()}
OPTIONS: dict[str, dict[str, object]] = {
    "plain": {},
    "causal": CAUSAL,
    "grouped": {"num_kv_heads": 2, "value_dim": 5, **CAUSAL},
    "fused projection": {"fused_qkv": True, **CAUSAL},
    **{name: {"rotary": rotary, **CAUSAL} for name, rotary in ROTARIES.items()},
    "ALiBi": {"position_bias": hw.ALiBi(), **CAUSAL},
    "relative bias": {"position_bias": hw.RelativeBias(HEADS, 8, 10)},
    "sinks, temperature": {"scores": hw.Scores(scale=0.3, sinks=True, temperature=True), **CAUSAL},
    "softcap": {"scores": hw.Scores(softcap=5.0), "backend": "blockwise", **CAUSAL},
    "talking heads": {"scores": hw.Scores(talking_heads=True), "backend": "reference"},
    "norm": {"qk_norm": hw.QKNorm("layer", over="heads"), "output_gate": "head"},
    "element gate": {"qk_norm": hw.QKNorm(), "output_gate": "element", "mask": hw.window([1, 2, 3, 4, 5, None])},
    "blockwise": {"backend": "blockwise", "mask": hw.window(3)},
    "dropout": {"dropout": 0.4, **CAUSAL},
}
"""Options of the layer by name."""

CALLS: dict[str, Callable[[Callable], dict[str, object]]] = {
    "no option": lambda move: {},
    "gate": lambda move: {"gate": move(random(BATCH, HEADS))},
    "mask": lambda move: {"mask": hw.padding([9, 13])},
    "bias": lambda move: {"bias": move(random(LENGTH, LENGTH))},
    "weights": lambda move: {"return_weights": True},
    "positions": lambda move: {"positions": move(torch.arange(LENGTH) + 3)},
    "list of lengths": lambda move: {"lengths": [4, 13]},
    "lengths": lambda move: {"lengths": move(torch.tensor([4, 13]))},
    "lengths and weights": lambda move: {"lengths": move(torch.tensor([4, 0])), "return_weights": True},
}
"""Options of one call by name."""


def results(outputs, leaves) -> list[Tensor]:
    """Return the outputs of a pass, followed by the gradients of the leaves."""
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    outputs = [each.values() if each.is_nested else each for each in outputs if each is not None]
    differentiable = [each for each in outputs if each.requires_grad]
    if not differentiable:
        return outputs
    # A row without a key has a log-sum-exp of -inf, whose square would have no gradient.
    loss = sum((each.clamp(min=-100.0) ** 2).sum() for each in differentiable)
    gradients = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [*outputs, *(gradient for gradient in gradients if gradient is not None)]


def attend_passes() -> Iterator[tuple[str, Callable[[Callable], list[Tensor]]]]:
    """Yield passes of `attend` by name. Each is a function of `move`, which brings a tensor to the device."""

    def run(move, options, queries=LENGTH, masks_on_cpu=True, dtype=torch.float32):
        sizes = ((HEADS, queries, 8), (KV_HEADS, LENGTH, 8), (KV_HEADS, LENGTH, 5))
        leaves = [move(random(BATCH, *size).to(dtype), requires_grad=True) for size in sizes]
        options = dict(options)
        if "mask_of" in options:
            with pretend_device.reads_allowed():
                options["mask"] = options.pop("mask_of")(lambda each: each if masks_on_cpu else move(each))
        moved = {name: move_all(value, move) for name, value in options.items()}
        extra = [value for name, value in moved.items() if name in ("bias", "sinks") and isinstance(value, Tensor)]
        leaves += [each.requires_grad_() for each in extra]
        return results(hw.attend(*leaves[:3], **moved), leaves)

    for name, mask_of in MASKS.items():
        on_device = name in FROM_THE_DEVICE
        for backend in (None, "fused", "blockwise", "reference"):
            options = {"mask_of": mask_of, "backend": backend}
            yield f"{name}, {backend}", lambda move, o=options, d=on_device: run(move, o, masks_on_cpu=not d)
        yield f"{name}, from the device", lambda move, m=mask_of: run(move, {"mask_of": m}, masks_on_cpu=False)
    for name in ("causal", "window", "padding", "documents"):
        for queries in (1, 5):
            options = {"mask_of": MASKS[name]}
            yield f"{name}, {queries} queries", lambda move, o=options, n=queries: run(move, o, queries=n)
        options = {"mask_of": MASKS[name], "return_lse": True}
        yield f"{name}, bfloat16", lambda move, o=options: run(move, o, dtype=torch.bfloat16)
    for name, options in ATTEND.items():
        for backend in (None, "fused", "blockwise", "reference"):
            if backend is None and name == "talking heads":
                continue
            chosen = {**options, "backend": backend}
            if backend is not None and not _can(backend, options):
                continue
            if backend == "blockwise" and name == "dropout":
                continue  # the pretended device has no generator of random numbers
            yield f"{name}, {backend}", lambda move, o=chosen: run(move, o)


def _can(backend, options) -> bool:
    """Return True if a backend can compute these options of `attend` on a GPU."""
    if backend == "fused":
        return not {"softcap", "talking_heads", "return_lse"} & options.keys()
    return backend == "reference" or "talking_heads" not in options


def layer_passes(combinations: str) -> Iterator[tuple[str, Callable[[Callable, Callable], list[Tensor]]]]:
    """Yield passes of layers by name. Each is a function of `move`, which brings a tensor to the device, and
    `move_module`, which does the same with a layer. `combinations` is "all" or "some", as in `_self_attention`.
    """
    yield from _self_attention(combinations)
    yield from _other_inputs()
    yield from _other_layers()
    yield from _decoding()


def _self_attention(combinations: str) -> Iterator[tuple[str, Callable[[Callable, Callable], list[Tensor]]]]:
    """Yield self-attention with every option of a layer, and with every option of a call: "all" combinations of two
    options, or "some", in which each option of a layer has three options of a call.
    """

    def run(move, move_module, options, call_of):
        layer = _layer(move_module, hw.MultiHeadAttention, WIDTH, HEADS, **options)
        x = move(random(BATCH, LENGTH, WIDTH), requires_grad=True)
        return results(layer(x, **call_of(move)), [x, *layer.parameters()])

    for number, (name, options) in enumerate(OPTIONS.items()):
        for place, (call, call_of) in enumerate(CALLS.items()):
            if combinations == "some" and (number + place) % 3:
                continue
            # Without packing, as on a GPU, the longest sequence of a batch decides on dynamic angles.
            if name == "dynamic" and "lengths" in call:
                continue
            yield f"{name}, {call}", lambda m, mm, o=options, c=call_of: run(m, mm, o, c)


def _other_inputs() -> Iterator[tuple[str, Callable[[Callable, Callable], list[Tensor]]]]:
    """Yield cross-attention, and packed and nested sequences."""

    def cross(move, move_module, projected):
        layer = _layer(move_module, hw.MultiHeadAttention, WIDTH, HEADS, context_dim=7, value_context_dim=5)
        x = move(random(BATCH, LENGTH, WIDTH), requires_grad=True)
        contexts = [move(random(BATCH, 11, width), requires_grad=True) for width in (7, 5)]
        inputs = [layer.project_context(*contexts)] if projected else contexts
        return results(layer(x, *inputs), [x, *contexts, *layer.parameters()])

    def packed(move, move_module, options, call, starts=(0, 3, 3, 13), context_starts=None):
        layer = _layer(move_module, hw.MultiHeadAttention, WIDTH, HEADS, **options)
        x = move(random(LENGTH, WIDTH), requires_grad=True)
        offsets = {"offsets": move(torch.tensor(starts))}
        inputs = [x]
        if context_starts is not None:
            inputs.append(move(random(17, WIDTH), requires_grad=True))
            offsets["context_offsets"] = move(torch.tensor(context_starts))
        moved = {name: move_all(value, move) for name, value in call.items()}
        return results(layer(*inputs, **offsets, **moved), [*inputs, *layer.parameters()])

    yield "cross-attention", lambda m, mm: cross(m, mm, projected=False)
    yield "projected context", lambda m, mm: cross(m, mm, projected=True)
    for name in ("plain", "causal", "rotary", "ALiBi", "element gate", "blockwise", "sinks, temperature"):
        yield f"packed, {name}", lambda m, mm, o=OPTIONS[name]: packed(m, mm, o, {})
    prefix = {"mask": hw.causal() | hw.prefix(2)}
    yield "packed, prefix", lambda m, mm: packed(m, mm, prefix, {})
    yield "packed, gates", lambda m, mm: packed(m, mm, CAUSAL, {"gate": random(3, HEADS)})
    yield "packed, gate of heads", lambda m, mm: packed(m, mm, CAUSAL, {"gate": random(HEADS)})
    contexts = (0, 9, 12, 17)
    yield "packed cross-attention", lambda m, mm: packed(m, mm, {}, {}, context_starts=contexts)
    for name in ("causal", "element gate"):
        options = OPTIONS[name]
        yield f"packed cross-attention, {name}", lambda m, mm, o=options: packed(m, mm, o, {}, context_starts=contexts)


def _other_layers() -> Iterator[tuple[str, Callable[[Callable, Callable], list[Tensor]]]]:
    """Yield differential and latent attention, and the replacement of torch's layer."""

    def run(move, move_module, kind, *sizes, call=None, inputs=1, **options):
        layer = _layer(move_module, kind, WIDTH, HEADS, **options)
        x = move(random(BATCH, LENGTH, WIDTH), requires_grad=True)
        moved = {name: move_all(value, move) for name, value in (call or {}).items()}
        return results(layer(*[x] * inputs, **moved), [x, *layer.parameters()])

    for call in ({}, {"gate": random(BATCH, HEADS)}, {"return_weights": True}, {"lengths": torch.tensor([4, 13])}):
        yield (
            f"differential, {list(call)}",
            lambda m, mm, c=call: run(m, mm, hw.DifferentialAttention, call=c, **CAUSAL),
        )
    latent = {"kv_rank": 5, "head_dim": 4, "rotary_dim": 4, **CAUSAL}
    for call in ({"absorbed": True}, {"absorbed": False}, {"bias": random(LENGTH, LENGTH)}):
        yield f"latent, {call.keys()}", lambda m, mm, c=call: run(m, mm, hw.LatentAttention, call=c, **latent)
    masks = {
        "none": {},
        "padding": {"key_padding_mask": torch.arange(LENGTH) > torch.tensor([[4], [20]])},
        "causal": {"attn_mask": torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1), "is_causal": True},
    }
    for name, mask in masks.items():
        for need_weights in (True, False):
            call = {**mask, "need_weights": need_weights}
            yield (
                f"torch's layer, {name}, {need_weights}",
                lambda m, mm, c=call: run(m, mm, MultiheadAttention, call=c, inputs=3, batch_first=True),
            )


def _decoding() -> Iterator[tuple[str, Callable[[Callable, Callable], list[Tensor]]]]:
    """Yield prompts and steps of decoding with every cache."""
    caches = {
        "dynamic": lambda layer: hw.DynamicCache(),
        "static": lambda layer: layer.static_cache(BATCH, LENGTH + 5),
        "sliding": lambda layer: hw.SlidingCache(4, sinks=2),
    }
    kinds = {
        "layer": (hw.MultiHeadAttention, {"rotary": hw.Rotary(), "num_kv_heads": 2, **CAUSAL}),
        "ALiBi": (hw.MultiHeadAttention, {"position_bias": hw.ALiBi(), **CAUSAL}),
        "dynamic angles": (hw.MultiHeadAttention, {"rotary": ROTARIES["dynamic"], **CAUSAL}),
        "differential": (hw.DifferentialAttention, CAUSAL),
        "latent": (hw.LatentAttention, {"kv_rank": 5, "head_dim": 4, "rotary_dim": 4, **CAUSAL}),
    }

    def decode(move, move_module, kind, options, make_cache):
        layer = _layer(move_module, kind, WIDTH, HEADS, **options)
        x, cache, outputs = move(random(BATCH, LENGTH, WIDTH)), make_cache(layer), []
        is_static = isinstance(cache, hw.StaticCache)
        with torch.no_grad():
            first = {"lengths": move(torch.tensor([5, 2]))} if is_static else {}
            outputs.append(layer(x[:, :5], cache=cache, **first))
            outputs += [layer(x[:, step : step + 1], cache=cache) for step in (5, 6, 7)]
            if not isinstance(cache, hw.SlidingCache):
                cache.crop(6)
            if is_static:
                cache.crop(move(torch.tensor([4, 1])))
            cache.reorder(move(torch.tensor([1, 1])))
            outputs.append(layer(x[:, 8:9], cache=cache))
            cache.reset()
            outputs.append(layer(x[:, 8:11], cache=cache))
        return outputs

    def train(move, move_module, make_cache):
        layer = _layer(move_module, hw.MultiHeadAttention, WIDTH, HEADS, **CAUSAL)
        x, cache = move(random(BATCH, LENGTH, WIDTH), requires_grad=True), make_cache(layer)
        outputs = [layer(part, cache=cache) for part in x.split([6, 1, 6], dim=1)]
        return results(tuple(outputs), [x, *layer.parameters()])

    for kind, (make, options) in kinds.items():
        for name, cache in caches.items():
            yield f"decoding, {kind}, {name}", lambda m, mm, k=make, o=options, c=cache: decode(m, mm, k, o, c)
    for name in ("dynamic", "sliding"):
        yield f"training with a cache, {name}", lambda m, mm, c=caches[name]: train(m, mm, c)


def _layer(move_module: Callable, kind: Callable[..., nn.Module], *sizes: int, **options: object) -> nn.Module:
    """Return a layer on the device, with the same parameters in every call."""
    torch.manual_seed(0)
    return move_module(kind(*sizes, **copy.deepcopy(options)))


def move_all(value, move):
    """Return an option with its tensors on the device."""
    if isinstance(value, tuple):
        return tuple(move(each) for each in value)
    return move(value.clone()) if isinstance(value, Tensor) else value


def move_nothing(tensor: Tensor, *, requires_grad: bool = False) -> Tensor:
    """Return a copy of a tensor on the CPU."""
    return tensor.clone().requires_grad_(requires_grad) if isinstance(tensor, Tensor) else tensor


def passes(kind: str) -> dict[str, Callable[[Callable, Callable], list[Tensor]]]:
    """Return the passes of one kind, "attend", "layers" or "all-layers", by name."""
    torch.manual_seed(0)
    if kind == "attend":
        return {name: lambda move, _, run=run: run(move) for name, run in attend_passes()}
    return dict(layer_passes("all" if kind == "all-layers" else "some"))


def check(kind: str, where: Callable[[], contextlib.AbstractContextManager], move, move_module) -> int:
    """Compare every pass on a device with the same pass on the CPU; print those that fail, and return the number of all
    passes.

    Args:
        kind: "attend", "layers" or "all-layers".
        where: context in which operators run on the device.
        move: function that brings a tensor to the device.
        move_module: function that brings a layer to the device.
    """
    all_passes = passes(kind)
    for name, run in all_passes.items():
        torch.manual_seed(0)
        try:
            with where():
                got = run(move, move_module)
            torch.manual_seed(0)
            expected = run(move_nothing, lambda module: module)
            _compare(got, expected, has_values="dropout" not in name)
        except Exception as error:
            files = [frame for frame in traceback.extract_tb(error.__traceback__) if "headwise" in frame.filename]
            lines = " ".join(f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in files[-3:])
            print(f"FAILED {name}: {type(error).__name__}: {str(error).splitlines()[0][:200]}, {lines}")
    return len(all_passes)


def fake_tensor(tensor, *, requires_grad: bool = False):
    """Return a tensor without values on the pretended device."""
    if not isinstance(tensor, Tensor) or tensor.device == pretend_device.device():
        return tensor
    return torch.empty_like(tensor, device=pretend_device.device(), requires_grad=requires_grad)


def check_masks() -> int:
    """Print each mask of numbers on the CPU that is copied to the device in more than its first call, or is expanded
    to more queries or heads than it differs in, and return the number of masks.
    """
    attention, passed = F.scaled_dot_product_attention, []
    F.scaled_dot_product_attention = lambda *args, **options: (passed.append(options), attention(*args, **options))[1]
    for name, mask_of in MASKS.items():
        mask = None if name in FROM_THE_DEVICE else mask_of(lambda tensor: tensor)
        with pretend_device.pretend_device() as mode:
            q, k, v = (pretend_device.on_device(random(BATCH, HEADS, LENGTH, 8)) for _ in range(3))
            hw.attend(q, k, v, mask=mask, backend="fused")
            first = mode.uploads
            hw.attend(q, k, v, mask=mask, backend="fused")
        if mode.uploads > first:
            print(f"FAILED {name}: copied {mode.uploads - first} tensors in the second call")
        needs_matrix = name not in ("none", "causal", "padding, full", *FROM_THE_DEVICE)
        matrix, is_causal = passed[-1]["attn_mask"], passed[-1]["is_causal"]
        if (matrix is not None) != needs_matrix or is_causal != (name == "causal"):
            print(f"FAILED {name}: passes a matrix: {matrix is not None}, is_causal: {is_causal}")
        if name == "left padding" and matrix.shape != (BATCH, 1, 1, LENGTH):
            print(f"FAILED {name}: a mask of shape {tuple(matrix.shape)}")
    return len(MASKS)


def _compare(got: list[Tensor], expected: list[Tensor], *, has_values: bool) -> None:
    """Raise `AssertionError` unless the results of the device are those of the CPU; with dropout, which is random, only
    their shapes are compared.
    """
    for number, (ours, theirs) in enumerate(zip(got, expected, strict=True)):
        assert ours.device == pretend_device.device(), f"result {number} is not on the device"
        tolerance = 1e-4 if theirs.dtype == torch.float32 else 5e-2
        assert ours.shape == theirs.shape
        if has_values and isinstance(ours, pretend_device.DeviceTensor):
            values = ours.detach().values_on_cpu
            torch.testing.assert_close(values, theirs.detach(), rtol=tolerance, atol=tolerance)


def add_a_read() -> None:
    """Make `attend` read its output, so that every pass fails."""
    run_contained = attend.run_contained

    def run_and_read(problem, run):
        answer = run_contained(problem, run)
        bool(answer.out.sum() > 0)
        return answer

    attend.run_contained = run_and_read


def main(kind: str, change: str = "") -> int:
    """Check passes or masks, and return their number."""
    pretend_device.device()  # before the first backward pass, which starts one thread for each device
    if change == "with-a-read":
        add_a_read()
    if kind == "masks":
        return check_masks()
    if change == "fake":
        return check(
            kind,
            lambda: FakeTensorMode(allow_non_fake_inputs=True),
            fake_tensor,
            lambda module: pretend_device.move_module(module, fake_tensor),
        )
    return check(kind, pretend_device.pretend_device, pretend_device.on_device, pretend_device.move_module)


if __name__ == "__main__":
    print(main(*sys.argv[1:]), "passes")
