"""A pass over a data set in batches, shared among processes, that resumes where it was stopped."""

from collections.abc import Callable, Iterable, Mapping, Sized
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, TypeVar

from torch import nn

from headwise.data.batches import count_sequences_and_tokens, digest_of, documents_of, iterate_batches
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.sites import SiteRecord
from headwise.progress import progress_bar
from headwise.runs.checkpoint import STORABLE, CheckpointedRun, TableT, storable
from headwise.runs.distributed import rank_and_world_size
from headwise.runs.files import require_outside_data
from headwise.statistics import moments
from headwise.statistics.moments import Clusters, clusters_of, separate_clusters

STORABLE.extend((SiteKey, SiteRecord, moments.RunningMoments, moments.RunningLargest))
STORABLE.extend((moments.Moments, moments.ClusterSums))


@storable
@dataclass
class PassProgress:
    """Progress of one pass over the batches of a data set. All batches so far are counted, including those that other
    processes work on.

    Attributes:
        batches: number of batches so far.
        digest: hash of their content and of their documents, by which a resumed run detects other data.
        sequences, tokens: number of sequences and tokens in them, without padding.
        is_unfinished: True if the last of the batches needs further runs of the model.
    """

    batches: int = 0
    digest: str = ""
    sequences: int = 0
    tokens: int = 0
    is_unfinished: bool = False

    def begin(self, dataset: Texts | Iterable[Any]) -> None:
        """Start the hash of the data set with the document number of each sequence. The document numbers determine
        standard errors. Because they are in the hash, a run cannot be resumed with other document numbers.
        """
        self.digest = digest_of(documents_of(dataset) or ())

    def count_batch(self, batch: Mapping[str, Any]) -> None:
        """Count one more batch with its sequences and tokens, and add its content to the hash of the data."""
        sequences, tokens = count_sequences_and_tokens(batch)
        self.batches += 1
        self.sequences += sequences
        self.tokens += tokens
        self.digest = digest_of([self.digest, *(part for name in sorted(batch) for part in (name, batch[name]))])

    @property
    def summary(self) -> dict[str, Any]:
        """Numbers of sequences and tokens so far, and the hash of the data, for the metadata of a result table."""
        return {"sequences": self.sequences, "tokens": self.tokens, "digest": self.digest}


@storable
@dataclass
class SiteProgress(PassProgress):
    """Progress of one pass over a data set, and its results so far. If several processes share the data set, these are
    the results of one process: `records` has the statistics of the heads of each attention module.
    """

    records: list[SiteRecord] = field(default_factory=list)

    def __getstate__(self) -> dict[str, Any]:
        # Without the latest call of each site, which no call of a resumed run continues.
        records = [
            SiteRecord(each.site, each.layer, each.heads, each.kv_heads, each.statistics, each.nonfinite_rows)
            for each in self.records
        ]
        return {**vars(self), "records": records}


def prepare_texts(dataset: Any, model: nn.Module, out: str | Path | None, *, shown: bool) -> Any:
    """Return the data set of a run. A `Texts` is tokenized first, with a context (largest number of tokens) that the
    model accepts; other data sets are returned unchanged. `shown` shows a progress bar. Raise `InputError` if the
    output folder `out` is inside the data.
    """
    if not isinstance(dataset, Texts):
        return dataset
    if out is not None and isinstance(dataset.source, str | Path):
        require_outside_data(out, dataset.source)
    texts = dataset.within(model)
    tokenize(texts, shown=shown and rank_and_world_size()[0] == 0)
    return texts


def tokenize(texts: Texts, *, shown: bool) -> None:
    """Read and tokenize texts, if this has not been done. `shown` shows a progress bar, which disappears at the end."""
    if texts.is_tokenized:
        return
    with progress_bar("tokenizing", texts.limit, "sequences", shown=shown, transient=True) as bar:
        texts.tokenize(bar.advance)


PassProgressT = TypeVar("PassProgressT", bound=PassProgress)


class Pass(Generic[PassProgressT]):
    """One process's pass over its share of the batches of a data set. A stopped pass resumes after the last batch in
    its checkpoint. Of `n` processes, process `rank` works on batches rank, rank + n, rank + 2 n and so on.

    Attributes:
        resumed: the partial result in the process's checkpoint; an empty one if there is none.
        shows_progress: True if this process shows a progress bar.
    """

    def __init__(self, run: CheckpointedRun[PassProgressT, Any], shown: bool) -> None:
        self.resumed, self._run, self.shows_progress = run.load_progress(), run, shown and run.rank == 0

    def over(
        self,
        dataset: Texts | Iterable[Any],
        process_batch: Callable[[dict[str, Any], Clusters], None],
        progress: PassProgressT,
    ) -> PassProgressT:
        """Call `process_batch(batch, clusters)` for each batch of this process's share, except the batches that a
        stopped run has finished. `clusters` states which sequences are of the same document. `process_batch` adds its
        results to `progress`, which is written to checkpoints and returned. `progress` also counts the batches. Raise
        `InputError` if the data differs from that of the stopped run.
        """
        rank, world_size = rank_and_world_size()
        title, unit, total = "data", "batches", len(dataset) if isinstance(dataset, Sized) else None
        if isinstance(dataset, Texts):
            title, unit, total = Path(dataset.name).name, "tokens", dataset.tokens
        resumed, documents, first = self.resumed, documents_of(dataset), 0
        clusters = None if documents is None else clusters_of(documents)
        progress.begin(dataset)
        with progress_bar(title, total, unit, shown=self.shows_progress) as bar:
            for batch in iterate_batches(dataset):
                progress.count_batch(batch)
                bar.step = count_sequences_and_tokens(batch)[1] if unit == "tokens" else 1
                is_new = progress.batches > resumed.batches - resumed.is_unfinished
                if progress.batches == resumed.batches and progress.digest != resumed.digest:
                    raise self._run.different_data_error()
                if is_new and (progress.batches - 1) % world_size == rank:
                    numbers = range(first, progress.sequences)
                    of_batch = separate_clusters(numbers) if clusters is None else clusters[first : progress.sequences]
                    process_batch(batch, of_batch)
                first = progress.sequences
                (bar.advance if is_new else bar.resume)(bar.step)
                if is_new:
                    self._run.save_progress(progress)
        if progress.batches < resumed.batches:
            raise self._run.different_data_error()
        if not progress.batches:
            raise InputError("dataset", expected="at least one batch", got="none")
        self._run.save_progress(progress, now=True)
        return progress

    def save_unfinished(self, progress: PassProgressT) -> None:
        """Write a checkpoint in the middle of a batch, if it is time for one. A resumed run calls `process_batch` again
        for this batch.
        """
        progress.is_unfinished = True
        self._run.save_progress(progress)
        progress.is_unfinished = False


def require_same_data(finished: TableT, dataset: Texts | Iterable[Any], run: CheckpointedRun[Any, TableT]) -> TableT:
    """Return `finished`, the result table of a finished run, if the data set equals the one that the run used.
    Otherwise raise `InputError`.
    """
    progress = PassProgress()
    progress.begin(dataset)
    for batch in iterate_batches(dataset):
        progress.count_batch(batch)
    if finished.metadata["measured"]["digest"] != progress.digest:
        raise run.different_data_error()
    return finished
