"""A pass over data in batches, which processes share, and which goes on where it was stopped."""

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from headwise.data.batches import count_sequences_and_tokens, digest_of, iterate_batches
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.interceptor import Site
from headwise.intercept.sites import SiteRecord
from headwise.runs.checkpoint import CheckpointedRun, TableT
from headwise.runs.distributed import rank_and_world_size
from headwise.runs.progress import progress_bar
from headwise.runs.table import MeanEstimate
from headwise.statistics.moments import RunningMoments


@dataclass
class PassProgress:
    """How far a process is.

    Attributes:
        batches: how many of the data's it is past, those of other processes included.
        digest: of all of these, so that a run does not go on with other data.
        sequences, tokens: in these batches.
    """

    batches: int = 0
    digest: str = ""
    sequences: int = 0
    tokens: int = 0

    def to_dict(self) -> dict[str, Any]:
        """See `Checkpointable`."""
        return dict(vars(self))

    @classmethod
    def from_dict(cls, packed: dict[str, Any]) -> Any:
        """See `Checkpointable`."""
        return cls(**packed)

    def count_batch(self, batch: Mapping[str, Any]) -> None:
        """Count a batch, whoever runs it."""
        sequences, tokens = count_sequences_and_tokens(batch)
        self.batches += 1
        self.sequences += sequences
        self.tokens += tokens
        self.digest = digest_of([self.digest, *(part for name in sorted(batch) for part in (name, batch[name]))])

    @property
    def summary(self) -> dict[str, Any]:
        """What was read, as a table tells it."""
        return {"sequences": self.sequences, "tokens": self.tokens, "digest": self.digest}


@dataclass
class SiteProgress(PassProgress):
    """How far a process is, and the `records` of the sites of which it measured something."""

    records: list[SiteRecord] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """See `Checkpointable`."""
        packed = super().to_dict()
        packed["records"] = [
            vars(record)
            | {
                "site": tuple(record.site),  # plain containers only, which load without running code
                "statistics": {name: vars(moments) for name, moments in record.statistics.items()},
            }
            for record in self.records
        ]
        return packed

    @classmethod
    def from_dict(cls, packed: dict[str, Any]) -> Any:
        """See `Checkpointable`."""
        records = []
        for record in packed["records"]:
            statistics = {name: RunningMoments(**moments) for name, moments in record["statistics"].items()}
            records.append(SiteRecord(**record | {"site": Site(*record["site"]), "statistics": statistics}))
        return cls(**packed | {"records": records})


SiteProgressT = TypeVar("SiteProgressT", bound=SiteProgress)


def run_pass(
    dataset: Texts | Iterable[Any],
    read: Callable[[dict[str, Any]], None],
    run: CheckpointedRun[SiteProgressT, TableT],
    before: SiteProgressT,
    state: SiteProgressT,
    *,
    shown: bool,
) -> None:
    """Read the batches that this process has still to read. Between two of them `state` is kept.

    Args:
        dataset: all batches.
        read: what is done with a batch; what it comes to, it puts into the state.
        run: what keeps the state.
        before: where the process was stopped.
        state: a new one, which counts the batches.
        shown: whether to show a bar.

    Raises:
        InputError: other data than before; none.
        MissingExtra: a bar, and rich is not installed.
    """
    rank, processes = rank_and_world_size()
    title, unit, total = "data", "batches", len(dataset) if isinstance(dataset, Sized) else None
    if isinstance(dataset, Texts):
        title, unit, total = Path(dataset.name).name, "tokens", dataset.tokens
    with progress_bar(title, total, unit, shown=shown and rank == 0) as advance:
        for batch in iterate_batches(dataset):
            state.count_batch(batch)
            new = state.batches > before.batches
            if state.batches == before.batches and state.digest != before.digest:
                raise run.different_data_error()
            if new and (state.batches - 1) % processes == rank:
                read(batch)
            advance(count_sequences_and_tokens(batch)[1] if unit == "tokens" else 1, not new)
            if new:
                run.save_progress(state)
    if state.batches < before.batches:
        raise run.different_data_error()
    if not state.batches:
        raise InputError("dataset", expected="at least one batch", got="none")
    run.save_progress(state, now=True)


def require_same_data(finished: TableT, dataset: Texts | Iterable[Any], run: CheckpointedRun[Any, TableT]) -> TableT:
    """A table that is there already, if the data is still what it was."""
    state = PassProgress()
    for batch in iterate_batches(dataset):
        state.count_batch(batch)
    if finished.metadata["measured"]["digest"] != state.digest:
        raise run.different_data_error()
    return finished


def head_estimates(spread: RunningMoments) -> list[MeanEstimate]:
    """What was measured of each head."""
    numbers = (spread.value.tolist(), spread.standard_error.tolist(), spread.count.long().tolist())
    return [MeanEstimate(*each) for each in zip(*numbers, strict=True)]
