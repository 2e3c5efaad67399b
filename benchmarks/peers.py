"""All peers by name, and the comparison of headwise with them in a regime, as rows of results."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks import jax_peers, library_peers, oracle, torch_peers
from benchmarks.command_line import Options
from benchmarks.contestants import Contestant, LeftOutError, Peer, ours
from benchmarks.measure import GEMM, Call, Ratio, Row, compared, gemm, gemm_share, interleaved, show
from benchmarks.oracle import YARDSTICK, Results, WrongError
from benchmarks.regime import Data, Regime

TORCH_LAYER = "nn.MultiheadAttention"
LLAMA = "LlamaAttention"
FLEX = "FlexAttention block"
FASTEST = "fastest peer"

PEERS = {
    YARDSTICK: Peer(torch_peers.sdpa_block),
    TORCH_LAYER: Peer(torch_peers.torch_layer),
    f"{TORCH_LAYER}, weights": Peer(torch_peers.torch_layer_with_weights, keeps_matrix=True),
    FLEX: Peer(torch_peers.flex_block, torch_only=False),
    "x-transformers": Peer(library_peers.x_transformers, {"bias": False}, torch_only=False),
    LLAMA: Peer(library_peers.llama, {"bias": False, "rotary": True}, torch_only=False),
    "BertAttention": Peer(library_peers.bert, torch_only=False),
    "Equinox": Peer(jax_peers.equinox, torch_only=False, keeps_matrix=True),
    "Flax NNX": Peer(jax_peers.flax, torch_only=False, keeps_matrix=True),
}
"""Every peer by name. A flavour lists the regime options that differ because of the peer's layer; headwise is then
built with the same options.
"""

QUICK = (YARDSTICK, TORCH_LAYER)
"""Peers of a quick run: the usual hand-written block, and torch's own layer."""

FAST = (*QUICK, FLEX, "x-transformers")
"""Peers of `--peers fast`. The others store the matrix of weights, or call SDPA as the block does."""

LONGEST_MATRIX = 2048
"""Longest sequence for peers that store the matrix of weights. Longer ones are measured in fewer rounds, since each
round takes seconds.
"""


