"""Settings of a model in addition to its weights: everything else in its modules that its outputs depend on.

Code that is replaced from outside, such as by hooks, is not among them.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from headwise.data.batches import digest_of

WITHOUT_EFFECT = ("training", "gradient_checkpointing", "generation_config", "name_or_path")
"""Attributes of modules that the outputs in a given mode do not depend on."""

CONFIG_WITHOUT_EFFECT = ("transformers_version", "_name_or_path", "architectures", "dtype", "torch_dtype", "use_cache")
"""Fields of configurations of which the same is true; they differ between a model in memory and its saved copy. The
data type is that of the weights."""


def model_settings(model: nn.Module) -> dict[str, Any]:
    """Return all properties of a model, except weights, that affect its outputs, as texts. The properties are the
    fields of the configuration and, by module path, the class, public attributes (such as the `p` of a dropout), and
    hashes of buffers, saved or not.
    """
    config = getattr(model, "config", None)
    modules: dict[str, dict[str, str]] = {}
    for path, module in model.named_modules():
        settings = modules[path or type(model).__name__] = {"class": _name(type(module))}
        for name, value in vars(module).items():
            is_method = getattr(value, "__self__", None) is module
            if not name.startswith("_") and name not in WITHOUT_EFFECT and not is_method:
                settings[name] = _text(value)
        settings.update({name: _text(buffer) for name, buffer in module.named_buffers(recurse=False)})
    return {"config": _config_settings(config) if hasattr(config, "to_dict") else {}, "modules": modules}


def _config_settings(config: Any) -> dict[str, str]:
    """Return the fields of a `transformers` configuration as texts, together with the name of its attention
    implementation. Fields that do not affect outputs are left out.
    """
    fields = {name: value for name, value in config.to_dict().items() if name not in CONFIG_WITHOUT_EFFECT}
    fields["attn_implementation"] = getattr(config, "_attn_implementation", None)
    return {name: _text(value) for name, value in sorted(fields.items())}


def _text(value: Any) -> str:
    """Return a text for the value of a setting, such that values with different effects have different texts. For an
    object of an unknown type, the text is the name of its class.
    """
    is_object = dataclasses.is_dataclass(value) and not isinstance(value, type)
    if isinstance(value, Tensor):
        text = digest_of([value])
    elif value is None or isinstance(value, bool | int | float | complex | str | torch.dtype | torch.device):
        text = repr(value)
    elif isinstance(value, Mapping):
        text = f"{{{', '.join(f'{_text(key)}: {_text(item)}' for key, item in value.items())}}}"
    elif isinstance(value, list | tuple):
        text = f"[{', '.join(map(_text, value))}]"
    elif hasattr(value, "to_dict"):
        text = digest_of([_config_settings(value)])
    elif is_object:
        text = _name(type(value)) + _text({each.name: getattr(value, each.name) for each in dataclasses.fields(value)})
    else:
        text = _name(value if hasattr(value, "__qualname__") else type(value))
    return text


def _name(value: Any) -> str:
    """Return the full name of a class or function, with its Python module."""
    return f"{value.__module__}.{value.__qualname__}"
