"""Patching of all heads of SmolLM2 over 16 pairs of prompts with two names: findings of docs/patching.md.

    python -m research.analyses.patching FOLDER

Rules: one pair for each template of `hw.name_movers`, with names drawn with seed 0, and the indirect object's name
first in every other pair. The corrupted prompt repeats the other name, so that the answers change places. The pairs
are independent, and `recovered` of all heads is tested against 0 at a false discovery rate of 5 %. All pairs count,
those that the model answers wrongly included. Prints the tables of the page and draws its pictures; a method whose
table is in the folder is not run again.
"""

import argparse
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import headwise as hw
from headwise.analysis.head_tests.name_prompts import TEMPLATES, name_prompts
from headwise.runs.significance import FALSE_DISCOVERY_RATE
from research.markdown import markdown_table

PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"
SHOWN = 12
"""Number of heads of the table, those with the largest effects."""


def name_pairs(tokenizer: Any) -> dict[str, Any]:
    """Return the prompts and answers, padded on the right."""
    drawn = name_prompts(tokenizer, 2 * len(TEMPLATES), seed=0)
    prompts = [drawn[number + len(TEMPLATES) * (number % 2)] for number in range(len(TEMPLATES))]
    longest = max(len(prompt.ids) for prompt in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt.ids)] = prompt.ids
        mask[row, : len(prompt.ids)] = 1
    answer, wrong = (torch.tensor([getattr(prompt, name) for prompt in prompts]) for name in ("answer", "wrong"))
    corrupted = ids.clone()
    corrupted[range(len(prompts)), [prompt.places[2] for prompt in prompts]] = answer
    return {
        "clean": {"input_ids": ids, "attention_mask": mask},
        "corrupted": {"input_ids": corrupted, "attention_mask": mask},
        "answer": answer,
        "wrong": wrong,
    }


def measure(folder: Path) -> dict[str, Any]:
    """Return the table of each method; measure and save those that the folder lacks."""
    model, tokenizer = hw.load("smollm2", "causal")
    pairs = name_pairs(tokenizer)
    methods: dict[str, tuple[Any, Callable[..., Any], dict[str, Any]]] = {
        "activation": (hw.Patching, hw.activation_patching, {}),
        "attribution": (hw.AttributionPatching, hw.attribution_patching, {}),
        "attribution in 4 steps": (hw.AttributionPatching, hw.attribution_patching, {"steps": 4}),
        "direct paths": (hw.PathPatching, hw.path_patching, {}),
    }
    tables = {}
    for name, (table_type, function, options) in methods.items():
        place = folder / name.replace(" ", "-")
        if not place.exists():
            start = time.process_time()
            function(model, **pairs, **options).save(place)
            print(f"{name}: {time.process_time() - start:.0f} s of processor time")
        tables[name] = table_type.load(place)
    return tables


def significant(table: Any) -> list[Any]:
    """Return the rows whose effect differs from 0, largest first."""
    rows = [row for row, q in zip(table.rows, table.tests()["recovered_q"], strict=True) if q <= FALSE_DISCOVERY_RATE]
    return sorted(rows, key=lambda row: -abs(row.statistics["recovered"].value))


def print_tables(tables: dict[str, Any]) -> None:
    """Print the agreement of the estimates, and the heads with the largest effects."""
    activation = tables["activation"]
    clean, corrupted = (activation.metadata["measured"][name] for name in ("clean", "corrupted"))
    print(f"difference of logits: {clean} (clean), {corrupted} (corrupted)")
    agreements = []
    for name in ("attribution", "attribution in 4 steps"):
        agreement = hw.agreement(tables[name], activation)
        correlations = [
            "{:.2f} ({:.2f} to {:.2f})".format(getattr(agreement, kind), *agreement.interval(kind))
            for kind in ("spearman", "pearson")
        ]
        overlaps = [str(round(agreement.overlap(number) * number)) for number in (10, 20)]
        agreements.append((name, *correlations, *overlaps))
    headers = ("estimate", "Spearman", "Pearson", "same among the top 10", "same among the top 20")
    print("\n".join(markdown_table(headers, agreements)))
    for name, table in tables.items():
        found = significant(table)
        print(f"{name}: {len(found)} heads at a false discovery rate of 5 %: {', '.join(row.name for row in found)}")
    q = dict(zip([row.name for row in activation.rows], activation.tests()["recovered_q"], strict=True))
    order = sorted(activation.rows, key=lambda row: -abs(row.statistics["recovered"].value))[:SHOWN]
    rows = []
    for row in order:
        cells = []
        for table in tables.values():
            estimate = table.head(row.layer, row.head).statistics["recovered"]
            cells.append(f"{estimate.value:.2f} ± {estimate.sem:.2f}")
        rows.append((row.name, *cells, f"{q[row.name]:.1g}"))
    print("\n".join(markdown_table(("head", *tables, "`recovered_q`"), rows)))


def draw(tables: dict[str, Any]) -> None:
    """Draw the pictures of the page."""
    agreement = hw.agreement(tables["attribution"], tables["activation"])
    for name, axes in (("attribution-patching", agreement.plot()), ("path-patching", tables["direct paths"].plot())):
        figure: Any = axes.figure
        figure.savefig(PICTURES / f"{name}.png", dpi=110)


def main() -> None:
    """Measure, print and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    tables = measure(parser.parse_args().folder)
    print_tables(tables)
    draw(tables)


if __name__ == "__main__":
    main()
