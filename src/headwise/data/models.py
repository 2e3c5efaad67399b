"""Loading of models by name: two from the Python package index, a local folder, or a Hugging Face hub id."""

import re
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from difflib import get_close_matches
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.checks import device_argument, float_dtype
from headwise.data.converted_models import converted_folder
from headwise.errors import InputError, MissingExtra, require
from headwise.packaged_models import PACKAGED
from headwise.removal.remove_heads import class_of_saved, has_record

TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.txt",
    "vocab.json",
    "spiece.model",
)
"""Files of tokenizers; a folder with a tokenizer has at least one of them."""

PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")
"""Files of processors of pictures and sound; a folder with a processor has at least one of them."""

AUTO_CLASSES = {None: "AutoModel", "causal": "AutoModelForCausalLM", "masked": "AutoModelForMaskedLM"}
"""The class of `transformers` that loads a model with each kind of language-model head, or without one."""

SAVED = "saved"
"""In place of a kind of language-model head: the class that the model was saved as, with its head."""


@dataclass(frozen=True)
class LoadedModel:
    """A model in evaluation mode, its tokenizer, and a title for display. `model, tokenizer = loaded` unpacks the first
    two.
    """

    title: str
    model: nn.Module
    tokenizer: Any

    def __iter__(self) -> Iterator[Any]:
        return iter((self.model, self.tokenizer))


