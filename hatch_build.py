"""Build hook of the wheel: compiles the native kernels where that is possible, and leaves them out where it is not."""

import importlib.util
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

SCRIPT = "src/headwise/attention/backends/native/build.py"
"""The script that compiles; it imports neither torch nor headwise."""


class NativeBuildHook(BuildHookInterface):
    """Hook that adds the library of native kernels to a wheel. An editable installation has none: `make` compiles it in
    the source tree.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Compile the library and add it to the wheel, which then is for this platform only, but for all versions of
        Python and torch. Without a compiler or torch's headers, the wheel has no library and is for all platforms.
        """
        if self.target_name != "wheel" or version == "editable":
            return
        script = _load(Path(self.root, SCRIPT))
        reason = script.why_not()
        if reason is not None:
            self.app.display_warning(f"headwise is built without native kernels: {reason}")
            return
        script.build()
        build_data["artifacts"].append(str(script.LIBRARY.relative_to(self.root)))
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["pure_python"], build_data["tag"] = False, f"py3-none-{platform}"


def _load(path: Path) -> ModuleType:
    """Return the module in a file of the source tree, which is not installed while it is built."""
    spec = importlib.util.spec_from_file_location("native_build", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
