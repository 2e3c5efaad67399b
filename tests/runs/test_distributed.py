"""Two processes share a run: gathering, broadcasting, and errors."""

import pytest
import torch

import headwise as hw
from headwise.checks import device_argument
from headwise.runs.distributed import broadcast_from_rank0, gather_from_ranks, rank_and_world_size
from profile_runs import results_of_two_processes


def test_a_single_process_needs_no_setup():
    assert rank_and_world_size() == (0, 1)
    assert gather_from_ranks("part") == ["part"]
    assert broadcast_from_rank0(lambda: "result") == "result"


@pytest.mark.parametrize(
    ("is_built", "gpus", "device", "reason"),
    [
        (False, 0, "abacus", ""),
        (False, 0, "", ""),
        (False, 0, "cpu:x", ""),
        (False, 0, "cuda", ": this torch has no CUDA"),
        (False, 0, "cuda:1", ": this torch has no CUDA"),
        (True, 0, "cuda", ": no GPU was found"),
        (True, 2, "cuda:2", ": the last GPU is cuda:1"),
    ],
)
def test_a_device_that_torch_cannot_use_is_refused_with_the_reason(is_built, gpus, device, reason, monkeypatch):
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")
    assert device_argument("device", "cpu") == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "_is_compiled", lambda: is_built)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: gpus)
    with pytest.raises(hw.InputError) as error:
        device_argument("device", device)
    expected = f"device: expected a device that torch can use, got '{device}'{reason}; use --device cpu (device='cpu')"
    assert str(error.value) == expected


def test_two_processes_exchange_values_and_errors(tmp_path):
    def refuse():
        raise hw.InputError("dataset", expected="data", got="none")

    def collect(rank):
        with pytest.raises(hw.HeadwiseError, match="^dataset: expected data, got none$"):
            broadcast_from_rank0(refuse)
        place, gathered = rank_and_world_size(), gather_from_ranks({"rank": rank})
        return place, gathered, broadcast_from_rank0(lambda: f"of rank {rank}")

    gathered = [{"rank": 0}, {"rank": 1}]
    results = results_of_two_processes(collect, tmp_path)
    assert results == [((0, 2), gathered, "of rank 0"), ((1, 2), gathered, "of rank 0")]
