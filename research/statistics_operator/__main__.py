"""Compare the plain, the native and the Triton implementation of attention with statistics on drawn calls.

    python -m research.statistics_operator [--calls N] [--out FILE]

Triton's interpreter runs the kernels on the CPU. `agreement.py` states the rule. The last line is JSON: the number of
calls, of results beyond a bound, and of those whose mean error is more than twice that of the plain implementation. The
exit status is 1 if there are any.
"""

import argparse
import json
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path

from tqdm import tqdm

from research.statistics_operator.worker import SEEDS_AT_ONCE, compare_seeds, start


def main() -> int:
    """Compare, save and print, and return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=2000, help="least number of calls")
    parser.add_argument("--out", type=Path, help="file for the results")
    options = parser.parse_args()
    total: dict = {}
    with ProcessPoolExecutor(os.cpu_count(), get_context("spawn"), start) as pool:
        first, at_once = 0, 4 * (os.cpu_count() or 1)
        with tqdm(total=options.calls, unit="call", disable=None) as progress:
            while not total or total["plain"].calls < options.calls:
                starts = range(first, first + at_once * SEEDS_AT_ONCE, SEEDS_AT_ONCE)
                for part in pool.map(compare_seeds, starts):
                    progress.update(part["plain"].calls)
                    for name, agreement in part.items():
                        total[name].merge(agreement) if name in total else total.update({name: agreement})
                first = starts.stop
    results = {
        name: {
            "calls": agreement.calls,
            "beyond": agreement.beyond,
            "worse": agreement.worse_than(total["plain"]),
            "mean error, as a share of the bound": agreement.mean_errors(),
        }
        for name, agreement in total.items()
    }
    if options.out:
        versions = {each: version(each) for each in ("headwise", "torch", "triton")}
        options.out.write_text(json.dumps({"versions": versions, "results": results}, indent=1) + "\n", "utf-8")
    counts = {name: [each["calls"], len(each["beyond"]), len(each["worse"])] for name, each in results.items()}
    print(json.dumps({"calls, beyond, worse": counts}))
    return int(any(each["beyond"] or each["worse"] for each in results.values()))


if __name__ == "__main__":
    sys.exit(main())
