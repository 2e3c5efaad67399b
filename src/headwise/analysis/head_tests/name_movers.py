"""Name-mover test: heads that move a name to the end of a prompt, and heads that do the opposite."""

from collections import defaultdict
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.attribution import logit_parts
from headwise.analysis.causality import require_causal_decoder
from headwise.analysis.circuits.module_maps import placed_modules
from headwise.analysis.circuits.stream import NotLinearError, stream_factors, unembedding_matrix
from headwise.analysis.circuits.trace import RunTrace, double_copy
from headwise.analysis.head_pass import SiteValues, measure_sequences, pass_data
from headwise.analysis.head_tests.name_prompts import NAMES, ROLES, TEMPLATES, NamePrompt, name_prompts
from headwise.analysis.head_tests.weight_reader import WeightReader, batch_of_ids, require_finite_weights
from headwise.analysis.prompts import AnswerTokens
from headwise.attention.autocast import without_autocast
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.checks import require_module, require_one_of, whole_number
from headwise.data.batches import NumberedBatches, device_of
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, SiteKey
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import NO_ESTIMATE, HeadRow, MeanEstimate
from headwise.runs.significance import (
    FALSE_DISCOVERY_RATE,
    false_discovery_rates,
    one_sided_p_values,
)
from headwise.settings import COPIED_PROMPTS, NAME_PROMPTS
from headwise.shapes import Float, Int
from headwise.statistics.columns import Column


