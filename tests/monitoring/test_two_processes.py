"""Trainings that two processes share: the statistics of one process on all sequences, unchanged bits, and `qk_clip`."""

import warnings

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module
from trained_models import decoder, token_batches, train

import headwise as hw
from monitoring.clipped_models import arguments, model
from profile_runs import results_of_two_processes

SEQUENCES = 6
"""Number of sequences in a step, half of them in each process."""

KINDS = ("ddp", "fsdp2")


def _wrapped(kind):
    """Return the model of one process, and what is called in its place."""
    trained = decoder()
    if kind == "ddp":
        return trained, torch.nn.parallel.DistributedDataParallel(trained)
    for layer in trained.model.layers:
        fully_shard(layer)
    return fully_shard(trained), None


@pytest.fixture(scope="module", params=[3, pytest.param(20, marks=pytest.mark.slow)])
def steps(request):
    return request.param


@pytest.fixture(scope="module")
def results(steps, tmp_path_factory):
    """Bits and rows of two processes, of a training of each kind with and without a monitor."""
    folder = tmp_path_factory.mktemp("distributed")

    def trainings(rank, kind):
        for options in ({}, {"every": 2, "out": folder / f"run-{kind}"}):
            trained, call = _wrapped(kind)
            halves = [ids.chunk(2)[rank] for ids in token_batches(steps, batch=SEQUENCES)]
            run = hw.monitor(call or trained, **options) if options else None
            bits, _ = train(trained, halves, call=call, run=run)
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


# -- clipping of logits ----------------------------------------------------------------------------------------------

NAMES = ("llama", "llama, grouped", "phi3", "gpt2", "gpt_neox", "latent")


def _sharded(name):
    """Return the heads that are scaled in a sharded model, and its parameters afterwards."""
    sharded, mesh = model(name).train(), init_device_mesh("cpu", (2,))
    for layer in getattr(sharded, "layers", getattr(sharded, "h", ())):
        fully_shard(layer, mesh=mesh)
    fully_shard(sharded, mesh=mesh)
    with hw.monitor(sharded, statistics=["max_logit"], every=1) as monitor:
        sharded(**arguments(name.partition(",")[0]))
        monitor.step()
        # Without a backward pass the parameters of the root stay gathered.
        heads = hw.qk_clip(sharded, monitor, 1.0)
    assert all(isinstance(parameter, DTensor) for parameter in sharded.parameters())
    return heads, {path: parameter.full_tensor().detach() for path, parameter in sharded.named_parameters()}


def _tensor_parallel():
    """Return the parameters of an attention module after `qk_clip`, with heads divided among processes."""
    parallel, mesh = model("llama"), init_device_mesh("cpu", (2,))
    plan = {"q_proj": ColwiseParallel(), "k_proj": ColwiseParallel(), "v_proj": ColwiseParallel()}
    attention = parallelize_module(parallel.layers[0].self_attn, mesh, plan)
    hw.qk_clip(parallel, {(0, 1): 3.0, (0, 5): 4.0}, 1.0)
    return {name: getattr(attention, name).weight.full_tensor().detach() for name in ("q_proj", "k_proj", "v_proj")}


def _in_copies():
    """Return the parameters of this process's copy of a model in DistributedDataParallel."""
    copy = torch.nn.parallel.DistributedDataParallel(model("llama").train())
    with hw.monitor(copy, statistics=["max_logit"], every=1) as monitor:
        inputs = arguments("llama")
        copy(input_ids=inputs["input_ids"][torch.distributed.get_rank() :])
        monitor.step()
        heads = hw.qk_clip(copy, monitor, 1.0)
    return heads, {path: parameter.detach() for path, parameter in copy.module.named_parameters()}


def _refusals():
    """Return the errors for models whose parameters cannot be scaled."""
    messages = []
    other = model("llama")
    mesh = init_device_mesh("cpu", (2,))
    fully_shard(other.layers[0].self_attn, mesh=mesh)
    changed = model("llama")
    changed.layers[0].self_attn.q_proj.forward = changed.layers[0].self_attn.v_proj.forward
    fully_shard(changed, mesh=mesh)
    flat = FullyShardedDataParallel(model("llama"), device_id=torch.device("cpu"))
    for each in (other, changed, flat):
        with pytest.raises(hw.InputError) as error:
            hw.qk_clip(each, {(0, 1): 3.0}, 1.0)
        messages.append(str(error.value))
    return messages


def _clip_all(_rank):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = {name: _sharded(name) for name in NAMES}
        return result | {"parallel": _tensor_parallel(), "copies": _in_copies(), "refused": _refusals()}


@pytest.fixture(scope="module")
def clipped(tmp_path_factory):
    return results_of_two_processes(_clip_all, tmp_path_factory.mktemp("processes"))


@pytest.mark.parametrize("name", NAMES)
def test_sharded_parameters_get_the_same_bits(clipped, name):
    for result in clipped:
        heads, parameters = result[name]
        expected = model(name)
        hw.qk_clip(expected, {(head.layer, head.head): head.logit for head in heads}, 1.0)
        assert len(heads) > 3
        assert all(torch.equal(parameters[path], value) for path, value in expected.named_parameters())


def test_heads_that_are_divided_among_processes(clipped):
    expected = model("llama")
    hw.qk_clip(expected, {(0, 1): 3.0, (0, 5): 4.0}, 1.0)
    for result in clipped:
        for name, weight in result["parallel"].items():
            assert torch.equal(weight, getattr(expected.layers[0].self_attn, name).weight)


def test_copies_stay_equal(clipped):
    (heads, parameters), (other_heads, other_parameters) = (result["copies"] for result in clipped)
    assert heads
    assert heads == other_heads
    assert all(torch.equal(value, other_parameters[path]) for path, value in parameters.items())


def test_refusals(clipped):
    of_class, of_forward, flat = clipped[0]["refused"]
    assert "got FSDPLlamaAttention in layers.0.self_attn, whose class is unknown; " in of_class
    assert of_forward == (
        "model: expected nn.Linear or Conv1D for weights that are divided among processes, got "
        "layers.0.self_attn.q_proj of the class Linear"
    )
    assert flat == (
        "model: expected a model with its own parameters, got FullyShardedDataParallel at the model; "
        "fully_shard keeps single parameters"
    )
