"""Command-line options that all benchmarks share."""

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.regime import Regime


@dataclass(frozen=True)
class Options:
    """Command-line options of a benchmark.

    Attributes:
        quick: measure in 3 rounds, with few peers and lengths up to 1,024.
        tiny: use the smallest sizes, to test the code.
        rounds: number of samples of each contestant.
        only: part of the name of the regimes to measure; "" measures all.
        peers: "all", or "torch" for peers that need no other package.
    """

    quick: bool = False
    tiny: bool = False
    rounds: int = 7
    only: str = ""
    peers: str = "all"

    def sizes(self, sizes: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        """Return those of the sizes (batch, length, embed, heads) that are measured: lengths up to 1,024 in a quick
        run, and one small size in a tiny run.
        """
        if self.tiny:
            return [(min(size[0], 3), 40, 48, size[3]) for size in sizes[:1]]
        return [size for size in sizes if not self.quick or size[1] <= 1024]

    def wants(self, regime: Regime) -> bool:
        """Return whether a regime is measured, that is, whether its name contains the value of `--only`."""
        return self.only in regime.name


def arguments(description: str | None, command_line: Sequence[str] | None = None) -> Options:
    """Parse the command line of a benchmark script into `Options`. Exit with a message if a package of a wanted peer is
    missing. The script's docstring is shown as help.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, few peers, lengths up to 1,024")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to test the code; the ratios mean nothing")
    parser.add_argument("--rounds", type=int, help="samples of each contestant; 7 by default")
    parser.add_argument("--only", default="", help="part of the name of the regimes to measure")
    parser.add_argument(
        "--peers", choices=("all", "torch"), default="all", help="torch: only peers that need no other package"
    )
    chosen = parser.parse_args(command_line)
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
        raise SystemExit(
            f'{", ".join(missing)}: not installed, but needed for a comparison; pip install "headwise[bench]"'
        )