@dataclass(frozen=True)
class ModelSource:
    """Location of a model's files: a local folder or a Hugging Face hub id. The methods load the model's configuration,
    tokenizer or weights from this location, or raise `InputError`.

    Attributes:
        name: name by which the user called the model.
        title: name of the model for display.
        location: the folder, or the hub id.
        options: further arguments of `from_pretrained`: the name of the GGUF file, or the revision on the hub.
        converts: True to read the copy of a GGUF file in the cache folder, which is written when it is first needed;
            False to read the GGUF file itself, which takes many times as long.
    """

    name: str
    title: str
    location: str
    options: dict[str, str]
    converts: bool = True

    @property
    def is_gguf(self) -> bool:
        """True if the model is stored in a GGUF file, which always contains a causal language model."""
        return "gguf_file" in self.options

    @cached_property
    def _files(self) -> tuple[str, dict[str, str]]:
        """First argument (a folder or hub id) and keyword arguments for `from_pretrained`. For a GGUF file, the folder
        is the cached copy in Hugging Face format, unless `converts` is False or this copy cannot be written.
        """
        folder = None
        if self.is_gguf and self.converts:
            folder = converted_folder(Path(self.location) / self.options["gguf_file"], self._save)
        return (self.location, self.options) if folder is None else (str(folder), {})

    def _save(self, folder: Path) -> None:
        """Read a GGUF file, and save its model and tokenizer in `folder`, in Hugging Face format."""
        source: Any = replace(self, converts=False)
        tokenizer = source.tokenizer()
        source.model("causal").save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    def config(self) -> Any:
        """Return the configuration of the model."""
        return self._from_pretrained("model", "AutoConfig")

    def lm_head(self) -> str | None:
        """Return the kind of language-model head that the model was saved with: "causal", "masked", or None for
        neither.
        """
        architecture = "CausalLM" if self.is_gguf else "".join(self.config().architectures or ())
        if "CausalLM" in architecture or "LMHeadModel" in architecture:
            return "causal"
        return "masked" if "MaskedLM" in architecture else None

    def tokenizer(self) -> Any:
        """Return the tokenizer of the model."""
        if not self.is_gguf:
            self.config()  # a broken model is reported as one
            folder = Path(self.location)
            if folder.is_dir() and not any((folder / file).is_file() for file in TOKENIZER_FILES):
                got = f"a folder with none of {', '.join(TOKENIZER_FILES)}"
                raise InputError("tokenizer", expected=f"a tokenizer in {self.name!r}", got=got)
        return self._from_pretrained("tokenizer", "AutoTokenizer")

    def processor(self) -> Any:
        """Return the processor of a model that reads pictures or sound, which prepares these and the text."""
        self.config()  # a broken model is reported as one
        if not self.has_processor:
            got = f"none of {', '.join(PROCESSOR_FILES)}"
            raise InputError("model", expected=f"a model that reads pictures in {self.name!r}", got=got)
        try:
            return self._from_pretrained("processor", "AutoProcessor")
        except InputError:
            return self._from_pretrained("processor", "AutoImageProcessor")

    @cached_property
    def has_processor(self) -> bool:
        """True if the model has a processor of pictures or sound."""
        if self.is_gguf:
            return False
        folder = Path(self.location)
        if folder.is_dir():
            return any((folder / file).is_file() for file in PROCESSOR_FILES)
        from transformers.utils import cached_file

        missing = {"_raise_exceptions_for_missing_entries": False, "revision": self.options.get("revision")}
        with suppress(OSError):  # of the hub
            return any(cached_file(self.location, file, **missing) for file in PROCESSOR_FILES)
        return False

    def tokenizer_if_any(self) -> Any:
        """Return the processor of a model that reads pictures or sound, and the tokenizer of another model. Return None
        if there is none and the model reads other data than token ids.
        """
        if self.has_processor:
            return self.processor()
        try:
            return self.tokenizer()
        except InputError:
            names = [""] if self.is_gguf else self.config().architectures or [""]
            if getattr(getattr(_transformers(), names[0], None), "main_input_name", "input_ids") == "input_ids":
                raise
            return None

    def model(self, lm_head: str | None = None, dtype: torch.dtype | None = None) -> nn.Module:
        """Load the model and return it in evaluation mode. `lm_head` selects its head: "causal" or "masked" for that
        language-model head, None for no head, "saved" for the head of the class that the model was saved as. `dtype` is
        the data type of the weights; None keeps that of the saved weights.
        """
        transformers, name = _transformers(), AUTO_CLASSES.get(lm_head, "")
        if lm_head == SAVED and self.is_gguf:
            name = AUTO_CLASSES["causal"]
        elif lm_head == SAVED:
            name = (self.config().architectures or ["none in its configuration"])[0]
            saved = getattr(transformers, name, None)
            if not (isinstance(saved, type) and issubclass(saved, nn.Module)):
                raise InputError("model", expected=f"a class of transformers that {self.name!r} names", got=name)
        elif lm_head is not None and not (self.is_gguf and lm_head == "causal"):
            config = self.config()
            if type(config) not in getattr(transformers, name)._model_mapping:
                kind = f"a {config.model_type} model"
                remedy = f"hw.load({self.name!r}, {SAVED!r}) loads the head that it was saved with"
                raise self._lacks_head(lm_head, f"{kind}, for which transformers has no such head", remedy)
        types: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
        # Mismatched sizes are in the report, and in the error of `transformers` they are not.
        options = types | {"output_loading_info": True, "ignore_mismatched_sizes": True}
        model, report = self._from_pretrained("model", name, **options)
        self._require_all_weights(report, lm_head, f"{model.base_model_prefix}.")
        if self.is_gguf:
            if getattr(model, "hf_quantizer", None) is not None:
                # The weights are plain numbers, and can be saved as such.
                model.hf_quantizer.remove_quantization_config(model)
            model.name_or_path = model.config.name_or_path = self.location  # not the cache folder
        elif lm_head is None and has_record(model.config) and self.lm_head() is None:
            # Heads of the saved model were removed, so that plain `transformers` cannot load it with its own head.
            names = self.config().architectures or [type(model).__name__]
            if type(model).__name__ not in names:
                remedy = f"hw.load({self.name!r}, {SAVED!r}) loads it"
                warnings.warn(f"the head of the saved {names[0]} is not loaded; {remedy}", stacklevel=3)
        loaded: nn.Module = model.eval()
        return loaded

    def _lacks_head(self, lm_head: str | None, reason: str, remedy: str | None) -> InputError:
        """Return the `InputError` for a model that lacks a language-model head of the kind `lm_head`; `reason` and
        `remedy` are clauses of its message.
        """
        expected = f"a model with a {lm_head} language-model head"
        return InputError("model", expected=expected, got=f"{self.name!r}, {reason}", remedy=remedy)

    def _require_all_weights(self, report: Mapping[str, Any], lm_head: str | None, body: str) -> None:
        """Raise `InputError` if `report`, the loading report of `transformers`, lists weights that are missing or have
        another shape. A missing pooler is allowed, because AutoModel adds one to models trained without it. If no
        missing weight has a name that starts with `body`, the error states that the model lacks the head `lm_head`.
        """
        mismatched = sorted(report["mismatched_keys"])
        if mismatched:
            parameter, found, expected = mismatched[0]
            others = f" ({len(mismatched)} weights differ)" if len(mismatched) > 1 else ""
            got = f"{tuple(found)} in {self.name!r}{others}"
            raise InputError("model", expected=f"{parameter} of shape {tuple(expected)}", got=got)
        missing = sorted(key for key in report["missing_keys"] if not (lm_head != SAVED and "pooler" in key))
        if missing and lm_head not in (None, SAVED) and not any(key.startswith(body) for key in missing):
            remedy = "smollm2 is such a model" if lm_head == "causal" else None
            raise self._lacks_head(lm_head, f"which was saved without one ({missing[0]} is missing)", remedy)
        if missing:
            got = f"none for {missing[0]} ({len(missing)} are missing) in {self.name!r}"
            raise InputError("model", expected="all of the model's weights", got=got)

    def _from_pretrained(self, argument: str, auto_class: str, **options: Any) -> Any:
        """Call `from_pretrained` of the class of `transformers` named `auto_class`, and return the result. Any failure
        becomes an `InputError` about `argument`, which is "model", "tokenizer" or "processor".
        """
        transformers = _transformers()
        loader, (location, files) = getattr(transformers, auto_class), self._files
        try:
            if argument == "model" and auto_class != "AutoConfig" and not self.is_gguf:
                loader = class_of_saved(loader, self.config())
            with _quiet(transformers):
                return loader.from_pretrained(location, trust_remote_code=False, **files, **options)
        except Exception as error:  # every file of a broken folder can fail in its own way
            expected = f"a {argument} in {self.name!r} that can be loaded"
            raise InputError(argument, expected=expected, got=_first_sentence(error)) from error


