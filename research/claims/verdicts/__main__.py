"""Judge the claims.

python -m research.claims.verdicts [FOLDER]    writes FOLDER/verdicts.json
"""

import json
import sys
from pathlib import Path

from .cells import RESULTS
from .judge import judge


def main() -> None:
    """Write the verdicts of a folder of results."""
    folder = Path(sys.argv[1]) if len(sys.argv) > 1 else RESULTS
    if not (folder / "cells").is_dir():
        raise SystemExit(f"{folder} has no folder of cells")
    (folder / "verdicts.json").write_text(json.dumps(judge(folder), indent=1, allow_nan=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
