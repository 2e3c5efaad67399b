"""The settings that determine a run's numbers: model weights, data options, package versions and arguments."""

import json
import re
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import PackageNotFoundError, version
from itertools import takewhile
from typing import Any

import torch
from torch import nn

from headwise.data.batches import digest_of
from headwise.data.texts import Texts
from headwise.data.tokenization import input_embeddings, output_embeddings
from headwise.intercept.layer_index import innermost_attention_modules
from headwise.intercept.model_name import model_name
from headwise.page.columns import ModelIdentity
from headwise.runs.quantisation import quantisation_of
from headwise.runs.weight_hashes import hashed_state

HEADS = ("pooler", "qa_outputs", "embeddings.mask_token")
"""Parts of a model that belong to its task, by the names of `transformers`. Attention does not depend on them, and the
same model for another task lacks them."""

IDLE = re.compile(r"_token_ids?$|dropout|_pdrop$|drop_path|layerdrop|^use_cache$|^tie_word_embeddings$|^initializer_")
"""Names of fields of a configuration that concern generation and training alone."""


def run_settings(model: nn.Module, texts: Texts | None, title: str | None, **settings: Any) -> dict[str, Any]:
    """Collect the settings that determine a run's numbers, as JSON-compatible values: the model (its name `title`,
    class, data type, device and a hash of its weights), the data options of `texts`, the versions of packages, and the
    run's other arguments (`settings`). If `title` is None, the name is that of its hub id, folder or class. A stopped
    run resumes only with equal settings.

    Args:
        model: the model; a hash of its weights identifies it.
        texts: the texts that it reads, whose options are recorded; None for other data.
        title: the model's name for display; by default the last part of its hub id, its folder, or its class.
        settings: the other arguments of the run, JSON-compatible.

    Returns:
        a dictionary with the keys "model", "data", "versions" and "settings".
    """
    parameter = next((weight for weight in model.parameters() if weight.is_floating_point()), torch.empty(0))
    collected = {
        "model": {
            "name": title or model_name(model),
            "class": type(model).__name__,
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": parameter.device.type,
            "quantisation": quantisation_of(model),
            "weights": _weights_digest(model),
            "attention": identity_of(model).as_json(),
        },
        "data": None if texts is None else text_options(texts),
        "versions": _package_versions(),
        "settings": settings,
    }
    normalized: dict[str, Any] = json.loads(json.dumps(collected))  # tuples become lists, as when read from a file
    return normalized


def identity_of(model: nn.Module) -> ModelIdentity:
    """Return the identity of a model by its weights and its configuration. Of a model that has input embeddings, the
    weights are those of the innermost module around these embeddings and all attention modules, without the output
    embeddings and `HEADS`: they are the same for all heads of `transformers` for a task, such as a language model's.
    """
    modules = dict(model.named_modules())
    paths = innermost_attention_modules(modules, modules)
    parameter = next((weight for weight in model.parameters() if weight.is_floating_point()), torch.empty(0))
    dtype = str(parameter.dtype).removeprefix("torch.")
    embeddings = [path for path, module in modules.items() if module is input_embeddings(model)]
    body = modules[_common_ancestor([*paths, *embeddings])] if embeddings else getattr(model, "base_model", model)
    outputs = [path for path, module in body.named_modules() if module is output_embeddings(model)]
    state = hashed_state(body, without=[*outputs, *HEADS])
    return ModelIdentity(len(paths), dtype, digest_of([*state, _architecture(model)]))


def _common_ancestor(paths: Sequence[str]) -> str:
    """Return the path of the innermost module that contains all modules at `paths`."""
    names = zip(*(path.split(".") for path in paths), strict=False)
    common = takewhile(lambda at_depth: len(set(at_depth)) == 1, names)
    return ".".join(at_depth[0] for at_depth in common)


def _architecture(model: Any) -> str | None:
    """Return the configuration of a `transformers` model as JSON, without fields that all configurations have, such as
    the names of its classes, and without those that change nothing of what its heads compute in evaluation mode. Return
    None for another module.
    """
    config, transformers = getattr(model, "config", None), sys.modules.get("transformers")
    if transformers is None or not isinstance(config, transformers.PretrainedConfig):
        return None
    general = transformers.PretrainedConfig().to_dict()
    own = {name: value for name, value in config.to_dict().items() if name not in general}
    return json.dumps(_computing(own), sort_keys=True, default=str)


def _computing(fields: Any) -> Any:
    """Return the fields of a configuration, and of those in it, without those that `IDLE` describes."""
    if not isinstance(fields, dict):
        return fields
    return {name: _computing(value) for name, value in fields.items() if not IDLE.search(str(name))}


def _weights_digest(model: nn.Module) -> str:
    """Return a hash of a model's weights: the names and values of all entries of its `state_dict` (parameters and saved
    buffers).
    """
    return digest_of(hashed_state(model))


def attention_digest(model: nn.Module, paths: Iterable[str]) -> str:
    """Return a hash of the weights of a model's modules at the given paths, which does not depend on the paths. A path
    without a module does not count.
    """
    modules = dict(model.named_modules())
    return digest_of(part for path in paths if path in modules for part in hashed_state(modules[path]))


def text_options(texts: Texts) -> dict[str, Any]:
    """Return the name of the source of the texts, and the options by which the texts become batches, by option name."""
    names = ("context", "documents", "batch", "limit", "column")
    return {"source": texts.name} | {name: getattr(texts, name) for name in names}


def _package_versions() -> dict[str, str]:
    """Return the versions of headwise, torch and transformers by name, without packages that are not installed."""
    versions = {}
    for package in ("headwise", "torch", "transformers"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions
