"""Results of a study, of the layers of a model, and of timings, and what is computed from them."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from research.claims.estimates import Estimate, ratios, slope

# -- studies ----------------------------------------------------------------------------------------------------------


class Study:
    """Results of one study: the runs of each number of heads.

    Attributes:
        name: of the study.
        saved: the content of its file.
        runs: one dictionary for each training, by number of heads.
    """

    def __init__(self, name: str, saved: Mapping[str, Any]) -> None:
        self.name, self.saved = name, saved
        runs = {int(heads): each for heads, each in saved["runs"].items()}
        self.runs: dict[int, list[dict[str, Any]]] = dict(sorted(runs.items()))

    @property
    def title(self) -> str:
        """Data, task, width and depth in words."""
        depth = self.saved["depth"]
        layers = f"{depth} layer{'s' * (depth > 1)}"
        return f"{self.saved['data']}, {self.saved['task']}, width {self.saved['width']}, {layers}"

    @property
    def heads(self) -> list[int]:
        """Numbers of heads that were compared, in increasing order."""
        return list(self.runs)

    @property
    def margin(self) -> float:
        """Smallest significant difference between two mean losses, by Tukey's range test; NaN if it is unknown."""
        return math.nan if self.saved["margin"] is None else self.saved["margin"]

    def values(self, name: str = "loss", without: int | None = None) -> dict[int, dict[int, float]]:
        """Return a measured value of each run, by number of heads and seed. It is infinite if the training diverged.

        Args:
            name: of the value, such as "loss" or "train_loss".
            without: seed to leave out.
        """
        return {
            heads: {run["seed"]: math.inf if run[name] is None else run[name] for run in runs if run["seed"] != without}
            for heads, runs in self.runs.items()
        }

    def losses(self, without: int | None = None) -> dict[int, Estimate]:
        """Return the mean held-out loss over seeds with its interval, by number of heads.

        Args:
            without: seed to leave out.
        """
        return {heads: Estimate.of(list(values.values())) for heads, values in self.values("loss", without).items()}

    @property
    def best(self) -> int:
        """Number of heads with the lowest mean loss."""
        return lowest(self.losses())

    def is_worse(self, heads: int) -> bool:
        """Return whether a number of heads is significantly worse than the best."""
        losses = self.losses()
        return losses[heads].mean - losses[self.best].mean > self.margin

    @property
    def not_worse(self) -> list[int]:
        """Numbers of heads that are not significantly worse than the best."""
        return [heads for heads in self.heads if not self.is_worse(heads)]


def lowest(losses: Mapping[int, Estimate]) -> int:
    """Return the number of heads with the lowest mean."""
    return min(losses, key=lambda heads: losses[heads].mean)


def is_good(study: Study, heads: int, without: int | None = None) -> bool:
    """Return whether the mean loss is at most the best mean loss plus the standard error of that best mean.

    Args:
        study: results of a setting.
        heads: number of heads.
        without: seed to leave out.
    """
    losses = study.losses(without)
    best = losses[lowest(losses)]
    tolerance = 0.0 if math.isnan(best.error) else best.error
    return heads in losses and losses[heads].mean <= best.mean + tolerance


def is_good_in_pairs(study: Study, heads: int) -> bool:
    """Return whether the mean difference to the best, taken seed by seed, is at most its standard error."""
    values, losses = study.values(), study.losses()
    if heads not in values:
        return False
    best = values[lowest(losses)]
    difference = Estimate.of([loss - best[seed] for seed, loss in values[heads].items()])
    return difference.mean <= difference.error or lowest(losses) == heads


# -- gaps and ablation effects ----------------------------------------------------------------------------------------


def slopes(values: Mapping[int, Mapping[int, float]]) -> Estimate:
    """Return the change of a value for each doubling of the heads, fitted for each seed and averaged over seeds.

    Args:
        values: by number of heads, then by seed. Seeds without a finite value for each number of heads are left out.
    """
    finite = ({seed for seed, value in by_seed.items() if math.isfinite(value)} for by_seed in values.values())
    seeds = sorted(set.intersection(*finite))
    return Estimate.of([slope({heads: by_seed[seed] for heads, by_seed in values.items()}) for seed in seeds])


def gaps(study: Study) -> dict[int, dict[int, float]]:
    """Return the generalisation gap, held-out loss minus training loss, by number of heads and seed."""
    held, train = study.values(), study.values("train_loss")
    return {heads: {seed: held[heads][seed] - train[heads][seed] for seed in held[heads]} for heads in held}


