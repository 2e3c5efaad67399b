"""How far the backends are from float64, next to attention written plainly in the same dtype.

Regime: random problems of `tests/strategies.py` (1 to 23 queries and keys, every mask, biases with holes, softcap,
sinks). For each dtype and backend, the share of problems whose output is beyond twice the error of one plain run, and
beyond twice that of the worst of eight orders of the same sums.

    python benchmarks/accuracy.py [problems]
"""

import json
import sys
from collections import Counter

import torch
from hypothesis import HealthCheck, Phase, given, settings

import headwise as hw
from oracles import distance, plain_attention, plain_errors
from strategies import problems

PROBLEMS = int(sys.argv[1]) if len(sys.argv) > 1 else 2000


def measure(dtype: torch.dtype) -> Counter:
    """How many problems exceed each bound, by backend."""
    beyond: Counter = Counter()

    @settings(
        max_examples=PROBLEMS,
        derandomize=True,
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(problems())
    def run(drawn):
        q, k, v = drawn.tensors(dtype)
        wide = (q.double(), k.double(), v.double())
        exact = plain_attention(*wide, **drawn.rule)
        once = distance(plain_attention(q, k, v, **drawn.rule).out, exact.out)
        worst = plain_errors(q, k, v, exact, **drawn.rule)["out"]
        for backend in ("fused", "reference"):
            if hw.why_not(backend, q, k, v, **drawn.options) is not None:
                continue
            out = hw.attend(q, k, v, **drawn.options, backend=backend)
            error = distance(out, exact.out)
            beyond[backend, "one plain run"] += error > 2 * once
            beyond[backend, "worst of eight orders"] += error > 2 * worst
            beyond[backend, "problems"] += 1

    run()
    return beyond


result = {}
for dtype in (torch.float32, torch.bfloat16):
    counts = measure(dtype)
    for (backend, bound), count in sorted(counts.items()):
        if bound != "problems":
            result[f"{backend}, {dtype}, beyond twice {bound}"] = count / counts[backend, "problems"]
            print(f"{backend:10} {dtype!s:15} {bound:22} {count / counts[backend, 'problems']:.2%}")
print(json.dumps({"benchmark": "accuracy", "problems": PROBLEMS, "torch": torch.__version__, "shares": result}))
