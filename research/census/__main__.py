"""Compare `hw.watch` and `hw.gate` with attention recorded at torch's dispatcher, for all model types.

    python -m research.census [--types A,B] [--every N] [--again OUTCOME,...] [--out FILE] [--workers N]

The last line is JSON: the number of model types with each outcome. All verdicts go to a file, from which
`research.census.report` writes docs/reports/census.md.
"""

import argparse
import json
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from threading import Lock

from tqdm import tqdm

from benchmarks.measure import machine
from research.census.pool import judged

RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    """Judge the chosen model types, save their verdicts, and print the number of each outcome as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="", help="model types, separated by commas")
    parser.add_argument("--every", type=int, default=1, help="only every so many model types")
    parser.add_argument("--start", type=int, default=0, help="with --every: number of the first model type")
    parser.add_argument("--again", default="", help="repeat the types with these outcomes, separated by commas")
    parser.add_argument("--workers", type=int, default=2, help="number of processes")
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the verdicts")
    options = parser.parse_args()

    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    verdicts = {}
    is_part = options.types or options.again or options.every > 1
    if is_part and options.out.exists():
        verdicts = {verdict["model_type"]: verdict for verdict in json.loads(options.out.read_text())["verdicts"]}
    wanted = sorted(CONFIG_MAPPING_NAMES)[options.start :: options.every]
    if options.types:
        wanted = options.types.split(",")
    if options.again:
        outcomes = options.again.split(",")
        wanted = [name for name in wanted if name not in verdicts or verdicts[name]["outcome"] in outcomes]

    lock = Lock()
    with tqdm(total=len(wanted), unit="type", disable=None) as bar, ThreadPoolExecutor(options.workers) as threads:

        def on_verdict(verdict: dict) -> None:
            """Store a verdict, show it in the progress bar, and save the file after every tenth one."""
            with lock:
                verdicts[verdict["model_type"]] = verdict
                bar.set_postfix_str(f"{verdict['model_type']}: {verdict['outcome']}")
                bar.update()
                if bar.n % 10 == 0 or bar.n == len(wanted):
                    write(verdicts, options.out)

        parts = [wanted[index :: options.workers] for index in range(options.workers)]
        list(threads.map(lambda part: judged(part, on_verdict), parts))
    counts = Counter(verdict["outcome"] for verdict in verdicts.values())
    print(json.dumps({"census": len(verdicts), **dict(counts.most_common())}))


def write(verdicts: dict[str, dict], path: Path) -> None:
    """Write the verdicts of all model types, in order, versions, processor and total seconds to a JSON file."""
    seconds = sum(verdict["seconds"] for verdict in verdicts.values())
    versions = {name: version(name) for name in ("headwise", "torch", "transformers")}
    ordered = [verdicts[name] for name in sorted(verdicts)]
    processor = "{cpu} with {capability}".format(**machine())
    results = {"versions": versions, "processor": processor, "seconds": round(seconds), "verdicts": ordered}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
