"""The four tests of heads on two published models: findings and picture of docs/head-tests.md.

    python -m research.analyses.head_tests FOLDER [--treebank FILE] [--draw]

Rules: all tests run with their default arguments and seed 0. Sinks are measured on the topics of Python's language
reference that have 64 tokens or more, cut to 64 tokens. A head is found at a false discovery rate of 5 % over the heads
of its model. Dependencies need a treebank in CoNLL-U format; SmolLM2 reads its first 250 sentences, after its first
special token. A test whose table is in the folder is not run again. `--draw` draws the picture, which needs all tables.
"""

import argparse
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from typing import Any

import headwise as hw
from headwise.data.models import load
from headwise.runs.significance import FALSE_DISCOVERY_RATE
from research.markdown import markdown_table

PICTURES = Path(__file__).parent.parent.parent / "docs" / "pictures"
TOKENS, POSITIONS, SENTENCES, SHOWN = 64, (0, 1, 2), 250, 12


def sinks(name: str) -> hw.SinkRate:
    """Return the sink rates of a model."""
    loaded = load(name)
    texts = [topics[topic] for topic in sorted(topics)]
    long = [text for text in texts if len(loaded.tokenizer(text, verbose=False)["input_ids"]) >= TOKENS]
    dataset = hw.Texts(long, loaded.tokenizer, TOKENS, "truncate")
    return hw.sink_rate(loaded.model, dataset, positions=POSITIONS, title=loaded.title)


def retrieval() -> hw.Retrieval:
    """Return the retrieval scores of SmolLM2."""
    loaded = load("smollm2", "causal")
    return hw.retrieval_score(loaded.model, loaded.tokenizer, title=loaded.title)


def name_movers() -> hw.NameMovers:
    """Return the result of the name-mover test of SmolLM2."""
    loaded = load("smollm2", "causal")
    return hw.name_movers(loaded.model, loaded.tokenizer, title=loaded.title)


def dependencies(name: str, treebank: Path) -> hw.DependencyAccuracy:
    """Return the dependency accuracy of a model."""
    loaded = load(name)
    of_decoder = {"limit": SENTENCES, "start_token": loaded.tokenizer.bos_token_id} if name == "smollm2" else {}
    return hw.dependency_accuracy(loaded.model, loaded.tokenizer, treebank, title=loaded.title, **of_decoder)


def tests(treebank: Path | None) -> dict[str, tuple[Any, Callable[[], Any], str]]:
    """Return the tests by the name of their folder: the type of the table, the function, and the tested column."""
    found: dict[str, tuple[Any, Callable[[], Any], str]] = {
        "retrieval": (hw.Retrieval, retrieval, "score"),
        "name-movers": (hw.NameMovers, name_movers, "name_mover"),
    }
    for name in ("minilm", "smollm2"):
        found[f"sinks-{name}"] = (hw.SinkRate, partial(sinks, name), "")
        if treebank is not None:
            found[f"dependencies-{name}"] = (hw.DependencyAccuracy, partial(dependencies, name, treebank), "gain")
    return found


def report(name: str, table: Any, tested: str) -> None:
    """Print what was measured, the number of heads that are found, and the heads with the largest values."""
    print(f"\n{name}: {table.metadata['measured']}")
    table = table.best() if isinstance(table, hw.DependencyAccuracy) else table
    if tested:
        q = table.tests()[f"{tested}_q"]
        print(f"{sum(each <= FALSE_DISCOVERY_RATE for each in q)} of {len(q)} heads at a false discovery rate of 5 %")
    plotted = table.PLOTTED or table.statistics[0]
    order = sorted(table.rows, key=lambda row: -abs(row.statistics[plotted].value))[:SHOWN]
    rows = [
        (row.name, *(f"{row.statistics[each].value:.3f} ± {row.statistics[each].sem:.3f}" for each in table.statistics))
        for row in order
    ]
    print("\n".join(markdown_table(("head", *table.statistics), rows)))


def draw(folder: Path) -> None:
    """Draw the picture of the page."""
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(2, 2, figsize=(11, 13))
    hw.Retrieval.load(folder / "retrieval").plot(ax=axes[0, 0])
    hw.SinkRate.load(folder / "sinks-smollm2").plot(ax=axes[0, 1])
    hw.NameMovers.load(folder / "name-movers").plot(kind="scatter", against="preference", ax=axes[1, 0])
    hw.DependencyAccuracy.load(folder / "dependencies-minilm").plot(ax=axes[1, 1])
    figure.tight_layout()
    figure.savefig(PICTURES / "head-tests.png", dpi=80)


def main() -> None:
    """Run the tests, print the tables and draw the picture."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--treebank", type=Path)
    parser.add_argument("--draw", action="store_true")
    options = parser.parse_args()
    for name, (table_type, measure, tested) in tests(options.treebank).items():
        if not (options.folder / name).exists():
            start, processor = time.monotonic(), time.process_time()
            measure().save(options.folder / name)
            seconds, of_processor = time.monotonic() - start, time.process_time() - processor
            print(f"{name}: {seconds:.0f} s, {of_processor:.0f} s of processor time")
        report(name, table_type.load(options.folder / name), tested)
    if options.draw:
        draw(options.folder)


if __name__ == "__main__":
    main()