def cost_of_half(study: Study, how: str) -> dict[int, dict[int, float]]:
    """Return the increase of the loss without half of the heads, by number of heads and seed.

    Args:
        study: whose trained models lost heads.
        how: "random" (mean over the random sets) or "least" (the least important half).
    """
    return _of_removed(study, lambda removed: _loss_of_half(removed, how) - removed["whole"])


def cost_of_all(study: Study) -> dict[int, dict[int, float]]:
    """Return the increase of the loss without any head, by number of heads and seed."""
    return _of_removed(study, lambda removed: removed["least"][str(removed["heads"])] - removed["whole"])


def share_of_half(study: Study, how: str) -> dict[int, dict[int, float]]:
    """Return the effect of removing half of the heads as a share of the effect of removing all."""
    half, every = cost_of_half(study, how), cost_of_all(study)
    return {heads: {seed: cost / every[heads][seed] for seed, cost in runs.items()} for heads, runs in half.items()}


def _of_removed(study: Study, value: Callable[[Mapping[str, Any]], float]) -> dict[int, dict[int, float]]:
    return {heads: {run["seed"]: value(run["removed"]) for run in runs} for heads, runs in study.runs.items()}


def _loss_of_half(removed: Mapping[str, Any], how: str) -> float:
    losses = removed[how][str(removed["heads"] // 2)]
    return _mean(losses) if isinstance(losses, list) else losses


# -- distances by layer -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Layer:
    """Mean distance between the heads of one layer, and its difference to untrained models.

    Attributes:
        model: title of the model.
        heads: number of heads; 0 for a real model.
        layer: index of the layer.
        trained: distance in the trained model.
        untrained: distance in the untrained model.
        as_sharp: distance in the untrained model whose queries are scaled to the entropy of the trained one.
        over_untrained: paired difference of trained and untrained.
        over_as_sharp: paired difference of trained and as_sharp.
    """

    model: str
    heads: int
    layer: int
    trained: Estimate
    untrained: Estimate
    as_sharp: Estimate
    over_untrained: Estimate
    over_as_sharp: Estimate


def layers_of(study: Study) -> list[Layer]:
    """Return the layers of the trained models of a study, with means over seeds."""
    layers = []
    for heads, runs in study.runs.items():
        if "distance" not in runs[0]:
            continue
        for layer in runs[0]["distance"]["trained"]:
            of = {name: [run["distance"][name][layer] for run in runs] for name in runs[0]["distance"]}
            layers.append(_layer(study.title, heads, int(layer), of["trained"], of["untrained"], of["as sharp"]))
    return layers


def layers_of_real(saved: Mapping[str, Any]) -> list[Layer]:
    """Return the layers of a real model, with means over sequences. Untrained models are first averaged over seeds."""
    layers = []
    for layer in saved["trained"][0]:
        trained = [sequence[layer] for sequence in saved["trained"]]
        others = [
            [_mean(seed[sequence][layer] for seed in saved[kind]) for sequence in range(len(trained))]
            for kind in ("untrained", "as sharp")
        ]
        layers.append(_layer(saved["title"], 0, int(layer), trained, *others))
    return layers


def _layer(model: str, heads: int, layer: int, *of: Sequence[float]) -> Layer:
    trained, *others = of
    over = (Estimate.of([a - b for a, b in zip(trained, other, strict=True)]) for other in others)
    return Layer(model, heads, layer, *map(Estimate.of, of), *over)


def _mean(values: Any) -> float:
    listed = list(values)
    return sum(listed) / len(listed)


# -- times ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class TimeRatio:
    """Ratio of two times: median and quartiles over rounds.

    Attributes:
        regime: device, batch and length.
        what: forward or training.
        heads: number of heads.
        low: lower quartile.
        median: of the ratios.
        high: upper quartile.
    """

    regime: str
    what: str
    heads: int
    low: float
    median: float
    high: float


def time_ratios(regimes: Sequence[Mapping[str, Any]], over: str, under: str) -> list[TimeRatio]:
    """Return the ratio of two cases for every regime, forward and training, and every number of heads.

    Args:
        regimes: results of the timings.
        over: name of the numerator, in which {n} stands for the number of heads.
        under: name of the denominator, likewise.
    """
    ratios_of_cases = []
    for regime in regimes:
        seconds = regime["seconds"]
        numbers = sorted({int(name.split()[-1]) for name in seconds})
        title = f"{regime['device']}, batch {regime['batch']}, length {regime['length']}"
        for what in ("forward", "training"):
            for n in numbers:
                pair = (seconds[f"{what} {name.format(n=n)}"] for name in (over, under))
                ratios_of_cases.append(TimeRatio(title, what, n, *ratios(*pair)))
    return ratios_of_cases
