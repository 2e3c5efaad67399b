"""Temporary replacement of functions of other libraries and of headwise, and functions that other libraries put in the
place of torch's: these are called while a model is intercepted, too.
"""

import threading
from collections.abc import Callable, Iterable
from functools import cache, update_wrapper
from types import FunctionType
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket

from headwise.checks import has_own_class


class Replacement(NamedTuple):
    """Attribute of a module or class that is to be replaced, and the function that takes its place."""

    owner: Any
    name: str
    function: Any


class Patches:
    """Context in which some functions of torch or other libraries are replaced, in all threads. An active context may
    be entered again; the last exit restores the functions. A function that other code has replaced in the meantime is
    not restored.

    Args:
        replacements: function that returns what to replace, called when the context is first entered.
        others: patches that are needed as well.
    """

    def __init__(self, replacements: Callable[[], Iterable[Replacement]], *others: "Patches") -> None:
        self._replacements, self._others = replacements, others
        self._lock, self._depth = threading.Lock(), 0
        self._restore: list[Callable[[], None]] = []

    def __enter__(self) -> None:
        for other in self._others:
            other.__enter__()
        with self._lock:
            self._depth += 1
            if self._depth == 1:
                for replacement in self._replacements():
                    self._replace(*replacement)

    def __exit__(self, *_: object) -> None:
        with self._lock:
            self._depth -= 1
            while not self._depth and self._restore:
                self._restore.pop()()
        for other in reversed(self._others):
            other.__exit__()

    def _replace(self, owner: Any, name: str, function: Any) -> None:
        """Replace the attribute `name` of `owner` by `function`, and store a function that restores the previous
        value.
        """
        is_inherited, before = name not in vars(owner), vars(owner).get(name)

        def restore() -> None:
            if vars(owner).get(name) is not function:
                return
            if is_inherited:
                delattr(owner, name)
            else:
                setattr(owner, name, before)

        self._restore.append(restore)
        setattr(owner, name, function)


SDPA: Callable[..., Tensor] = torch._C._nn.scaled_dot_product_attention
"""Torch's own `scaled_dot_product_attention`, also while other functions replace it."""

_OWN_FUNCTIONS = {
    owner: {name: function for name, function in vars(owner).items() if isinstance(function, FunctionType)}
    for owner in (F, torch.functional, Tensor)
}
_ALL_OWN_FUNCTIONS = frozenset(function for functions in _OWN_FUNCTIONS.values() for function in functions.values())


class InterceptedFunction:
    """Callable object that takes the place of a function of torch or of another library, and intercepts the calls of
    this function.

    Args:
        intercept: function that intercepts a call; it receives the other function, and the arguments of the call.
        previous: the other function.
        compiled: function that a compiler reads in place of `intercept`; by default one that calls the other function.

    Attributes:
        previous: the other function: torch's own, or that of another library.
    """

    def __init__(
        self,
        intercept: Callable[..., Any],
        previous: Callable[..., Any],
        compiled: Callable[..., Any] | None = None,
    ) -> None:
        update_wrapper(self, previous)
        self._intercept, self.previous, self._compiled = intercept, previous, compiled or call_replaced

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the intercepting function, or the one that a compiler reads, with the other function as its first
        argument.
        """
        if torch.compiler.is_dynamo_compiling():
            return self._compiled(self.previous, *args, **kwargs)
        return self._intercept(self.previous, *args, **kwargs)


def intercepting(
    owner: Any, name: str, intercept: Callable[..., Any], compiled: Callable[..., Any] | None = None
) -> Replacement:
    """Return a replacement for the function `name` of `owner`. The replacement calls `intercept` with the function that
    it replaces, followed by the arguments of the call. While `torch.compile` compiles code, the replacement calls
    `compiled` instead.
    """
    return Replacement(owner, name, InterceptedFunction(intercept, getattr(owner, name), compiled))


def is_causal_bias(mask: Any) -> bool:
    """Return True if `mask` is an object of torch's class `CausalBias`. The class is imported only if needed, since its
    module imports torch's compiler.
    """
    if not isinstance(mask, Tensor) or has_own_class(mask):
        return False
    from torch.nn.attention.bias import CausalBias

    return isinstance(mask, CausalBias)


def call_replaced(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call `function`, a function of torch whose public name now refers to a replacement, and return its result.

    Torch computes a call of SDPA with a mask of the class `CausalBias` by a method of this class, but only if the
    function under the name of SDPA is its own. So the method is called directly.
    """
    mask: Any = args[3] if len(args) > 3 else kwargs.get("attn_mask")
    if function is SDPA and is_causal_bias(mask):
        mask_class: Any = type(mask)
        return mask_class._dispatch(*args, **kwargs)
    return function(*args, **kwargs)


def is_foreign(function: Callable[..., Any], own: Callable[..., Any]) -> bool:
    """Return True if `function`, found under a public name of torch, comes from another library. It is then neither
    torch's own function `own` nor headwise's intercepting replacement of `own`.
    """
    while isinstance(function, InterceptedFunction):
        function = function.previous
    return function is not own


def is_sdpa_foreign() -> bool:
    """Return True if another library has replaced torch's `scaled_dot_product_attention` by its own function."""
    return is_foreign(F.scaled_dot_product_attention, SDPA)


OPERATORS = OpOverload, OpOverloadPacket
"""Classes of operators under `torch.ops`: those of torch itself (`torch.ops.aten`), and those of other libraries."""

_OTHER_NAMES = {"_unsafe_view": "view", "_to_copy": "to"}


def operator_name(operator: Any) -> str:
    """Return the name of an operator under `torch.ops` with the name of its library, such as "aten::softmax"."""
    packet = operator.overloadpacket if isinstance(operator, OpOverload) else operator
    name: str = packet._qualified_op_name
    return name


@cache
def _of_operator(operator: Any) -> Callable[..., Any]:
    """Return the torch function that computes the same as an operator under `torch.ops.aten`, from the same arguments.
    Return the operator itself if there is no such function.
    """
    library, _, name = operator_name(operator).partition("::")
    if library == "aten":
        for owner in (torch._C._VariableFunctions, torch._C._nn, torch._C.TensorBase):
            function = getattr(owner, _OTHER_NAMES.get(name, name), None)
            if function is not None and not isinstance(function, FunctionType):
                return cast("Callable[..., Any]", function)
        if name in ("einsum", "split"):
            return cast("Callable[..., Any]", getattr(torch, name))
    return cast("Callable[..., Any]", operator)


def torchs_own(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return torch's original function if `function` is a replacement that is installed under the original's public
    name. For an operator such as `torch.ops.aten.softmax`, return the torch function that computes the same. Otherwise
    return `function` itself.

    Functions of torch that are written in Python pass to a torch function mode what is found under their own name, in
    place of themselves. The mode must not call a replacement again, from which they were called.
    """
    if isinstance(function, OPERATORS):
        return _of_operator(function)
    if not isinstance(function, FunctionType | InterceptedFunction) or function in _ALL_OWN_FUNCTIONS:
        return function
    usual_name = getattr(function, "__name__", "")
    for owner, functions in _OWN_FUNCTIONS.items():
        if usual_name in functions and vars(owner).get(usual_name) is function:
            return functions[usual_name]
    for owner, functions in _OWN_FUNCTIONS.items():
        for name, own in functions.items():
            if vars(owner).get(name) is function:
                return own
    return function
