"""The rotary positions that a configuration of `transformers` describes."""

import math
from typing import Any

from headwise.attention.rotary import Rotary
from headwise.attention.rotary_scaling import DynamicNTK, LinearScaling, Llama3, Scaling, YaRN
from headwise.errors import InputError


def rotary_of(config: Any, head_dim: int, *, partial: bool) -> Rotary:
    """The rotation of heads that are `head_dim` wide.

    Args:
        config: its `rope_parameters` are read: `rope_theta`, `rope_type` and what that type takes.
        head_dim: features of a head.
        partial: whether the family turns a part of them, which `partial_rotary_factor` says.

    Raises:
        InputError: a `rope_type` we have no rotation for.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type")
    if kind not in SCALINGS:
        raise InputError("block", expected=f"a rope_type of {', '.join(SCALINGS)}", got=repr(kind))
    part = parameters.get("partial_rotary_factor", 1.0)
    if part != 1.0 and not partial:
        raise InputError("block", expected="heads that are turned whole", got=f"partial_rotary_factor {part}")
    width = None if part == 1.0 else int(head_dim * part)
    return Rotary(theta=float(parameters["rope_theta"]), width=width, scaling=SCALINGS[kind](config, parameters))


def _default(config: Any, parameters: dict[str, Any]) -> None:
    return None


def _linear(config: Any, parameters: dict[str, Any]) -> Scaling:
    return LinearScaling(parameters["factor"])


def _dynamic(config: Any, parameters: dict[str, Any]) -> Scaling:
    return DynamicNTK(parameters["factor"], config.max_position_embeddings)


def _yarn(config: Any, parameters: dict[str, Any]) -> Scaling:
    trained = _trained_length(config, parameters)
    factor = parameters.get("factor") or config.max_position_embeddings / trained
    given = parameters.get("attention_factor")
    over, under = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if given is None and over and under:  # DeepSeek's way of saying it
        given = (0.1 * over * math.log(factor) + 1) / (0.1 * under * math.log(factor) + 1)
    return YaRN(
        factor,
        trained,
        fast=parameters.get("beta_fast") or 32.0,
        slow=parameters.get("beta_slow") or 1.0,
        attention_factor=given,
        truncate=parameters.get("truncate", True),
    )


def _llama3(config: Any, parameters: dict[str, Any]) -> Scaling:
    return Llama3(
        parameters["factor"],
        _trained_length(config, parameters),
        low=parameters["low_freq_factor"],
        high=parameters["high_freq_factor"],
    )


def _trained_length(config: Any, parameters: dict[str, Any]) -> int:
    length: int = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    return length


SCALINGS = {"default": _default, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3}
"""What becomes of each `rope_type`."""
