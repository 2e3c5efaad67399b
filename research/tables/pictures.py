"""Draw the pictures of the README and of the page about plots from real models: `make pictures`."""

from pathlib import Path
from typing import Any

import headwise as hw
from headwise.data.models import load

ROOT = Path(__file__).parent.parent.parent
PICTURES, RESULTS = ROOT / "docs" / "pictures", ROOT / "research" / "findings" / "results"

loaded = load("minilm")
seen = hw.view(loaded.model, loaded.tokenizer, "Which do you like better, coffee or tea?", title=loaded.title)
lines = seen.plot(kind="lines", heads=[(0, 2), (1, 8), (5, 11), (1, 11)])
roles = hw.load_profile(RESULTS / "smollm2").plot(kind="role_counts")
for axes, name in ((lines, "heads"), (roles, "roles")):
    figure: Any = axes.figure
    figure.savefig(PICTURES / f"{name}.png", dpi=110)
