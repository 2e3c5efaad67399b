"""Two processes share a run: gathering, broadcasting, errors, and equal profiles."""

import multiprocessing
import pickle

import pytest
import torch

import headwise as hw
import tiny
from headwise.checks import device_argument
from headwise.runs.distributed import broadcast_from_rank0, gather_from_ranks, rank_and_world_size
from profile_runs import run, texts


def test_a_single_process_needs_no_setup():
    assert rank_and_world_size() == (0, 1)
    assert gather_from_ranks("part") == ["part"]
    assert broadcast_from_rank0(lambda: "result") == "result"


def test_devices_that_torch_cannot_use_are_refused():
    assert device_argument("device", "cpu") == torch.device("cpu")
    for name in ("abacus", "", "cpu:x"):
        with pytest.raises(hw.InputError, match=f"^device: expected a device that torch can use, got '{name}'; use "):
            device_argument("device", name)


@pytest.mark.parametrize(
    ("is_built", "gpus", "device", "reason"),
    [
        (False, 0, "cuda", "this torch has no CUDA"),
        (False, 0, "cuda:1", "this torch has no CUDA"),
        (True, 0, "cuda", "no GPU was found"),
        (True, 2, "cuda:2", "the last GPU is cuda:1"),
    ],
)
def test_a_gpu_that_is_missing_is_refused_with_the_reason(is_built, gpus, device, reason, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(hw.InputError) as error:
        device_argument("device", device)
    expected = (
        f"device: expected a device that torch can use, got '{device}': {reason}; use --device cpu (device='cpu')"
    )
    assert str(error.value) == expected


def _collect(rank, out):
    """Return what the collective functions return on this rank, and a profile of both processes."""

    def refuse():
        raise hw.InputError("dataset", expected="data", got="none")

    def result():
        return f"of rank {rank}"

    with pytest.raises(hw.HeadwiseError, match="^dataset: expected data, got none$"):
        broadcast_from_rank0(refuse)
    profile = run(tiny.model("decoder"), out, list(texts()))
    return {
        "place": rank_and_world_size(),
        "gathered": gather_from_ranks({"rank": rank}),
        "broadcast": broadcast_from_rank0(result),
        "profile": profile,
    }


def _process(rank, folder):
    """Run `_collect` as one of two processes, and write what it returned."""
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    result = _collect(rank, folder / "out")
    (folder / f"{rank}.pickle").write_bytes(pickle.dumps(result))
    torch.distributed.destroy_process_group()


def test_two_processes_agree_with_each_other_and_with_one(tmp_path):
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_process, args=(rank, tmp_path)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(120)
    assert [process.exitcode for process in processes] == [0, 0]
    first, second = (pickle.loads((tmp_path / f"{rank}.pickle").read_bytes()) for rank in range(2))
    assert (first["place"], second["place"]) == ((0, 2), (1, 2))
    assert first["gathered"] == second["gathered"] == [{"rank": 0}, {"rank": 1}]
    assert first["broadcast"] == second["broadcast"] == "of rank 0"
    alone = run(tiny.model("decoder"), None, list(texts()))
    for profile in (first["profile"], second["profile"]):
        assert profile.metadata["measured"] == alone.metadata["measured"]
        for head, expected in zip(profile.heads, alone.heads, strict=True):
            assert head.identifiers == expected.identifiers
            for name, estimate in expected.statistics.items():
                assert head.statistics[name] == pytest.approx(estimate, rel=1e-9, abs=1e-12, nan_ok=True), name
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["profile.parquet"]
