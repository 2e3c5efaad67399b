"""Path patching: effect of the direct paths from one head to the inputs of other heads, or to the logits.

Wang et al. (2022, arXiv 2211.00593, section 3 and appendix B, algorithm 1) measure the direct effect of a sender head h
on receivers R, "through residual connections and MLPs (but not through other attention heads)", with four runs of the
model. Goldowsky-Dill et al. (2023, arXiv 2304.05969) define path patching for any set of paths.
"""

from collections.abc import Collection, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.patching.activation_patching import Patching
from headwise.analysis.patching.prompt_pairs import (
    CallKey,
    LayerHead,
    PromptPairs,
    SiteHead,
    output_of_shape,
    prompt_pairs,
)
from headwise.analysis.recording import RecordedOutputs, RecordedRun
from headwise.analysis.repeated_runs import RepeatedRuns, restored_state
from headwise.analysis.residual_stream import ModuleOutputs, ResidualStream, projection_weight, require_direct
from headwise.attention.backends import reference
from headwise.attention.problem import Problem
from headwise.errors import InputError
from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Call, Change, HeadOutput, Interceptor, SiteKey
from headwise.intercept.layer_index import is_inside
from headwise.progress import progress_bar
from headwise.runs.rows import HeadRow
from headwise.settings import MLP_MODES
from headwise.shapes import Float

TOLERANCE = 1e-4
"""Largest difference of results, absolute or relative, that counts as rounding."""

MLP_NAMES = ("mlp", "feedforward", "feed_forward", "ffn", "moe", "experts")
"""Parts of the names of classes that compute the MLP of a layer, in lower case."""

ALL_FROZEN = "attention whose heads can all be frozen"

HeadInputs = Mapping[str, Float[Tensor, "batch receivers length features"]]
"""Queries (q), keys (k) or values (v) of some heads in one attention call, after rotary positions."""


class PathPatching(Patching):
    """Table of the effect of patching the direct paths from each head (the sender) to the receivers, one row per
    sender. The receivers, which are other heads or the logits, read the sender's output from another run. All other
    heads are frozen at their outputs in the unpatched run. `difference` is the logit of the right answer minus that of
    the wrong one after patching. `recovered` is this difference on a scale from 0 (corrupted run) to 1 (clean run).

    The steps are those of Wang et al. (2022, appendix B, algorithm 1):

    1. Run the model on both batches, and record the outputs of all heads.
    2. Run it on the batch that is patched, with the output of the sender from the other run, and all other heads frozen
       at their outputs in the unpatched run. Norms and MLPs are computed again.
    3. Record the inputs of the receivers in this run. If the receivers are the logits, the logit difference of this
       run is the result.
    4. Run the model on the batch that is patched, with these inputs of the receivers, and everything after the
       receivers computed as usual.

    Wang et al. compute MLPs again along the paths (`mlps="recompute"`), and patch from other prompts into the run that
    answers correctly (`direction="noise"`). With `mlps="freeze"`, MLPs are frozen in step 2, too, so that paths lead
    through the residual stream alone. A sender that no path connects to a receiver, such as one in a later layer, has
    no effect: `recovered` is exactly 0 for "denoise" and 1 for "noise".
    """

    NAME = "path_patching"


def path_patching(
    model: nn.Module,
    clean: Tensor | Mapping[str, Any],
    corrupted: Tensor | Mapping[str, Any],
    *,
    answer: Any,
    wrong: Any,
    receivers: str | Collection[LayerHead] = "logits",
    input: str | None = None,  # noqa: A002
    senders: Collection[LayerHead] | None = None,
    at: Any = -1,
    direction: str = "denoise",
    mlps: str = "recompute",
    progress: bool = False,
) -> PathPatching:
    """Measure the effect of the direct paths from one head at a time (the sender) to the receivers. The receivers are
    the final logits, or the queries, keys or values of other heads. Paths that pass through any other head are left
    out. The class `PathPatching` lists the steps (Wang et al. 2022).

    The table states for each sender how much of the logit difference is recovered if the run on the corrupted prompts
    has these paths from the run on the clean prompts (or the reverse, for the direction "noise"). All receivers are
    patched together.

        through = hw.path_patching(model, clean, corrupted, answer=mary, wrong=john, receivers=[(9, 9)], input="q")

    Keys and values that several query heads share are patched for the receivers alone. Receivers' outputs are computed
    by the definition of attention, which must reproduce the model's own. Heads must be all that mixes tokens: with all
    heads frozen, logits must not depend on other tokens than the one that the answer follows (checked on the prompts).

    Args:
        model: any module that `watch` supports and that returns logits `(batch, length, vocabulary)`.
        clean: prompts that the model answers correctly, as for `activation_patching`.
        corrupted: as many prompts, with the same shapes and the same padding.
        answer: token ids of the right answers, `(batch,)`, or one for all.
        wrong: token ids of the answers that the corrupted prompts ask for, in the same form.
        receivers: "logits", or heads `(layer, head)`, zero-based.
        input: inputs of the receiving heads that are patched: "q", "k" or "v", or several of these letters.
        senders: heads whose paths are patched, one row of the table each; all by default.
        at: index of the token that the answer follows, as for `activation_patching`.
        direction: "denoise" patches from the clean run into the corrupted one; "noise" patches the other way.
        mlps: "recompute" or "freeze", in the run in which all heads but the sender are frozen.
        progress: show a progress bar on standard error.

    Raises:
        InputError: as for `activation_patching`; attention cannot be frozen, or something else mixes tokens; queries,
            keys and values of a receiver are unknown or do not reproduce its output; MLPs cannot be frozen.
        MissingExtra: rich is not installed and `progress` is set.
    """
    if isinstance(receivers, str):
        if receivers != "logits":
            raise InputError("receivers", expected="'logits' or heads (layer, head)", got=repr(receivers))
        if input is not None:
            raise InputError("input", expected='None for receivers="logits"', got=repr(input))
    elif not (isinstance(input, str) and input and set(input) <= set("qkv") and len(set(input)) == len(input)):
        expected = "the inputs of the receivers to patch: 'q', 'k' or 'v', or several letters"
        raise InputError("input", expected=expected, got=repr(input))
    if mlps not in MLP_MODES:
        raise InputError("mlps", expected=" or ".join(map(repr, MLP_MODES)), got=repr(mlps))
    with prompt_pairs(model, clean, corrupted, direction, answer=answer, wrong=wrong, at=at) as pairs:
        table_heads = pairs.heads(senders, "senders")
        receiving = [] if isinstance(receivers, str) else pairs.heads(receivers, "receivers")
        paths, rows = _PathRuns(pairs, receiving, input or "", freeze_mlps=mlps == "freeze"), []
        with (
            intercepted(model, paths.interceptor),
            progress_bar("paths", len(table_heads), "heads", shown=progress) as bar,
        ):
            for site, labels in bar.track(table_heads):
                rows.append(HeadRow(**labels, statistics=pairs.estimates(paths.difference([(site, labels["head"])]))))
        named = [[labels["module"], labels["head"]] for _, labels in receiving] or "logits"
        note = {} if paths.runs.note is None else {"note": paths.runs.note}
        return pairs.table(PathPatching, rows, note, receivers=named, input=input, mlps=mlps, heads=len(rows))


class _PathRuns:
    """Runs of a model in which the direct paths from some heads (the senders) to the receivers are patched. The model
    runs on the destination batch (the one that is patched), at first without patches. `names` has the letters q, k and
    v of those inputs of the receiving heads that are patched. It is empty if the receivers are the logits.

    Attributes:
        interceptor: interceptor that patches paths, which must be active for `difference`.
        runs: the runs, which may reuse layer outputs.
    """

    def __init__(self, pairs: PromptPairs, receivers: Iterable[SiteHead], names: str, *, freeze_mlps: bool) -> None:
        self._pairs, self._model, self._patches_heads = pairs, pairs.model, bool(names)
        heads: dict[SiteKey, list[int]] = {}
        for site, labels in receivers:
            heads.setdefault(site, []).append(labels["head"])
        if names and not heads:
            raise InputError("receivers", expected="'logits', or at least one head", got="none")
        self._unpatched = RecordedRun(self._model)
        self.interceptor = _PathInterceptor(pairs.source_run, self._unpatched, heads, names)
        self._mlps = ModuleOutputs(_mlps_of(self._model, pairs.paths)) if freeze_mlps else None
        with (
            restored_state(self._model),
            intercepted(self._model, self._unpatched),
            nullcontext() if self._mlps is None else self._mlps.recorded(),
            intercepted(self._model, self.interceptor),
        ):
            pairs.set_unpatched(pairs.difference())
        self._inputs = self.interceptor.recorded
        if unread := {*pairs.source_run.unread, *self._unpatched.unread}:
            got = f"attention that was not intercepted in {', '.join(sorted(unread))}"
            raise InputError("model", expected=ALL_FROZEN, got=got)
        # Outputs are frozen by the number of the call, which a run that skips calls of the same site would change.
        calls_once = all(len(outputs) == 1 for outputs in self._unpatched.by_site.values())
        self.runs = RepeatedRuns(self._model, pairs.paths, reuse=calls_once and self._mlps is None)
        with intercepted(self._model, self.interceptor):
            self.interceptor.patch({})
            expected = "one whose results stay the same if heads get their own outputs"
            self._require_unpatched(self.runs.run_unchanged(pairs.difference), expected)
            self._require_unpatched(self._frozen_difference([]), expected)
            self.interceptor.freeze([])
            with restored_state(self._model):
                expected = "one in which intercepted attention heads, and nothing else, mix tokens"
                self._require_unpatched(pairs.difference_in_other_context(), expected)
            if self._mlps is not None:
                self._require_frozen_mlps()

    def difference(self, senders: Collection[tuple[SiteKey, int]]) -> Float[Tensor, " pairs"]:
        """Patch the direct paths from some heads, `senders`, to the receivers (other heads or the logits). Return, for
        each prompt pair, the logit of the right answer minus that of the wrong one in the patched run.
        """
        difference = self._frozen_difference(senders)
        if not self._patches_heads:
            return difference
        changed = {}
        for key, inputs in self.interceptor.recorded.items():
            if key not in self._inputs:
                got = f"call {key[1]} of {key[0].path} in a patched run alone"
                raise InputError("receivers", expected="heads that attend in the same calls in all runs", got=got)
            if any(not torch.equal(inputs[name], self._inputs[key][name]) for name in inputs):
                changed[key] = inputs
        if not changed:
            return self._pairs.unpatched
        self.interceptor.patch(changed)
        return self.runs.run_gated(self._pairs.difference, {site.path for site, _ in changed})

    def _frozen_difference(self, senders: Collection[tuple[SiteKey, int]]) -> Float[Tensor, " pairs"]:
        """Run the model with the outputs of all heads replaced by recorded ones. The heads in `senders` have their
        outputs in the run on the source batch, and other heads have their outputs in the unpatched run. Return the
        logit difference (right minus wrong answer) of each prompt pair. If `senders` is empty, no layer outputs of
        earlier runs are reused.
        """
        self.interceptor.freeze(senders)
        with nullcontext() if self._mlps is None else self._mlps.replayed():
            paths = {site.path for site, _ in senders} or self._pairs.paths
            return self.runs.run_gated(self._pairs.difference, paths)

    def _require_unpatched(self, difference: Float[Tensor, " pairs"], expected: str) -> None:
        """Raise `InputError` if a run that should change nothing has other logit differences (right minus wrong answer)
        than the unpatched run. Differences by rounding are allowed.
        """
        unpatched = self._pairs.unpatched
        if not torch.allclose(difference, unpatched, TOLERANCE, TOLERANCE, equal_nan=True):
            got = f"logit differences {difference.tolist()} in place of {unpatched.tolist()}"
            raise InputError("model", expected=expected, got=got)

    def _require_frozen_mlps(self) -> None:
        """Raise `InputError` unless only direct paths are left when the outputs of MLPs are frozen. For this check, the
        outputs of all heads are changed. The end of the residual stream must then change by the output projections of
        these changes alone.
        """
        stream = ResidualStream(self._model)
        with stream.followed():
            self._frozen_difference([])
        before = stream.final_norm_call().input
        source, written = self._pairs.source_run, torch.zeros_like(before)
        every = [(record.site, head) for record in source.records for head in range(record.heads)]
        with stream.followed():
            self._frozen_difference(every)
        for site, outputs in self._unpatched.by_site.items():
            for index, out in enumerate(outputs):
                change = (source.output_of_call(site, index) - out).transpose(1, 2).flatten(2)
                weight = projection_weight(self._model, site.path, change.shape[-1], before)
                if change.shape[:2] != before.shape[:2]:
                    expected = "a model with one residual stream for all heads"
                    raise InputError("model", expected=expected, got=f"another one in {site.path}")
                written += change.to(before.dtype) @ weight.mT
        require_direct(self._model, stream.final_norm_call().input - before, written, before)


