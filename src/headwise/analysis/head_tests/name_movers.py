"""Name-mover test: heads that move a name to the end of a prompt, and heads that do the opposite."""

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headwise.analysis.attribution import logit_parts
from headwise.analysis.causality import require_causal_decoder
from headwise.analysis.circuits.module_maps import ModuleMaps, placed_module
from headwise.analysis.circuits.stream import NotLinearError, stream_factors, unembedding_matrix
from headwise.analysis.circuits.trace import RunTrace, double_copy
from headwise.analysis.head_pass import SequenceValues, measure_sequences, pass_data
from headwise.analysis.head_tests.name_prompts import NAMES, ROLES, TEMPLATES, NamePrompt, name_prompts
from headwise.analysis.head_tests.weight_reader import WeightReader
from headwise.analysis.prompts import AnswerTokens
from headwise.attention.autocast import without_autocast
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.checks import require_module, whole_number
from headwise.data.batches import NumberedBatches, call_model, device_of, evaluation_mode, with_cache_disabled
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import SiteKey
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.plots.kinds import require_name
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import NO_ESTIMATE, HeadRow, MeanEstimate
from headwise.runs.significance import (
    FALSE_DISCOVERY_RATE,
    false_discovery_rates,
    one_sided_p_values,
)
from headwise.settings import COPIED_PROMPTS, NAME_PROMPTS
from headwise.shapes import Bool, Float
from headwise.statistics.columns import Column


class NameMovers(HeadTable[HeadRow]):
    """Table of the name-mover test (Wang et al. 2022, sections 3.1 and 3.3), one row per head. All columns are means
    over prompts, with standard errors clustered by template; `n` counts templates.

        attention_indirect  weight from the last token to the name of the indirect object, which follows the prompt
        attention_subject   sum of the weights from the last token to both occurrences of the subject's name
        preference          attention_indirect - attention_subject
        logit               what the head adds directly to the logit of the indirect object minus that of the subject,
                            by the definition of `hw.logit_attribution`
        copying             share of names whose logit is among the 5 highest that the head's OV matrix produces for
                            the residual stream at the name, before the second attention module
        negative_copying    the same among the 5 lowest

    The copying columns are NaN for heads of the first attention module, which do not read that state, and for models
    without a linear residual stream. `metadata["measured"]["no_copying"]` is the reason.

    `tests()` has p-values (two-sided t-tests against zero over templates) of `preference` and `logit`. A name mover
    must have both effects: `name_mover_p` is the larger of the one-sided p-values of preference > 0 and logit > 0 (the
    intersection-union test, Berger 1982). `negative_p` is that of preference > 0 and logit < 0. The columns with `_q`
    are adjusted for the number of heads (Benjamini and Hochberg 1995).
    """

    NAME = "name_movers"
    ROW_TYPE = HeadRow
    COLUMNS = (
        Column("attention_indirect", "Weight from the last token to the name of the indirect object.", "share"),
        Column("attention_subject", "Weight from the last token to both occurrences of the subject's name.", "share"),
        Column("preference", "Difference between these two weights.", is_signed=True, is_tested=True),
        Column(
            "logit",
            "What the head adds directly to the logit of the indirect object minus that of the subject.",
            "logit",
            is_signed=True,
            is_tested=True,
        ),
        Column("copying", "Share of names that the head's OV matrix copies.", "share"),
        Column("negative_copying", "Share of names whose logit the head's OV matrix lowers most.", "share"),
    )
    SAMPLES = "prompt"
    PLOTTED = "logit"

    def tests(self) -> dict[str, list[float]]:
        """Return the columns of tests, each with one number per head: those of `preference` and `logit`, and of both.

        Raises:
            MissingExtra: scipy is not installed.
        """
        columns = [[row.statistics[name] for row in self.rows] for name in ("preference", "logit")]
        tests = super().tests()
        prefers, raises, lowers = (
            one_sided_p_values(measured, sign)
            for measured, sign in zip((*columns, columns[1]), (1, 1, -1), strict=True)
        )
        for name, p in (("name_mover", _largest(prefers, raises)), ("negative", _largest(prefers, lowers))):
            tests |= {f"{name}_p": p, f"{name}_q": false_discovery_rates(p)}
        return tests

    def found(self, kind: str = "name_mover", rate: float = FALSE_DISCOVERY_RATE) -> list[HeadRow]:
        """Return the heads that pass the test at a false discovery rate, those with the largest effect on the logits
        first.

        Args:
            kind: "name_mover" or "negative".
            rate: largest adjusted p-value.

        Raises:
            InputError: the kind is another one.
            MissingExtra: scipy is not installed.
        """
        require_name("kind", kind, dict.fromkeys(("name_mover", "negative")))
        q = self.tests()[f"{kind}_q"]
        rows = [row for row, adjusted in zip(self.rows, q, strict=True) if adjusted <= rate]
        return sorted(rows, key=lambda row: -abs(row.statistics["logit"].value))