class NameMovers(HeadTable[HeadRow]):
    """Table of the name-mover test (Wang et al. 2022, sections 3.1 and 3.3), one row per head. It states how much the
    head attends from the end of a prompt to the name that must follow the prompt. It also states how the head changes
    the logit of this name.

    All columns are means over prompts, with standard errors clustered by template; `n` counts templates.

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
    COLUMNS = (
        Column("attention_indirect", "Weight from the last token to the name of the indirect object.", "share"),
        Column("attention_subject", "Weight from the last token to both occurrences of the subject's name.", "share"),
        Column("preference", "Difference attention_indirect - attention_subject.", is_signed=True, is_tested=True),
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
        """Return p-values (such as `logit_p`) and adjusted p-values (such as `logit_q`) by name, with one number per
        head. They test the columns `preference` and `logit` separately. They also test both columns together, as
        `name_mover_p` for name movers and `negative_p` for negative name movers.

        Raises:
            MissingExtra: scipy is not installed.
        """
        columns = [[row.statistics[name] for row in self.rows] for name in ("preference", "logit")]
        tests = super().tests()
        prefers, raises, lowers = (
            one_sided_p_values(measured, sign)
            for measured, sign in zip((*columns, columns[1]), (1, 1, -1), strict=True)
        )
        for name, of_logit in (("name_mover", raises), ("negative", lowers)):
            # The larger p-value of each head; NaN if one is NaN.
            p = [max(pair) if pair[0] == pair[0] else pair[0] for pair in zip(prefers, of_logit, strict=True)]
            tests |= {f"{name}_p": p, f"{name}_q": false_discovery_rates(p)}
        return tests

    def found(self, kind: str = "name_mover", rate: float = FALSE_DISCOVERY_RATE) -> list[HeadRow]:
        """Return the rows of the heads that are name movers (or negative name movers) at a false discovery rate of
        `rate`. Heads with the largest absolute effect on the logits come first.

        Args:
            kind: "name_mover" or "negative".
            rate: largest adjusted p-value.

        Raises:
            InputError: the kind is another one.
            MissingExtra: scipy is not installed.
        """
        require_one_of("kind", kind, ("name_mover", "negative"))
        q = self.tests()[f"{kind}_q"]
        rows = [row for row, adjusted in zip(self.rows, q, strict=True) if adjusted <= rate]
        return sorted(rows, key=lambda row: -abs(row.statistics["logit"].value))


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
    """Test which heads are name movers (Wang et al. 2022). A name mover attends from the end of a prompt to the name
    that must follow the prompt, and raises the logit of this name. `NameMovers` defines the columns and the tests.

    The model reads prompts such as "When Mary and John walked home from the bakery, John handed a warm loaf to". A name
    mover attends from the last token to the name that follows (Mary) more than to the other name, and raises the logit
    of Mary. A negative name mover attends in the same way, and lowers this logit.

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
    require_causal_decoder(model, [batch_of_ids(model, drawn[0].ids[None])])
    by_length: dict[int, list[NamePrompt]] = defaultdict(list)  # a model reads prompts of one length without padding
    for prompt in drawn:
        by_length[len(prompt.ids)].append(prompt)
    groups = [
        group[start : start + AT_ONCE]
        for _, group in sorted(by_length.items())
        for start in range(0, len(group), AT_ONCE)
    ]
    numbers = [prompt.template for group in groups for prompt in group]
    batches = [
        {"input_ids": torch.stack([prompt.ids for prompt in group]), "group": torch.full((len(group),), index)}
        for index, group in enumerate(groups)
    ]
    data = pass_data(model, NumberedBatches(batches, numbers), (), out=out, shown=progress)
    reader = _EndAttention(model)

    def measure_batch(batch: dict[str, Any]) -> tuple[list[SiteRecord], SiteValues]:
        group, ids = groups[int(batch["group"][0])], batch["input_ids"]
        reader.places = torch.tensor([prompt.places for prompt in group])
        reader.run(ids)
        answers, wrong = [prompt.answer for prompt in group], [prompt.wrong for prompt in group]
        tokens = AnswerTokens.from_arguments(answers, wrong, -1)
        parts, logits, _ = logit_parts(model, batch_of_ids(model, ids), tokens)
        sizes = [record.heads for record in reader.records]
        if sum(sizes) != parts.shape[1]:
            raise InputError("model", expected="attention in the same modules in each run", got="other modules")
        values: SiteValues = {}
        for record, effects in zip(reader.records, torch.split(parts.double().cpu(), sizes, 1), strict=True):
            weights = reader.found[record.site]
            require_finite_weights(record.site, weights)
            indirect, subject = weights[..., 0], weights[..., 1:].sum(-1)
            values[record.site] = {
                "attention_indirect": indirect,
                "attention_subject": subject,
                "preference": indirect - subject,
                "logit": effects,
                OF_MODEL: logits.double().cpu()[:, None],
            }
        return reader.records, values

    def make_table(registry: SiteRegistry, values: SiteValues, metadata: dict[str, Any]) -> NameMovers:
        copying, reason = name_copying(model, drawn[:copied]) if copied else ({}, "no prompts to copy names from")
        logits = next(iter(values.values()))[OF_MODEL][:, 0]
        measured = {
            "templates": len(set(numbers)),
            "logit": MeanEstimate.of(logits.tolist(), numbers)._asdict(),
            "solved": float((logits > 0).double().mean()),
            "no_copying": reason,
        }
        templates = [prompt.template for prompt in drawn[:copied] for _ in range(2)]  # of both names
        rows = []
        for record, labels in registry.head_labels():
            head, of_names = labels["head"], copying.get(record.site.path, {})
            statistics = {
                name: MeanEstimate.of(of_site[:, head].tolist(), numbers)
                for name, of_site in values[record.site].items()
                if name != OF_MODEL
            }
            for name in ("copying", "negative_copying"):
                of_heads = of_names.get(name)
                statistics[name] = (
                    NO_ESTIMATE if of_heads is None else MeanEstimate.of(of_heads[:, head].tolist(), templates)
                )
            rows.append(HeadRow(**labels, statistics=statistics))
        return NameMovers(tuple(rows), {**metadata, "measured": metadata["measured"] | measured})

    options: dict[str, Any] = {"prompts": prompts, "copied": copied, "seed": seed}
    options |= {"out": out, "force": force, "progress": progress, "title": title}
    table = measure_sequences(data, measure_batch, NameMovers, make_table, **options)
    reader.warn_of_unread(stacklevel=3)
    return table


