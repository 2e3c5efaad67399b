"""Imports of libraries whose dependencies are missing: packages that they import but that no model of the study uses.

Compiled packages for sound and pictures exist for other builds of torch only. An absent package is replaced by an empty
one whose attributes are all placeholders.
"""

import importlib.abc
import importlib.machinery
import sys
import types
from typing import Any

import torch

ABSENT = {
    *("torchaudio", "faiss", "librosa", "numba", "lightning", "environs", "spear_tts_pytorch", "ruamel"),
    *("vector_quantize_pytorch", "fairscale", "hl_gauss_pytorch", "omegaconf", "boto3"),
    *("vocos", "ema_pytorch", "polars", "pyfaidx"),
    *("naturalspeech2_pytorch", "audiolm_pytorch", "autofaiss", "joblib", "torchdiffeq"),
}
"""Packages that are never used, even where they are installed."""


class _Placeholder(type):
    """Class of placeholders: their attributes are placeholders, too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)

    def __iter__(cls) -> Any:
        return iter(())


def _placeholder(name: str) -> Any:
    """Return a class without content, which may also be called as a decorator."""

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        if cls is placeholder:
            return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else _placeholder(name)
        return object.__new__(cls)

    placeholder = _Placeholder(name, (), {"__new__": new})
    return placeholder


class _AbsentModule(types.ModuleType):
    """Module whose attributes are placeholders."""

    __path__: list[str] = []  # noqa: RUF012

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _placeholder(name)


class _Finder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Finds the absent packages."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Return the specification of an absent package; None for all others."""
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True)
            if name.split(".", maxsplit=1)[0] in ABSENT
            else None
        )

    def create_module(self, spec: Any) -> types.ModuleType:
        """Return an empty module."""
        return _AbsentModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Do nothing: the module is empty."""


def make_importable() -> None:
    """Make the libraries of the study importable in this process."""
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
        for name in ("nms", "qnms"):  # torchvision registers shapes of its compiled operators, which are absent
            torch.library.define(f"torchvision::{name}", "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
