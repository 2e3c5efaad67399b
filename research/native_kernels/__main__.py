"""Compare the native kernels with float64 on drawn attention problems.

    python -m research.native_kernels [--problems N] [--start SEED] [--instruction-sets A,B] [--out FILE]

Every problem is computed in float32 and in bfloat16 on each instruction set, which has a process of its own.
`research.native_kernels.judge` states the rule for results. The last line is JSON: for each instruction set and dtype,
the number of problems, of those computed again, and of those that fail. The file also has the largest ratios, the root
of the mean squared ratio of norms, and every failing problem with its seed. The exit status is 1 if a problem fails.

    python -m research.native_kernels --start 137 --problems 1      # repeat the problem of one seed
"""

import argparse
import json
import sys
from dataclasses import dataclass, field
from functools import partial
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

from headwise.attention.backends.native.build import INSTRUCTION_SETS
from research.native_kernels.judge import Judge, Verdict
from research.native_kernels.problems import draw_problem
from research.native_kernels.worker import DTYPES, Worker

AHEAD = 16
"""Problems that the processes of instruction sets may begin before the first of them is judged."""


@dataclass
class Summary:
    """Verdicts on all problems of one instruction set and dtype.

    Attributes:
        problems: number of problems.
        again: number of problems that were computed again with more sets of values.
        failures: descriptions of the problems that fail, each with its ratios beyond a limit.
        ratios: by result, the largest ratio of norms, the largest ratio of largest errors, the sum of squared ratios of
            norms, and the number of problems.
    """

    problems: int = 0
    again: int = 0
    failures: list[str] = field(default_factory=list)
    ratios: dict[str, list[float]] = field(default_factory=dict)

    def add(self, verdict: Verdict) -> None:
        """Add the verdict on one problem."""
        self.problems += 1
        self.again += verdict.again
        if verdict.beyond:
            beyond = {name: [round(ratio, 2) for ratio in verdict.ratios[name]] for name in verdict.beyond}
            self.failures.append(f"{beyond} {verdict.problem}")
        for name, (norm, largest) in verdict.ratios.items():
            numbers = self.ratios.setdefault(name, [0.0, 0.0, 0.0, 0])
            numbers[:] = [max(numbers[0], norm), max(numbers[1], largest), numbers[2] + norm**2, numbers[3] + 1]

    def as_json(self) -> dict:
        """Return the summary for the file of results."""
        ratios = {
            name: {
                "largest ratio of norms": round(norm, 3),
                "largest ratio of largest errors": round(largest, 3),
                "root of the mean squared ratio of norms": round((squares / count) ** 0.5, 3),
            }
            for name, (norm, largest, squares, count) in self.ratios.items()
        }
        return {"problems": self.problems, "again": self.again, "failures": self.failures, "ratios": ratios}


def measure(workers: dict[str, Worker], seeds: range) -> dict[str, dict[str, Summary]]:
    """Judge all problems on the instruction sets of some processes. Return a summary for each of them and each dtype.

    This process computes the exact results and those of plain attention, and compares; meanwhile, the others compute
    the next problems.
    """
    summaries = {name: {dtype: Summary() for dtype in DTYPES} for name in workers}
    problems = [(seed, dtype) for seed in seeds for dtype in DTYPES]
    for n, (seed, dtype) in enumerate(tqdm(problems, unit="problem", disable=None)):
        for ahead in problems[n + AHEAD - 1 : n + AHEAD] if n else problems[:AHEAD]:
            for worker in workers.values():
                worker.prepare(*ahead)
        judge = Judge(draw_problem(seed), DTYPES[dtype])
        for name, worker in workers.items():
            summaries[name][dtype].add(judge.judge(partial(worker.compute, seed, dtype)))
    return summaries


def main() -> int:
    """Judge the problems, save and print the summaries, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--problems", type=int, default=20_000, help="number of problems")
    parser.add_argument("--start", type=int, default=0, help="seed of the first problem")
    parser.add_argument("--instruction-sets", default=",".join(INSTRUCTION_SETS), help="separated by commas")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()
    torch.set_num_threads(1)
    workers, results = {}, {}
    for name in options.instruction_sets.split(","):
        worker = Worker(name)
        reason = worker.why_not()
        if reason is None:
            workers[name] = worker
        else:
            print(f"{name}: {reason}")
    for name, summaries in measure(workers, range(options.start, options.start + options.problems)).items():
        for dtype, summary in summaries.items():
            results[f"{name}, {dtype}"] = summary.as_json()
            for failure in summary.failures[:20]:
                print(f"{name}, {dtype}: {failure[:300]}")
    if options.out:
        versions = {each: version(each) for each in ("headwise", "torch")}
        options.out.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n", "utf-8")
    counts = {key: [each["problems"], each["again"], len(each["failures"])] for key, each in results.items()}
    print(json.dumps({"problems, again, failures": counts}))
    return int(any(each["failures"] for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
