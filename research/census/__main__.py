"""Compare `hw.watch` with eager attention for every model type of `transformers`, with tiny random models.

    python -m research.census [--only PART] [--types A,B] [--out FILE] [--again OUTCOME,...]

The last line is JSON: the number of model types with each outcome. All verdicts go to a file, from which
`research.census.report` writes docs/reports/census.md.
"""

import argparse
import json
from collections import Counter
from importlib.metadata import version
from pathlib import Path

from tqdm import tqdm

from research.census.pool import judged

RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    """Judge the chosen model types, save their verdicts, and print the number of each outcome as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of the model types")
    parser.add_argument("--types", default="", help="model types, separated by commas")
    parser.add_argument("--again", default="", help="repeat the types with these outcomes, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the verdicts")
    options = parser.parse_args()

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    verdicts = {}
    if (options.again or options.types or options.only) and options.out.exists():
        verdicts = {verdict["model_type"]: verdict for verdict in json.loads(options.out.read_text())["verdicts"]}
    wanted = [name for name in CONFIG_MAPPING_NAMES if options.only in name]
    if options.types:
        wanted = [name for name in wanted if name in options.types.split(",")]
    if options.again:
        outcomes = options.again.split(",")
        wanted = [name for name in wanted if name not in verdicts or verdicts[name]["outcome"] in outcomes]

    with tqdm(total=len(wanted), unit="type") as bar:

        def on_verdict(verdict: dict) -> None:
            """Store a verdict, show it in the progress bar, and save the file after every tenth one."""
            verdicts[verdict["model_type"]] = verdict
            bar.set_postfix_str(f"{verdict['model_type']}: {verdict['outcome']}")
            bar.update()
            if bar.n % 10 == 0 or bar.n == len(wanted):
                write(verdicts, options.out)

        judged(wanted, on_verdict)
    counts = Counter(verdict["outcome"] for verdict in verdicts.values())
    print(json.dumps({"census": len(verdicts), **dict(counts.most_common())}))


def write(verdicts: dict[str, dict], path: Path) -> None:
    """Write the verdicts of all model types, the versions and the total seconds to a JSON file."""
    seconds = sum(verdict["seconds"] for verdict in verdicts.values())
    versions = {name: version(name) for name in ("headwise", "torch", "transformers")}
    results = {"versions": versions, "seconds": round(seconds), "verdicts": list(verdicts.values())}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
