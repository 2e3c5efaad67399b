"""Command-line options that all benchmarks share."""

import argparse
import importlib.util
from collections.abc import Sequence
from dataclasses import dataclass

from benchmarks.regime import Regime

RUNTIMES = ("onnxruntime", "onnxscript", "openvino")
"""Packages of other runtimes for whole models, and of the export to them."""

PACKAGES = {
    "all": ("transformers", "x_transformers", "jax", "equinox", "flax", *RUNTIMES),
    "fast": ("transformers", "x_transformers", *RUNTIMES),
    "torch": (),
}
"""Packages that the peers of each value of `--peers` need, in addition to torch."""


@dataclass(frozen=True)
class Options:
    """Command-line options of a benchmark.

    Attributes:
        quick: measure in 3 rounds, with few peers and lengths up to 1,024.
        tiny: use the smallest sizes, to test the code.
        rounds: number of samples of each contestant.
        long_rounds: number of samples where a round takes seconds: in whole layers above 2,048 tokens, and in models at
            8,192 tokens, with batches of 4,096 tokens, or with slow methods.
        only: part of the name of the regimes to measure; "" measures all.
        peers: "all"; "fast" for the peers that can be the fastest; or "torch" for peers that need no other package.
    """

    quick: bool = False
    tiny: bool = False
    rounds: int = 9
    long_rounds: int = 3
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

    @property
    def command_line(self) -> list[str]:
        """The arguments that `arguments` parses into these options."""
        flags = [f"--{name}" for name in ("quick", "tiny") if getattr(self, name)]
        rounds = ["--rounds", str(self.rounds), "--long-rounds", str(self.long_rounds)]
        return [*flags, *rounds, "--only", self.only, "--peers", self.peers]


def option_parser(description: str | None) -> argparse.ArgumentParser:
    """Return a parser for the options that all benchmarks share. The script's docstring is shown as help."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 rounds, few peers, lengths up to 1,024")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes, to test the code; the ratios mean nothing")
    parser.add_argument("--rounds", type=int, help="samples of each contestant; 9 by default")
    parser.add_argument(
        "--long-rounds", type=int, help="samples where a round takes seconds; 3 by default, at most --rounds"
    )
    parser.add_argument("--only", default="", help="part of the name of the regimes to measure")
    parser.add_argument(
        "--peers",
        choices=tuple(PACKAGES),
        default="all",
        help="fast: only peers that can be the fastest; torch: only peers that need no other package",
    )
    return parser


def checked_options(parser: argparse.ArgumentParser, chosen: argparse.Namespace) -> Options:
    """Return the options that `parser` has read. Exit with a message if a number of rounds is below 1, or a package of
    a wanted peer is missing.
    """
    rounds = chosen.rounds if chosen.rounds is not None else 3 if chosen.quick or chosen.tiny else 9
    long_rounds = min(rounds, 3 if chosen.long_rounds is None else chosen.long_rounds)
    if long_rounds < 1:
        parser.error("--rounds, --long-rounds: expected 1 or more")
    require(*PACKAGES[chosen.peers])
    return Options(chosen.quick, chosen.tiny, rounds, long_rounds, chosen.only, chosen.peers)


def arguments(description: str | None, command_line: Sequence[str] | None = None) -> Options:
    """Parse the command line of a benchmark script into `Options`. Exit with a message if a package of a wanted peer is
    missing. The script's docstring is shown as help.
    """
    parser = option_parser(description)
    return checked_options(parser, parser.parse_args(command_line))


def require(*packages: str) -> None:
    """Exit with a message if a package is not installed."""
    missing = [package for package in packages if importlib.util.find_spec(package) is None]
    if missing:
        raise SystemExit(
            f'{", ".join(missing)}: not installed, but needed for a comparison; pip install "headwise[bench]"'
        )
