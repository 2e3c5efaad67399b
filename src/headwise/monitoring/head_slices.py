"""Slices of parameters that compute the queries and keys of single heads, and their multiplication by factors.

The logit of head h is a bilinear form of its query and key, with their biases. Multiplying it by a factor g takes

- g^1/2 in the query projection and g^1/2 in the key projection, if the key is the head's own (Kimi Team 2025,
  section 2.1);
- g in the query projection, if heads share the key, which stays unchanged, so that the other heads keep their logits;
- in latent attention, g^1/2 in both parts that are not rotated and g in the rotated part of the query, since all heads
  share the rotated key.

A rotation by position is linear, and commutes with the factor.

Slices of modules of unknown classes are derived from a run of the model on a batch. In front of each attention module
of such a class:

1. The module runs, and the derivative of one logit of each head, of query i for key j, is taken with respect to the
   outputs of all linear maps in the module. Features of these with a derivative at token i alone compute the query, and
   those with one at token j alone the key.
2. The module runs again for each head, with these rows of the weights, and of the biases, halved. All logits of the
   head must be halved exactly, and those of the other heads must keep their bits. A factor of 1/2 is exact, so that a
   norm, a softcap or a bias between the projection and the softmax cannot pass. Attention is then computed from the
   logits of the first run, and the module's output must keep its bits, so that the projections compute neither values
   nor gates.

A module in which this is not so is refused by name.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from headwise.analysis.circuits.trace import is_norm
from headwise.attention.autocast import without_autocast
from headwise.attention.position_bias import ALiBi
from headwise.data.batches import call_model, copied, device_of, evaluation_mode, with_cache_disabled
from headwise.errors import InputError
from headwise.families.registry import LatentFamily, family_of, places_of_heads
from headwise.intercept.eager_softmax import SOFTMAXES
from headwise.intercept.patches import SDPA
from headwise.intercept.session import current_session
from headwise.intercept.unreadable_tensors import has_usual_values
from headwise.nn.differential import DifferentialAttention
from headwise.nn.latent import LatentAttention
from headwise.nn.multihead import MultiHeadAttention


class HeadSlice(NamedTuple):
    """Slice of a model parameter that computes a part of one head's query or key: `length` entries from `start` along
    `axis`.

    Attributes:
        parameter: path of the parameter in the model.
        axis: axis along which it is cut.
        start: first index along the axis.
        length: number of indices.
        exponent: power of the factor of the head's logits by which the slice is multiplied.
    """

    parameter: str
    axis: int
    start: int
    length: int
    exponent: float


HeadSlices = tuple[tuple[HeadSlice, ...], ...]
"""Slices of each head of an attention module."""


def is_known(module: nn.Module) -> bool:
    """Return True if the class of an attention module is enough to find its query and key projections, or to state why
    its attention logits do not scale with them. Otherwise the module must be run to find the projections.
    """
    package, is_named = type(module).__module__.partition(".")[0], family_of(module) is not None
    return package == "headwise" or (package in ("torch", "transformers") and is_named) or bool(_why_not(module))


def head_slices(model: nn.Module, path: str) -> HeadSlices:
    """Return, for each head of the attention module at `path`, the slices of parameters that compute the head's query
    and key. Raise `InputError` if the attention logits of the module do not scale with these slices.
    """
    module = model.get_submodule(path)
    if reason := _why_not(module):
        raise _refused(path, module, reason)
    places = places_of_heads(model, path)
    places.parameters(model)  # checks their lengths
    is_shared = places.num_kv_heads != places.num_heads
    exponents = {"query": 1.0 if is_shared else 0.5, "rotated query": 1.0} | ({} if is_shared else {"key": 0.5})
    slices: list[list[HeadSlice]] = [[] for _ in range(places.num_heads)]
    for blocks in places.blocks:
        if blocks.part in exponents:
            for head, of_head in enumerate(slices):
                start = blocks.start + head * blocks.step
                of_head.append(HeadSlice(blocks.parameter, blocks.axis, start, blocks.width, exponents[blocks.part]))
    return tuple(tuple(of_head) for of_head in slices)


def _why_not(module: Any) -> str | None:
    """Return why the attention logits of a module do not scale with its query and key projections, as a noun phrase for
    an error message. Return None if they do.
    """
    if isinstance(module, DifferentialAttention):
        return "two maps of each head, of which the logits of one are unknown,"
    if isinstance(module, MultiHeadAttention | LatentAttention) and module.talking_before is not None:
        return "talking heads, which mix the logits of all heads,"
    has_bias = isinstance(module, MultiHeadAttention) and type(module.position_bias) not in (type(None), ALiBi)
    if has_bias or hasattr(module, "has_relative_attention_bias"):
        return "a position bias, which may be positive and does not scale with them,"
    family = family_of(module)
    if isinstance(family, LatentFamily):
        return None  # its norms are of the latents, in front of the projections into heads
    stated = () if family is None else family.qk_norms
    parts = module.named_modules()
    found = (name for name, part in parts if is_norm(part) and name.rpartition(".")[2].startswith(("q", "k")))
    norm = next((name for name in stated if getattr(module, name, None) is not None), None) or next(found, None)
    return f"the norm {norm}, which undoes a factor of the projection before it," if norm else None


# -- multiplication by factors ----------------------------------------------------------------------------------------

Factors = Mapping[HeadSlice, float]
"""Factor of each slice."""

TOLERANCE = 2.0**-7
"""Largest difference from a product by a power of two, relative to the largest output, that counts as rounding. The
product is exact, unless the order of sums differs between calls."""


def require_scalable(model: nn.Module, slices: Iterable[HeadSlice]) -> None:
    """Raise `InputError` unless a slice of a projection's parameters can be scaled: a factor on the slice multiplies
    the output features of this slice, and changes nothing else. To check this, projections run on random inputs while
    the slices are halved.
    """
    by_parameter = _by_parameter(slices)
    by_owner: dict[str, dict[str, list[HeadSlice]]] = {}
    for path, of_parameter in by_parameter.items():
        _require_values(path, model.get_parameter(path))
        owner, _, name = path.rpartition(".")
        by_owner.setdefault(owner, {})[name] = of_parameter
    _require_unshared(model, by_parameter)
    for owner, of_owner in by_owner.items():
        projection: Any = model.get_submodule(owner)
        if isinstance(projection, nn.MultiheadAttention):
            continue  # its own parameters, of which nothing else computes queries and keys
        got = f"{owner} of the class {type(projection).__name__}"
        if _is_distributed(projection.weight):
            has_own_forward = isinstance(projection, nn.Linear) and type(projection).forward is not nn.Linear.forward
            if has_own_forward or "forward" in vars(projection) or not _is_linear_map(projection):
                expected = "nn.Linear or Conv1D for weights that are divided among processes"
                raise InputError("model", expected=expected, got=got)
        elif not _scales(projection, of_owner):
            expected = "projections whose output scales with their weight"
            raise InputError("model", expected=expected, got=f"{got}, whose output does not")


@torch.no_grad()
def scale_slices(model: nn.Module, factors: Factors) -> None:
    """Multiply slices of a model's parameters by their factors, in place."""
    for path, slices in _by_parameter(factors).items():
        parameter = model.get_parameter(path)
        if _is_distributed(parameter):
            _scale_distributed(parameter, {each: factors[each] for each in slices})
        else:
            for each in slices:
                _cut(parameter, each).mul_(factors[each])


