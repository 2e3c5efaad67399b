"""What was measured, read back and put together: a study, the layers of a model, times. No verdicts here."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from research.claims.spread import Estimate, ratios, slope

# -- studies ----------------------------------------------------------------------------------------------------------


class Study:
    """One study as it was saved."""

    def __init__(self, name: str, saved: Mapping[str, Any]) -> None:
        self.name, self.saved = name, saved
        runs = {int(heads): each for heads, each in saved["runs"].items()}
        self.runs: dict[int, list[dict[str, Any]]] = dict(sorted(runs.items()))

    @property
    def title(self) -> str:
        """Data, task, width and depth."""
        depth = self.saved["depth"]
        layers = f"{depth} layer{'s' * (depth > 1)}"
        return f"{self.saved['data']}, {self.saved['task']}, width {self.saved['width']}, {layers}"

    @property
    def heads(self) -> list[int]:
        """The numbers that were compared."""
        return list(self.runs)

    @property
    def margin(self) -> float:
        """The least difference of two mean losses that can be told, by Tukey's range test."""
        return math.nan if self.saved["margin"] is None else self.saved["margin"]

    def values(self, name: str = "loss", without: int | None = None) -> dict[int, dict[int, float]]:
        """Of each number of heads, by seed; one that diverged is infinite."""
        return {
            heads: {run["seed"]: math.inf if run[name] is None else run[name] for run in runs if run["seed"] != without}
            for heads, runs in self.runs.items()
        }

    def losses(self, without: int | None = None) -> dict[int, Estimate]:
        """Held-out loss over seeds."""
        return {heads: Estimate.of(list(each.values())) for heads, each in self.values("loss", without).items()}

    @property
    def best(self) -> int:
        """The number of heads of least mean loss."""
        return least(self.losses())

    def is_worse(self, heads: int) -> bool:
        """Whether it can be told that so many are worse than the best."""
        losses = self.losses()
        return losses[heads].mean - losses[self.best].mean > self.margin

    @property
    def alike(self) -> list[int]:
        """Those that are not told from the best."""
        return [heads for heads in self.heads if not self.is_worse(heads)]


def least(losses: Mapping[int, Estimate]) -> int:
    """The number of heads whose mean is least."""
    return min(losses, key=lambda heads: losses[heads].mean)


def is_good(study: Study, heads: int, without: int | None = None) -> bool:
    """Whether the mean of so many heads is within one standard error of the best mean, the error being the best's."""
    losses = study.losses(without)
    best = losses[least(losses)]
    room = 0.0 if math.isnan(best.error) else best.error
    return heads in losses and losses[heads].mean <= best.mean + room


def is_good_in_pairs(study: Study, heads: int) -> bool:
    """The same, the difference and its error taken seed by seed."""
    values, losses = study.values(), study.losses()
    if heads not in values:
        return False
    best = values[least(losses)]
    apart = Estimate.of([loss - best[seed] for seed, loss in values[heads].items()])
    return apart.mean <= apart.error or least(losses) == heads


# -- what heads cost and close --------------------------------------------------------------------------------------


def slopes(of: Mapping[int, Mapping[int, float]]) -> Estimate:
    """The change for each doubling of the heads, seed by seed."""
    seeds = sorted(set.intersection(*({seed for seed in each if math.isfinite(each[seed])} for each in of.values())))
    return Estimate.of([slope({heads: each[seed] for heads, each in of.items()}) for seed in seeds])


def gaps(study: Study) -> dict[int, dict[int, float]]:
    """Held-out loss less training loss."""
    held, train = study.values(), study.values("train_loss")
    return {heads: {seed: held[heads][seed] - train[heads][seed] for seed in held[heads]} for heads in held}


def cost_of_half(study: Study, how: str) -> dict[int, dict[int, float]]:
    """What the loss rises by without half of the heads, at random (the mean of the draws) or the least important."""
    return _of_removed(study, lambda removed: _loss_of_half(removed, how) - removed["whole"])


def cost_of_all(study: Study) -> dict[int, dict[int, float]]:
    """What it rises by without any head: what attention is worth to the model."""
    return _of_removed(study, lambda removed: removed["least"][str(removed["heads"])] - removed["whole"])


def share_of_half(study: Study, how: str) -> dict[int, dict[int, float]]:
    """The part that half of the heads cost of what all of them do."""
    half, every = cost_of_half(study, how), cost_of_all(study)
    return {heads: {seed: cost / every[heads][seed] for seed, cost in runs.items()} for heads, runs in half.items()}


def _of_removed(study: Study, value: Callable[[Mapping[str, Any]], float]) -> dict[int, dict[int, float]]:
    return {heads: {run["seed"]: value(run["removed"]) for run in runs} for heads, runs in study.runs.items()}


def _loss_of_half(removed: Mapping[str, Any], how: str) -> float:
    given = removed[how][str(removed["heads"] // 2)]
    return _mean(given) if isinstance(given, list) else given


# -- layers ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Distances in one layer, and how far it is above those of the untrained model, and of that one made as sharp."""

    model: str
    heads: int
    layer: int
    trained: Estimate
    untrained: Estimate
    as_sharp: Estimate
    over_untrained: Estimate
    over_as_sharp: Estimate


def layers_of(study: Study) -> list[Layer]:
    """Of the trained models of a study, over seeds."""
    found = []
    for heads, runs in study.runs.items():
        if "distance" not in runs[0]:
            continue
        for layer in runs[0]["distance"]["trained"]:
            of = {name: [run["distance"][name][layer] for run in runs] for name in runs[0]["distance"]}
            found.append(_layer(study.title, heads, int(layer), of["trained"], of["untrained"], of["as sharp"]))
    return found


def layers_of_real(saved: Mapping[str, Any]) -> list[Layer]:
    """Of a real model, over sequences; of untrained ones the mean over their seeds."""
    found = []
    for layer in saved["trained"][0]:
        trained = [each[layer] for each in saved["trained"]]
        others = [
            [_mean(seed[each][layer] for seed in saved[kind]) for each in range(len(trained))]
            for kind in ("untrained", "as sharp")
        ]
        found.append(_layer(saved["title"], 0, int(layer), trained, *others))
    return found


def _layer(model: str, heads: int, layer: int, *of: Sequence[float]) -> Layer:
    trained, *others = of
    over = (Estimate.of([a - b for a, b in zip(trained, other, strict=True)]) for other in others)
    return Layer(model, heads, layer, *map(Estimate.of, of), *over)


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


# -- times -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Cost:
    """A time against another: the median of the ratios of pairs, and their quartiles."""

    regime: str
    what: str
    heads: int
    low: float
    median: float
    high: float


def costs(regimes: Sequence[Mapping[str, Any]], over: str, under: str) -> list[Cost]:
    """Of every regime, forward and training: `over` against `under`, names in which {n} is the number of heads."""
    found = []
    for regime in regimes:
        seconds = regime["seconds"]
        numbers = sorted({int(name.split()[-1]) for name in seconds})
        title = f"{regime['device']}, batch {regime['batch']}, length {regime['length']}"
        for what in ("forward", "training"):
            for n in numbers:
                pair = (seconds[f"{what} {name.format(n=n)}"] for name in (over, under))
                found.append(Cost(title, what, n, *ratios(*pair)))
    return found
