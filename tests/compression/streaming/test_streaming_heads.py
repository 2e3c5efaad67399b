"""`StreamingHeads`: bytes, files, and the models that they are for."""

import functools
import json
from copy import deepcopy
from io import StringIO

import numpy as np
import pytest
import torch

import headwise as hw
from compression.streaming import streaming_oracle
from compression.streaming.streaming_oracle import ids
from headwise.compression.streaming.localize import localize
from headwise.compression.streaming.streaming_heads import StreamingHeads

WINDOW, FIRST = 4, 2


@functools.cache
def localized(name="llama", dtype=torch.float64):
    """Return a model, which tests copy before they change it, and its streaming heads."""
    made = streaming_oracle.model(name).to(dtype)
    dataset = [{"input_ids": ids(2, 15, seed)} for seed in range(2)]
    return made, localize(made, dataset, 0.2, window=WINDOW, first=FIRST)


@pytest.fixture(scope="module")
def llama():
    return localized()


@pytest.mark.parametrize("found_in", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("run_in", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@torch.no_grad()
def test_bytes_state_their_dtype_and_are_those_of_the_cache(found_in, run_in):
    made, streaming = localized(dtype=found_in)
    made = deepcopy(made).to(run_in)
    stated = streaming.cache_bytes(15, batch=2, dtype=run_in)
    cache = streaming.cache(made)
    with streaming.running(made):
        made(ids(2, 15), past_key_values=cache)
    assert stated.streaming == sum(
        tensor.nbytes
        for layer in cache.layers
        for name in ("keys", "values", "window_keys", "window_values")
        if (tensor := getattr(layer, name, None)) is not None
    )
    assert stated.dtype == str(run_in).removeprefix("torch.")
    by_default = streaming.cache_bytes(15, batch=2)
    assert by_default == streaming.cache_bytes(15, batch=2, dtype=found_in)
    assert by_default.dtype == str(found_in).removeprefix("torch.")
    assert by_default.dense * run_in.itemsize == stated.dense * found_in.itemsize


@pytest.mark.usefixtures("as_user")
def test_bytes_of_another_kind_are_refused(llama):
    for dtype in ("float32", torch.int8):
        with pytest.raises(hw.InputError, match="dtype: expected a floating-point dtype"):
            llama[1].cache_bytes(15, dtype=dtype)


@pytest.mark.parametrize("found_in", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("run_in", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_a_model_is_recognized_in_another_dtype(found_in, run_in):
    made = streaming_oracle.model("llama")
    streaming = StreamingHeads.from_json(localized(dtype=found_in)[1].to_json())
    streaming.cache(deepcopy(made).to(found_in))  # the same numbers
    if run_in != found_in:
        streaming.cache(deepcopy(made).to(run_in))
        streaming.cache(deepcopy(made).to(found_in).to(run_in))
    torch.manual_seed(1)
    other = deepcopy(made)
    for weight in other.model.layers[2].self_attn.parameters():
        torch.nn.init.normal_(weight, std=float(weight.detach().std()))
    with pytest.raises(hw.InputError, match="the model of these streaming heads, got one with other weights"):
        streaming.cache(other.to(run_in))


def test_the_result_is_saved_printed_and_listed(llama, tmp_path):
    made, streaming = llama
    streaming.save(tmp_path / "streaming.json")
    loaded = StreamingHeads.load(tmp_path / "streaming.json")
    assert loaded == streaming
    with loaded.running(made), torch.no_grad():
        made(ids(1, 9), past_key_values=loaded.cache(made))
    table = streaming.table()
    assert len(table) == 6
    assert table.streaming.sum() == streaming.streaming_kv_heads
    assert table.outside.between(0, 1).all()
    assert f"{streaming.streaming_kv_heads} of 6 key/value heads stream" in str(streaming)
    assert f"{streaming.modules[1].outside[0]:6.1%}" in str(streaming).splitlines()[5]
    assert repr(streaming) == f"StreamingHeads({streaming.streaming_kv_heads} of 6 key/value heads, window 4, first 2)"
    others = [('"format": 1', '"format": 2'), ('"float64"', '"float65"'), ('"float64"', '"nn"')]
    for text in ("[]", "{}", *(streaming.to_json().replace(*other) for other in others)):
        with pytest.raises(hw.InputError, match="streaming: expected JSON of streaming heads"):
            StreamingHeads.from_json(text)
    with pytest.raises(hw.InputError, match="streaming: expected a file with streaming heads"):
        StreamingHeads.load(tmp_path / "none.json")


def test_the_exported_pattern_is_read_as_kvpress_reads_it(llama, tmp_path):
    _, streaming = llama
    streaming.export_pattern(tmp_path / "pattern")
    config = json.loads((tmp_path / "pattern" / "config.json").read_text())
    text = (tmp_path / "pattern" / "full_attention_heads.tsv").read_text()
    scores = np.clip(np.loadtxt(StringIO(text), dtype=float, delimiter="\t"), 0, 1)
    assert (config["sink_size"], config["recent_size"]) == (FIRST, WINDOW)
    assert scores.shape == (3, 2)
    ratio = streaming.streaming_kv_heads / streaming.kv_heads
    lowest = np.argsort(scores, axis=None)[: round(scores.size * ratio)]
    mask = np.zeros(scores.shape, dtype=bool)
    mask[np.unravel_index(lowest, scores.shape)] = True
    assert mask.tolist() == [[head in each.streaming for head in range(2)] for each in streaming.modules]


def test_a_pattern_of_layers_with_windows_is_refused(tmp_path):
    _, streaming = localized("gemma3")
    with pytest.raises(hw.InputError, match="none of which has a window of its own"):
        streaming.export_pattern(tmp_path)


def test_heads_of_another_model_are_refused(llama):
    _, streaming = llama
    other = streaming_oracle.model("llama")
    with torch.no_grad():
        other.model.layers[0].self_attn.q_proj.weight.mul_(2.0)
    for call in (streaming.running, streaming.cache):
        with pytest.raises(hw.InputError, match="the model of these streaming heads, got one with other weights"):
            call(other)
    with pytest.raises(hw.InputError, match=r"one with a module model\.layers\.0\.self_attn"):
        streaming.running(streaming_oracle.model("gpt2"))


@pytest.mark.usefixtures("as_user")
def test_edited_values_are_refused(llama):
    content = json.loads(llama[1].to_json())
    first, *others = content["modules"]
    edits = [("window", 0), ("window", 2.5), ("first", -1), ("budget", "x"), ("losses", [1.0]), ("has_held_out", 1)]
    edits += [("losses", [0.0, 0.0]), ("identity", [1, 2, 3]), ("weights", ["1"]), ("budget", float("nan"))]
    of_module = [("streaming", [-1]), ("streaming", [0, 0]), ("streaming", [9]), ("streaming", [0.0]), ("layer", -1)]
    of_module += [
        ("num_kv_heads", 0),
        ("num_heads", 5),
        ("features_per_token", 0),
        ("dtype", "int8"),
        ("scores", [1.0]),
        ("layer", 1),
        ("outside", ["0.5"] * first["num_kv_heads"]),
    ]
    texts = [json.dumps(content | {name: value}) for name, value in [*edits, ("modules", [])]]
    texts += [json.dumps(content | {"modules": [first | {name: value}, *others]}) for name, value in of_module]
    texts.append(json.dumps(content | {"modules": [first, first]}))
    for text in [*texts, None, 5]:
        with pytest.raises(hw.InputError, match="^streaming: expected "):
            StreamingHeads.from_json(text)