def _largest(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the larger of two p-values of each head; NaN if one is NaN."""
    return [max(pair) if pair[0] == pair[0] else pair[0] for pair in zip(first, second, strict=True)]


AT_ONCE = 32
"""Largest number of prompts that the model reads at once."""


def name_movers(
    model: nn.Module,
    tokenizer: Any,
    *,
    prompts: int = NAME_PROMPTS,
    copied: int = COPIED_PROMPTS,
    names: Collection[str] = NAMES,
    templates: Collection[str] = TEMPLATES,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> NameMovers:
    """Test for each head whether it moves the name of the indirect object to the end of a prompt (Wang et al. 2022).
    `NameMovers` defines the columns and the tests.

    The model reads prompts such as "When Mary and John walked home from the bakery, John handed a warm loaf to". A name
    mover attends from the last token to the name that follows (Mary) more than to the other one, and raises its logit.
    A negative name mover attends in the same way, and lowers the logit.

        model, tokenizer = hw.load("smollm2", lm_head="causal")
        movers = hw.name_movers(model, tokenizer)
        movers.found()                      # the name movers, at a false discovery rate of 5 %
        movers.table()                      # one row per head: attention, logit, copying, tests

    The model runs in evaluation mode, without gradients: three times on each prompt, and a copy of it in float64 once
    on each of `copied` prompts.

    Args:
        model: a causal decoder with a language-model head, of which `watch` sees the attention.
        tokenizer: its tokenizer, a fast one.
        prompts: number of prompts.
        copied: number of these prompts whose names test the OV matrices of heads; 0 leaves out the copying scores.
        names: first names to draw from; those that are not one token of the tokenizer are left out.
        templates: beginnings of sentences with {A}, {B} and {C}, where {C} is one of the other two names.
        seed: seed of the names.
        out: folder for the table; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: the model's name for display.

    Raises:
        InputError: the model is an encoder, or its heads do not write directly into the input of the final norm; fewer
            than 8 names are one token each; or an argument has another form.
        MissingExtra: a package that `out` or `progress` needs is not installed.
    """
    require_module(model)
    drawn = name_prompts(tokenizer, prompts, seed, names, templates)
    whole_number("copied", copied, least=0)
    with evaluation_mode(model), torch.no_grad():
        require_causal_decoder(model, [_batch(model, drawn[:1])])
    reader, groups = _EndAttention(model), list(_groups(drawn))
    numbers = [prompt.template for group in groups for prompt in group]
    batches = [
        {"input_ids": torch.stack([prompt.ids for prompt in group]), "group": torch.full((len(group),), index)}
        for index, group in enumerate(groups)
    ]
    data = pass_data(model, NumberedBatches(batches, numbers), (), out=out, shown=progress)

    def measure_batch(batch: dict[str, Any]) -> tuple[list[SiteRecord], dict[SiteKey, SequenceValues]]:
        return _measure(model, reader, groups[int(batch["group"][0])])

    def make_table(
        registry: SiteRegistry, values: dict[SiteKey, SequenceValues], metadata: dict[str, Any]
    ) -> NameMovers:
        copying, reason = name_copying(model, drawn[:copied]) if copied else ({}, "no prompts to copy names from")
        logits = next(iter(values.values()))[OF_MODEL][:, 0]
        measured = {
            "templates": len(set(numbers)),
            "logit": MeanEstimate.of(logits.tolist(), numbers)._asdict(),
            "solved": float((logits > 0).double().mean()),
            "no_copying": reason,
        }
        rows = tuple(
            _row(labels, values[record.site], copying.get(record.site.path), numbers)
            for record, labels in registry.head_labels()
        )
        return NameMovers(rows, {**metadata, "measured": metadata["measured"] | measured})

    options: dict[str, Any] = {"prompts": prompts, "copied": copied, "seed": seed}
    options |= {"out": out, "force": force, "progress": progress, "title": title}
    table = measure_sequences(data, measure_batch, NameMovers, make_table, **options)
    reader.warn_of_unread(stacklevel=3)
    return table


OF_MODEL = "logit_of_model"
"""Name of the difference of the model's logits in the values of a prompt."""


def _measure(
    model: nn.Module, reader: "_EndAttention", prompts: Sequence[NamePrompt]
) -> tuple[list[SiteRecord], dict[SiteKey, SequenceValues]]:
    """Return the sites of a model, and for each prompt the attention to names and the direct effects of heads."""
    batch = _batch(model, prompts)
    reader.begin_prompts(torch.tensor([prompt.places for prompt in prompts]), batch["input_ids"].shape[1])
    with intercepted(model, reader):
        call_model(model, batch)
    reader.require_attention()
    answers, wrong = [prompt.answer for prompt in prompts], [prompt.wrong for prompt in prompts]
    parts = logit_parts(model, batch, AnswerTokens.from_arguments(answers, wrong, -1))
    sizes = [record.heads for record in reader.records]
    if sum(sizes) != parts.heads.shape[1]:
        raise InputError("model", expected="attention in the same modules in each run", got="other modules")
    values: dict[SiteKey, SequenceValues] = {}
    for record, effects in zip(reader.records, torch.split(parts.heads.double().cpu(), sizes, 1), strict=True):
        weights = reader.weights_of(record.site)
        if not bool(weights.isfinite().all()):
            raise InputError("model", expected="finite attention weights", got="NaN or infinity")
        indirect, subject = weights[..., 0], weights[..., 1:].sum(-1)
        values[record.site] = {
            "attention_indirect": indirect,
            "attention_subject": subject,
            "preference": indirect - subject,
            "logit": effects,
            OF_MODEL: parts.logit.double().cpu()[:, None],
        }
    return reader.records, values


def _row(
    labels: dict[str, Any], of_site: SequenceValues, copying: "NameCopying | None", templates: Sequence[int]
) -> HeadRow:
    """Return the row of a head from the values of its site, and from the copying of names in its module."""
    head, statistics = labels["head"], dict.fromkeys(("copying", "negative_copying"), NO_ESTIMATE)
    measured = {
        name: MeanEstimate.of(values[:, head].tolist(), templates)
        for name, values in of_site.items()
        if name != OF_MODEL
    }
    if copying is not None:
        for name, of_heads in (("copying", copying.highest), ("negative_copying", copying.lowest)):
            statistics[name] = MeanEstimate.of(of_heads[:, head].double().tolist(), copying.templates)
    return HeadRow(**labels, statistics=measured | statistics)


def _groups(prompts: Sequence[NamePrompt]) -> Iterator[list[NamePrompt]]:
    """Yield prompts of one length, which a model reads together without padding."""
    by_length: dict[int, list[NamePrompt]] = defaultdict(list)
    for prompt in prompts:
        by_length[len(prompt.ids)].append(prompt)
    for _, group in sorted(by_length.items()):
        yield from (group[start : start + AT_ONCE] for start in range(0, len(group), AT_ONCE))


def _batch(model: nn.Module, prompts: Sequence[NamePrompt]) -> dict[str, Any]:
    """Return the arguments of a model for prompts of one length."""
    ids = torch.stack([prompt.ids for prompt in prompts]).to(device_of(model))
    return with_cache_disabled(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)})


