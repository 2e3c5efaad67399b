"""Claim 3: heads run in parallel at no cost."""

from collections.abc import Mapping
from typing import Any

import numpy as np

from .definitions import DEPENDS, FREE, HELD, NOT, OPEN, ROUNDS


def parallel(timings: Mapping[str, Any] | None) -> dict[str, Any]:
    """Claim 3: time of the layer with several heads over its time with one, by device."""
    if timings is None:
        return {"outcome": OPEN, "devices": {}}
    devices: dict[str, Any] = {}
    for regime in timings["measured"]:
        about = timings["about"]
        row = devices.setdefault(regime["device"], {"threads": about["threads"], "gpu": about.get("gpu"), "cases": []})
        for name, seconds in regime["seconds"].items():
            what, kind, heads = name.split()
            if kind == "fused" and heads != "1":
                ratios = np.array(seconds) / np.array(regime["seconds"][f"{what} fused 1"])
                share = float(np.mean(ratios <= FREE))
                verdict = "free" if share >= ROUNDS else "not free" if 1 - share >= ROUNDS else "open"
                case = {"batch": regime["batch"], "length": regime["length"], "pass": what, "heads": int(heads)}
                row["cases"].append({**case, "median": float(np.median(ratios)), "verdict": verdict})
    for row in devices.values():
        found = [case["verdict"] for case in row["cases"]]
        row["counts"] = {verdict: found.count(verdict) for verdict in ("free", "not free", "open")}
        row["outcome"] = OPEN if not found else HELD if set(found) == {"free"} else DEPENDS if "free" in found else NOT
    outcomes = {row["outcome"] for row in devices.values()}
    return {"outcome": outcomes.pop() if len(outcomes) == 1 else DEPENDS if outcomes else OPEN, "devices": devices}
