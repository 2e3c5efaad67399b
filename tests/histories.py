"""Histories for tests, with numbers that a function computes."""

from headwise.monitoring.history import History


def history(layers, heads, steps, value, statistic="entropy", folder=None):
    """Return a history with `value(layer, head, step)` of each head in each of the `steps`."""
    settings = {"model": "TinyModel", "statistics": [statistic]}
    result = History(settings) if folder is None else History.create(folder, settings)
    for step in steps:
        result.append(step, rows(layers, heads, lambda layer, head, step=step: {statistic: value(layer, head, step)}))
    return result


def rows(layers, heads, statistics):
    """Return the rows of a step with the dict `statistics(layer, head)` of each head."""
    shared = {"kind": "self", "sequences": 3, "nonfinite_rows": 0}
    return [
        {
            "layer": layer,
            "head": head,
            "kv_head": head,
            "module": f"layers.{layer}",
            **shared,
            **statistics(layer, head),
        }
        for layer in range(layers)
        for head in range(heads)
    ]
