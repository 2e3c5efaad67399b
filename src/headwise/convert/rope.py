"""Conversion of the rotary embedding that a configuration of `transformers` describes."""

import math
from typing import Any

from headwise.attention.rotary import Rotary
from headwise.attention.rotary_scaling import DynamicNTK, LinearScaling, Llama3, Scaling, YaRN
from headwise.errors import InputError


def rotary_of(config: Any, head_dim: int, *, partial: bool) -> Rotary:
    """Return the `Rotary` embedding that a configuration of a `transformers` model describes, for heads of `head_dim`
    features. Raise `InputError` for an unknown `rope_type`. Also raise it if the configuration rotates only a part of
    these features and `partial` is False.

    Args:
        config: of the model; its `rope_parameters` contain `rope_theta`, `rope_type` and the options of that type.
        head_dim: number of features of a head.
        partial: whether blocks of the family rotate only the share `partial_rotary_factor` of the features.

    Raises:
        InputError: an unknown `rope_type`, or a partial rotation that the family does not use.
    """
    parameters = config.rope_parameters
    kind = parameters.get("rope_type")
    if kind not in SCALINGS:
        raise InputError("block", expected=f"a rope_type of {', '.join(SCALINGS)}", got=repr(kind))
    share = parameters.get("partial_rotary_factor", 1.0)
    if share != 1.0 and not partial:
        raise InputError("block", expected="rotation of all features of a head", got=f"partial_rotary_factor {share}")
    width = None if share == 1.0 else int(head_dim * share)
    return Rotary(theta=float(parameters["rope_theta"]), width=width, scaling=SCALINGS[kind](config, parameters))


def _no_scaling(config: Any, parameters: dict[str, Any]) -> None:
    """Return None, since `rope_type` "default" does not scale the rotation frequencies."""
    return None


def _linear(config: Any, parameters: dict[str, Any]) -> Scaling:
    """Return the scaling of rotation frequencies for `rope_type` "linear", with the factor in `parameters` (the
    `rope_parameters` of the configuration).
    """
    return LinearScaling(parameters["factor"])


def _dynamic(config: Any, parameters: dict[str, Any]) -> Scaling:
    """Return the scaling of rotation frequencies for `rope_type` "dynamic" (dynamic NTK), with the factor in
    `parameters` (the `rope_parameters` of the configuration) and the configuration's `max_position_embeddings`.
    """
    return DynamicNTK(parameters["factor"], config.max_position_embeddings)


def _yarn(config: Any, parameters: dict[str, Any]) -> Scaling:
    """Return the scaling of rotation frequencies for `rope_type` "yarn", with its options read from `parameters` (the
    `rope_parameters` of the configuration). A missing factor or trained context length is derived from the
    configuration, and a missing attention factor from `mscale` and `mscale_all_dim` if both are present. Other missing
    options have their defaults.
    """
    trained_length = _trained_length(config, parameters)
    factor = parameters.get("factor") or config.max_position_embeddings / trained_length
    attention_factor = parameters.get("attention_factor")
    mscale, mscale_all_dim = parameters.get("mscale"), parameters.get("mscale_all_dim")
    if attention_factor is None and mscale and mscale_all_dim:  # DeepSeek
        attention_factor = (0.1 * mscale * math.log(factor) + 1) / (0.1 * mscale_all_dim * math.log(factor) + 1)
    return YaRN(
        factor,
        trained_length,
        fast=parameters.get("beta_fast") or 32.0,
        slow=parameters.get("beta_slow") or 1.0,
        attention_factor=attention_factor,
        truncate=parameters.get("truncate", True),
    )


def _llama3(config: Any, parameters: dict[str, Any]) -> Scaling:
    """Return the scaling of rotation frequencies for `rope_type` "llama3", with its options read from `parameters` (the
    `rope_parameters` of the configuration). A missing trained context length is read from the configuration.
    """
    return Llama3(
        parameters["factor"],
        _trained_length(config, parameters),
        low=parameters["low_freq_factor"],
        high=parameters["high_freq_factor"],
    )


def _trained_length(config: Any, parameters: dict[str, Any]) -> int:
    """Return the context length, in tokens, with which the model was trained before its context was extended. It is
    `original_max_position_embeddings` if `parameters` (the `rope_parameters` of the configuration) contains it,
    otherwise the configuration's `max_position_embeddings`.
    """
    length: int = parameters.get("original_max_position_embeddings") or config.max_position_embeddings
    return length


SCALINGS = {"default": _no_scaling, "linear": _linear, "dynamic": _dynamic, "yarn": _yarn, "llama3": _llama3}
"""Function that makes the scaling of each `rope_type` from a configuration and its `rope_parameters`."""
