"""Names of models for display: short, and without the folders in which models are stored."""

from pathlib import Path
from typing import Any

from headwise.packaged_models import PACKAGED


def model_name(model: Any) -> str:
    """Return a short name of a model for display: the last part of its id on the Hugging Face hub, or the name of the
    folder that it was loaded from. A model with neither has the name of its class.
    """
    name = getattr(getattr(model, "config", None), "name_or_path", None)
    if not isinstance(name, str) or not name:
        return type(model).__name__
    for packaged in PACKAGED.values():
        if packaged.location() == Path(name):
            return short_name(packaged.hub)
    return short_name(str(Path(name).resolve()) if Path(name).is_dir() else name) or type(model).__name__


def short_name(name: str) -> str:
    r"""Return the last part of a model's id on the Hugging Face hub, or of its path. A name without slashes is returned
    unchanged.

    >>> short_name("sentence-transformers/all-MiniLM-L6-v2")
    'all-MiniLM-L6-v2'
    """
    return name.replace("\\", "/").rstrip("/").rpartition("/")[2]
