"""All engines whose functions are intercepted while a model is. A new adapter is listed here."""

from headwise.intercept.adapters.engine import Engine
from headwise.intercept.adapters.flash_attention import FLASH_ATTENTION
from headwise.intercept.adapters.library_functions import FunctionPatches
from headwise.intercept.adapters.torch_flex import FLEX
from headwise.intercept.adapters.torch_varlen import VARLEN
from headwise.intercept.adapters.xformers import XFORMERS

ENGINES: tuple[Engine, ...] = (FLASH_ATTENTION, VARLEN, FLEX, XFORMERS)
"""The engines. Functions of `transformers` are intercepted by `hf_calls.py`, and read by `transformers_engines.py`."""

engine_patches = FunctionPatches(ENGINES)
"""Context in which the functions of the engines are intercepted, for `watch` and `gate`."""
