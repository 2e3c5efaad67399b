"""Compare `hw.watch` with eager attention for every model type of `transformers`, with tiny random models.

python -m research.census [--only PART] [--types A,B] [--out FILE] [--again OUTCOME,...]

The last line is JSON: how many types have which outcome. All verdicts go to a file, from which
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
    """Run the census."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="part of the name of the model types")
    parser.add_argument("--types", default="", help="model types, separated by commas")
    parser.add_argument("--again", default="", help="repeat the types with these outcomes, separated by commas")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the verdicts")
    chosen = parser.parse_args()

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    kept = {}
    if (chosen.again or chosen.types or chosen.only) and chosen.out.exists():
        kept = {each["model_type"]: each for each in json.loads(chosen.out.read_text())["verdicts"]}
    wanted = [each for each in CONFIG_MAPPING_NAMES if chosen.only in each]
    if chosen.types:
        wanted = [each for each in wanted if each in chosen.types.split(",")]
    if chosen.again:
        outcomes = chosen.again.split(",")
        wanted = [each for each in wanted if each not in kept or kept[each]["outcome"] in outcomes]

    with tqdm(total=len(wanted), unit="type") as bar:

        def on_verdict(verdict: dict) -> None:
            kept[verdict["model_type"]] = verdict
            bar.set_postfix_str(f"{verdict['model_type']}: {verdict['outcome']}")
            bar.update()
            if bar.n % 10 == 0 or bar.n == len(wanted):
                write(kept, chosen.out)

        judged(wanted, on_verdict)
    counts = Counter(each["outcome"] for each in kept.values())
    print(json.dumps({"census": len(kept), **dict(counts.most_common())}))


def write(verdicts: dict[str, dict], path: Path) -> None:
    """Write all verdicts to a JSON file."""
    seconds = sum(each["seconds"] for each in verdicts.values())
    versions = {name: version(name) for name in ("headwise", "torch", "transformers")}
    found = {"versions": versions, "seconds": round(seconds), "verdicts": list(verdicts.values())}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