def load(
    name: str,
    lm_head: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str | None = None,
    revision: str | None = None,
) -> LoadedModel:
    """Load a model and its tokenizer by name: "minilm" or "smollm2" (small models in Python packages), a folder in
    Hugging Face format, or a hub id. The result has the attributes `model`, `tokenizer` and `title`. It can be unpacked
    into model and tokenizer. For a model that reads pictures or sound, the second one is its processor. It is None if
    the model has none and reads other data than token ids.

    Args:
        name: the model's name.
        lm_head: "causal" or "masked" for a language model that returns logits; None for one that returns hidden states.
            "saved" loads the class that the model was saved as, with its head, such as a classifier.
        dtype: data type of the weights, such as `torch.bfloat16`; by default that of the saved weights.
        device: device of the weights, such as "cuda"; by default the CPU.
        revision: branch, tag or commit of a model on the hub.

    The weights of "smollm2" are in a GGUF file. When it is first loaded, it is converted to a folder in Hugging Face
    format, which headwise keeps in its cache folder (see `docs/command-line.md`).

    Raises:
        InputError: an argument cannot be used, nothing loadable has that name, torch cannot use the device, or weights
            are missing or have other shapes than the configuration states.
        MissingExtra: `transformers` (or, for a GGUF file, another package of the extra `gguf`) is not installed.

    Warns:
        UserWarning: the Python package of a model is not installed, so that the hub's model is loaded; or the cache
            folder cannot be written.

    Example:
        >>> model, tokenizer = headwise.load("minilm")  # doctest: +SKIP
    """
    if lm_head not in (*AUTO_CLASSES, SAVED):
        raise InputError("lm_head", expected='"causal", "masked", "saved" or None', got=repr(lm_head))
    float_dtype("dtype", dtype)
    usable = None if device is None else device_argument("device", device)
    source = find_model(name, revision)
    tokenizer = source.tokenizer_if_any()
    model = source.model(lm_head, dtype)
    return LoadedModel(source.title, model if usable is None else model.to(usable), tokenizer)


def find_model(name: str, revision: str | None = None, *, argument: str = "model") -> ModelSource:
    """Return the location of the files of the model called `name`: "minilm" or another key of `PACKAGED`, a Hugging
    Face folder, or a hub id whose configuration can be fetched. `revision` is a branch, tag or commit on the hub.
    `argument` is the name of the argument that error messages complain about.
    """
    _transformers()
    if not isinstance(name, str) or not name:
        raise InputError(argument, expected="the name of a model", got=repr(name))
    packaged = PACKAGED.get(name)
    folder = None if packaged is None else packaged.location()
    if folder is None and not is_existing_folder(name):
        _require_on_hub(argument, name, revision)
        options = {} if revision is None else {"revision": revision}
        if packaged is None:
            return ModelSource(name, name, name, options)
        weights = "" if packaged.gguf is None else ", whose weights are not quantised"
        message = f"{name} is loaded from the hub, as {packaged.hub}{weights}, since its package is not installed"
        warnings.warn(f"{message}; {packaged.install}", stacklevel=3)
        return ModelSource(name, packaged.title, packaged.hub, options)
    if revision is not None:
        raise InputError("revision", expected="a model on the hub", got=f"{revision!r} of {name!r}, which is local")
    if packaged is not None:
        for needed in ("gguf", "accelerate", "filelock", "platformdirs") if packaged.gguf else ():
            if find_spec(needed) is None:
                raise MissingExtra(needed, extra="gguf", purpose=f"reading {packaged.gguf}")
        return ModelSource(name, packaged.title, str(folder), {"gguf_file": packaged.gguf} if packaged.gguf else {})
    if not (Path(name) / "config.json").is_file():
        is_pipeline = (Path(name) / "model_index.json").is_file()
        remedy = "hw.view(pipeline.transformer, pipeline, text) views a pipeline of diffusers" if is_pipeline else None
        expected = "a folder with a config.json (Hugging Face format)"
        raise InputError(argument, expected=expected, got=repr(name), remedy=remedy)
    return ModelSource(name, Path(name).resolve().name, name, {})


