"""Plans of a model's attention, which are made when a call of the model is traced and followed by later calls.

The first call of a model is traced: a torch function mode follows every tensor from the inputs to attention, and from
there to the output projection. If functions that state their heads compute all attention of the model, the derived
facts are kept as a `Plan`. A later call follows the plan, without the function mode, if its inputs are of the same kind
and the modules of the model are unchanged. Each attention call must then have the place and the heads that the plan
states. Mask, padding and token ids are read in every call.
"""

from collections import Counter, OrderedDict
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary, ref

import torch
from torch import Tensor, nn

from headwise.attention.masks.grid import Grid
from headwise.intercept.compared_tokens import ComparedTokens, LinearMapCall, NumberedTokens
from headwise.intercept.interceptor import InputSources, SiteKey
from headwise.intercept.unreadable_tensors import has_no_numbers
from headwise.shapes import Int

MOST_PLANS = 16
"""Largest number of plans that are kept for one model. A model that changes its modules in every call needs a new plan
each time, and follows none.
"""

OTHER_WAY = (
    "these modules attend in another way than in an earlier call of the model with inputs of the same kind, so their "
    "attention is left out"
)
"""Reason for modules whose attention contradicts the plan that the call follows."""

DEVICES = ("cpu", "cuda")
"""Types of devices whose autocast a plan depends on."""

_STATED = frozenset({bool, int, float, str, type(None), torch.dtype, torch.device})
"""Types of inputs and of attributes of modules that are compared by value."""


class Place(NamedTuple):
    """Place of an attention call in a call of the model.

    Attributes:
        path: path of the innermost module that runs.
        number: number of attention calls before it that have the same innermost module.
    """

    path: str
    number: int


