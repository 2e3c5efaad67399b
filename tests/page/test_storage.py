"""Numbers of a page as bytes, decoded by code of its own."""

import base64
import gzip
import json
import math
import struct

import numpy
import pytest
import torch

import headwise as hw
import tiny
from headwise.analysis.page import page_contents
from headwise.page import write
from headwise.page.contents import AllWeights, HeadAttention, LargestWeights, VisibleKeys
from headwise.page.write import angular, page_html, page_json, stored_rows


def decoded(weights, steps):
    """Return the weights behind angular integers, one by one."""
    return numpy.array([math.sin(q / steps * math.pi / 2) ** 2 for q in weights])


@pytest.mark.parametrize(("dtype", "steps"), [(torch.uint8, 255), (torch.uint16, 65535)])
def test_the_error_of_angular_integers_is_bounded(dtype, steps):
    weights = torch.cat([torch.linspace(0, 1, 1003), torch.tensor([0.0, 1.0, 0.5, 1e-6, 1 - 1e-6])])
    found = decoded(angular(weights, dtype).tolist(), steps)
    errors = numpy.abs(found - weights.double().numpy())
    assert errors.max() <= math.pi / 4 / steps * 1.001
    assert found[-5] == 0
    assert found[-4] == 1
    assert errors[-2:].max() < 1e-4
    assert errors.max() > math.pi / 8 / steps  # the bound is close


def blob(arrays, name):
    """Return the bytes of an array of a page."""
    return gzip.decompress(base64.b64decode(arrays[name]))


def rows_of(data, queries, keys):
    """Decode sparse rows: for each query a dict of weights by key, and the sum of all its weights."""
    (count,) = struct.unpack_from("<i", data)
    counts = struct.unpack_from(f"<{queries}H", data, 4)
    totals = decoded(struct.unpack_from(f"<{queries}H", data, 4 + 2 * queries), 65535)
    start = 4 + 4 * queries
    size, code = (2, "H") if keys <= 65536 else (4, "I")
    listed = struct.unpack_from(f"<{count}{code}", data, start)
    weights = decoded(data[start + size * count :], 255)
    assert len(weights) == count
    rows, place = [], 0
    for number in counts:
        assert list(listed[place : place + number]) == sorted(set(listed[place : place + number]))
        rows.append(dict(zip(listed[place : place + number], weights[place : place + number], strict=True)))
        place += number
    return rows, totals


def seen_from_the_start(queries, keys):
    """Return that each query sees all keys."""
    first = torch.zeros(queries, dtype=torch.int64)
    return VisibleKeys(first + 1, first, first + keys)


def heads_with(weights, keys=None):
    """Return the attention of heads with these weights."""
    queries, number = weights.shape[1:]
    everything = seen_from_the_start(queries, number)
    return [HeadAttention(0, 0, keys or number, each[:1, :1], AllWeights(each), everything) for each in weights]


def test_all_weights_are_stored_if_there_are_few():
    weights = torch.rand(3, 5, 7).softmax(-1)
    for (storage, data), expected in zip(stored_rows(heads_with(weights)), weights, strict=True):
        assert storage == "dense"
        found = decoded(struct.unpack("<35H", data), 65535)
        numpy.testing.assert_allclose(found, expected.flatten().double().numpy(), atol=1.3e-5)


@pytest.mark.parametrize("keys", [None, 70_000])
def test_the_largest_weights_are_stored_if_there_are_many(monkeypatch, keys):
    monkeypatch.setattr(write, "DENSE_WEIGHTS", 1)
    monkeypatch.setattr(write, "LISTED_WEIGHTS", 3 * 5 * 4)
    weights = (torch.rand(3, 5, 47) * 4).softmax(-1)
    weights[1, 2] = 0  # a row without a visible key
    stored = stored_rows(heads_with(weights, keys))
    listed = []
    for (_, data), expected in zip(stored, weights, strict=True):
        rows, totals = rows_of(data, 5, keys or 47)
        numpy.testing.assert_allclose(totals, expected.sum(-1).numpy(), atol=2e-5)
        for row, truth in zip(rows, expected, strict=True):
            assert len(row) >= 2 * bool(truth.any())  # half of the budget is the same for all queries
            for key, weight in row.items():
                assert float(truth[key]) - 0.0062 <= weight <= float(truth[key]) + 1e-7
            left_out = [float(truth[key]) for key in range(47) if key not in row]
            assert not row or max(left_out) <= min(float(truth[key]) for key in row)
            listed += [float(truth[key]) for key in row]
    assert len(listed) <= 60
    assert len(listed) >= 55


