"""Every model type of `transformers`, tiny and random, under `hw.watch`, against the weights of eager attention.

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
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="a part of the type's name")
    parser.add_argument("--types", default="", help="these, by commas")
    parser.add_argument("--again", default="", help="those with these outcomes in the file, which is kept for the rest")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the verdicts go")
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
    """Keep them."""
    seconds = sum(each["seconds"] for each in verdicts.values())
    versions = {name: version(name) for name in ("headwise", "torch", "transformers")}
    found = {"versions": versions, "seconds": round(seconds), "verdicts": list(verdicts.values())}
    path.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