class _EndAttention(WeightReader):
    """Interceptor that reads the attention weights of the last token of prompts for the names in them."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self._places = torch.zeros(0, len(ROLES), dtype=torch.int64)
        self._row = 0
        self._weights: dict[SiteKey, Float[Tensor, "batch heads roles"]] = {}

    def begin_prompts(self, places: Tensor, length: int) -> None:
        """Expect a run of the model over prompts of `length` tokens, with names at `places`, `(prompts, roles)`."""
        self.begin(len(places), length)
        self._places, self._row, self._weights = places, length - 1, {}

    def read(self, site: SiteKey, block: RowBlock) -> None:
        """Store the weights of the last row for the tokens of names."""
        grid = block.grid
        if site not in self._weights:
            self._weights[site] = torch.zeros(grid.batch, grid.heads, len(ROLES), dtype=torch.float64)
        if self._row not in block.rows:
            return
        sequences, heads = block.sequences_and_heads
        weights = block.weights[:, :, self._row - block.rows.start].double().cpu()
        is_place = block.visibility.key_indices.cpu() == self._places[sequences, :, None]
        self._weights[site][sequences, heads] += torch.einsum("bhc,brc->bhr", weights, is_place.double())

    def weights_of(self, site: SiteKey) -> Float[Tensor, "prompts heads roles"]:
        """Return the weights at a site in the last run."""
        if site not in self._weights:
            raise InputError("model", expected="attention in the same modules in each run", got=f"none in {site.label}")
        return self._weights[site]


TOP = 5
"""Number of logits among which the name's must be."""


