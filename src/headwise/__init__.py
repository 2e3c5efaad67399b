"""headwise: multi-head attention for PyTorch with access to every head.

`import headwise` imports nothing, not even torch. Each public name is imported when it is first used (PEP 562). The
names and their modules are in `__init__.pyi`, which type checkers and editors read too.
"""

import ast
import importlib
import pkgutil
from typing import Any

__version__ = "0.1.0"

_MODULES = {
    alias.name: node.module
    for node in ast.parse(pkgutil.get_data(__name__, "__init__.pyi") or b"").body
    if isinstance(node, ast.ImportFrom)
    for alias in node.names
}
"""Module of each public name."""

__all__ = list(_MODULES)


def __getattr__(name: str) -> Any:
    """Import a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(_MODULES[name])
    value = getattr(module, name, None) or importlib.import_module(f"{module.__name__}.{name}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    """List every public name, imported or not."""
    return sorted({*globals(), *__all__})
