"""Hooks that belong to one model only: copies and pickles of the model are without them."""

from collections.abc import Callable
from typing import Any

from torch import nn

HOOK_DICTS = (
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
)
"""Attributes in which a module keeps its forward hooks, or options of them, by the hooks' ids."""


class UncopiedHooks:
    """Base class of objects whose methods are hooks of a module. Such hooks must not work in a copy of the module. If
    the object is copied with the module, the copy has `is_copy` True, and its hooks must do nothing.

    Attributes:
        is_copy: True in a copy.
    """

    is_copy = False

    @property
    def context(self) -> str:
        """Name of the context that registered the hooks, such as "hw.gate", for error messages."""
        raise NotImplementedError

    @property
    def remedy(self) -> str:
        """Advice on how to remove these hooks, for error messages."""
        return f"leave the context of {self.context} first"

    def __deepcopy__(self, memo: dict[int, Any]) -> "UncopiedHooks":
        return _copy_of(type(self))

    def __reduce__(self) -> tuple[Any, ...]:
        return _copy_of, (type(self),)


def uncopied_hooks_of(module: nn.Module) -> UncopiedHooks | None:
    """Return the object with the hooks that `gate`, `accelerate` or another context of headwise has registered on a
    module. If there are several such objects, return that of the innermost context; if there is none, return None.
    """
    hooks = (*reversed(module._forward_hooks.values()), *module._forward_pre_hooks.values())
    owners = (getattr(hook, "__self__", None) for hook in hooks)
    return next((owner for owner in owners if isinstance(owner, UncopiedHooks) and not owner.is_copy), None)


def _copy_of(kind: type[UncopiedHooks]) -> UncopiedHooks:
    """Return a new object of the class `kind` for a copied module. Its hooks do nothing, and its only attribute is
    `is_copy`, which is True.
    """
    hooks = kind.__new__(kind)
    hooks.is_copy = True
    return hooks


def getstate_without_hooks(getstate: Callable[[nn.Module], Any]) -> Callable[[nn.Module], Any]:
    """Return a replacement for `getstate`, the method `__getstate__` of `nn.Module`, which `copy` and `pickle` call.
    The state returned by the replacement does not contain hooks that belong to the original module only.
    """

    def __getstate__(module: nn.Module) -> Any:  # noqa: N807
        state = getstate(module)
        attributes = state[0] if isinstance(state, tuple) else state
        hooks = {**attributes.get("_forward_pre_hooks", {}), **attributes.get("_forward_hooks", {})}
        uncopied = {key for key, hook in hooks.items() if isinstance(getattr(hook, "__self__", None), UncopiedHooks)}
        if not uncopied:
            return state
        attributes = dict(attributes)
        for name in HOOK_DICTS:
            by_id = attributes[name]
            attributes[name] = type(by_id)((key, hook) for key, hook in by_id.items() if key not in uncopied)
        return (attributes, *state[1:]) if isinstance(state, tuple) else attributes

    return __getstate__