def _by_parameter(slices: Iterable[HeadSlice]) -> dict[str, list[HeadSlice]]:
    by_parameter: dict[str, list[HeadSlice]] = {}
    for each in slices:
        by_parameter.setdefault(each.parameter, []).append(each)
    return by_parameter


def _cut(parameter: Tensor, piece: HeadSlice) -> Tensor:
    """Return the slice `piece` of a parameter, as a view."""
    return parameter.narrow(piece.axis, piece.start, piece.length)


def _require_unshared(model: nn.Module, paths: Iterable[str]) -> None:
    """Raise `InputError` if one of the parameters at `paths` is also used elsewhere in the model, at another path."""
    names_of: dict[Any, set[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names_of.setdefault(id(parameter), set()).add(name)
        if has_usual_values(parameter) and parameter.numel():
            names_of.setdefault((parameter.device, parameter.data_ptr()), set()).add(name)
    for path in paths:
        shared = set().union(*(names for names in names_of.values() if path in names)) - {path}
        if shared:
            expected = "query and key projections that one attention module uses alone"
            raise InputError("model", expected=expected, got=f"{path}, which is {min(shared)} too")


def _require_values(path: str, parameter: Tensor) -> None:
    """Raise `InputError` for a parameter that cannot be multiplied in place by a factor, such as a quantised one."""
    if _is_distributed(parameter):
        placements: Sequence[Any] = parameter.placements  # type: ignore[attr-defined]
        if not any(each.is_partial() for each in placements) and parameter.is_floating_point():
            return
    elif has_usual_values(parameter):
        return
    kind = type(parameter).__name__ if type(parameter) is not nn.Parameter else "a parameter"
    got = f"{path}, {kind} of {str(parameter.dtype).removeprefix('torch.')} on {parameter.device}"
    raise InputError("model", expected="weights that can be multiplied by a factor", got=got)


def _is_distributed(parameter: Tensor) -> bool:
    """Return True if a parameter is a DTensor, whose elements are divided among processes."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(parameter, DTensor)


def _scale_distributed(parameter: Any, factors: Factors) -> None:
    """Multiply slices of a DTensor by factors, in place. Each process multiplies its own part, without
    communication.
    """
    from torch.distributed.tensor import DTensor, Replicate

    axis = next(iter(factors)).axis
    shape = [1] * parameter.ndim
    shape[axis] = parameter.shape[axis]
    vector = torch.ones(shape, dtype=torch.promote_types(parameter.dtype, torch.float32), device=parameter.device)
    for piece, factor in factors.items():
        _cut(vector, piece).fill_(factor)
    mesh = parameter.device_mesh
    replicated = DTensor.from_local(vector, mesh, [Replicate()] * mesh.ndim, run_check=False)
    parameter.mul_(replicated)


def _is_linear_map(module: nn.Module) -> bool:
    """Return True for `nn.Linear`, and for `Conv1D` of transformers, whose weight is transposed."""
    return isinstance(module, nn.Linear) or type(module).__name__ == "Conv1D"


@contextmanager
def _halved(features_of: Iterable[tuple[Tensor, int, Sequence[int]]]) -> Iterator[None]:
    """Context manager within which some features of parameters are multiplied by 1/2. Each item of `features_of` states
    a parameter, an axis, and the features along this axis. The parameters are restored at the end.
    """
    saved: list[tuple[Tensor, int, Tensor, Tensor]] = []
    try:
        for tensor, axis, features in features_of:
            index = torch.tensor(features, device=tensor.device)
            saved.append((tensor, axis, index, tensor.index_select(axis, index)))
            tensor.index_copy_(axis, index, saved[-1][-1] * 0.5)
        yield
    finally:
        for tensor, axis, index, values in reversed(saved):
            tensor.index_copy_(axis, index, values)


@torch.no_grad()
def _scales(projection: Any, slices_of: Mapping[str, Sequence[HeadSlice]]) -> bool:
    """Halve slices of a projection's parameters, and run the projection on random inputs. Return True if the output
    features of these slices are halved, and no others change. `slices_of` has the slices by parameter name; the
    parameters are restored afterwards.
    """
    weight, axis = projection.weight, slices_of["weight"][0].axis
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(3, weight.shape[1 - axis], generator=generator).to(weight.device, weight.dtype)
    expected = torch.ones(weight.shape[axis], dtype=weight.dtype, device=weight.device)
    pieces = [(getattr(projection, name), each) for name, of_name in slices_of.items() for each in of_name]
    for _, each in pieces:
        expected[each.start : each.start + each.length] = 0.5
    with without_autocast(weight.device):
        # `forward`, since hooks are to count calls of the model alone.
        before = projection.forward(inputs)
        with _halved((tensor, each.axis, range(each.start, each.start + each.length)) for tensor, each in pieces):
            after = projection.forward(inputs)
    expected, limit = before * expected, TOLERANCE * before.abs().amax()
    is_tensor = isinstance(after, Tensor) and after.shape == expected.shape
    return is_tensor and bool(((after - expected).abs() <= limit).all())


# -- modules of unknown classes ---------------------------------------------------------------------------------------

Rows = dict[str, tuple[int, ...]]
"""Output features of linear maps, by the path of the map in the attention module."""


def derived_slices(
    model: nn.Module, heads: Mapping[str, int | None], inputs: Mapping[str, Any]
) -> dict[str, HeadSlices]:
    """Run the model on `inputs`, and derive which slices of parameters compute the query and key of each head, for
    attention modules of unknown classes. `heads` has the number of query heads by module path, or None if it is
    unknown.
    """
    slices: dict[str, HeadSlices] = {}

    def derive(path: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if path not in slices:
            slices[path] = _of_module(path, module, heads[path], args, kwargs)

    devices = sorted({parameter.device.index for parameter in model.parameters() if parameter.is_cuda})
    with (
        ExitStack() as stack,
        current_session().paused(),
        evaluation_mode(model),
        torch.no_grad(),
        torch.random.fork_rng(devices),
    ):
        for path in heads:
            hook = model.get_submodule(path).register_forward_pre_hook(partial(derive, path), with_kwargs=True)
            stack.callback(hook.remove)
        arguments = {name: value for name, value in inputs.items() if name != "use_cache"}
        call_model(model, copied(with_cache_disabled(model, arguments)))
    for path in heads:
        if path not in slices:
            raise _refused(path, model.get_submodule(path), "no run on these inputs")
    return slices


class _Logits(TorchFunctionMode):
    """Torch function mode that records the logits of each attention call, and the `inputs` from which they are
    computed: queries and keys, or the argument of softmax. If there are `replacements` for a call, attention is
    computed from the replacements.
    """

    def __init__(self, replacements: Sequence[tuple[Tensor, ...]] = ()) -> None:
        self.recorded: list[Tensor] = []
        self.inputs: list[tuple[Tensor, ...]] = []
        self._replacements = replacements

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        names = ("query", "key") if func is SDPA else ("input",) if func in SOFTMAXES else ()
        positional, named = list(args), dict(kwargs or {})
        inputs = tuple(
            positional[index] if index < len(positional) else named[name] for index, name in enumerate(names)
        )
        if not inputs or inputs[0].ndim <= 2:
            return func(*args, **named)
        if func is SDPA:
            q, k = inputs
            group = q.shape[-3] // k.shape[-3] if named.get("enable_gqa") else 1
            self.recorded.append(q @ (k.repeat_interleave(group, -3) if group > 1 else k).mT)
        else:
            self.recorded.append(inputs[0])
        call, replacements = len(self.inputs), self._replacements
        self.inputs.append(inputs)
        for index, tensor in enumerate(replacements[call] if call < len(replacements) else ()):
            if index < len(positional):
                positional[index] = tensor
            else:
                named[names[index]] = tensor
        return func(*positional, **named)


def _of_module(
    path: str, module: nn.Module, heads: int | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> HeadSlices:
    """Run one attention module on recorded arguments, and return the slices of parameters that compute each head's
    query and key. Raise `InputError` if logits do not scale with them.
    """

    def run(replacements: Sequence[tuple[Tensor, ...]] = ()) -> tuple[Tensor, list[tuple[Tensor, ...]], list[Tensor]]:
        """Run the module, and return the logits `(batch, heads, queries, keys)` of its attention call. Also return the
        inputs of that call (queries and keys, or the argument of softmax), and the tensors that the module returns.
        """
        with _Logits(replacements) as mode:
            output = module.forward(*args, **kwargs)
        if len(mode.recorded) != 1:
            raise _refused(path, module, f"{len(mode.recorded)} attention calls in one run")
        scores: Tensor = mode.recorded[0]
        if scores.ndim == 3 and heads and len(scores) % heads == 0:
            scores = scores.unflatten(0, (-1, heads))  # type: ignore[no-untyped-call]
        if scores.ndim != 4 or heads not in (None, scores.shape[1]) or min(scores.shape[2:]) < 2:
            stated = "an unknown number of" if heads is None else heads
            raise _refused(path, module, f"logits of shape {tuple(scores.shape)} for {stated} heads")
        return scores, mode.inputs, [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]

    device = device_of(module)
    with without_autocast(device):
        rows = _rows_of_heads(path, module, lambda: run()[0])
        logits, inputs, outputs = run()
        of_keys = [(name, feature) for _, keys in rows for name, features in keys.items() for feature in features]
        is_shared = not all(keys for _, keys in rows) or len(set(of_keys)) < len(of_keys)
        parts: list[list[Rows]] = [[queries] if is_shared else [queries, keys] for queries, keys in rows]
        for head, of_head in enumerate(parts):
            for part in of_head:
                features_of = (
                    (module.get_submodule(name).get_parameter(parameter), axis, features)
                    for name, features in part.items()
                    for parameter, axis in _parameters(module, name).items()
                )
                with _halved(features_of):
                    changed_logits, _, changed = run(inputs)
                _require_halved(path, module, logits, changed_logits, head)
                pairs = zip(outputs, changed, strict=True)
                if not all(bool(((old == new) | (old != old) & (new != new)).all()) for old, new in pairs):  # noqa: PLR0124
                    got = f"a projection of head {head} that changes more than logits, such as values or a gate,"
                    raise _refused(path, module, got)
    exponent = 1.0 if is_shared else 0.5
    prefix = f"{path}." if path else ""
    return tuple(
        tuple(
            HeadSlice(f"{prefix}{name}.{parameter}", axis, *run, exponent)
            for part in of_head
            for name, features in part.items()
            for run in _runs(features)
            for parameter, axis in _parameters(module, name).items()
        )
        for of_head in parts
    )


def _rows_of_heads(path: str, module: nn.Module, logits: Callable[[], Tensor]) -> list[tuple[Rows, Rows]]:
    """Return, for each head, the output features of linear maps that compute its query, and those that compute its key.
    The features are found by derivatives of one attention logit of the head.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str, linear: nn.Module, arguments: Any, output: Tensor) -> Tensor:
        if name in outputs:
            raise _refused(path, module, f"several runs of {name}")
        outputs[name] = output if output.requires_grad else output.detach().requires_grad_()
        return outputs[name]

    with ExitStack() as stack, torch.enable_grad():
        for name, linear in module.named_modules():
            if _is_linear_map(linear):
                stack.callback(linear.register_forward_hook(partial(keep, name)).remove)
        scores = logits()
        query, key = scores.shape[2] - 1, scores.shape[3] - 2
        rows = []
        for head in range(scores.shape[1]):
            one = scores[:, head, query, key].sum()
            slopes: Sequence[Tensor | None] = (
                torch.autograd.grad(one, list(outputs.values()), retain_graph=True, allow_unused=True)
                if one.requires_grad and outputs
                else [None] * len(outputs)
            )
            at = {name: slope for name, slope in zip(outputs, slopes, strict=True) if slope is not None}
            rows.append((_only_at(at, query), _only_at(at, key)))
    query_rows = _own([queries for queries, _ in rows])
    if not all(query_rows):
        raise _refused(path, module, "no linear map of its own that computes the queries of single heads")
    return [(queries, keys) for queries, (_, keys) in zip(query_rows, rows, strict=True)]


def _only_at(slopes: Mapping[str, Tensor], token: int) -> Rows:
    """Return, for each linear map, the output features whose derivatives are nonzero at the token `token` and 0 at all
    other tokens. Maps without such features are left out.
    """
    features = {}
    for name, slope in slopes.items():
        if slope.ndim < 2 or slope.shape[-2] <= token:
            continue
        at_token = (slope != 0).flatten(0, -3).any(0) if slope.ndim > 2 else slope != 0
        elsewhere = at_token.any(0) & (at_token.sum(0) > at_token[token].to(at_token.sum(0)))
        found = (at_token[token] & ~elsewhere).nonzero()[:, 0].tolist()
        if found:
            features[name] = tuple(found)
    return features


def _own(rows: Sequence[Rows]) -> list[Rows]:
    """Return the output features of linear maps that belong to each head. A linear map is left out if one of its
    features belongs to two heads.
    """
    counts = Counter((name, feature) for of_head in rows for name, own in of_head.items() for feature in own)
    shared = {name for (name, _), number in counts.items() if number > 1}
    return [{name: features for name, features in of_head.items() if name not in shared} for of_head in rows]


def _require_halved(path: str, module: nn.Module, before: Tensor, after: Tensor, head: int) -> None:
    """Compare attention logits before and after the projections of one head are halved. Raise `InputError` unless all
    logits of this head are halved, and those of other heads are unchanged. Logits of keys that a mask hides may stay
    the same.
    """
    own, halved = before[:, head], after[:, head]
    is_scaled = (halved == own * 0.5) | ((halved == own) & ((own < HIDDEN) | own.isinf()))
    others = [other for other in range(before.shape[1]) if other != head]
    if not torch.equal(before[:, others], after[:, others]):
        raise _refused(path, module, f"a projection of head {head} that changes the logits of other heads")
    if not bool(is_scaled.all()):
        got = "logits that are not halved with their projection, as by a norm, a softcap or a bias after it,"
        raise _refused(path, module, got)


HIDDEN = -1e3
"""Logits below this number that do not follow the projections are those of keys that a mask hides."""


def _parameters(module: nn.Module, name: str) -> dict[str, int]:
    """Return the axis of the output features in each parameter of a linear map, by parameter name ("weight", and "bias"
    if there is one).
    """
    linear = module.get_submodule(name)
    axes = {"weight": 0 if isinstance(linear, nn.Linear) else 1}
    return axes if getattr(linear, "bias", None) is None else axes | {"bias": 0}


def _runs(features: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yield the first feature and the length of each run of consecutive numbers in `features`, which ascend."""
    start = 0
    for index in range(1, len(features) + 1):
        if index == len(features) or features[index] != features[index - 1] + 1:
            yield features[start], index - start
            start = index


def _refused(path: str, module: nn.Module, reason: str) -> InputError:
    """Return the error for an attention module whose logits cannot be scaled through its query and key projections."""
    expected = "attention modules whose logits scale with their query and key projections"
    return InputError("model", expected=expected, got=f"{reason} in {path or type(module).__name__}")
