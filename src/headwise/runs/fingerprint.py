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
    """Return all settings on which a run's numbers depend, as JSON-compatible values. These are the model with a hash
    of its weights, the options of `texts` (None for other data), package versions, and the run's other arguments. The
    model's name is `title`, or its hub id, folder or class. A stopped run resumes only with equal settings.
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
    """Return the identity of a model: its number of attention modules, its dtype, and a hash of weights and
    configuration. Parts that belong to the model's task are not hashed: the output embeddings, and the modules named in
    `HEADS`. Thus a model and the same model with another `transformers` task head have the same identity. If the model
    has input embeddings, only the weights of the innermost module that contains them and all attention modules are
    hashed.
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
    """Return the configuration of a `transformers` model as JSON, or None for other modules. Only fields that can
    change what attention heads compute in evaluation mode are included. Class names and other fields that every
    configuration has, and settings of training and generation, are left out.
    """
    config, transformers = getattr(model, "config", None), sys.modules.get("transformers")
    if transformers is None or not isinstance(config, transformers.PretrainedConfig):
        return None
    general = transformers.PretrainedConfig().to_dict()
    own = {name: value for name, value in config.to_dict().items() if name not in general}
    return json.dumps(_computing(own), sort_keys=True, default=str)


def _computing(fields: Any) -> Any:
    """Return the fields of a model's configuration, as nested dictionaries, that can change what the model computes.
    Fields for training and generation only, whose names match `IDLE`, are left out.
    """
    if not isinstance(fields, dict):
        return fields
    return {name: _computing(value) for name, value in fields.items() if not IDLE.search(str(name))}


def attention_digest(model: nn.Module, paths: Iterable[str]) -> str:
    """Return one hash of the weights of the modules at the given paths in a model. The paths themselves are not hashed,
    so modules at other paths with equal weights have the same hash.
    """
    modules = dict(model.named_modules())
    return digest_of(part for path in paths if path in modules for part in hashed_state(modules[path]))


def text_options(texts: Texts) -> dict[str, Any]:
    """Return the source of the texts and the options that determine their batches, such as `context` and `limit`, as a
    dictionary.
    """
    names = ("context", "documents", "batch", "limit", "column")
    return {"source": texts.name} | {name: getattr(texts, name) for name in names}


def hashed_state(module: nn.Module, *, without: Sequence[str] = ()) -> Iterator[Any]:
    """Yield the parts of a module's `state_dict` from which its hash is computed. For each entry, these are its name
    and, for each tensor in it, the dtype, the shape and the hashes of its values; other values are pickled. Entries
    whose names are at or below the paths in `without` are left out.
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
    """Yield the parts of one entry of a `state_dict` that are hashed. For a tensor subclass that wraps other tensors,
    such as a quantised weight, these are the subclass's name, its settings and the wrapped tensors. Otherwise the only
    part is `value` itself.
    """
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
    """Return True if a tensor stores its numbers in memory of its own. Return False if, for example, the numbers are
    computed only when needed.
    """
    try:
        return value.numel() == 0 or value.data_ptr() != 0
    except (RuntimeError, ValueError):  # of a tensor without storage, or of a layer that has not run yet
        return False


def _plain(name: str, value: Tensor) -> Tensor:
    """Return a tensor's numbers as an ordinary dense tensor: sparse and quantised tensors are converted, and a lazy
    conjugation or negation is carried out. Raise `InputError` for a nested tensor, and for one on the meta device.
    """
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
    """Return one hash for each block of a tensor, whose bits are read as integers: the sum of the block's integers,
    each multiplied by a random odd number, modulo 2**64. Two blocks that differ in one integer always have different
    hashes. Blocks that differ in several have different hashes with a probability of at least 1 - 2**-32 (multilinear
    hashing: Carter and Wegman, Universal Classes of Hash Functions, 1979).
    """
    if value.is_complex():
        value = torch.view_as_real(value)
    bits = value.contiguous().flatten()
    bits = bits.view(INTEGERS.get(bits.element_size(), torch.int32))
    sums = [(block.long() * factors[: len(block)]).sum() for block in torch.split(bits, BLOCK)]
    return torch.stack(sums)
