"""Loading of models by name: two from the Python package index, a local folder, or a Hugging Face hub id."""

import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.checks import float_dtype
from headwise.errors import InputError, MissingExtra, require
from headwise.packaged_models import PACKAGED
from headwise.removal.loading import class_of_saved, has_record

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
"""Files of tokenizers; a folder with a tokenizer has at least one of them."""


AUTO_CLASSES = {None: "AutoModel", "causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}
"""The class of `transformers` that loads a model with each kind of language-model head, or without one."""

SAVED = "saved"
"""In place of a kind of language-model head: the class that the model was saved as, with its head."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model in evaluation mode, its tokenizer, and its title for display. It can be unpacked into model and
    tokenizer.
    """

    title: str
    model: nn.Module
    tokenizer: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))


@dataclass(frozen=True)
class ModelSource:
    """Location of a model's files, found by the model's name. Its methods load the configuration, the tokenizer or the
    weights.

    Attributes:
        name: name by which the user called the model.
        title: name of the model for display.
        location: the folder, or the hub id.
        options: further arguments of `from_pretrained`: the name of the GGUF file, or the revision on the hub.
    """

    name: str
    title: str
    location: str
    options: dict[str, str]

    @property
    def is_gguf(self) -> bool:
        """True if the model is stored in a GGUF file, which always contains a causal language model."""
        return "gguf_file" in self.options

    def config(self) -> Any:
        """Return the configuration of the model. Of a GGUF file this takes seconds.

        Raises:
            InputError: the configuration cannot be loaded.
            MissingExtra: `transformers` is not installed.
        """
        return self._from_pretrained("model", "AutoConfig")

    def lm_head(self) -> str | None:
        """Return the kind of the language-model head of the model, according to its configuration: "causal", "masked",
        or None for neither.
        """
        architecture = "CausalLM" if self.is_gguf else "".join(self.config().architectures or ())
        if "CausalLM" in architecture or "LMHeadModel" in architecture:
            return "causal"
        return "masked" if "MaskedLM" in architecture else None

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model.

        Raises:
            InputError: the tokenizer cannot be loaded.
            MissingExtra: `transformers` is not installed.
        """
        if not self.is_gguf:
            self.config()  # a broken model is reported as one
            folder = Path(self.location)
            if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
                got = f"a folder with none of {', '.join(TOKENIZER_FILES)}"
                raise InputError("tokenizer", expected=f"a tokenizer in {self.name!r}", got=got)
        return self._from_pretrained("tokenizer", "AutoTokenizer")

    def tokenizer_if_any(self) -> Any:
        """Return the tokenizer of the model; None if the model reads no token ids, such as one of images, and has none.

        Raises:
            InputError: the tokenizer of a model that reads token ids cannot be loaded.
            MissingExtra: `transformers` is not installed.
        """
        try:
            return self.tokenizer()
        except InputError:
            if self.is_gguf or self._reads_tokens():
                raise
            return None

    def _reads_tokens(self) -> bool:
        """Return True if the main input of the model is token ids, or is not known."""
        transformers = require("transformers", purpose="loading a model", extra="hf")
        names = self.config().architectures or [""]
        return getattr(getattr(transformers, names[0], None), "main_input_name", "input_ids") == "input_ids"

    def model(self, lm_head: str | None = None, dtype: torch.dtype | None = None) -> nn.Module:
        """Return the model in evaluation mode. `lm_head` is the kind of its language-model head, "causal" or "masked",
        or None for a model that returns hidden states, or "saved" for the class that the model was saved as. `dtype` is
        the data type of its weights; None for the saved one.

        Raises:
            InputError: the model cannot be loaded, or weights are missing or have other shapes.
            MissingExtra: `transformers` is not installed.
        """
        types: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        name = self._saved_class() if lm_head == SAVED else AUTO_CLASSES[lm_head]
        # Mismatched sizes are in the report, and in the error of `transformers` they are not.
        options = types | {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = self._from_pretrained("model", name, **options)
        self._require_all_weights(report, may_lack_pooler=lm_head != SAVED)
        quantizer = getattr(model, "hf_quantizer", None)
        if self.is_gguf and quantizer is not None:
            quantizer.remove_quantization_config(model)  # the weights are plain numbers, and can be saved as such
        if lm_head is None and not self.is_gguf:
            self._warn_of_head(model)
        loaded: nn.Module = model.eval()
        return loaded

    def _saved_class(self) -> str:
        """Return the name of the class of `transformers` that the model was saved as."""
        if self.is_gguf:
            return str(AUTO_CLASSES["causal"])
        transformers = require("transformers", purpose="loading a model", extra="hf")
        names = self.config().architectures or ["none in its configuration"]
        saved = getattr(transformers, names[0], None)
        if not (isinstance(saved, type) and issubclass(saved, nn.Module)):
            raise InputError("model", expected=f"a class of transformers that {self.name!r} names", got=names[0])
        return str(names[0])

    def _require_all_weights(self, report: Mapping[str, Any], *, may_lack_pooler: bool) -> None:
        """Raise `InputError` if weights were missing or had other shapes, according to the report of `transformers`.
        Models that were trained without a pooler, which AutoModel adds, may lack it.
        """
        mismatched = sorted(report["mismatched_keys"])
        if mismatched:
            parameter, found, expected = mismatched[0]
            others = f" ({len(mismatched)} weights differ)" if len(mismatched) > 1 else ""
            got = f"{tuple(found)} in {self.name!r}{others}"
            raise InputError("model", expected=f"{parameter} of shape {tuple(expected)}", got=got)
        missing = sorted(key for key in report["missing_keys"] if not (may_lack_pooler and "pooler" in key))
        if missing:
            got = f"none for {missing[0]} ({len(missing)} are missing)"
            raise InputError("model", expected="all of the model's weights", got=got)

    def _warn_of_head(self, model: Any) -> None:
        """Warn if heads of the saved model were removed, so that plain `transformers` cannot load it, and it has
        another head than a language model's, which is not loaded.
        """
        names = self.config().architectures or [type(model).__name__]
        if has_record(model.config) and self.lm_head() is None and type(model).__name__ not in names:
            remedy = f"hw.load({self.name!r}, {SAVED!r}) loads it"
            warnings.warn(f"the head of the saved {names[0]} is not loaded; {remedy}", stacklevel=4)

    def _from_pretrained(self, argument: str, auto_class: str, **options: Any) -> Any:
        """Call `from_pretrained` of a class of `transformers` for this model, and return the result. Any failure raises
        `InputError` with the first sentence of its reason; `argument` is "model" or "tokenizer".
        """
        transformers = require("transformers", purpose="loading a model", extra="hf")
        loader = getattr(transformers, auto_class)
        try:
            if argument == "model" and auto_class != "AutoConfig" and not self.is_gguf:
                loader = class_of_saved(loader, self.config())
            return loader.from_pretrained(self.location, trust_remote_code=False, **self.options, **options)
        except Exception as error:  # every file of a broken folder can fail in its own way
            if argument == "model":
                raise _not_loadable(argument, self.name, error) from error
            expected = f"a tokenizer in {self.name!r} that can be loaded"
            raise InputError(argument, expected=expected, got=_first_sentence(error)) from error


def load(
    name: str, lm_head: str | None = None, *, dtype: torch.dtype | None = None, revision: str | None = None
) -> LoadedModel:
    """Load a model and its tokenizer by name: "minilm" or "smollm2" (small models in Python packages), a folder in
    Hugging Face format, or a hub id. The result has the attributes `model`, `tokenizer` and `title`. It can be unpacked
    into model and tokenizer. The tokenizer of a model that reads no token ids, such as one of images, is None if it has
    none.

    Args:
        name: the model's name.
        lm_head: "causal" or "masked" for a language model that returns logits; None for one that returns hidden states.
            "saved" loads the class that the model was saved as, with its head, such as a classifier.
        dtype: data type of the weights, such as `torch.bfloat16`; by default that of the saved weights.
        revision: branch, tag or commit of a model on the hub.

    Raises:
        InputError: an argument cannot be used, nothing loadable has that name, or weights are missing or have other
            shapes than the configuration states.
        MissingExtra: `transformers` (or, for a GGUF file, `gguf` and `accelerate`) is not installed.

    Example:
        >>> model, tokenizer = headwise.load("minilm")  # doctest: +SKIP
    """
    if lm_head not in (*AUTO_CLASSES, SAVED):
        raise InputError("lm_head", expected='"causal", "masked", "saved" or None', got=repr(lm_head))
    float_dtype("dtype", dtype)
    source = find_model(name, revision)
    tokenizer = source.tokenizer_if_any()
    return LoadedModel(source.title, source.model(lm_head, dtype), tokenizer)


def find_model(name: str, revision: str | None = None, *, argument: str = "model") -> ModelSource:
    """Return the location of the model called `name`: a key of `PACKAGED` (a model inside a Python package, such as
    "minilm"), a Hugging Face folder, or a hub id, of which the configuration has to be reachable. `revision` is a
    branch, tag or commit on the hub, and `argument` is the name of the argument in error messages.

    Raises:
        InputError: nothing loadable has that name, or a revision of a model that is not loaded from the hub.
        MissingExtra: `transformers` (or, for a GGUF file, `gguf` and `accelerate`) is not installed.
    """
    require("transformers", purpose="loading a model", extra="hf")
    if not isinstance(name, str) or not name:
        raise InputError(argument, expected="the name of a model", got=repr(name))
    packaged = PACKAGED.get(name)
    folder = None if packaged is None else packaged.location()
    if folder is None and not is_existing_folder(name):
        hub_id = name if packaged is None else packaged.hub
        try:
            _require_on_hub(hub_id, revision)
        except Exception as error:  # the type differs between versions of huggingface_hub
            raise _not_loadable(argument, name, error) from error
        options = {} if revision is None else {"revision": revision}
        return ModelSource(name, name if packaged is None else hub_id.split("/")[-1], hub_id, options)
    if revision is not None:
        raise InputError("revision", expected="a model on the hub", got=f"{revision!r} of {name!r}, which is local")
    if packaged is not None:
        title = packaged.hub.split("/")[-1]
        return ModelSource(name, title, str(folder), _gguf_options(packaged.gguf))
    if not (Path(name) / "config.json").is_file():
        raise InputError(argument, expected="a folder with a config.json (Hugging Face format)", got=repr(name))
    return ModelSource(name, Path(name).resolve().name, name, {})


def is_existing_folder(name: str | Path) -> bool:
    """Return True if a name is the path of an existing folder, and False also for a name that cannot be a path."""
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):  # too long a path, or a null character
        return False


def _gguf_options(file: str | None) -> dict[str, str]:
    """Return the option of `from_pretrained` that names a model's GGUF file; no option if the model has none.

    Raises:
        MissingExtra: a package that reads GGUF files is not installed.
    """
    if file is None:
        return {}
    for needed in ("gguf", "accelerate"):
        if find_spec(needed) is None:
            raise MissingExtra(needed, extra="gguf", purpose=f"reading {file}")
    return {"gguf_file": file}


def _not_loadable(argument: str, name: str, error: Exception) -> InputError:
    """Return the `InputError` for a model that cannot be loaded, with the original exception's reason."""
    return InputError(
        argument,
        expected=f"{', '.join(PACKAGED)}, a folder in Hugging Face format or a hub id that can be reached",
        got=repr(name),
        remedy=f"the reason: {_first_sentence(error)}",
    )


def _require_on_hub(name: str, revision: str | None) -> None:
    """Raise an exception if the `config.json` of a model is not in the local cache and cannot be reached on the Hugging
    Face hub. `name` is the model's hub id, and `revision` its branch, tag or commit (None for the main branch).

    One request is enough here, whereas `from_pretrained` would retry for a minute without a network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(name, "config.json", revision=revision), str):
        get_hf_file_metadata(hf_hub_url(name, "config.json", revision=revision))


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an exception's message, without terminal colour codes. If the message is empty,
    return the name of the exception's type.
    """
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return text.split(". ")[0].rstrip(".") or type(error).__name__
