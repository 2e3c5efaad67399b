"""The settings that determine a run's numbers: model weights, data options, package versions and arguments.

Weights are hashed where they are: none is copied from an accelerator.
"""

import json
import pickle
import re
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from itertools import chain, takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from headwise.data.batches import device_of, digest_of
from headwise.data.texts import Texts
from headwise.data.tokenization import input_embeddings, output_embeddings
from headwise.errors import InputError
from headwise.intercept.layer_index import innermost_attention_modules, is_related
from headwise.intercept.model_name import model_name
from headwise.page.columns import ModelIdentity
from headwise.runs.quantisation import quantisation_of
from headwise.shapes import Int

HEADS = ("pooler", "qa_outputs", "embeddings.mask_token")
"""Parts of a model that belong to its task, by the names of `transformers`. Attention does not depend on them, and the
same model for another task lacks them."""

IDLE = re.compile(r"_token_ids?$|dropout|_pdrop$|drop_path|layerdrop|^use_cache$|^tie_word_embeddings$|^initializer_")
"""Names of fields of a configuration that concern generation and training alone."""

BLOCK = 2**16
"""Number of integers that one hash stands for. A block and its factors fit into the cache of a processor."""

INTEGERS = {1: torch.int8, 2: torch.int16}
"""Integers with as many bytes as one number. Larger numbers are read as several integers of 32 bits."""


def run_settings(model: nn.Module, texts: Texts | None, title: str | None, **settings: Any) -> dict[str, Any]:
    """Return the settings that determine a run's numbers, JSON-compatible: the model with a hash of its weights (named
    `title`, or by its hub id, folder or class), the options of `texts` (None for other data), the versions of packages,
    and the run's other arguments `settings`. A stopped run resumes only with equal settings.
    """
    identity, versions = identity_of(model), {}
    for package in ("headwise", "torch", "transformers"):
        with suppress(PackageNotFoundError):
            versions[package] = version(package)
    collected = {
        "model": {
            "name": title or model_name(model),
            "class": type(model).__name__,
            "dtype": identity.dtype,
            "device": device_of(model).type,
            "quantisation": quantisation_of(model),
            "weights": digest_of(hashed_state(model)),
            "attention": list(identity),
        },
        "data": None if texts is None else text_options(texts),
        "versions": versions,
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
    if embeddings:
        names = zip(*(path.split(".") for path in [*paths, *embeddings]), strict=False)
        common = takewhile(lambda at_depth: len(set(at_depth)) == 1, names)
        body = modules[".".join(at_depth[0] for at_depth in common)]
    else:
        body = getattr(model, "base_model", model)
    outputs = [path for path, module in body.named_modules() if module is output_embeddings(model)]
    state = hashed_state(body, without=[*outputs, *HEADS])
    return ModelIdentity(len(paths), dtype, digest_of([*state, _architecture(model)]))


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


def attention_digest(model: nn.Module, paths: Iterable[str]) -> str:
    """Return a hash of the weights of the modules at the given paths, which does not depend on the paths."""
    modules = dict(model.named_modules())
    return digest_of(part for path in paths if path in modules for part in hashed_state(modules[path]))


def text_options(texts: Texts) -> dict[str, Any]:
    """Return the name of the source of the texts, and the options by which the texts become batches, by option name."""
    names = ("context", "documents", "batch", "limit", "column")
    return {"source": texts.name} | {name: getattr(texts, name) for name in names}


def hashed_state(module: nn.Module, *, without: Sequence[str] = ()) -> Iterator[Any]:
    """Yield each entry of a module's `state_dict`: its name, and for each tensor in it, such as those in the packed
    weights of a quantised layer, the dtype, the shape and the hashes of its values. Other values are pickled. Entries
    inside the modules at the paths `without`, and single entries named there, are left out.
    """
    factors: dict[torch.device, Tensor] = {}
    for name, entry in module.state_dict().items():
        if any(is_related(name, path) for path in without):
            continue
        yield name
        leaves, structure = pytree.tree_flatten(entry)
        yield str(structure)
        for value in chain.from_iterable(_parts(name, leaf) for leaf in leaves):
            if not isinstance(value, Tensor):
                try:
                    pickled = pickle.dumps(value)
                except Exception as error:
                    expected = "values in state_dict() that can be pickled"
                    got = f"{type(value).__name__} in {name}"
                    raise InputError("model", expected=expected, got=got) from error
                yield pickled
                continue
            values = _plain(name, value)
            if values.device not in factors:  # random odd numbers, the same in every process
                generator = torch.Generator().manual_seed(0)
                numbers = torch.randint(-(2**63), 2**63 - 1, (BLOCK,), generator=generator) | 1
                factors[values.device] = numbers.to(values.device)
            yield value.dtype, tuple(value.shape)
            yield _block_hashes(values, factors[values.device])


def _parts(name: str, value: Any) -> Iterator[Any]:
    """Yield a value or, in place of a tensor that wraps others, these and what the wrapper states of them."""
    if is_traceable_wrapper_subclass(value):
        names, context = value.__tensor_flatten__()
        yield type(value).__qualname__
        yield repr(context)
        for each in names:
            yield from _parts(name, getattr(value, each))
    elif isinstance(value, Tensor) and type(value) not in (Tensor, nn.Parameter) and not _has_memory(value):
        raise InputError("model", expected="weights in memory", got=f"{name} of the type {type(value).__name__}")
    else:
        yield value


def _has_memory(value: Tensor) -> bool:
    """Return True if the numbers of a tensor are in memory of its own."""
    try:
        return value.numel() == 0 or value.data_ptr() != 0
    except (RuntimeError, ValueError):  # of a tensor without storage, or of a layer that has not run yet
        return False


def _plain(name: str, value: Tensor) -> Tensor:
    """Return the numbers of an entry as a tensor that is dense, not quantised, and without a lazy conjugation."""
    if value.is_meta:
        got, remedy = f"{name} on the device meta", "load the model without offloading"
        raise InputError("model", expected="weights in memory", got=got, remedy=remedy)
    if value.is_nested:
        raise InputError("model", expected="weights of one shape", got=f"the nested tensor {name}")
    value = value.detach()
    value = value.dequantize() if value.is_quantized else value
    value = value if value.layout == torch.strided else value.to_dense()
    return value.resolve_conj().resolve_neg()


def _block_hashes(value: Tensor, factors: Int[Tensor, "block"]) -> Int[Tensor, "blocks"]:
    """Return a hash of each block of a tensor's bits: the sum of the block's integers, each multiplied by a random odd
    number, modulo 2**64. A change of one integer always changes the hash; changes of several do so with a probability
    of at least 1 - 2**-32 (multilinear hashing: Carter and Wegman, Universal Classes of Hash Functions, 1979).
    """
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = value.contiguous().flatten()
    bits = bits.view(INTEGERS.get(bits.element_size(), torch.int32))
    sums = [(block.long() * factors[: len(block)]).sum() for block in torch.split(bits, BLOCK)]
    return torch.stack(sums)