class CallFacts(NamedTuple):
    """Properties of an attention call that are the same in each call of the model that follows a plan.

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
        """Return the properties of a call with queries, keys and values `(batch, heads, length, features)`."""
        return CallFacts(function, q.shape[1], k.shape[1], q.shape[3], v.shape[3])


@dataclass(frozen=True, eq=False)
class PlannedCall:
    """Attention call that a plan states, with the facts that were derived about it.

    Attributes:
        facts: properties by which the call is recognised.
        site: where in the model.
        sources: inputs of the model on which queries and keys depend, without their tokens.
        is_in_order: True if queries, keys and values are the tokens of their projections in the same order.
        key_maps: names of the weights that compute the keys.
        weights: parameters of each linear map that the model applies to the head outputs.
    """

    facts: CallFacts
    site: SiteKey
    sources: InputSources
    is_in_order: bool
    key_maps: frozenset[Hashable]
    weights: list[list["ref[Tensor]"]] = field(default_factory=list)


class Step(NamedTuple):
    """Attention call of a model that happens now, in a call of the model that is recorded or follows a plan.

    Attributes:
        facts: properties by which the call is recognised later.
        place: where it happens; None if nothing is recorded.
        planned: what the plan states about it; None while the model is traced.
    """

    facts: CallFacts
    place: Place | None
    planned: PlannedCall | None


def numbers_in_order(batch: int, length: int, device: torch.device) -> Int[Tensor, "batch 1 length"]:
    """Return the numbers of the tokens in the result of a linear map in their order, as `TokenNumbers` counts them."""
    return torch.arange(1, batch * length + 1, dtype=torch.int32, device=device).view(batch, 1, length)


def are_in_order(tokens: ComparedTokens, grid: Grid) -> bool:
    """Return True if queries, keys and values of an attention call are known to be the tokens in the results of linear
    maps, in their order.
    """
    if tokens.values is None:
        return False
    lengths = (grid.queries, grid.keys, grid.keys)
    for each, length in zip((tokens.queries, tokens.keys, tokens.values), lengths, strict=True):
        if each.depend_on_data:
            return False
        expected = numbers_in_order(grid.batch, length, grid.device)
        expected = expected if each.numbers.ndim == 3 else expected[:, 0]
        if prod(each.linear_map.shape) != expected.numel() or each.numbers.ndim != expected.ndim:
            return False
        if (len(each.numbers), each.numbers.shape[-1]) != (grid.batch, length):
            return False
        if not bool((each.numbers == expected).all()):
            return False
    # The numbers of two linear maps can only be compared if their results have the same axes.
    shapes = {each.linear_map.shape for each in (tokens.queries, tokens.keys, tokens.values)}
    return len(shapes) == (1 if grid.queries == grid.keys else 2)


@dataclass(frozen=True, eq=False)
class Plan:
    """Facts about all attention of a model, which were derived in a traced call of the model.

    Attributes:
        calls: its attention calls, by place.
        counts: possible numbers of attention calls in one call of a module that attends, by the module's path.
        paths: paths of the modules around attention.
        other_paths: paths of all other modules that ran.
        needs_mode: True if some attention calls are intercepted by a torch function mode alone.
        sizes: smallest and largest size of each axis of the inputs in the traced calls.
        guards: references to the objects by whose identity the modules of the model are compared.
    """

    calls: Mapping[Place, PlannedCall]
    counts: Mapping[str, frozenset[int]]
    paths: frozenset[str]
    other_paths: frozenset[str]
    needs_mode: bool
    sizes: tuple[tuple[int, int], ...]
    guards: list[object] = field(default_factory=list)

    def fits(self, sizes: tuple[int, ...]) -> bool:
        """Return True if these sizes of inputs lie between those of traced calls."""
        return all(least <= size <= most for size, (least, most) in zip(sizes, self.sizes, strict=True))

    def widened_by(self, before: "Plan") -> "Plan":
        """Return this plan for the sizes of the plan `before`, too, if it states the same. Otherwise return this plan
        unchanged.
        """
        names = ("_stated_calls", "counts", "paths", "other_paths", "needs_mode")
        if any(getattr(self, name) != getattr(before, name) for name in names):
            return self
        pairs = zip(self.sizes, before.sizes, strict=True)
        return replace(self, sizes=tuple((min(one[0], two[0]), max(one[1], two[1])) for one, two in pairs))

    @property
    def _stated_calls(self) -> dict[Place, tuple[Hashable, ...]]:
        """Statements of the plan about each attention call, without the weights of its projection."""
        return {place: (call.facts, call.site, call.sources, call.is_in_order) for place, call in self.calls.items()}


_PLANS: WeakKeyDictionary[nn.Module, OrderedDict[Hashable, Plan]] = WeakKeyDictionary()
"""Plans of each model, by the state of its modules and the kind of its inputs; those that were used last come last."""


class PlanKey(NamedTuple):
    """Model and kind of inputs to which a plan applies.

    Attributes:
        model: the module that is called.
        kind: state of its modules, kind of its inputs, and settings of torch.
        sizes: sizes of the inputs.
    """

    model: nn.Module
    kind: Hashable
    sizes: tuple[int, ...]

    @staticmethod
    def of(model: nn.Module, state: Hashable, arguments: Mapping[str, Any]) -> "PlanKey | None":
        """Return the key of a call of `model`, whose modules are in the given state. Return None if an argument is of
        a kind for which there are no plans, such as a cache of keys and values.
        """
        kinds: list[Hashable] = []
        sizes: list[int] = []
        if has_no_numbers() or not _add_kind(arguments, kinds, sizes, {}):
            return None
        autocast = [
            torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None for device in DEVICES
        ]
        modes = torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._len_torch_function_stack()
        return PlanKey(model, (state, *kinds, *modes, *autocast), tuple(sizes))

    def plan(self) -> Plan | None:
        """Return the plan that a call with this key follows; None if the call has to be traced."""
        plans = _PLANS.get(self.model)
        plan = None if plans is None else plans.get(self.kind)
        return plan if plan is not None and plan.fits(self.sizes) else None

    def store(self, plan: Plan, held: Iterable[object]) -> None:
        """Store a new plan. If an earlier one for inputs of other sizes states the same, it is stored for sizes between
        those of both. The plan is discarded when one of the objects in `held` no longer exists, since a new object may
        then get its identity, by which the state of the modules is compared.
        """
        plans, owner, kind = _PLANS.setdefault(self.model, OrderedDict()), ref(self.model), self.kind

        def discard(_: object) -> None:
            model = owner()
            if model is not None and model in _PLANS:
                _PLANS[model].pop(kind, None)

        before = plans.pop(kind, None)
        plans[kind] = plan if before is None else plan.widened_by(before)
        plan.guards.extend(ref(each, discard) if type(each).__weakrefoffset__ else each for each in held)
        plans[kind].guards[:] = plan.guards
        if len(plans) > MOST_PLANS:
            plans.popitem(last=False)

    def discard(self) -> None:
        """Remove the plan that a call has contradicted."""
        if self.model in _PLANS:
            _PLANS[self.model].pop(self.kind, None)


def _add_kind(value: Any, kinds: list[Hashable], sizes: list[int], numbers: dict[int, int]) -> bool:
    """Add the kind of an argument to `kinds`, and the sizes of its tensors to `sizes`. Of a tensor the kind states
    which axes have size 1, and if the same tensor is another argument: `numbers` has the tensors so far. Return False
    if there are no plans for such an argument.
    """
    if type(value) in _STATED:
        kinds.append(value)
    elif type(value) is Tensor and value.layout is torch.strided and not value.is_nested:
        number = numbers.setdefault(id(value), len(numbers))
        ones = tuple(size == 1 for size in value.shape)
        kinds.append((number, value.dtype, value.device, ones))
        sizes.extend(value.shape)
    elif type(value) in (tuple, list):
        kinds.append((type(value), len(value)))
        return all(_add_kind(each, kinds, sizes, numbers) for each in value)
    elif isinstance(value, Mapping):
        kinds.append((type(value), *value))
        return all(_add_kind(each, kinds, sizes, numbers) for each in value.values())
    else:
        return False
    return True


_OF_EVERY_MODULE = vars(nn.Module()).keys()
"""Names of the attributes that every module has."""


class ModuleStates:
    """Reader of the state of a model's modules: what may decide how they attend.

    It is the training mode, attributes such as numbers, flags and lists, those of the objects that a module holds, such
    as its configuration, the modules inside, and the forward hooks. Modules of torch without others inside, such as
    linear maps, are read for hooks alone.

    Attributes:
        model: the model.
    """

    def __init__(self, model: nn.Module) -> None:
        modules, self.model = list(model.modules()), model
        self._hooks = [hooks for each in modules for hooks in (each._forward_hooks, each._forward_pre_hooks)]
        self._written = [
            each
            for each in modules
            if not isinstance(each, torch.jit.ScriptModule)
            and (each._modules or not type(each).__module__.startswith("torch.nn.modules."))
        ]
        self._attributes = [(vars(each), [*vars(each).keys() - _OF_EVERY_MODULE]) for each in self._written]
        self._children = [each._modules for each in self._written]
        held = _objects_among(attributes[name] for attributes, names in self._attributes for name in names)
        self._objects = [vars(each) for each in held]
        inner = _objects_among(value for attributes in self._objects for value in attributes.values())
        self._objects += [vars(each) for each in inner if not any(each is other for other in held)]

    def held(self) -> list[object]:
        """Return the objects by whose identity the state is compared."""
        modules = [each for children in self._children for each in children.values()]
        of_modules = [attributes.get(name) for attributes, names in self._attributes for name in names]
        values = [*of_modules, *(value for attributes in self._objects for value in attributes.values())]
        elements = [each for value in values if isinstance(value, list | tuple) for each in value]
        elements += [each for value in values if isinstance(value, dict) for each in value.values()]
        without = (*_STATED, list, tuple, dict)
        return [each for each in (*modules, *values, *elements) if type(each) not in without]

    def read(self, interceptors: int) -> Hashable:
        """Return the present state of the modules, which equals that of another time if nothing has changed. Each of
        so many `interceptors` has hooks on every module, which are not part of the state.
        """
        return (
            tuple([(place, *hooks) for place, hooks in enumerate(self._hooks) if len(hooks) != interceptors]),
            tuple([type(each).forward for each in self._written]),
            tuple([tuple(map(id, children.values())) for children in self._children]),
            tuple(
                [
                    value if type(value) in _STATED else _identity(value)
                    for attributes, names in self._attributes
                    for value in (len(attributes), attributes.get("training"), *map(attributes.get, names))
                ]
            ),
            tuple(
                [
                    value if type(value) in _STATED else _identity(value)
                    for attributes in self._objects
                    for value in attributes.values()
                ]
            ),
        )


def _identity(value: object) -> Hashable:
    """Return what an attribute of a module is compared by, if not by its value. Tensors are not told apart, as their
    numbers do not decide how a module attends.
    """
    if isinstance(value, Tensor):
        return "tensor"
    if isinstance(value, list | tuple | dict):
        elements = value.items() if isinstance(value, dict) else value
        return tuple(
            [each if type(each) in _STATED else str(each) if type(each) is tuple else id(each) for each in elements]
        )
    return id(value)


def _objects_among(values: Iterable[object]) -> list[object]:
    """Return the objects among `values` that have attributes of their own, such as the configuration of a module, each
    of them once.
    """
    distinct = {id(each): each for each in values}.values()
    without = (nn.Module, Tensor, type)
    return [
        each for each in distinct if hasattr(each, "__dict__") and not isinstance(each, without) and not callable(each)
    ]


class Recording:
    """Record of the attention in a call of a model that is traced, from which a plan is made.

    Args:
        key: the model and the kind of its inputs.
        held: objects by whose identity the state of the modules is compared.

    Attributes:
        key: the model and the kind of its inputs.
        needs_mode: True if some attention calls are intercepted by a torch function mode alone.
    """

    def __init__(self, key: PlanKey, held: Iterable[object]) -> None:
        self.key, self._held = key, held
        self._reading: set[str] = set()
        self._counter: Counter[str] = Counter()
        self._calls: dict[Place, PlannedCall] = {}
        self._counts: dict[str, set[int]] = {}
        self._running: list[int] = []
        self._ran: set[str] = set()
        self._has_failed = self.needs_mode = False

    def fail(self) -> None:
        """Record that there is no plan for this call: some of its attention must be followed through all functions."""
        self._has_failed = True

    def on_read(self, path: str) -> None:
        """Record that the module at `path` reads numbers of a tensor, which may decide how it attends."""
        self._reading.add(path)

    def start(self, path: str) -> None:
        """Record that a call of the module at `path` starts."""
        self._ran.add(path)
        self._running.append(self._counter[path])

    def end(self, path: str) -> None:
        """Record that the call of the module at `path` ends."""
        if self._running:
            self._counts.setdefault(path, set()).add(self._counter[path] - self._running.pop())

    def place(self, path: str) -> Place:
        """Return the place of the next attention call in the module at `path`."""
        place = Place(path, self._counter[path])
        self._counter[path] += 1
        return place

    def add(self, place: Place, call: PlannedCall) -> None:
        """Add an attention call, for the plan."""
        self._calls[place] = call

    def on_projected(self, place: Place, weights: Iterable[Tensor]) -> None:
        """Record the parameters of a linear map that the model applies to the head outputs of an attention call."""
        if place in self._calls:
            self._calls[place].weights.append([ref(weight) for weight in weights])

    def store(self) -> None:
        """Store the plan at the end of the model's call, if everything was derived that the plan states."""
        is_whole = len(self._calls) == sum(self._counter.values())
        if self._has_failed or not is_whole or not self._calls:
            return
        attending = {place.path for place in self._calls}
        if any(path == each or path.startswith(f"{each}.") for path in self._reading for each in attending):
            return
        names = [path.split(".") for path in attending]
        around = {".".join(each[:depth]) for each in names for depth in range(len(each) + 1)}
        counts = {path: frozenset(counts) for path, counts in self._counts.items() if path in attending}
        sizes = tuple((size, size) for size in self.key.sizes)
        others = frozenset(self._ran - around)
        self.key.store(Plan(self._calls, counts, frozenset(around), others, self.needs_mode, sizes), self._held)


class Following:
    """State of a call of a model that follows a plan.

    Attributes:
        plan: the plan.
    """

    def __init__(self, key: PlanKey, plan: Plan) -> None:
        self._key, self.plan = key, plan
        self._counter: Counter[str] = Counter()
        self._numbers: dict[tuple[int, int], Tensor] = {}

    def attention_calls(self, path: str) -> int:
        """Return the number of attention calls so far whose innermost module is that at `path`."""
        return self._counter[path]

    def next_call(self, path: str, facts: CallFacts) -> PlannedCall | None:
        """Return what the plan states about the attention call that happens now in the module at `path`. Return None
        if the plan does not state a call with these properties there; it is then not followed again.
        """
        planned = self.plan.calls.get(Place(path, self._counter[path]))
        self._counter[path] += 1
        if planned is None or planned.facts != facts:
            self._key.discard()
            return None
        return planned

    def sources_of(self, planned: PlannedCall, grid: Grid) -> InputSources:
        """Return the sources of an attention call with these sizes, with its tokens if they are in order."""
        if not planned.is_in_order:
            return planned.sources
        tokens = [self._new_tokens(grid, length) for length in (grid.queries, grid.keys, grid.keys)]
        return planned.sources._replace(tokens=ComparedTokens(*tokens))

    def _new_tokens(self, grid: Grid, length: int) -> NumberedTokens:
        """Return the tokens in a new result of a linear map. Results of the same sizes have the same tensor of numbers,
        which shows at once that their tokens do not differ.
        """
        sizes = grid.batch, length
        if sizes not in self._numbers:
            self._numbers[sizes] = numbers_in_order(*sizes, grid.device)
        return NumberedTokens(self._numbers[sizes], LinearMapCall(sizes))

    def has_all(self, path: str, before: int) -> bool:
        """Return True if a call of the module at `path` has made as many attention calls as the plan states. `before`
        is their number at its start. If it has not, the plan is not followed again.
        """
        counts = self.plan.counts.get(path)
        if counts is None or self._counter[path] - before in counts:
            return True
        self._key.discard()
        return False
