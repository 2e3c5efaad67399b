"""Write docs/formation.md and its pictures from research/formation/results/.

python -m research.formation.report
"""

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from research.claims.result_files import read_json
from research.formation import report_formation, report_growth, report_pictures
from research.formation.changes import changes
from research.markdown import wrap

ROOT = Path(__file__).parent.parent.parent
RESULTS = Path(__file__).parent / "results"
DPI = 110

INTRODUCTION = """\
# Watch induction heads form

Use this page to see what [`hw.monitor`](monitor.md) and [`hw.watch`](watch.md) show while a model trains. In the first
part of the page, induction heads form in a small decoder within a minute, and the loss falls at the same steps. In the
second part, a training with a learning rate that is too high fails, long after an alarm of the monitor. With
[`hw.qk_clip`](monitor.md#clipping-logits), which limits attention logits, the training does not fail.

The measurements of your own training look like this:

```python
import torch
from transformers import LlamaConfig, LlamaForCausalLM

import headwise as hw

config = LlamaConfig(vocab_size=256, hidden_size=64, num_hidden_layers=2, num_attention_heads=4)
model = LlamaForCausalLM(config).train()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
repeats = hw.random_repeats(256)    # random token ids below 256 that occur four times in a row

with hw.monitor(model, every=20, statistics=["previous", "max_logit"]) as monitor:
    for step in range(40):
        if step % 20 == 0:
            model.eval()
            with torch.no_grad(), hw.watch(model) as heads:
                model(input_ids=repeats)
            model.train()
            print(step, heads.table()["induction"].max())    # the largest induction score of a head
        ids = torch.randint(256, (8, 32))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        monitor.step()
monitor.history.plot("previous")    # attention to the previous token: a line for each head
```

`hw.random_repeats` returns random tokens of which the whole sequence occurs four times. The statistic `induction` of a
head is the share of its attention that goes to the tokens after earlier copies of the query's token. Olsson et al.
(2022) call it the prefix-matching score. This statistic needs token ids, so `hw.watch` measures it in additional
forward passes. `hw.monitor` measures statistics that need no token ids, in the forward passes of the training itself.

`make formation` repeats the measurements and writes this page.
"""


def page(results: Path) -> str:
    """Return the text of the page."""
    repeats, quotes, plain, growing, clipped = (
        trainings(results, kind) for kind in ("repeats", "quotes", "plain", "growing", "clipped")
    )
    lines = [
        INTRODUCTION,
        *report_formation.section(repeats, quotes, plain),
        *report_growth.section(growing, clipped),
        wrap(measured_on(repeats[0]["environment"])),
    ]
    return "\n".join(lines).rstrip() + "\n"


def trainings(results: Path, kind: str) -> list[dict[str, Any]]:
    """Return the results of the trainings of a kind, in the order of their seeds."""
    return sorted((read_json(path) for path in results.glob(f"{kind}-*.json")), key=lambda result: result["seed"])


def measured_on(environment: Mapping[str, Any]) -> str:
    """Return the sentence that states where the numbers come from."""
    versions = environment["versions"]
    return (
        f"Measured on {environment['date']} with torch {versions['torch']} and transformers "
        f"{versions['transformers']}, on one thread ({environment['cpu']})."
    )


def draw(results: Path, pictures: Path) -> None:
    """Draw the pictures of the page."""
    repeats, quotes, plain = (trainings(results, kind) for kind in ("repeats", "quotes", "plain"))
    figures = {"formation": report_pictures.formation(repeats[0], changes(repeats[0]))}
    columns = {f"seed {result['seed']}": result for result in repeats}
    columns |= {"seed 0,\nunchanged text": plain[0]}
    figures["formation-seeds"] = report_pictures.trainings(columns)
    figures["formation-quotes"] = report_pictures.trainings({f"seed {result['seed']}": result for result in quotes})
    figures["formation-logits"] = report_pictures.growth(
        *(trainings(results, kind)[0] for kind in ("growing", "clipped"))
    )
    for name, figure in figures.items():
        figure.savefig(pictures / f"{name}.png", dpi=DPI)


def main() -> None:
    """Write the page and its pictures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=RESULTS, help="folder of results")
    parser.add_argument("--to", type=Path, default=ROOT / "docs" / "formation.md", help="file to write")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs" / "pictures", help="folder of the pictures")
    options = parser.parse_args()
    options.to.write_text(page(options.results), encoding="utf-8")
    draw(options.results, options.pictures)


if __name__ == "__main__":
    main()
