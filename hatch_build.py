"""Build hook of the wheel: compiles the native kernels where that is possible, and leaves them out where it is not."""

import importlib.util
import sysconfig
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NATIVE = "src/headwise/attention/backends/native"
"""Folder of the kernels. Its script `build.py`, which compiles them, imports neither torch nor headwise."""


class NativeBuildHook(BuildHookInterface):
    """Hook that adds the library of native kernels to a wheel. An editable installation has none: `make` compiles it in
    the source tree.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library and add it to the wheel, which then is for this platform only, but for all versions of
        Python and torch. Without a compiler or torch's headers, the wheel is for all platforms, and has a file with the
        reason in the place of the library.
        """
        if self.target_name != "wheel" or version == "editable":
            return
        self._folder = TemporaryDirectory()  # until the wheel is complete
        script = _load(Path(self.root, NATIVE, "build.py"))
        file = Path(self._folder.name, script.LIBRARY.name)
        try:
            script.build(file)
            platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
            build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"
        except RuntimeError as error:
            self.app.display_warning(f"headwise is built without native kernels: {error}")
            file = Path(self._folder.name, script.NOTE.name)
            file.write_text(f"{error}\n", "utf-8")
        build_data["force_include"][str(file)] = f"{NATIVE.removeprefix('src/')}/{file.name}"

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """Remove the compiled library, which the wheel now contains."""
        if hasattr(self, "_folder"):
            self._folder.cleanup()


def _load(path: Path) -> ModuleType:
    """Return the module in a file of the source tree, which is not installed while it is built."""
    spec = importlib.util.spec_from_file_location("native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
