"""Draw the picture of the README from a real model: `make pictures`."""

from pathlib import Path

import headwise as hw
from headwise.data.models import load
from headwise.show.head_lines import plot_heads

loaded = load("minilm")
seen = hw.view(loaded.model, loaded.tokenizer, "Which do you like better, coffee or tea?", title=loaded.title)
figure = plot_heads(seen, [(0, 2), (1, 8), (5, 11), (1, 11)])
figure.savefig(Path(__file__).parent.parent.parent / "docs" / "pictures" / "heads.png", dpi=110)