def is_existing_folder(name: str | Path) -> bool:
    """Return True if `name` is the path of an existing folder. Return False otherwise, also for text that cannot be a
    path.
    """
    try:
        return Path(name).is_dir()
    except (OSError, ValueError):  # too long a path, or a null character
        return False


def _transformers() -> Any:
    return require("transformers", purpose="loading a model", extra="hf")


def _require_on_hub(argument: str, name: str, revision: str | None) -> None:
    """Raise `InputError` unless the `config.json` of a model is in the local Hugging Face cache or on the hub. The
    caller has checked that `name` is neither a local folder nor in an installed package. This check sends one request,
    whereas `from_pretrained` without a network would retry for a minute.
    """
    from huggingface_hub.utils import HFValidationError, validate_repo_id

    packaged = PACKAGED.get(name)
    similar: str | None = None
    remedy: str | None
    if packaged is not None:
        hub_id, remedy = packaged.hub, packaged.install
        expected = f"the package of {name} ({packaged.requirement.partition('=')[0]}), or {hub_id} on the hub"
    else:
        hub_id, expected = name, f"{', '.join(PACKAGED)}, a folder in Hugging Face format or a hub id"
        known = {_letters(each): key for key, model in PACKAGED.items() for each in (key, model.title)}
        matches = get_close_matches(_letters(name), known, n=1, cutoff=0.75)
        similar = known[matches[0]] if matches else None
        remedy = f"did you mean {similar}?" if similar else None
    try:
        validate_repo_id(hub_id)
        is_path = name.startswith(".")
    except HFValidationError:
        is_path = True
    is_file = False
    with suppress(OSError, ValueError):  # too long a path, or a null character
        is_file = Path(name).is_file()
    if is_path or is_file:
        problem = "which is a file and not a folder" if is_file else "and there is no such folder"
        raise InputError(argument, expected=expected, got=f"{name!r}, {problem}", remedy=remedy)
    # A name that differs in case or punctuation alone is not looked for on the hub.
    is_misspelt = similar is not None and _letters(name) == _letters(similar)
    reason = "which is none of these" if is_misspelt else _why_not_on_hub(hub_id, revision)
    if reason is not None:
        got = f"{name!r}, {reason}" if packaged is None else f"no such package, and {hub_id}, {reason}"
        raise InputError(argument, expected=expected, got=got, remedy=remedy)


def _why_not_on_hub(hub_id: str, revision: str | None) -> str | None:
    """Return the reason that the `config.json` of a model is neither in the local cache nor on the Hugging Face hub, as
    a clause for an error message. Return None if the cache or the hub has the file.
    """
    from huggingface_hub import errors, get_hf_file_metadata, hf_hub_url, try_to_load_from_cache

    if isinstance(try_to_load_from_cache(hub_id, "config.json", revision=revision), str):
        return None
    try:
        get_hf_file_metadata(hf_hub_url(hub_id, "config.json", revision=revision))
    except Exception as error:  # errors of the network have classes that differ between versions of huggingface_hub
        reasons = {
            errors.GatedRepoError: "which the hub opens only to users who have accepted its terms (hf auth login)",
            errors.RepositoryNotFoundError: "which is not on the hub, or private (then log in: hf auth login)",
            errors.RevisionNotFoundError: f"which has no revision {revision!r} on the hub",
            errors.EntryNotFoundError: "which has no config.json on the hub",
            errors.HfHubHTTPError: f"for which the hub answered: {_first_sentence(error)}",
            errors.OfflineModeIsEnabled: "which is not in the local cache, and HF_HUB_OFFLINE is set",
            Exception: "which is not in the local cache, and the hub cannot be reached",
        }
        return next(reason for kind, reason in reasons.items() if isinstance(error, kind))
    return None


def _letters(name: str) -> str:
    """Return only the letters and digits of a name, in lower case, so that similar names can be compared."""
    return re.sub(r"[\W_]", "", name.lower())


@contextmanager
def _quiet(transformers: Any) -> Iterator[None]:
    """Silence `transformers` while the context is open. Its warnings about the model are not printed, since headwise
    raises errors for the serious ones, and its progress bars appear only after 2 s.
    """
    logging = transformers.utils.logging
    verbosity, set_hook = logging.get_verbosity(), getattr(logging, "set_tqdm_hook", lambda hook: None)
    if verbosity == logging.WARNING:  # the default
        logging.set_verbosity_error()
    previous = set_hook(lambda factory, arguments, options: factory(*arguments, **{"delay": 2} | options))
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        set_hook(previous)


def _first_sentence(error: Exception) -> str:
    """Return the first sentence of an exception's message, without terminal colour codes. If the message is empty,
    return the exception's type name.
    """
    text = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", str(error)).split())
    return text.split(". ")[0].rstrip(".") or type(error).__name__
