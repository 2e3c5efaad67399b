"""Command-line options that all benchmarks share."""

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.regime import Regime


@dataclass(frozen=True)
class Options:
    """Options of a benchmark."""

    quick: bool = False
    tiny: bool = False
    rounds: int = 7
    only: str = ""
    peers: str = "all"

    def sizes(self, sizes: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        """Return the sizes (batch, length, embed, heads) to measure: lengths up to 1,024 for a quick run."""
        if self.tiny:
            return [(min(size[0], 3), 40, 48, size[3]) for size in sizes[:1]]
        return [size for size in sizes if not self.quick or size[1] <= 1024]

    def wants(self, regime: Regime) -> bool:
        """Return whether the name of a regime contains the value of `--only`."""
        return self.only in regime.name


def arguments(description: str | None, given: Sequence[str] | None = None) -> Options:
    """Parse the command line of a script, whose docstring is the description."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, few peers, lengths up to 1,024")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to test the code; the ratios mean nothing")
    parser.add_argument("--rounds", type=int, help="samples of each contestant; 7 by default")
    parser.add_argument("--only", default="", help="part of the name of the regimes to measure")
    parser.add_argument(
        "--peers", choices=("all", "torch"), default="all", help="torch: only peers that need no other package"
    )
    chosen = parser.parse_args(given)
    if chosen.rounds is None:
        chosen.rounds = 3 if chosen.quick or chosen.tiny else 7
    if chosen.rounds < 1:
        parser.error("--rounds: expected 1 or more")
    options = Options(**vars(chosen))
    if options.peers == "all":
        require("transformers", "x_transformers", "jax", "equinox", "flax")
    return options


def require(*packages: str) -> None:
    """Exit with a message if a package is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise SystemExit(f'{", ".join(missing)}: not installed, and compared with; pip install "headwise[bench]"')