def _mlps_of(model: nn.Module, sites: Collection[str]) -> list[nn.Module]:
    """Return the MLP modules of a model: those with a class name such as "MLP" or "FeedForward". Modules that contain
    attention or are part of it are left out, and so are MLPs inside another MLP.
    """
    paths: list[str] = []
    for path, module in model.named_modules():
        is_mlp = any(name in type(module).__name__.lower() for name in MLP_NAMES)
        has_attention = any(path == site or is_inside(site, path) or is_inside(path, site) for site in sites)
        if is_mlp and not has_attention and not any(is_inside(path, other) for other in paths):
            paths.append(path)
    if not paths:
        expected = "'recompute' for a model whose MLPs are not modules with such a name"
        raise InputError("mlps", expected=expected, got=f"'freeze' for {type(model).__name__}")
    return [model.get_submodule(path) for path in paths]


class _PathInterceptor(Interceptor):
    """Interceptor for path patching with three modes. At first, it only records the queries, keys or values of the
    receivers; `names` has the letters of those to record. After `freeze`, it also replaces the outputs of all heads by
    recorded ones. After `patch`, it computes the outputs of the receivers from given queries, keys or values.

    Attributes:
        recorded: inputs of the receivers in the last run in which they were recorded, by call.
    """

    def __init__(
        self, source: RecordedOutputs, unpatched: RecordedOutputs, receivers: Mapping[SiteKey, list[int]], names: str
    ) -> None:
        self._source, self._unpatched, self._receivers, self._names = source, unpatched, receivers, names
        self._senders: dict[SiteKey, list[int]] | None = None
        self._new_inputs: Mapping[CallKey, HeadInputs] = {}
        self._records, self._has_failed = True, False
        self.recorded: dict[CallKey, HeadInputs] = {}

    def freeze(self, senders: Iterable[tuple[SiteKey, int]]) -> None:
        """Set up the next runs, in which the outputs of all heads are replaced. The heads in `senders` have their
        outputs in the run on the source batch, and all other heads have their outputs in the unpatched run. The
        queries, keys or values of the receivers (heads that read the senders' outputs) are recorded.
        """
        self._senders, self._new_inputs, self._records, self.recorded = {}, {}, True, {}
        for site, head in senders:
            self._senders.setdefault(site, []).append(head)

    def patch(self, inputs: Mapping[CallKey, HeadInputs]) -> None:
        """Set up the next runs, in which the receivers compute their outputs from the given queries, keys or values. If
        `inputs` is empty, head outputs stay unchanged.
        """
        self._senders, self._new_inputs, self._records = None, inputs, False

    def on_unreadable(self, path: str, reason: str) -> None:
        """Raise `InputError` for a module whose attention cannot be frozen, for the given reason. Do nothing if this
        object itself raised an error before, since such an error also marks the module as unreadable.
        """
        if not self._has_failed:
            raise InputError("model", expected=ALL_FROZEN, got=f"{reason}: {path}")

    def change(self, call: Call) -> Change | None:
        """Return the function that replaces head outputs, or records the receivers' inputs, in an attention call.
        Return None if the call has nothing to replace or record.
        """
        key, receivers = (call.site, call.index), self._receivers.get(call.site, [])
        if self._senders is None and not (self._records and receivers) and key not in self._new_inputs:
            return None

        def change(attended: HeadOutput) -> Tensor:
            try:
                return self._changed(attended, key, receivers)
            except InputError:
                self._has_failed = True
                raise

        return change

    def _changed(
        self, attended: HeadOutput, key: CallKey, receivers: list[int]
    ) -> Float[Tensor, "batch heads queries value_dim"]:
        """Return the head outputs of an attention call after patching or freezing. They are unchanged if the call is
        neither patched nor frozen. In runs in which the queries, keys or values of the receivers are recorded, also
        store them.
        """
        site, out = key[0], attended.out
        if self._records and receivers:
            problem = _receiving_problem(attended, site, receivers)
            self.recorded[key] = {name: getattr(problem, name)[:, receivers] for name in self._names}
        if key in self._new_inputs:
            problem, tensors = _receiving_problem(attended, site, receivers), dict[str, Any]()
            for name, new in self._new_inputs[key].items():
                current = getattr(problem, name)
                if current[:, receivers].shape != new.shape:
                    expected = f"receivers with {name} of the same shape in all runs, {tuple(new.shape)}"
                    raise InputError("receivers", expected=expected, got=tuple(current[:, receivers].shape))
                tensors[name] = current.clone()
                tensors[name][:, receivers] = new.to(current)
            # Equal inputs change nothing, and neither do those of other heads that share a key/value head.
            patched, plain = (reference.run(each).out[:, receivers] for each in (replace(problem, **tensors), problem))
            out = out.clone()
            out[:, receivers] += (patched - plain).to(out)
            return out
        if self._senders is None:
            return out
        frozen, senders = output_of_shape(self._unpatched, key, out.shape), self._senders.get(site)
        if senders is None:
            return frozen
        is_sender = torch.zeros(out.shape[1], dtype=torch.bool, device=frozen.device)
        is_sender[senders] = True
        return torch.where(is_sender[:, None, None], output_of_shape(self._source, key, out.shape), frozen)


