"""The command line of the benchmarks."""

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.regime import Regime


@dataclass(frozen=True)
class Options:
    """What the command line says."""

    quick: bool = False
    tiny: bool = False
    rounds: int = 7
    only: str = ""
    peers: str = "all"

    def sizes(self, sizes: Sequence[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
        """(batch, length, embed, heads): up to a length of 1,024 where it is to be quick."""
        if self.tiny:
            return [(min(size[0], 3), 40, 48, size[3]) for size in sizes[:1]]
        return [size for size in sizes if not self.quick or size[1] <= 1024]

    def wants(self, regime: Regime) -> bool:
        """Whether `--only` names it."""
        return self.only in regime.name


def arguments(description: str | None, given: Sequence[str] | None = None) -> Options:
    """The options of a script, from its docstring and the command line."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, few peers, lengths to 1,024 but for claims")
    parser.add_argument("--tiny", action="store_true", help="sizes that show that it runs; the figures mean nothing")
    parser.add_argument("--rounds", type=int, help="samples of each contestant; 7 unless given")
    parser.add_argument("--only", default="", help="a part of the regime's name, as it is printed")
    parser.add_argument("--peers", choices=("all", "torch"), default="all", help="torch: those that need no more")
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
    """End, with one sentence, unless the packages are there."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise SystemExit(f'{", ".join(missing)}: not installed, and compared with; pip install "headwise[bench]"')
