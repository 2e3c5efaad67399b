"""Tiny models with random weights, built from the model types of transformers.

Configs are shrunk by the names of their sizes (see `shrink.py`). Everything that does not follow from names is in
`special_configs.py`.
"""

import copy
import importlib
import inspect
import math
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn

from research.tiny_models.shrink import DERIVED, shrunk
from research.tiny_models.special_configs import CLASSES, CONFIGS, GAINS, PARTS

# -- configs ----------------------------------------------------------------------------------------------------------


def tiny_config(model_type: str) -> Any:
    """Return the default config of a model type with tiny sizes."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config_class = CONFIG_MAPPING[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start, overrides = CONFIGS.get(model_type, ({}, {}))
        sizes = shrunk(config_class(**start).to_dict() | start)
        for path, value in overrides.items():
            *parents, name = path.split(".")
            entries = sizes
            for parent in parents:
                entries = entries.setdefault(parent, {})
            if value is Ellipsis:
                entries.pop(name, None)
            else:
                entries[name] = copy.deepcopy(value)
        return config_class(**{name: value for name, value in sizes.items() if name not in DERIVED})


# -- models -----------------------------------------------------------------------------------------------------------


def class_of(model_type: str, config: Any) -> type[nn.Module]:
    """Return the class to build for a model type: the base model if there is one, otherwise a class with a head,
    otherwise any model class that takes the config.
    """
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    modules = modeling_modules(type(config))
    if model_type in CLASSES:
        return next(getattr(module, CLASSES[model_type]) for module in modules if hasattr(module, CLASSES[model_type]))
    tables = sorted(
        name for name in dir(modeling_auto) if name.startswith("MODEL_") and name.endswith("_MAPPING_NAMES")
    )
    tables.sort(key=lambda name: (name != "MODEL_MAPPING_NAMES", name != "MODEL_FOR_PRETRAINING_MAPPING_NAMES"))
    for table in tables:
        names = getattr(modeling_auto, table).get(model_type)
        for name in (names,) if isinstance(names, str) else names or ():
            for module in modules:
                if hasattr(module, name):
                    return getattr(module, name)
    for module in modeling_modules(type(config)):
        candidate: Any
        for _, candidate in inspect.getmembers(module, inspect.isclass):
            defined_here = candidate.__module__ == module.__name__ and "forward" in vars(candidate)
            is_model = defined_here and issubclass(candidate, PreTrainedModel)
            if is_model and _config_of(candidate) == type(config).__name__:
                return candidate
    raise LookupError(f"no model class for {model_type}")


def modeling_modules(config: type) -> list[Any]:
    """Return the `modeling_*` modules in the same folder as a config class."""
    folder = config.__module__.rpartition(".")[0]
    names = sorted(file.stem for file in Path(inspect.getfile(config)).parent.glob("modeling_*.py"))
    return [importlib.import_module(f"{folder}.{name}") for name in names]


def _config_of(model: type) -> str:
    """Return the name of the config class that a model class takes; "" if it is not annotated."""
    config_class = inspect.get_annotations(model).get("config") or getattr(model, "config_class", None)
    first_parameter = list(inspect.signature(model.__init__).parameters.values())[1:2]  # type: ignore[misc]
    if first_parameter and first_parameter[0].annotation is not inspect.Parameter.empty:
        config_class = first_parameter[0].annotation
    return config_class if isinstance(config_class, str) else getattr(config_class, "__name__", "")


def build(model_type: str, implementation: str | None = None, seed: int = 0) -> nn.Module:
    """Return a tiny model of random weights whose heads differ, in float32 on the CPU and in evaluation mode.

    Args:
        model_type: name of the model type in `transformers`.
        implementation: attention implementation; by default the model's own.
        seed: seed of the random weights.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    model_class: Any = class_of(model_type, config)
    config = getattr(config, PARTS.get(model_type, ""), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {} if implementation is None else {"attn_implementation": implementation}
        model = model_class._from_config(config, **options)
    randomise(model, seed, GAINS.get(model_type, 1.0))
    return model.float().eval()


@torch.no_grad()
def randomise(model: nn.Module, seed: int = 0, gain: float = 1.0) -> None:
    """Replace the weights by random ones, large enough that heads differ by more than rounding errors. `gain` scales
    the matrices.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if not parameter.is_floating_point() or not parameter.numel():
            continue
        short = name.rsplit(".", 1)[-1]
        if parameter.ndim < 2:
            if short in ("bias",) or not parameter.isfinite().all():
                parameter.normal_(0.0, 0.1, generator=generator)
            continue
        fan_in = max(parameter[0].numel(), 1)
        width = 0.5 if "embed" in name else 1 / math.sqrt(fan_in)
        if any(part in name for part in ("q_proj", "k_proj", "query", "key", "qkv", "q_lin", "k_lin", "c_attn")):
            width *= 2.0
        parameter.normal_(0.0, gain * width, generator=generator)
