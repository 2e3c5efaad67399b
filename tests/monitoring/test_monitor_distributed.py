"""Two processes that train together have the statistics of one process on all sequences, and unchanged bits."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from trained_models import decoder, token_batches, train

from headwise.monitoring.monitor import monitor
from profile_runs import results_of_two_processes

SEQUENCES = 6
"""Number of sequences in a step, half of them in each process."""

KINDS = ("ddp", "fsdp2")


def _wrapped(kind):
    """Return the model of one process, and what is called in its place."""
    model = decoder()
    if kind == "ddp":
        return model, torch.nn.parallel.DistributedDataParallel(model)
    for layer in model.model.layers:
        fully_shard(layer)
    return fully_shard(model), None


@pytest.fixture(scope="module", params=[3, pytest.param(20, marks=pytest.mark.slow)])
def steps(request):
    return request.param


@pytest.fixture(scope="module")
def results(steps, tmp_path_factory):
    """Bits and rows of two processes, of a training of each kind with and without a monitor."""
    folder = tmp_path_factory.mktemp("distributed")

    def trainings(rank, kind):
        for options in ({}, {"every": 2, "out": folder / f"run-{kind}"}):
            model, call = _wrapped(kind)
            halves = [ids.chunk(2)[rank] for ids in token_batches(steps, batch=SEQUENCES)]
            run = monitor(call or model, **options) if options else None
            bits, _ = train(model, halves, call=call, run=run)
            local = [each.to_local() if hasattr(each, "to_local") else each for each in bits]
            yield local, None if run is None else run.history.rows()

    return results_of_two_processes(lambda rank: {kind: list(trainings(rank, kind)) for kind in KINDS}, folder)


@pytest.mark.parametrize("kind", KINDS)
def test_two_processes_have_the_statistics_of_one(kind, steps, results):
    (plain, _), (monitored, rows) = results[0][kind]
    assert all(torch.equal(one, two) for one, two in zip(plain, monitored, strict=True))
    assert rows == results[1][kind][1][1]
    assert sorted({row["step"] for row in rows}) == list(range(0, steps, 2))
    rows = [row for row in rows if row["step"] < 3]  # later weights differ from those of one process
    _, alone = train(decoder(), token_batches(3, batch=SEQUENCES), every=2)
    expected = alone.history.rows()
    assert [row["step"] for row in rows] == [row["step"] for row in expected]
    for row, of_one in zip(rows, expected, strict=True):
        assert row["sequences"] == SEQUENCES
        for name in ("max_logit", "entropy", "first", "output_norm"):
            assert row[name] == pytest.approx(of_one[name], abs=1e-6 if row["step"] == 0 else 2e-4), name
