"""The peers by name, the fair comparison of ours with all of them, and what it found as rows."""

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from benchmarks import jax_peers, library_peers, oracle, torch_peers
from benchmarks.command_line import Options
from benchmarks.contestants import Contestant, LeftOutError, Peer, ours
from benchmarks.measure import Call, Ratio, Row, gemm, gemm_flops, interleaved, show
from benchmarks.oracle import YARDSTICK, WrongError
from benchmarks.regime import Data, Regime

TORCH_LAYER = "nn.MultiheadAttention"
LLAMA = "LlamaAttention"
FLEX = "FlexAttention block"
FASTEST = "fastest peer"
GEMM = "GEMM rate"

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
"""Every peer. A flavour says what its layer has not, or has more; ours is then built alike."""

QUICK = (YARDSTICK, TORCH_LAYER)
"""Those that a quick run keeps: what people write, and what torch has."""


LONGEST_MATRIX = 2048
"""Texts longer than this have no peer that keeps the matrix, and `FEW_ROUNDS`, since each takes seconds."""

FEW_ROUNDS = 3


@dataclass
class Comparison:
    """What comparing several regimes found."""

    options: Options
    rows: list[Row] = field(default_factory=list)
    left_out: dict[str, str] = field(default_factory=dict)
    also: dict[str, Callable[[Regime, Data], Contestant]] = field(default_factory=dict)
    """Other ways to write ours, held to the same error and shown beside the peers."""

    def add(self, regime: Regime, *, without: Sequence[str] = (), gemm_share: bool = False) -> None:
        """Check ours and every peer in a regime, time them by turns, and keep a row for each.

        Ends the script with one sentence where ours is wrong.
        """
        if not self.options.wants(regime):
            return
        names = [name for name, peer in PEERS.items() if name not in without and self._asked(name, peer)]
        for name in [name for name in names if PEERS[name].keeps_matrix and regime.length > LONGEST_MATRIX]:
            names.remove(name)
            self.left_out[f"{name}, {regime.name}"] = f"keeps the matrix; compared up to {LONGEST_MATRIX:,} tokens"
        timed, opponent = self._checked(regime, names)
        if gemm_share:
            timed[GEMM] = gemm(regime.torch_dtype)
        rounds = self.options.rounds if regime.length <= LONGEST_MATRIX else min(self.options.rounds, FEW_ROUNDS)
        taken = interleaved(timed, rounds)
        self.keep(regime, taken, opponent)
        for name in self.also:
            seconds = statistics.median(taken["ours"]), statistics.median(taken[name])
            self.rows.append(Row(regime, name, Ratio.of(taken[name], taken["ours"]), *seconds))
            show(self.rows[-1])
        if gemm_share:
            self.rows.append(_share(regime, taken))
            show(self.rows[-1])

    def keep(self, regime: Regime, taken: dict[str, list[float]], opponent: dict[str, str], runs: int = 1) -> None:
        """A row for each peer and one for the fastest: the one that ours beats by least.

        Args:
            regime: what was computed.
            taken: seconds of every contestant in every round.
            opponent: for each peer, with which of ours it is compared.
            runs: what those seconds are of.
        """
        rows = []
        for name, mine in opponent.items():
            seconds = (statistics.median(taken[each]) / runs for each in (mine, name))
            rows.append(Row(regime, name, Ratio.of(taken[name], taken[mine]), *seconds))
        fastest = min(rows, key=lambda row: row.ratio.median)
        rows.append(replace(fastest, against=FASTEST, note=fastest.against))
        for row in rows:
            show(row)
        self.rows += rows

    def _asked(self, name: str, peer: Peer) -> bool:
        return (peer.torch_only or self.options.peers == "all") and (name in QUICK or not self.options.quick)

    def _checked(self, regime: Regime, names: list[str]) -> tuple[dict[str, Call], dict[str, str]]:
        """Everything that is right, to be timed; and for each peer which of ours it is compared with."""
        timed: dict[str, Call] = {name: Call(checked(regime, build)[0].run) for name, build in self.also.items()}
        opponent: dict[str, str] = {}
        for flavour in _flavours(names):
            alike = replace(regime, **flavour)
            mine = "ours" + "".join(f", {option} {given}" for option, given in flavour.items())
            right, yardstick = checked(alike)
            timed[mine] = Call(right.run)
            for name in names:
                if PEERS[name].flavour != flavour:
                    continue
                contestant = yardstick if name == YARDSTICK else self.sane(name, PEERS[name].build, alike)
                if contestant is not None:
                    timed[name], opponent[name] = Call(contestant.run), mine
        return timed, opponent

    def sane(self, name: str, build: Callable[[Regime, Data], Contestant], regime: Regime) -> Contestant | None:
        """A peer that computes the same thing; otherwise None, and it is named among those left out."""
        try:
            contestant = build(regime, regime.data())
            oracle.sane(contestant.results(contestant.run()), oracle.layer(regime), regime)
        except (LeftOutError, WrongError) as reason:
            said = str(reason)
        except Exception as error:  # what a peer cannot do is its own affair, and no reason to stop
            said = f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error) else ''}"
        else:
            return contestant
        print(f"LEFT OUT  {regime.name}  {name}: {said}", flush=True)
        self.left_out[f"{name}, {regime.name}"] = said
        return None


def checked(regime: Regime, build: Callable[[Regime, Data], Contestant] = ours) -> tuple[Contestant, Contestant]:
    """Ours and the yardstick, once they are shown to be right; otherwise the script ends."""
    data = regime.data()
    mine, yardstick = build(regime, data), torch_peers.sdpa_block(regime, data)
    try:
        oracle.check(mine.results(mine.run()), yardstick.results(yardstick.run()), oracle.layer(regime), regime)
    except WrongError as reason:
        raise SystemExit(f"{regime.name}: {reason}") from reason
    return mine, yardstick


def _flavours(names: list[str]) -> list[dict[str, bool]]:
    """Every flavour once."""
    found: list[dict[str, bool]] = []
    for name in names:
        if PEERS[name].flavour not in found:
            found.append(PEERS[name].flavour)
    return found


def _share(regime: Regime, taken: dict[str, list[float]]) -> Row:
    """Which part of the rate of a large product the layer reaches."""
    ratio = Ratio.of([regime.flops * each for each in taken[GEMM]], [gemm_flops() * each for each in taken["ours"]])
    rates = regime.flops / statistics.median(taken["ours"]), gemm_flops() / statistics.median(taken[GEMM])
    return Row(regime, GEMM, ratio, *rates)
