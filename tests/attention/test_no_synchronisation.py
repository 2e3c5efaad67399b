"""A pass of attention reads no value of a tensor on a GPU, for which Python would wait.

Three independent checks stand in for a GPU: a pretended device with values, fake tensors on that device, and tensors on
the CPU under a mode that refuses reads, with headwise's own test of readable values answering as on a GPU.
"""

import re

import pytest
import torch

import headwise as hw
from headwise.attention import attend
from pretend_device import HostRead, NoReads
from without_a_gpu import as_on_a_gpu, on_pretended_device, passes_that_read


def test_passes_on_a_device_read_nothing_and_equal_those_on_the_cpu():
    assert on_pretended_device("attend") == []


@pytest.mark.slow
def test_a_read_in_a_pass_fails_every_pass_on_the_device():
    failed = on_pretended_device("attend", "with-a-read")
    assert len(failed) > 100
    assert all("HostRead: aten._local_scalar_dense" in line for line in failed)


@pytest.mark.slow
def test_fake_tensors_pass_wherever_no_plan_of_blocks_is_made():
    for line in on_pretended_device("attend", "fake"):
        assert "InputError: backend: expected one that can do this" in line
        assert re.search("blockwise|softcap|log-sum-exp|bfloat16", line), line


@pytest.mark.slow
def test_masks_are_copied_to_a_device_once_and_a_plain_causal_call_has_no_matrix():
    assert on_pretended_device("masks") == []


def test_passes_read_nothing_where_values_are_unreadable(monkeypatch):
    assert passes_that_read("attend", monkeypatch) == {}


def test_a_read_in_a_pass_is_found_where_values_are_unreadable(monkeypatch):
    run_contained = attend.run_contained

    def run_and_read(problem, run):
        answer = run_contained(problem, run)
        bool(answer.out.sum() > 0)
        return answer

    monkeypatch.setattr(attend, "run_contained", run_and_read)
    errors = passes_that_read("attend", monkeypatch)
    assert len(errors) > 100
    assert set(errors.values()) == {"HostRead: aten._local_scalar_dense.default"}


READS = {
    "item": lambda x: x.sum().item(),
    "truth": lambda x: bool(x.sum() > 0),
    "number": lambda x: int(x.argmax()),
    "list": lambda x: x.nonzero(),
    "boolean index": lambda x: x[x > 0],
    "boolean assignment": lambda x: x.__setitem__(x > 0, torch.ones(())),
    "masked_select": lambda x: x.masked_select(x > 0),
    "equal": lambda x: torch.equal(x, x),
    "unique": lambda x: x.unique(),
    "repetitions": lambda x: x.repeat_interleave(torch.arange(5)),
    "allclose": lambda x: torch.allclose(x, x),
}


@pytest.mark.parametrize("read", READS.values(), ids=READS)
def test_the_mode_refuses_reads(read):
    x = torch.randn(5)
    read(x.clone())
    with NoReads(), pytest.raises(HostRead, match="aten"):
        read(x)


def test_masks_keep_what_was_read_when_they_were_made(monkeypatch):
    documents, scattered = hw.segments([0, 0, 1, 1]), hw.segments([0, 1, 0, 1])
    lengths = hw.padding(torch.tensor([2, 5]))
    as_on_a_gpu(monkeypatch)
    with NoReads():
        assert (documents.is_one_piece_each, scattered.is_one_piece_each) == (True, False)
        assert documents.for_sequence(0).is_one_piece_each
        assert not hw.segments([0, 0, 1, 1]).is_one_piece_each  # unknown
        assert lengths.natural_grid().keys == 5
    with pytest.raises(hw.InputError, match=r"lengths of 0 to 4 \(the keys\), got 5"):
        hw.attend(*(torch.randn(2, 1, 4, 2) for _ in range(3)), mask=lengths)


def test_a_mask_does_not_follow_later_changes_of_its_tensor():
    ids, lengths = torch.tensor([0, 0, 1]), torch.tensor([2])
    masks = [hw.segments(ids), hw.padding(lengths)]
    pictures = [mask.picture() for mask in masks]
    ids.fill_(7)
    lengths.fill_(1)
    assert [mask.picture() for mask in masks] == pictures
