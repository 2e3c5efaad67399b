"""Plans of a model's attention, which are made when calls of the model are traced, and followed by later calls.

A call of a model is traced: a torch function mode follows every tensor from the inputs to attention, and from there to
the output projection. If torch's SDPA, `transformers`, `headwise.attend` or an engine of `adapters/` computes all
attention of the model, the derived facts are kept as a `Plan`, with the steps of the call: which function the model
called, with which earlier results. The model may have computed tensors after attention that depend on none of the
model's inputs, and keep them for later calls. Then a second traced call with the same steps has to confirm the plan. A
later call follows the plan. The torch function mode then derives nothing, but compares each step with the plan, so that
the same facts hold. Mask, padding and token ids are read in every call.

If a step differs from the plan before the model has attended, another plan may contain this step; otherwise the rest of
the call is traced. If a step differs later, the modules that attend in this call are left out by name.

In generation, each call has one more token in its cache of keys and values. Two traced calls with different numbers of
cached tokens show which numbers in the steps grow with the number of cached tokens, and how. Later calls with at least
as many cached tokens follow a plan in which these numbers have grown accordingly (`Plan.with_cached`).

A plan is followed only by calls with the same

- module that is called, and state of its modules (`ModuleStates`): the modules and parameters themselves, training
  mode, numbers, flags and names among their attributes and in their configurations, the number of their hooks, and
  methods `forward` that are set on one module instead of its class;
- names, kinds and sizes of the arguments, the numbers and strings among them, and which arguments are one tensor; of a
  cache of keys and values, classes and sizes except the number of tokens;
- gradient mode, inference mode, autocast, and number of torch function modes (`PlanKey`);
- interception: one model, no statement of the user about its attention, such as `padding`, and interceptors that
  change outputs or only observe.

Everything else is compared while the call runs: each function with its arguments, among them the same parameters, and
each attention call with its module, function, heads and features.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence, Sized
from dataclasses import dataclass, field, replace
from numbers import Number
from operator import is_
from types import EllipsisType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from headwise.attention.masks.grid import Grid
from headwise.intercept.interceptor import InputSources, SiteKey
from headwise.intercept.trace.functions import READINGS, are_nested_deeply, is_sized_by_numbers, tensors_among
from headwise.intercept.trace.modules import RunningModule
from headwise.intercept.trace.tokens import ComparedTokens, LinearMapCall, NumberedTokens
from headwise.intercept.unreadable_tensors import has_no_numbers
from headwise.shapes import Int

GROWING_CACHES = frozenset(
    f"transformers.cache_utils.{name}" for name in ("DynamicCache", "DynamicLayer", "DynamicSlidingWindowLayer")
)
"""Names of the classes of caches, and of their layers, to which a call of a model adds the keys of its tokens."""

GROWING_CODE = ("transformers", "torch")
"""Packages whose models have steps that are extrapolated to more tokens in a cache. Models of other code may attend in
another way from some number of tokens on. That would be noticed after they have attended, too late to trace the call.
"""

CACHE = "past_key_values"
"""Name of the argument of such models that is a cache of keys and values."""

MOST_KINDS, MOST_VARIANTS = 256, 4
"""Largest numbers of kinds of calls for which plans of one model are kept, and of plans for each kind."""

OTHER_WAY = (
    "these modules attend in another way than in an earlier call of the model with inputs of the same kind, so their "
    "attention is left out"
)
"""Reason for modules whose attention contradicts the plan that the call follows."""

DEVICES = ("cpu", "cuda")
"""Types of devices whose autocast a plan depends on."""

_STATED = (int, type(None), bool, str, float, torch.dtype, torch.device)
"""Types of inputs and of attributes of modules that are compared by value."""

_CONTAINERS = (tuple, list, slice, torch.Size)
"""Types of arguments that contain others, in which whole numbers may grow with a cache of keys and values."""

_SINGLE = (EllipsisType, torch.layout, torch.memory_format)
"""Types of arguments of which each value is one object."""


class CallFacts(NamedTuple):
    """Properties of an attention call, such as its number of heads, that must be the same in each call of the model
    that follows one plan (stored facts about the model's attention).

    Attributes:
        function: name of the function that computes the attention.
        heads: number of query heads.
        kv_heads: number of key/value heads.
        head_dim: features of a query.
        value_dim: features of a value.
    """

    function: str
    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int

    @staticmethod
    def of(function: str, q: Tensor, k: Tensor, v: Tensor) -> "CallFacts":
        """Return the properties of an attention call, such as its number of heads, from its queries, keys and values
        `(batch, heads, length, features)`.
        """
        return CallFacts(function, q.shape[1], k.shape[1], q.shape[3], v.shape[3])


@dataclass(frozen=True)
class PlannedCall:
    """One attention call in a plan (stored facts about a model's attention, from a traced call of the model), with the
    facts that were derived about this attention call.

    Attributes:
        site: where in the model, without the number of the layer in its module.
        sources: inputs of the model on which queries and keys depend, without their tokens.
        is_in_order: True if queries, keys and values are the tokens of their projections in the same order.
        query_maps: names of the weights that compute the queries, or the keys if there are none. Layers of one module
            differ in them.
        key_maps: names of the weights that compute the keys of self-attention.
        weights: parameters of each linear map that the model applies to the head outputs.
    """

    site: SiteKey
    sources: InputSources
    is_in_order: bool
    query_maps: frozenset[Hashable]
    key_maps: frozenset[Hashable]
    weights: list[list["ref[Tensor]"]] = field(default_factory=list, compare=False)


class Step(NamedTuple):
    """Attention call that a model makes now. This call of the model is recorded for a plan (stored facts about the
    model's attention), or it follows a plan.

    Attributes:
        number: number of the call in the call of the model; None if nothing is recorded.
        planned: what the plan states about it; None while the model is traced.
    """

    number: int | None
    planned: PlannedCall | None


def numbers_in_order(batch: int, length: int, device: torch.device) -> Int[Tensor, "batch 1 length"]:
    """Number all tokens of a batch from 1 to `batch * length`, sequence after sequence. The tokens in the result of a
    linear map have these numbers until a later function reorders them.
    """
    return torch.arange(1, batch * length + 1, dtype=torch.int32, device=device).view(batch, 1, length)


def are_in_order(tokens: ComparedTokens, grid: Grid) -> bool:
    """Return True if linear maps are known to have computed the queries, keys and values of an attention call, and
    their tokens are known to be still in the original order.
    """
    if tokens.values is None:
        return False
    lengths = (grid.queries, grid.keys, grid.keys)
    for each, length in zip((tokens.queries, tokens.keys, tokens.values), lengths, strict=True):
        if each.depend_on_data:
            return False
        expected = numbers_in_order(grid.batch, length, grid.device)
        expected = expected if each.numbers.ndim == 3 else expected[:, 0]
        is_joined = len(each.linear_map.parts) > 1
        if is_joined or each.linear_map.size != expected.numel() or each.numbers.ndim != expected.ndim:
            return False
        if (len(each.numbers), each.numbers.shape[-1]) != (grid.batch, length):
            return False
        if not bool((each.numbers == expected).all()):
            return False
    # The numbers of two linear maps can only be compared if their results have the same axes.
    shapes = {each.linear_map.shape for each in (tokens.queries, tokens.keys, tokens.values)}
    return len(shapes) == (1 if grid.queries == grid.keys else 2)


FunctionStep = tuple[Any, tuple[str, ...], tuple[Any, ...]]
"""Description of a call of a torch function: the function, names of arguments, and descriptions of all arguments, of
which the last ones have the names.
"""


class Steps:
    """Description of the torch functions that a model calls, one after the other, and of its attention calls. Two calls
    of the model with equal steps compute the same from their inputs: they apply the same functions to the same earlier
    results and parameters, with the same other arguments.

    Args:
        given: the inputs of the model.
        with_sizes: True if descriptions state the sizes of tensors, which may differ in calls with the same key.

    Attributes:
        parameters: parameters in the descriptions so far, by their identities.
    """

    def __init__(self, given: Iterable[Any], *, with_sizes: bool = False) -> None:
        self._numbers: dict[int, tuple[ref[Tensor], tuple[Any, ...]]] = {}
        self._count, self._with_sizes = 0, with_sizes
        self.parameters: dict[int, ref[Tensor]] = {}
        self.add_results(list(given))

    def of(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> FunctionStep:
        """Return a description of one call of a torch function. In it, each tensor is described by its number among the
        inputs of the model and the results of earlier functions.
        """
        return function, tuple(kwargs), tuple(map(self._described, (*args, *kwargs.values())))

    def match(self, step: FunctionStep, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True if `step` describes this call of a function. The arguments are compared with `step` one by one,
        without a description of the whole call. This runs for each function that a model calls, so it must be fast.
        """
        stated_function, names, values = step
        if stated_function is not function and stated_function != function:
            return False
        if kwargs or names:
            if tuple(kwargs) != names:
                return False
            args = (*args, *kwargs.values())
        if len(args) != len(values):
            return False
        numbers = self._numbers
        for value, stated in zip(args, values, strict=True):
            if value is stated:
                continue
            described: Any
            if type(value) is Tensor:
                known = numbers.get(id(value))
                described = known[1] if known is not None and known[0]() is value else self._number(value)
            elif type(value) is nn.Parameter and id(value) not in numbers:
                described = nn.Parameter, id(value)
            else:
                described = self._described(value)
            if described != stated:
                return False
        return True

    def add_results(self, result: Any) -> None:
        """Assign a number to each tensor in the result of a function call, by which arguments of later calls are
        recognised.
        """
        if type(result) is Tensor:  # most results; this is done after each function that a model calls
            self._number(result)
        else:
            for each in tensors_among((result,)):
                self._number(each)

    def replace(self, tensor: Tensor, other: Tensor) -> None:
        """Record that interceptors have put `tensor` in the place of `other`. Both then have the same description."""
        self._numbers[id(tensor)] = ref(tensor), self._described(other)

    def _number(self, tensor: Tensor) -> tuple[Any, ...]:
        """Assign the next unused number to a tensor. Return its description: this number, followed by the sizes of the
        tensor if the plan compares sizes.
        """
        self._count += 1
        described: tuple[Any, ...] = (self._count,)
        if self._with_sizes:  # a nested tensor need not have a shape
            described = (self._count, object()) if tensor.is_nested else (self._count, *tensor.shape)
        self._numbers[id(tensor)] = ref(tensor), described
        return described

    def _described(self, value: Any) -> Any:
        """Return the description of one argument of a function call, by which two calls are compared. A tensor is
        described by its number, most other arguments by their value. An object whose value is unknown, such as a NumPy
        array, gets a description that equals no other one.
        """
        if isinstance(value, Tensor):
            return self._described_tensor(value)
        kind = type(value)
        if kind in _STATED:
            return (kind, value) if kind is bool or kind is float else value  # True and 1.0 equal 1
        if issubclass(kind, tuple | list):
            return kind, *map(self._described, value)
        if kind is slice:
            return kind, *map(self._described, (value.start, value.stop, value.step))
        if issubclass(kind, dict):
            return kind, *value, *map(self._described, value.values())
        is_single = kind in _SINGLE or issubclass(kind, type)
        return value if is_single else (kind, value) if isinstance(value, Number | str) else object()

    def _described_tensor(self, tensor: Tensor) -> tuple[Any, ...]:
        """Return the description of a tensor: its number, or the identity of a parameter. Parameters are described by
        identity because a module may attend with other parameters in each call.
        """
        known = self._numbers.get(id(tensor))  # another tensor may have had its identity
        if known is not None and known[0]() is tensor:
            return known[1]
        if not isinstance(tensor, nn.Parameter):
            return self._number(tensor)
        self.parameters.setdefault(id(tensor), ref(tensor))
        return nn.Parameter, id(tensor)


class Growing(NamedTuple):
    """Whole number among the arguments of a torch function that grows with the number of tokens in a cache of keys and
    values, as the number of keys does.

    Attributes:
        first: the number in the first of two traced calls.
        slope: how much it grows with each token in the cache.
    """

    first: int
    slope: int


class Plan(NamedTuple):
    """Facts about all attention of a model, which were derived in one call of the model while its torch functions were
    traced. Later calls of the same kind reuse them.

    Attributes:
        steps: functions that the model calls, with attention.
        calls: its attention calls, in their order.
        around: paths of the modules around attention.
        other_paths: paths of all other modules that ran.
        parameters: the parameters in the steps, which state their identities.
        kept: indices of the steps whose results the model may keep for later calls, which then take other steps.
        cached: number of tokens in the cache of keys and values that the model was called with; 0 without a cache.
        length: this number and that of the tokens of the call.
        growing: steps that depend on this number, by their index, with `Growing` in place of the numbers that grow;
            None if only one number of tokens was traced, so that it is unknown how the steps depend on it.
    """

    steps: list[FunctionStep]
    calls: list[PlannedCall]
    around: frozenset[str]
    other_paths: frozenset[str]
    parameters: list[ref[Tensor]]
    kept: frozenset[int] = frozenset()
    cached: int = 0
    length: int = 0
    growing: dict[int, FunctionStep] | None = None

    def joined(self, other: "Plan") -> "Plan | None":
        """Return a plan for calls with more tokens in their cache than in the two traced calls that this plan and
        `other` describe. It also applies to the one of the two that had fewer. Return None if the two calls differ in
        more than whole numbers and sizes that may grow linearly with the number of tokens. Also return None if such a
        number first appears after the first attention call. It may grow in another way later, and this would be noticed
        when the call cannot be traced any more. Also return None if the model may store a result whose size grows, such
        as a mask for each number of tokens, for later calls.
        """
        first, second = sorted((self, other), key=lambda plan: plan.cached)
        if first.cached == second.cached or first.calls != second.calls or len(first.steps) != len(second.steps):
            return None
        growing: dict[int, FunctionStep] = {}
        numbers, has_attended = {Growing(first.cached, 1), Growing(first.length, 1)}, False
        for index, (one, another) in enumerate(zip(first.steps, second.steps, strict=True)):
            if one != another:
                try:
                    step, found = _grown_step(one, another, second.cached - first.cached)
                except ValueError:
                    return None
                if has_attended and not found <= numbers:
                    return None
                growing[index] = step
                numbers |= found
            has_attended |= type(one[0]) is tuple  # the path of a module, and facts about its attention
        return None if growing.keys() & (first.kept | second.kept) else first._replace(growing=growing)

    def with_cached(self, cached: int) -> "Plan | None":
        """Return the plan for calls with `cached` tokens in their cache of keys and values; None if the plan does not
        state how the steps of such calls differ from those of the traced call.
        """
        if cached == self.cached:
            return self
        if self.growing is None or cached < self.cached:
            return None
        steps = self.steps.copy()
        for index, (function, names, values) in self.growing.items():
            steps[index] = function, names, tuple(_after_growth(value, cached - self.cached) for value in values)
        return self._replace(steps=steps, cached=cached, length=self.length + cached - self.cached)


def _grown_step(one: FunctionStep, other: FunctionStep, tokens: int) -> tuple[FunctionStep, set[Growing]]:
    """Return the common description of one step in two calls of a model, between which the cache has grown by `tokens`.
    It has `Growing` in place of each whole number or size that grows linearly. Also return the `Growing` objects. Raise
    `ValueError` if the steps differ in another way.
    """
    numbers: set[Growing] = set()

    def grown(one: Any, other: Any) -> Any:
        if one == other:
            return one
        if type(one) is type(other) is int and not (other - one) % tokens:
            numbers.add(Growing(one, (other - one) // tokens))
            return Growing(one, (other - one) // tokens)
        # The description of a container starts with its type, that of a tensor with a number, which must be the same.
        if not type(one) is type(other) is tuple or one[0] != other[0] or len(one) != len(other):
            raise ValueError
        is_tensor = type(one[0]) is int
        if not is_tensor and one[0] not in _CONTAINERS:
            raise ValueError
        elements = tuple(grown(*pair) for pair in zip(one[1:], other[1:], strict=True))
        if is_tensor and any(type(each) is Growing and each.first < 2 for each in elements):
            raise ValueError  # an axis of size 1 may be broadcast
        return one[0], *elements

    if one[:2] != other[:2] or len(one[2]) != len(other[2]):
        raise ValueError
    values = tuple(grown(*pair) for pair in zip(one[2], other[2], strict=True))
    return (*one[:2], values), numbers


def _after_growth(value: Any, tokens: int) -> Any:
    """Return the description of an argument after the cache has grown by `tokens`."""
    if type(value) is Growing:
        return value.first + value.slope * tokens
    return tuple(_after_growth(each, tokens) for each in value) if type(value) is tuple else value


_PLANS: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, list[tuple[Plan, bool]] | None]] = WeakKeyDictionary()
"""Plans of each model, by the kind of its calls, with True if the plan is confirmed. There are several for one kind if
its calls take different steps, as with padding or without. There is None in place of them if a call has contradicted a
plan after it attended.
"""


class PlanKey(NamedTuple):
    """Model and kind of its calls (such as the sizes of its inputs) to which a plan applies. A plan is stored facts
    about the model's attention.

    Attributes:
        model: the module that is called.
        kind: state of its modules, kind and sizes of its inputs, and settings of torch.
        cached: number of tokens in a cache of keys and values among the inputs; 0 without one.
        length: this number and that of the tokens of the call; 0 without a cache. Sizes of inputs that are equal to it
            are not a part of `kind`.
    """

    model: nn.Module
    kind: Hashable
    cached: int = 0
    length: int = 0

    @staticmethod
    def of(
        model: nn.Module, state: Hashable, arguments: Mapping[str, Any], *, may_grow: bool = False
    ) -> "PlanKey | None":
        """Return the key under which plans (stored facts about the model's attention) for a call of `model` are kept.
        Two calls have the same key if the `state` of the modules, the kinds and sizes of the `arguments`, and settings
        of torch such as autocast are the same. With `may_grow`, the number of tokens in a growing cache may differ.
        Return None if an argument rules out a plan, such as a list that contains itself, or a cache of keys and values
        of another class than `GROWING_CACHES`.
        """
        kinds: list[Hashable] = []
        cached = length = 0
        cache = GrowingCache.of(arguments) if may_grow else None
        if cache is not None:
            kinds, cached, length = [cache.kind], cache.tokens, cache.length
            arguments = {name: value for name, value in arguments.items() if name != CACHE}
        if has_no_numbers() or are_nested_deeply(arguments.values()) or not _add_kind(arguments, kinds, {}, length):
            return None
        autocast = [
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in DEVICES
        ]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._len_torch_function_stack()
        return PlanKey(model, (state, *kinds, *modes, *autocast), cached, length)

    def plans(self) -> list[Plan]:
        """Return the plans (stored facts about the model's attention) that calls with this key can follow. If there is
        none, the call has to be traced. Plans whose parameters have been freed are removed, since new parameters may
        get the same identities.
        """
        of_model = _PLANS.get(self.model)
        known = None if of_model is None else of_model.get(self.kind)
        if known:
            known[:] = [each for each in known if all(parameter() is not None for parameter in each[0].parameters)]
        fitting = [plan.with_cached(self.cached) for plan, is_confirmed in known or () if is_confirmed]
        return [plan for plan in fitting if plan is not None]

    def store(self, plan: Plan) -> None:
        """Store a new plan (facts about the model's attention). The plan is not confirmed if the traced call may have
        computed tensors that the model keeps for later calls. It is then followed only after a second traced call has
        produced the same plan, or one that can be joined with it.
        """
        of_model = _PLANS.setdefault(self.model, OrderedDict())
        plans = of_model.setdefault(self.kind, [])
        if plans is not None:
            is_confirmed = not plan.kept or any(
                (each.steps, each.calls) == (plan.steps, plan.calls) for each, _ in plans
            )
            for index, (each, _) in enumerate(plans):
                if (joined := each.joined(plan)) is not None:  # two traced calls have confirmed it
                    plan, is_confirmed = joined, True
                    del plans[index]
                    break
            others = [(each, was) for each, was in plans if each.steps != plan.steps]
            plans[:] = [(plan, is_confirmed), *others[: MOST_VARIANTS - 1]]
        if len(of_model) > MOST_KINDS:
            of_model.popitem(last=False)

    def refuse(self) -> None:
        """Remove the plans (stored facts about the model's attention) for calls of the model of this kind, because a
        call has contradicted one of them. From now on, store no plans for such calls.
        """
        _PLANS.setdefault(self.model, OrderedDict())[self.kind] = None


class GrowingCache(NamedTuple):
    """Cache of keys and values that a model is called with. The classes of the cache and of its layers are among
    `GROWING_CACHES`.

    Attributes:
        kind: classes of the cache, and sizes of the tensors in its layers except the number of tokens.
        tokens: number of tokens in it.
        length: number of tokens after the call. It is 0 for a cache that is empty before the call, as without a cache.
    """

    kind: Hashable
    tokens: int
    length: int

    @staticmethod
    def of(arguments: Mapping[str, Any]) -> "GrowingCache | None":
        """Return the cache among the arguments of a model's call. Return None if there is none of a known class, or if
        its layers have different numbers of tokens, or the number of new tokens is unknown.
        """
        cache: Any = arguments.get(CACHE)
        given = arguments.get("input_ids", arguments.get("inputs_embeds"))
        if _name_of(cache) not in GROWING_CACHES or not {_name_of(each) for each in cache.layers} <= GROWING_CACHES:
            return None
        counts = {layer.get_seq_length() for layer in cache.layers} or {0}
        tensors = [] if counts == {0} else [each for layer in cache.layers for each in (layer.keys, layer.values)]
        if len(counts) > 1 or not isinstance(given, Tensor) or given.ndim < 2:
            return None
        tokens = counts.pop()
        numbers: dict[int, int] = {}
        identities = [numbers.setdefault(id(each), len(numbers)) for each in tensors]
        # A layer with a window is full after some tokens, and does not grow any more.
        sizes = (
            (each.dtype, each.device, each.shape[:-2], each.shape[-1], each.shape[-2] < tokens) for each in tensors
        )
        kind = type(cache), *((type(layer), *vars(layer)) for layer in cache.layers), *sizes, *identities
        return GrowingCache(kind, tokens, tokens + given.shape[1] if tokens else 0)


def _name_of(value: Any) -> str:
    """Return the full name of the class of an object."""
    return f"{type(value).__module__}.{type(value).__qualname__}"


def _add_kind(value: Any, kinds: list[Hashable], numbers: dict[int, int], length: int) -> bool:
    """Append the kind of an argument of a model's call to `kinds`. The kind of a tensor is its dtype, device and shape,
    and a number from `numbers`, which is equal wherever the same tensor is passed. If `length` is the number of all
    tokens, also of those in a cache, it does not count as a size. Return False if no plan (stored facts about
    attention) is made for calls with such an argument.
    """
    if type(value) in _STATED:
        kinds.append((type(value), value))
    elif type(value) is Tensor and value.layout is torch.strided and not value.is_nested:
        number = numbers.setdefault(id(value), len(numbers))
        shape = tuple(None if size == length else size for size in value.shape) if length else value.shape
        kinds.append((number, value.dtype, value.device, shape))
    elif type(value) in (tuple, list):
        kinds.append((type(value), len(value)))
        return all(_add_kind(each, kinds, numbers, length) for each in value)
    elif isinstance(value, Mapping) and all(type(name) is str for name in value):
        kinds.append((type(value), *value))
        return all(_add_kind(each, kinds, numbers, length) for each in value.values())
    else:
        return False
    return True


class ModuleStates:
    """Reader of those properties of a model's modules that most often decide how they attend: training mode, numbers,
    flags and names, also in configurations of `transformers`, the numbers of hooks, the identity of modules and
    parameters, and replaced methods `forward`. If such a property changes, other plans (stored facts about the model's
    attention) apply. Any other change appears in the torch functions that the model calls.

    Args:
        model: the model.
        has_other_hooks: True if modules have hooks that headwise has not registered.

    Attributes:
        model: the model.
        may_grow: True if steps of generation may follow plans: all modules are of `GROWING_CODE`, without other hooks
            or replaced methods `forward`.
    """

    def __init__(self, model: nn.Module, *, has_other_hooks: bool) -> None:
        modules, self.model = list(model.modules()), model
        packages = {type(each).__module__.split(".")[0] for each in modules}
        is_replaced = any("forward" in vars(each) for each in modules)
        self.may_grow = packages <= set(GROWING_CODE) and not is_replaced and not has_other_hooks
        self._vars = [vars(each) for each in modules]
        hooks = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        written = [each for each in modules if each._modules or not type(each).__module__.startswith("torch.nn.")]
        self._attributes = [(vars(each), [*vars(each).keys() - _OF_EVERY_MODULE, "training"]) for each in written]
        configs = {id(each): each for module in modules if (each := vars(module).get("config")) is not None}
        self._attributes += [(vars(each), [*vars(each)]) for each in configs.values() if hasattr(each, "__dict__")]
        self._sized: list[Sized] = [*hooks, *(attributes for attributes, _ in self._attributes)]
        self._members = [members for each in modules for members in (each._modules, each._parameters) if members]
        self._latest: tuple[list[Any], Hashable] = [], None

    def read(self) -> Hashable:
        """Return the properties of the model's modules that decide how they attend, such as training mode. If none has
        changed since the last reading, return the same object as then.
        """
        values: list[Any] = [
            value if type(value) in _STATED else None
            for attributes, names in self._attributes
            for value in map(attributes.get, names)
        ]
        values += [len(each) for each in self._sized]
        values += ["forward" in each for each in self._vars]
        members: list[Any] = [member for each in self._members for member in each.values()]
        latest, state = self._latest
        if len(latest) != len(values) + len(members) or not all(map(is_, [*values, *members], latest)):
            state = *values, *map(id, members)
            self._latest = [*values, *members], state
        return state

    def identities(self) -> list[int]:
        """Return the identities of the attributes of the model's modules. If they differ after a call of the model, the
        call has changed attributes.
        """
        return [id(value) for attributes, _ in self._attributes for value in attributes.values()]


_OF_EVERY_MODULE = vars(nn.Module()).keys()
"""Names of the attributes that every module has."""


class Recording:
    """Record of the torch functions and attention calls in one traced call of a model. A plan (stored facts about the
    model's attention, for later calls) is made from it.

    Args:
        key: the model and the kind of the call.
        states: reader of the model's modules.
        steps: describes the steps.
        so_far: the steps so far.
        ran: paths of the modules that ran so far.
    """

    def __init__(
        self,
        key: PlanKey,
        states: ModuleStates,
        steps: Steps,
        so_far: Iterable[FunctionStep] = (),
        ran: Iterable[str] = (),
    ) -> None:
        self._key, self._states, self._before = key, states, states.identities()
        self._steps, self._so_far, self._ran = steps, list(so_far), set(ran)
        self._calls: list[PlannedCall | None] = []
        self._weights: list[list[list[ref[Tensor]]]] = []
        self._kept: set[int] = set()
        self._has_failed = False

    @property
    def has_cache(self) -> bool:
        """True if the model was called with a cache of keys and values that plans may depend on."""
        return self._key.cached > 0

    def fail(self) -> None:
        """Record that no plan for later calls can be made from this call of the model, since some of its attention is
        found only by tracing all functions.
        """
        self._has_failed = True

    def on_module(self, path: str) -> None:
        """Record that a call of the module at `path` starts."""
        self._ran.add(path)

    def on_function(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Record that the model calls a torch function. No plan for later calls is made if the function returns numbers
        of a tensor to Python after the first attention call, or a tensor whose size depends on such numbers: the model
        may take other steps if the numbers differ.
        """
        if self._calls and not self._has_failed:
            self._has_failed = function in READINGS or is_sized_by_numbers(function, args, kwargs)
        if not self._has_failed:
            self._so_far.append(self._steps.of(function, args, kwargs))

    def on_result(self, result: Any, is_of_input: Callable[[Tensor], bool]) -> None:
        """Record the `result` of a torch function. A model may keep a result for later calls, which then take other
        steps. This is possible if the model has already attended, and the result depends on no input, as a mask made
        from sizes alone. It is excluded if the model has computed the same result twice in this call.
        """
        if self._has_failed:
            return
        self._steps.add_results(result)
        if self._calls and not all(map(is_of_input, tensors_among((result,)))):
            *earlier, step = self._so_far
            self._kept |= set() if step in earlier else {len(earlier)}

    def on_replaced(self, tensor: Tensor, other: Tensor) -> None:
        """Record that interceptors have put `tensor` in the place of `other`, a tensor that the model computed."""
        self._steps.replace(tensor, other)

    def on_attention(self, path: str, facts: CallFacts, tensors: tuple[Tensor, ...]) -> int:
        """Record an attention call in the module at `path`, and return the number of the attention call within the
        model's call.
        """
        self.on_function((path, facts), tensors, {})
        self._calls.append(None)
        self._weights.append([])
        return len(self._calls) - 1

    def add(self, number: int, call: PlannedCall) -> None:
        """Store `call`, the facts that were derived about the attention call with this number."""
        self._calls[number] = call

    def on_projected(self, number: int, weights: Iterable[Tensor]) -> None:
        """Record the parameters of a linear map that the model applies to the head outputs of an attention call."""
        bases = [weight if weight._base is None else weight._base for weight in weights]  # views may be freed
        self._weights[number].append([ref(base) for base in bases])

    def store(self) -> None:
        """Store a plan (facts about the model's attention for later calls) at the end of the model's call. Store none
        if the call has changed attributes of modules, such as states that they keep for the next call.
        """
        calls = [
            replace(call, weights=weights)
            for call, weights in zip(self._calls, self._weights, strict=True)
            if call is not None
        ]
        if self._has_failed or not calls or len(calls) < len(self._calls) or self._states.identities() != self._before:
            return
        names = [call.site.path.split(".") for call in calls]
        around = frozenset(".".join(each[:depth]) for each in names for depth in range(len(each) + 1))
        parameters = list(self._steps.parameters.values())
        plan = Plan(
            self._so_far,
            calls,
            around,
            frozenset(self._ran - around),
            parameters,
            frozenset(self._kept),
            *self._key[2:],
        )
        self._key.store(plan)


class LoggedFunction(NamedTuple):
    """Call of a torch function that a model made before its first attention call. It is stored so that it can still be
    traced if the model's call turns out to follow no plan (stored facts about the model's attention).

    Attributes:
        function: the function.
        args: its arguments by position.
        kwargs: its arguments by name.
        result: what it returned.
        module_calls: the running modules.
    """

    function: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any
    module_calls: list[RunningModule]


class Following:
    """State of a model's call that follows a plan (stored facts about the model's attention). Each function that the
    model calls is compared with the plan. If one before the first attention call differs, another plan may fit; if none
    does, the logged functions are traced.

    Args:
        key: the model and the kind of the call.
        states: reader of the model's modules.
        plans: the plans for this kind of calls.
        given: the inputs of the model.
        trace: function that traces the call after all.

    Attributes:
        given: the inputs of the model.
        plan: the plan that is followed.
        is_contradicted: True if the call has taken another step than the plan states.
        log: functions that the model called before it first attended.
        skipped: paths of modules whose calls need not be followed: after the first attention call, those without
            attention.
    """

    def __init__(
        self,
        key: PlanKey,
        states: ModuleStates,
        plans: list[Plan],
        given: list[Any],
        trace: Callable[["Following"], None],
    ) -> None:
        self._key, self._states, self._plans, self.given, self._trace = key, states, plans, given, trace
        self.plan, self._steps = plans[0], Steps(given, with_sizes=key.cached > 0)
        self._step = self._call = 0
        self._ran: list[str] = []
        self.is_contradicted = False
        self.log: list[LoggedFunction] = []
        self.skipped: frozenset[str] = frozenset()
        self._numbers: dict[tuple[int, int], Tensor] = {}

    @property
    def has_attended(self) -> bool:
        """True if the model has already attended in its running call."""
        return self._call > 0

    def on_module(self, path: str) -> None:
        """Record that a call of the module at `path` starts."""
        self._ran.append(path)

    def is_next(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Return True if this call of a torch function is the next step of the plan (stored steps and attention of the
        model), or of another plan with the same steps so far. Otherwise stop following plans. If the model has not
        attended yet, trace its call instead. If it has, store no plan for such calls of the model from now on.
        """
        if self.is_contradicted:
            return False
        number, steps = self._step, self.plan.steps
        self._step = number + 1
        if number < len(steps) and self._steps.match(steps[number], function, args, kwargs):
            return True
        step = self._steps.of(function, args, kwargs)
        so_far, calls = self.plan.steps[:number], self.plan.calls[: self._call]
        for plan in self._plans:
            if plan.steps[: number + 1] == [*so_far, step] and plan.calls[: self._call] == calls:
                self.plan = plan
                self.skipped = plan.other_paths if self.has_attended else self.skipped
                return True
        if not self.has_attended:
            self._trace(self)
        else:
            self._key.refuse()
        self.is_contradicted = True
        return False

    def recording(self) -> Recording:
        """Return a record of the steps of the model's call so far. At the end of the call, another plan (stored facts
        about the model's attention) is made from it.
        """
        of_plan = {id(each): reference for reference in self.plan.parameters if (each := reference()) is not None}
        self._steps.parameters.update(of_plan)
        return Recording(self._key, self._states, self._steps, self.plan.steps[: self._step - 1], self._ran)

    def on_result(
        self,
        function: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        result: Any,
        modules: Sequence[RunningModule],
    ) -> None:
        """Record the `result` of a torch function that is a step of the plan (stored steps and attention of the model).
        `modules` are the running module calls.
        """
        self._steps.add_results(result)
        if not self._call:
            self.log.append(LoggedFunction(function, args, kwargs, result, list(modules)))

    def next_call(self, path: str, facts: CallFacts, tensors: tuple[Tensor, ...]) -> PlannedCall | None:
        """Return the facts about the attention call that happens now in the module at `path`, as stored in the plan
        that the model's call follows. Return None if this attention call is not the next step of the plan.
        """
        if not self.is_next((path, facts), tensors, {}):
            return None
        self._call += 1
        self.log.clear()
        self.skipped = self.plan.other_paths
        return self.plan.calls[self._call - 1]

    def is_complete(self) -> bool:
        """Return True if the finished call of the model has taken all steps of its plan (steps stored by an earlier
        call). Otherwise remove the plans for such calls.
        """
        if not self.is_contradicted and self._step < len(self.plan.steps):
            self._key.refuse()
            self.is_contradicted = True
        return not self.is_contradicted

    def sources_of(self, planned: PlannedCall, grid: Grid) -> InputSources:
        """Return the inputs of the model on which the queries and keys of a planned attention call depend. If its
        tokens are in their original order, include the tokens for the sizes in `grid`.
        """
        if not planned.is_in_order:
            return planned.sources
        tokens = []
        for length in (grid.queries, grid.keys, grid.keys):
            # Results of the same sizes have the same tensor, which shows at once that their tokens do not differ.
            sizes, numbers = (grid.batch, length), self._numbers.get((grid.batch, length))
            if numbers is None:
                numbers = self._numbers[sizes] = numbers_in_order(*sizes, grid.device)
            tokens.append(NumberedTokens(numbers, LinearMapCall(sizes)))
        return InputSources(*planned.sources[:4], ComparedTokens(*tokens), planned.sources.are_moved)
