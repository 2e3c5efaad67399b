"""Compiled and scripted modules inside of a model: their calls do not pass through Python, so nothing in them is seen.

A model with such modules can be intercepted if no attention can be inside of them. That is so if neither their graph
nor the code of their classes has a function by which attention is computed.
"""

import re
from collections.abc import Iterator
from types import CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn

_OF_ATTENTION = re.compile(r"softm|attention|attn|scaled_dot|sdpa|exp\b|exp2|exp_|flex", re.IGNORECASE)
"""Names of functions and classes that may compute attention: without an exponential there is no softmax."""


def kind_of_opaque(module: nn.Module) -> str | None:
    """Return "compiled" or "scripted" for a module whose calls do not pass through Python; None for any other one."""
    if isinstance(module, torch.jit.ScriptModule):
        return "scripted"
    is_compiled = hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None
    return "compiled" if is_compiled else None


def may_attend(module: nn.Module) -> bool:
    """Return True if a compiled or scripted module may compute attention. Return False only if this is excluded by the
    graph of a scripted module, or by the names in the code of all modules inside of a compiled one.
    """
    if isinstance(module, torch.jit.ScriptModule):
        return bool(_OF_ATTENTION.search(str(module.inlined_graph)))
    return any(_names_attention(each) for each in getattr(module, "_orig_mod", module).modules())


def _names_attention(module: nn.Module) -> bool:
    """Return True if the class of a module, or its code, has a name of attention, or if its code cannot be read."""
    if isinstance(module, torch.jit.ScriptModule):
        return may_attend(module)
    own = type(module)
    if own.__module__.startswith("torch.nn."):
        return bool(_OF_ATTENTION.search(own.__name__)) or "Transformer" in own.__name__
    functions = [value for name, value in vars(module).items() if callable(value) and not name.startswith("_")]
    for each in own.__mro__:
        if each is not object and not each.__module__.startswith("torch.nn."):
            functions += [value for name, value in vars(each).items() if callable(value) and name != "__init__"]
    return bool(_OF_ATTENTION.search(own.__name__)) or any(_may_compute(each, set()) for each in functions)


def _may_compute(function: Any, known: set[CodeType]) -> bool:
    """Return True if a function, or one that it names, has a name of attention in its code, or cannot be read. `known`
    are the codes that were read before.
    """
    if isinstance(function, type | nn.Module):
        return bool(_OF_ATTENTION.search(getattr(function, "__name__", type(function).__name__)))
    if not isinstance(function, FunctionType) or (function.__module__ or "").split(".")[0] == "torch":
        is_of_torch = (getattr(function, "__module__", None) or "").split(".")[0] in ("torch", "builtins", "math")
        return not is_of_torch or bool(_OF_ATTENTION.search(getattr(function, "__name__", "")))
    if function.__code__ in known:
        return False
    known.add(function.__code__)
    names = set(_names_in(function.__code__))
    if any(_OF_ATTENTION.search(name) for name in names):
        return True
    inside = [cell.cell_contents for cell in function.__closure__ or ()]
    for name in names:
        value = function.__globals__.get(name)
        of_module = vars(value) if isinstance(value, ModuleType) and value.__name__.split(".")[0] != "torch" else {}
        inside += [value, *(of_module[other] for other in names if other in of_module)]
    return any(_may_compute(each, known) for each in inside if isinstance(each, FunctionType))


def _names_in(code: CodeType) -> Iterator[str]:
    """Yield the names of all functions, attributes and variables in a code, and in functions that are defined in it."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _names_in(constant)
