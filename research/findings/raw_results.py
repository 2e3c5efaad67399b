"""Raw results: statistics of every head on every sequence, and similarities of every two heads of a layer."""

import json
from collections.abc import Callable, Collection, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from headwise.data.batches import NumberedBatches

DIGITS = 10
"""Significant digits of a saved number."""


def save_once(path: Path, measure: Callable[[], Any]) -> None:
    """Write what `measure` returns to a JSON file, unless the file exists."""
    if not path.exists():
        text = json.dumps(measure())
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_suffix(".part").write_text(text + "\n")
        path.with_suffix(".part").replace(path)


def statistics_of_sequences(
    model: nn.Module, data: NumberedBatches, special: Collection[int], statistic: str
) -> dict[str, Any]:
    """Return a statistic of every head on every sequence: `values`, a list for each head by its name, and `documents`,
    the document of each sequence.
    """
    values: dict[str, list[float]] = {}
    with torch.no_grad():
        for batch in data:
            for index in range(len(batch["input_ids"])):
                with hw.watch(model, special=special) as heads:
                    model(**{name: tensor[index : index + 1] for name, tensor in batch.items()})
                for row in heads.rows():
                    of_head = values.setdefault(f"{row['layer']}.{row['head']}", [])
                    of_head.append(rounded(row[statistic]))
    return {"statistic": statistic, "documents": list(data.documents), "values": values}


def similarities(model: nn.Module, data: Iterable[Mapping[str, Tensor]]) -> dict[str, Any]:
    """Return the debiased CKA of every two heads of a layer; and for a BERT, also the plain CKA, with the bias that few
    tokens cause (Kornblith et al. 2019, equation 3).
    """
    batches = list(data)
    found = {
        "tokens": sum(int(batch["attention_mask"].sum()) for batch in batches),
        "debiased": pairs_of_layers(hw.redundancy(model, batches)),
    }
    if hasattr(model, "encoder"):
        found["plain"] = plain_similarities(model, batches)
    return found


def pairs_of_layers(redundancy: hw.Redundancy) -> list[float]:
    """Return the CKA of every two heads of a layer."""
    table = redundancy.table()
    values = [value for a, b, value in zip(table["a"], table["b"], table["cka"], strict=True) if _layer(a) == _layer(b)]
    return [rounded(value) for value in values]


def _layer(name: Any) -> str:
    """Return the layer of a head named `layer.head`."""
    return str(name).split(".")[0]


def plain_similarities(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> list[float]:
    """Return the plain CKA of every two heads of each layer of a BERT, from the inputs of its output projections. The
    batches have no padding.
    """
    outputs: dict[int, list[Tensor]] = {}
    heads = model.config.num_attention_heads
    hooks = [
        layer.attention.output.dense.register_forward_pre_hook(
            lambda _module, inputs, number=number: outputs.setdefault(number, []).append(inputs[0].flatten(0, 1))
        )
        for number, layer in enumerate(model.encoder.layer)
    ]
    with torch.no_grad():
        for batch in batches:
            model(**batch)
    for hook in hooks:
        hook.remove()
    found = []
    for number in sorted(outputs):
        of_heads = torch.cat(outputs[number]).double().unflatten(1, (heads, -1))
        of_heads = of_heads - of_heads.mean(0)
        for first in range(heads):
            found += [rounded(plain_cka(of_heads[:, first], of_heads[:, each])) for each in range(first + 1, heads)]
    return found


def plain_cka(x: Tensor, y: Tensor) -> float:
    """Return the linear CKA of two matrices `(tokens, features)` whose columns have the mean 0."""
    return float((x.mT @ y).norm() ** 2 / ((x.mT @ x).norm() * (y.mT @ y).norm()))


def rounded(value: float) -> float:
    """Return a number with `DIGITS` significant digits."""
    return float(f"{value:.{DIGITS}g}")
