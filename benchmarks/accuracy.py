"""Error of the attention backends against float64, compared with a plain implementation of attention in the same dtype.

Regime: random problems of `tests/strategies.py` (1 to 23 queries and keys, every mask, biases with -inf, softcap,
sinks). For each dtype and backend, the script prints the share of problems in which the output error is more than twice
the error of one plain run, and the share in which it is more than twice the largest error among eight summation orders.

    python -m benchmarks.accuracy [problems]
"""

import argparse
import json
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, settings

import headwise as hw
from tests.oracles import distance, plain_attention, plain_errors
from tests.strategies import problems


def measure(dtype: torch.dtype, number: int) -> Counter:
    """Run `number` random problems in `dtype`. Return, for each (backend, bound), the number of problems whose error
    exceeds the bound, and for each (backend, "problems") the number of problems that the backend supports.
    """
    beyond: Counter = Counter()

    @settings(
        max_examples=number,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(problems())
    def run(drawn):
        q, k, v = drawn.tensors(dtype)
        in_float64 = (q.double(), k.double(), v.double())
        exact = plain_attention(*in_float64, **drawn.oracle_options)
        plain_error = distance(plain_attention(q, k, v, **drawn.oracle_options).out, exact.out)
        worst = plain_errors(q, k, v, exact, **drawn.oracle_options)["out"]
        for backend in ("fused", "reference"):
            if hw.why_not(backend, q, k, v, **drawn.attend_options) is not None:
                continue
            out = hw.attend(q, k, v, **drawn.attend_options, backend=backend)
            error = distance(out, exact.out)
            beyond[backend, "one plain run"] += error > 2 * plain_error
            beyond[backend, "worst of eight orders"] += error > 2 * worst
            beyond[backend, "problems"] += 1

    run()
    return beyond


def main() -> None:
    """Print the share of problems beyond each bound, and a line of JSON last."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("problems", type=int, nargs="?", default=2000, help="number of problems; 2,000 by default")
    number = parser.parse_args().problems
    shares = {}
    for dtype in (torch.float32, torch.bfloat16):
        counts = measure(dtype, number)
        for (backend, bound), count in sorted(counts.items()):
            if bound != "problems":
                share = shares[f"{backend}, {dtype}, beyond twice {bound}"] = count / counts[backend, "problems"]
                print(f"{backend:10} {dtype!s:15} {bound:22} {share:.2%}")
    print(json.dumps({"benchmark": "accuracy", "problems": number, "torch": torch.__version__, "shares": shares}))


if __name__ == "__main__":
    main()
