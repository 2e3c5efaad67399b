"""Identity of a profiled model: a check that a profile was measured on the heads of a given model."""

from collections.abc import Iterable
from typing import Any

from torch import nn

from headwise.analysis.profile import ATTENTION_DIGEST, Profile
from headwise.errors import InputError
from headwise.runs.fingerprint import attention_digest


def require_profile_of(profile: Profile, model: nn.Module, name: str) -> None:
    """Raise `InputError` if a profile was measured on another model than `model`, which is called `name`.

    The model may have another language-model head than the profiled one, which adds a prefix to the paths of its
    modules. If the attention modules have the same weights, the models are the same. Weights of different data types
    cannot be compared; then the names decide.

    Raises:
        InputError: the profile is that of another model; the message has both names.
    """
    metadata: Any = profile.metadata
    profiled = metadata["model"]
    paths = list(dict.fromkeys(head.module for head in profile.heads))
    own_paths = _corresponding_paths(model, paths)
    if own_paths is not None:
        dtype = next((str(weight.dtype) for weight in model.parameters() if weight.is_floating_point()), "")
        is_comparable = ATTENTION_DIGEST in metadata and dtype == f"torch.{profiled['dtype']}"
        if is_comparable and attention_digest(model, own_paths) == metadata[ATTENTION_DIGEST]:
            return
        if not is_comparable and profiled["name"] == name:
            return
    reason = "whose attention modules have other names" if own_paths is None else "whose attention weights differ"
    raise InputError("roles", expected=f"a profile of the model {name!r}", got=f"one of {profiled['name']!r}, {reason}")


def _corresponding_paths(model: nn.Module, paths: Iterable[str]) -> list[str] | None:
    """Return the paths in a model of the modules that have the given paths in the same model with another head, which
    differ by a prefix such as `model.`; None if a module has no counterpart.
    """
    own = [path for path, _ in model.named_modules()]
    found = []
    for path in paths:
        matches = [name for name in own if name == path or name.endswith(f".{path}") or path.endswith(f".{name}")]
        if not matches:
            return None
        found.append(min(matches, key=lambda name: abs(len(name) - len(path))))
    return found
