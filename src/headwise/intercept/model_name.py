"""Names of models for display: short, and without the folders in which models are stored."""

import os
from pathlib import Path
from typing import Any


def model_name(model: Any) -> str:
    """Return the name of a model: the last part of its hub id or, for a model without one or from a folder, the name of
    its class.
    """
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    if isinstance(name, str) and name and not os.path.isabs(name) and not Path(name).exists():
        return short_name(name)
    return type(model).__name__


def short_name(name: str) -> str:
    r"""Return the last part of a hub id or of the path of a model; a name without slashes is returned unchanged.

    >>> short_name("sentence-transformers/all-MiniLM-L6-v2")
    'all-MiniLM-L6-v2'
    """
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2] or name