def _receiving_problem(attended: HeadOutput, site: SiteKey, heads: list[int]) -> Problem:
    """Return the queries, keys, values and options of an attention call (a `Problem`), with one key/value head per
    query head. Raise `InputError` unless attention computed from this problem reproduces the model's own outputs of
    `heads`, up to rounding.
    """
    problem, path = attended.read_problem(), site.label
    remedy = 'use receivers="logits", or an implementation of attention that calls scaled_dot_product_attention'
    if problem is None:
        expected = "heads whose queries, keys and values are known"
        got = f"attention that {path} computes itself"
        raise InputError("receivers", expected=expected, got=got, remedy=remedy)
    if problem.talking is not None:
        expected, got = "heads that attend independently", f"talking heads in {path}"
        raise InputError("receivers", expected=expected, got=got, remedy='use receivers="logits"')
    k, v = (each.repeat_interleave(problem.grid.heads // each.shape[1], 1) for each in (problem.k, problem.v))
    problem = replace(problem, k=k, v=v, gate=None, return_lse=True, return_weights=False)
    answer, out = reference.run(problem), attended.out
    assert answer.lse is not None
    is_reproduced = answer.out.shape == out.shape
    has_key = answer.lse[:, heads] > -torch.inf
    if is_reproduced and bool(has_key.any()):
        difference = (answer.out[:, heads].double() - out[:, heads].double()).abs().amax(-1)[has_key]
        # Rounding of a score s changes its weight by a factor of up to exp(eps * s). Models may compute the softmax in
        # float32, also between tensors of float64.
        eps = max(torch.finfo(out.dtype).eps, torch.finfo(torch.float32).eps)
        largest_score = answer.lse[:, heads][has_key].abs().max().double()
        largest_value = problem.v[:, heads].abs().max().double()
        is_reproduced = bool((difference <= eps * (8 + 4 * largest_score) * largest_value).all())
    if not is_reproduced:
        expected = "heads whose outputs follow from their queries, keys and values"
        raise InputError("receivers", expected=expected, got=f"other outputs in {path}", remedy=remedy)
    return problem
