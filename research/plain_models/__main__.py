"""Compare `hw.watch` and `hw.gate` with the operators of plain PyTorch models of many libraries.

    pip install --no-deps -r research/plain_models/requirements.txt
    python -m research.plain_models [--only PART,...] [--again OUTCOME,...] [--processes N]

The last line is JSON: the number of models with each outcome. All verdicts go to results.json, from which
`research.plain_models.report` writes docs/reports/plain_models.md.
"""

import argparse
import json
import multiprocessing
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from pathlib import Path
from typing import Any

from tqdm import tqdm

from benchmarks.measure import machine
from research.plain_models.judge import OUTCOMES
from research.plain_models.registry import MODELS
from research.plain_models.worker import judge_model, load_zoo

RESULTS = Path(__file__).parent / "results.json"


def main() -> None:
    """Judge the chosen models, save their verdicts, and print the number of each outcome as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="parts of the names of the models, separated by commas")
    parser.add_argument("--again", default="", help="repeat the models with these outcomes, separated by commas")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS, help="file for the verdicts")
    options = parser.parse_args()

    wanted = [name for name in load_zoo() if any(part in name for part in options.only.split(","))]
    verdicts: dict[str, dict[str, Any]] = {}
    if (options.only or options.again) and options.out.exists():
        saved = json.loads(options.out.read_text(encoding="utf-8"))["verdicts"]
        verdicts = {verdict["name"]: verdict for verdict in saved if verdict["name"] in MODELS}
    if options.again:
        outcomes = options.again.split(",")
        wanted = [name for name in wanted if name not in verdicts or outcome_of(verdicts[name]) in outcomes]
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(options.processes, mp_context=spawn) as pool, tqdm(total=len(wanted), unit="model") as bar:
        for future in as_completed([pool.submit(judge_model, name) for name in wanted]):
            verdict = future.result()
            verdicts[verdict["name"]] = verdict
            bar.set_postfix_str(f"{verdict['name']}: {outcome_of(verdict)}")
            bar.update()
            write(verdicts, options.out)
    counts = Counter(map(outcome_of, verdicts.values()))
    print(json.dumps({"plain_models": len(verdicts), **dict(counts.most_common())}))


def outcome_of(verdict: dict[str, Any]) -> str:
    """Return the worst outcome of a model's calls, or "failed" for a model that could not be judged."""
    if verdict.get("failure") or not verdict["cases"]:
        return "failed"
    return min((case["outcome"] for case in verdict["cases"]), key=OUTCOMES.index)


def write(verdicts: dict[str, dict[str, Any]], path: Path) -> None:
    """Write the verdicts of all models, the versions of headwise and torch, and the processor to a JSON file."""
    versions = {name: version(name) for name in ("headwise", "torch")}
    by_name = [verdicts[name] for name in sorted(verdicts, key=str.lower)]
    processor = "{cpu} with {capability}".format(**machine())
    results = {"versions": versions, "processor": processor, "verdicts": by_name}
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