class NameCopying(NamedTuple):
    """Copying of names by the heads of one attention module.

    Attributes:
        highest: True if the logit of the name is among the 5 highest that the head's OV matrix produces.
        lowest: True if it is among the 5 lowest.
        templates: number of the template that each name is from.
    """

    highest: Bool[Tensor, "names heads"]
    lowest: Bool[Tensor, "names heads"]
    templates: list[int]


def name_copying(model: nn.Module, prompts: Sequence[NamePrompt]) -> tuple[dict[str, NameCopying], str | None]:
    """Return whether the heads of each attention module but the first copy names, by the path of the module; and the
    reason why that is unknown, or None.

    The state x of the residual stream at each name is that before the second attention module, which contains the first
    MLP. The logits are `U OV x`, with the OV matrices and the output embedding U of `hw.circuits`: without biases, and
    without the divisions by norms, which are positive factors.

    A copy of the model in float64 runs on the prompts. It needs 8 bytes per parameter.
    """
    try:
        copy = double_copy(model)
        with without_autocast(device_of(copy)), torch.no_grad():
            return _copying(copy, prompts), None
    except NotLinearError as error:
        return {}, str(error)
    except InputError as error:
        if error.argument != "model":
            raise
        return {}, str(error)


def _copying(copy: nn.Module, prompts: Sequence[NamePrompt]) -> dict[str, NameCopying]:
    """Return whether the heads of a model in float64 copy the names of prompts."""
    batch = _batch(copy, prompts[:1])
    trace = RunTrace(copy, batch)
    placed = [placed_module(trace, site) for site in trace.attention.sites.values()]
    factors = stream_factors(trace, batch, placed)
    unembedding = unembedding_matrix(trace, factors.shape)
    if len(placed) < 2:
        return {}
    second, states, names, templates = placed[1].maps.path, [], [], []
    for prompt in prompts:
        stream = _stream_before(RunTrace(copy, _batch(copy, [prompt])), second)
        for place, name in ((prompt.places[0], prompt.answer), (prompt.places[1], prompt.wrong)):
            states.append(stream[0, place])
            names.append(name)
            templates.append(prompt.template)
    inputs, ids = torch.stack(states, 1), torch.tensor(names, device=unembedding.device)
    return {
        module.maps.path: NameCopying(*_of_module(module.maps, factor, inputs, unembedding, ids), templates)
        for module, factor in zip(placed[1:], factors.of_modules[1:], strict=True)
    }


def _stream_before(trace: RunTrace, path: str) -> Float[Tensor, "1 length width"]:
    """Return the residual stream that the attention module at `path` reads, before a norm."""
    call = trace.call_of(path)
    assert call is not None
    assert call.input is not None
    norm = trace.norm_before(call.input)
    stream = call.input if norm is None else norm.input
    assert stream is not None
    return stream


def _of_module(
    maps: ModuleMaps,
    factor: float,
    inputs: Float[Tensor, "width names"],
    unembedding: Float[Tensor, "vocabulary width"],
    ids: Tensor,
) -> tuple[Bool[Tensor, "names heads"], Bool[Tensor, "names heads"]]:
    """Return whether the logit of each name is among the highest, and among the lowest, that each head of a module
    produces for it.
    """
    highest, lowest = [], []
    columns = torch.arange(len(ids), device=ids.device)
    for head in range(len(maps.output)):
        written = factor * (maps.output[head] @ (maps.value[maps.kv_head(head)] @ inputs))
        logits = unembedding @ written
        own = logits[ids, columns]
        highest.append((logits > own).sum(0) < TOP)
        lowest.append((logits < own).sum(0) < TOP)
    return torch.stack(highest, 1).cpu(), torch.stack(lowest, 1).cpu()