OF_MODEL = "logit_of_model"
"""Name of the difference of the model's logits in the values of a prompt."""


class _EndAttention(WeightReader):
    """Interceptor that reads the attention weights from the last token of each prompt to the names in the prompt. Each
    name has a role: indirect object, or first or second occurrence of the subject. `places` has the token positions of
    the names, as a tensor of prompts by roles. For each attention module, the weights are a tensor `(prompts, heads,
    roles)`.
    """

    places: Int[Tensor, "prompts roles"]

    def start(self, call: Call) -> Float[Tensor, "prompts heads roles"]:
        """Return a tensor of zeros for the attention weights of one attention module, which `read` fills."""
        return torch.zeros(call.grid.batch, call.grid.heads, len(ROLES), dtype=torch.float64)

    def read(self, site: SiteKey, block: RowBlock) -> None:
        """Add the attention weights from the last token to the names, if the block contains the query row of this
        token.
        """
        last = block.grid.queries - 1
        if last not in block.rows:
            return
        sequences, heads = block.sequences_and_heads
        weights = block.weights[:, :, last - block.rows.start].double().cpu()
        is_place = block.visibility.key_indices.cpu() == self.places[sequences, :, None]
        self.found[site][sequences, heads] += torch.einsum("bhc,brc->bhr", weights, is_place.double())


TOP = 5
"""Number of logits among which the name's must be."""

Copying = dict[str, Float[Tensor, "names heads"]]
"""1 where the logit of a name is among the highest ("copying"), or the lowest ("negative_copying"), that the OV matrix
of a head produces.
"""


def name_copying(model: nn.Module, prompts: Sequence[NamePrompt]) -> tuple[dict[str, Copying], str | None]:
    """Test whether each head copies names: whether its OV matrix, applied to the residual stream at a name, makes the
    logit of this name one of the highest or lowest. Return the results by path of the attention module (without the
    first module), and None. If the test is impossible, return an empty dictionary and the reason.

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


def _copying(copy: nn.Module, prompts: Sequence[NamePrompt]) -> dict[str, Copying]:
    """Test whether heads copy the names of the prompts. Return a dictionary from the path of each attention module,
    except the first, to the results for its heads. `copy` is the model in float64.
    """
    batch = batch_of_ids(copy, prompts[0].ids[None])
    trace = RunTrace(copy, batch)
    placed = placed_modules(trace)
    factors = stream_factors(trace, batch, placed)
    unembedding = unembedding_matrix(trace, factors.shape)
    if len(placed) < 2:
        return {}
    states, names = [], []
    for prompt in prompts:
        trace = RunTrace(copy, batch_of_ids(copy, prompt.ids[None]))
        call = trace.call_of(placed[1].maps.path)
        assert call is not None
        assert call.input is not None
        norm = trace.norm_before(call.input)
        stream = call.input if norm is None else norm.input
        assert stream is not None
        states += [stream[0, prompt.places[0]], stream[0, prompt.places[1]]]
        names += [prompt.answer, prompt.wrong]
    inputs, ids = torch.stack(states, 1), torch.tensor(names, device=unembedding.device)[None]
    found: dict[str, Copying] = {}
    for module, factor in zip(placed[1:], factors.of_modules[1:], strict=True):
        maps, highest, lowest = module.maps, [], []
        values = maps.value.repeat_interleave(len(maps.output) // len(maps.value), 0)
        for output, value in zip(maps.output, values, strict=True):
            logits = unembedding @ (factor * (output @ (value @ inputs)))
            of_names = logits.gather(0, ids)
            highest.append((logits > of_names).sum(0) < TOP)
            lowest.append((logits < of_names).sum(0) < TOP)
        of_module = {"copying": torch.stack(highest, 1), "negative_copying": torch.stack(lowest, 1)}
        found[maps.path] = {name: of_heads.double().cpu() for name, of_heads in of_module.items()}
    return found
