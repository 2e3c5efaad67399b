"""From a model type of transformers to a tiny model of random weights.

Configs are shrunk by the names of their sizes; what does not follow from names stands in exceptions.py.
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

from research.census.exceptions import CLASSES, CONFIGS, GAINS, PARTS
from research.census.shrink import DERIVED, shrunk

# -- configs ----------------------------------------------------------------------------------------------------------


def tiny_config(model_type: str) -> Any:
    """The config of a model type, shrunk."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind = CONFIG_MAPPING[model_type]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        start, overrides = CONFIGS.get(model_type, ({}, {}))
        sizes = shrunk(kind(**start).to_dict() | start)
        for path, value in overrides.items():
            *inside, name = path.split(".")
            place = sizes
            for each in inside:
                place = place.setdefault(each, {})
            if value is Ellipsis:
                place.pop(name, None)
            else:
                place[name] = copy.deepcopy(value)
        return kind(**{name: value for name, value in sizes.items() if name not in DERIVED})


# -- models -----------------------------------------------------------------------------------------------------------


def class_of(model_type: str, config: Any) -> type[nn.Module]:
    """The class that is built: the plain model where there is one, and otherwise one that takes the config."""
    from transformers import PreTrainedModel
    from transformers.models.auto import modeling_auto

    modules = _modeling(type(config))
    if model_type in CLASSES:
        return next(getattr(each, CLASSES[model_type]) for each in modules if hasattr(each, CLASSES[model_type]))
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
    for module in _modeling(type(config)):
        candidate: Any
        for _, candidate in inspect.getmembers(module, inspect.isclass):
            defined_here = candidate.__module__ == module.__name__ and "forward" in vars(candidate)
            is_model = defined_here and issubclass(candidate, PreTrainedModel)
            if is_model and _config_of(candidate) == type(config).__name__:
                return candidate
    raise LookupError(f"no model class for {model_type}")


def _modeling(config: type) -> list[Any]:
    """The files of models beside that of a config."""
    folder = config.__module__.rpartition(".")[0]
    names = sorted(each.stem for each in Path(inspect.getfile(config)).parent.glob("modeling_*.py"))
    return [importlib.import_module(f"{folder}.{name}") for name in names]


def _config_of(model: type) -> str:
    """The name of the config that a class takes."""
    said = inspect.get_annotations(model).get("config") or getattr(model, "config_class", None)
    first = list(inspect.signature(model.__init__).parameters.values())[1:2]  # type: ignore[misc]
    if first and first[0].annotation is not inspect.Parameter.empty:
        said = first[0].annotation
    return said if isinstance(said, str) else getattr(said, "__name__", "")


def build(model_type: str, implementation: str | None = None, seed: int = 0) -> nn.Module:
    """A model of random weights whose heads differ, on the CPU, in float32, under an implementation of attention.

    Args:
        model_type: as `transformers` calls it.
        implementation: of attention; the model's default unless given.
        seed: of the weights.
    """
    torch.manual_seed(seed)
    config = tiny_config(model_type)
    kind: Any = class_of(model_type, config)
    config = getattr(config, PARTS.get(model_type, ""), config)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = {} if implementation is None else {"attn_implementation": implementation}
        model = kind._from_config(config, **options)
    spread(model, seed, GAINS.get(model_type, 1.0))
    return model.float().eval()


@torch.no_grad()
def spread(model: nn.Module, seed: int = 0, gain: float = 1.0) -> None:
    """Weights wide enough that heads differ by more than rounding."""
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