def test_listed_and_dense_weights_of_a_view_are_the_same_page_numbers(monkeypatch):
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    (text,) = tiny.texts(53)
    dense, listed = (hw.view(model, tokenizer, text, keep_all=keep) for keep in (64, 0))
    monkeypatch.setattr(write, "DENSE_WEIGHTS", 1)
    for seen in (dense, listed):
        values, arrays = page_json(page_contents([seen]))
        for index, head in enumerate(dense.heads):
            stored = values["passages"][0]["heads"][0][index]
            assert stored["storage"] == "sparse"
            rows, totals = rows_of(blob(arrays, stored["rows"]), 53, 53)
            truth = head.attention.weights.weights
            numpy.testing.assert_allclose(totals, numpy.ones(53), atol=1e-4)
            for query, row in enumerate(rows):
                assert len(row) >= min(query + 1, 32) - 8  # only weights that are rounded to 0 are left out
                assert max(row) <= query
                assert list(row.values()) == pytest.approx([float(truth[query, key]) for key in row], abs=0.0062)


def test_values_tiles_and_visible_keys_of_a_page_equal_the_view():
    model, tokenizer = tiny.model("decoder"), tiny.tokenizer("decoder")
    texts = tiny.texts(7, 13)
    seen = hw.view(model, tokenizer, texts)
    values, arrays = page_json(page_contents([seen]))
    names = [statistic["name"] for statistic in values["statistics"]]
    numbers = numpy.frombuffer(blob(arrays, "values"), "<f4").reshape(3, len(names), 12)
    for row, name in enumerate(names):
        for index in range(12):
            expected = seen.estimate(name, index)
            assert tuple(numbers[:, row, index]) == pytest.approx(expected[:3], rel=1e-6, nan_ok=True)
    for number, view in enumerate(seen):
        own = numpy.frombuffer(blob(arrays, f"p{number}-values"), "<f4").reshape(len(names), 12)
        tiles = numpy.frombuffer(blob(arrays, f"p{number}-tiles-0"), "u1").reshape(12, len(view.words), len(view.words))
        visible = blob(arrays, values["passages"][number]["visibility"][0])
        length = len(view.words)
        assert struct.unpack_from("<i", visible) == (length,)
        assert struct.unpack_from(f"<{length}H", visible, 4) == (1,) * length
        bounds = struct.unpack_from(f"<{2 * length}I", visible, 4 + 2 * length)
        assert bounds == (*[0] * length, *range(1, length + 1))  # a query sees the keys up to itself
        for index, head in enumerate(view.heads):
            assert values["passages"][number]["heads"][0][index]["visible"] == 0
            assert own[names.index("entropy"), index] == pytest.approx(head.means["entropy"], rel=1e-6)
            found = decoded(tiles[index].flatten(), 255).reshape(length, length)
            numpy.testing.assert_allclose(found, head.attention.tiles.numpy(), atol=0.0031)


def test_equal_contents_give_equal_pages(coffee):
    assert page_html(page_contents([coffee])) == page_html(page_contents([coffee]))


def test_the_policy_of_a_page_allows_its_own_style_and_script_alone(coffee):
    page = page_html(page_contents([coffee]))
    policy = page.split('http-equiv="Content-Security-Policy" content="')[1].split('"')[0].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe" not in policy
    assert "http" not in policy
    assert len(page) < 300_000


def test_no_text_can_end_the_data(minilm):
    text = "</script><script>alert(1)</script> <!-- \u2028 & 'quotes' \"too\""
    seen = hw.view(minilm.model, minilm.tokenizer, text, title="<b>&\"'</b>")
    page = page_html(page_contents([seen]))
    data = page.split('<script type="application/json" id="contents">')[1].split("</script>")[0]
    assert not set("<>&\u2028\u2029") & set(data)
    contents = json.loads(data)
    assert contents["title"] == "<b>&\"'</b>"
    assert "<b>&" not in page.replace(data, "")
    assert contents["passages"][0]["title"].startswith("</script>")


def test_weights_beyond_the_listed_ones_are_not_invented():
    keys = torch.arange(5).expand(3, 5)
    weights = torch.tensor([[0.5, 0.25, 0.0, 0.0, 0.0]] * 3)
    largest = LargestWeights(keys, weights, torch.full((3,), 0.9))
    head = HeadAttention(0, 0, 9, torch.ones(1, 1), largest, seen_from_the_start(3, 9))
    ((_, data),) = stored_rows([head])
    rows, totals = rows_of(data, 3, 9)
    assert [sorted(row) for row in rows] == [[0, 1]] * 3
    assert totals == pytest.approx([0.9] * 3, abs=1e-4)