@dataclass
class Comparison:
    """Results of comparing headwise with its peers in one regime after another.

    Attributes:
        options: command-line options of the benchmark.
        rows: results so far.
        left_out: reason for each peer and regime that was left out.
        also: other ways to call headwise, by name. They must meet the same error bound and are reported like peers.
    """

    options: Options
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    also: dict[str, Callable[[Regime, Data], Contestant]] = field(default_factory=dict)

    def add(self, regime: Regime, *, without: Sequence[str] = (), with_gemm_share: bool = False) -> None:
        """Check headwise and every peer in a regime, time them interleaved, and add one row for each peer. Exit with a
        message if a result of headwise is wrong.

        Args:
            regime: sizes, mask and dtype. Nothing happens if the command line excludes it.
            without: names of peers to skip.
            with_gemm_share: also measure the share of the machine's matrix-multiplication rate.
        """
        if not self.options.wants(regime):
            return
        names = [name for name, peer in PEERS.items() if name not in without and self._asked(name, peer)]
        for name in [name for name in names if PEERS[name].keeps_matrix and regime.length > LONGEST_MATRIX]:
            names.remove(name)
            self.left_out[f"{name}, {regime.name}"] = f"keeps the matrix; compared up to {LONGEST_MATRIX:,} tokens"
        timed, opponent = self._checked(regime, names)
        if with_gemm_share:
            timed[GEMM] = gemm(regime.torch_dtype)
        rounds = self.options.rounds if regime.length <= LONGEST_MATRIX else self.options.long_rounds
        samples = interleaved(timed, rounds)
        self.keep(regime, samples, opponent)
        for name in self.also:
            self.rows.append(compared(regime, samples, "ours", name))
            show(self.rows[-1])
        if with_gemm_share:
            self.rows.append(gemm_share(regime, regime.flops, samples, "ours"))
            show(self.rows[-1])

    def keep(self, regime: Regime, samples: dict[str, list[float]], opponent: dict[str, str], runs: int = 1) -> None:
        """Add and print a row for each peer, and one for the fastest peer, which is the one with the smallest ratio.

        Args:
            regime: sizes, mask and dtype.
            samples: seconds of every contestant in every round.
            opponent: for each peer, the name of the headwise contestant it is compared with.
            runs: number of runs in each of these times.
        """
        rows = []
        for name, our_name in opponent.items():
            seconds = (statistics.median(samples[contestant]) / runs for contestant in (our_name, name))
            rows.append(Row(regime, name, Ratio.of(samples[name], samples[our_name]), *seconds))
        fastest = min(rows, key=lambda row: row.ratio.median)
        rows.append(replace(fastest, against=FASTEST, note=fastest.against))
        for row in rows:
            show(row)
        self.rows += rows

    def _asked(self, name: str, peer: Peer) -> bool:
        """Return whether the command line asks for a peer."""
        if self.options.quick and name not in QUICK:
            return False
        return {"all": True, "fast": name in FAST, "torch": peer.torch_only}[self.options.peers]

    def _checked(self, regime: Regime, names: list[str]) -> tuple[dict[str, Call], dict[str, str]]:
        """Return the calls to time, all of which are correct, by name; and for each peer the name of the headwise
        contestant with the same flavour.
        """
        timed: dict[str, Call] = {name: Call(checked(regime, build)[0].run) for name, build in self.also.items()}
        opponent: dict[str, str] = {}
        for flavour in _flavours(names):
            flavoured = replace(regime, **flavour)
            our_name = "ours" + "".join(f", {option} {value}" for option, value in flavour.items())
            our_contestant, yardstick = checked(flavoured)
            timed[our_name] = Call(our_contestant.run)
            for name in names:
                if PEERS[name].flavour != flavour:
                    continue
                contestant = yardstick if name == YARDSTICK else self.sane(name, PEERS[name].build, flavoured)
                if contestant is not None:
                    timed[name], opponent[name] = Call(contestant.run), our_name
        return timed, opponent

    def sane(
        self,
        name: str,
        build: Callable[[Regime, Data], Contestant],
        regime: Regime,
        exact: Results | None = None,
    ) -> Contestant | None:
        """Return the contestant of a peer if its results are correct: near those in `exact`, by default the layer's
        definition. Otherwise return None, and print and store the reason why it is left out.
        """
        try:
            contestant = build(regime, regime.data())
            oracle.sane(contestant.results(contestant.run()), exact or oracle.layer(regime), regime)
        except (LeftOutError, WrongError) as reason:
            message = str(reason)
        except Exception as error:  # a peer that fails is reported and must not stop the benchmark
            message = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        else:
            return contestant
        print(f"LEFT OUT  {regime.name}  {name}: {message}", flush=True)
        self.left_out[f"{name}, {regime.name}"] = message
        return None


def checked(regime: Regime, build: Callable[[Regime, Data], Contestant] = ours) -> tuple[Contestant, Contestant]:
    """Return the contestants of headwise, built by `build`, and of the block around SDPA. Exit with a message if
    headwise's result is wrong or has more than twice the error of that block.
    """
    data = regime.data()
    our_contestant, yardstick = build(regime, data), torch_peers.sdpa_block(regime, data)
    try:
        oracle.check(
            our_contestant.results(our_contestant.run()),
            yardstick.results(yardstick.run()),
            oracle.layer(regime),
            regime,
        )
    except WrongError as reason:
        raise SystemExit(f"{regime.name}: {reason}") from reason
    return our_contestant, yardstick


def _flavours(names: list[str]) -> list[dict[str, bool]]:
    """Return the distinct flavours of the named peers."""
    flavours: list[dict[str, bool]] = []
    for name in names:
        if PEERS[name].flavour not in flavours:
            flavours.append(PEERS[name].flavour)
    return flavours
