"""All adapters, and contexts in which the functions that they read are intercepted. A new adapter is listed here."""

from collections.abc import Iterator

import torch.nn.functional as F
from torch import nn
from torch.utils import checkpoint

from headwise.attention import attend
from headwise.intercept.adapters.engine import Engine
from headwise.intercept.adapters.flash_attention import FLASH_ATTENTION
from headwise.intercept.adapters.headwise_attend import answer_intercepted
from headwise.intercept.adapters.library_functions import FunctionPatches
from headwise.intercept.adapters.sdpa import intercepted_sdpa
from headwise.intercept.adapters.torch_flex import FLEX
from headwise.intercept.adapters.torch_layers import replacements_in_torch_attention
from headwise.intercept.adapters.torch_varlen import VARLEN
from headwise.intercept.adapters.transformers_attention import dispatch_patches
from headwise.intercept.adapters.xformers import XFORMERS
from headwise.intercept.checkpointing import InterceptedCheckpointFrame, InterceptedCheckpointFunction
from headwise.intercept.compiled_sdpa import compiled_sdpa
from headwise.intercept.patches import Patches, Replacement, intercepting
from headwise.intercept.uncopied_hooks import getstate_without_hooks

ENGINES: tuple[Engine, ...] = (FLASH_ATTENTION, VARLEN, FLEX, XFORMERS)
"""The engines. Functions of `transformers` are intercepted by `transformers_attention.py`."""

engine_patches = FunctionPatches(ENGINES)
"""Context in which the functions of the engines are intercepted."""


def _replacements_for_sdpa() -> Iterator[Replacement]:
    """Yield the replacements that intercept calls of SDPA and of `headwise.attend`, also when activation checkpointing
    repeats them. A further replacement, of a method of `nn.Module`, leaves headwise's hooks out of copies of modules.
    """
    yield intercepting(F, "scaled_dot_product_attention", intercepted_sdpa, compiled_sdpa)
    yield Replacement(attend, "interception_hook", answer_intercepted)
    yield Replacement(nn.Module, "__getstate__", getstate_without_hooks(nn.Module.__getstate__))
    yield Replacement(checkpoint, "CheckpointFunction", InterceptedCheckpointFunction)
    yield Replacement(checkpoint, "_CheckpointFrame", InterceptedCheckpointFrame)


sdpa_patches = Patches(_replacements_for_sdpa)
"""Context in which calls of SDPA are intercepted, for `accelerate`; several models share it."""

function_patches = Patches(replacements_in_torch_attention, sdpa_patches, dispatch_patches, engine_patches)
"""Context in which attention, or parts of it, is intercepted wherever it is computed, for `watch` and `gate`."""
