"""`compress`: the steps of a recipe, from the scores of heads to the verified smaller model, in one resumable run.

The output folder contains, in this order:

    recipe.json   the recipe, and hashes of model and texts, by which another run is detected
    plan.json     the heads that remain
    pruned, merged, healed    the model after each step, each complete, and loaded again with equal outputs
    healing       checkpoints of the healing, until it ends
    report.json   the loss on held-out text after each step
    model         the folder of the last step, renamed
    before-after.json   the report of `compression_report`, if the recipe has a section [report]
"""

import json
import shutil
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.analysis.losses import name_of_loss
from headwise.checks import flag, is_whole
from headwise.compression.healing.heal import heal
from headwise.compression.merging.merge_kv import merge_kv
from headwise.compression.parameter_counts import count_parameters
from headwise.compression.pruning.prune import prune
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.compression.recipe.inputs import RecipeInputs, load_inputs, recipe_settings
from headwise.compression.recipe.recipe import read_recipe
from headwise.compression.report.compression_report import compression_report, losses_of
from headwise.compression.report.report_result import CompressionReport
from headwise.compression.saving import write_model
from headwise.compression.scores.named_scores import plan_by_name
from headwise.data.batches import (
    call_model,
    copied,
    device_of,
    evaluation_mode,
    floating_tensors,
    relative_difference,
    to_device,
    with_cache_disabled,
)
from headwise.data.documents import require_first_document
from headwise.data.models import find_model
from headwise.errors import InputError
from headwise.progress import shown_progress
from headwise.removal.remove_heads import has_record
from headwise.runs.checkpoint import first_difference, other_run_error
from headwise.runs.distributed import LocalProcess
from headwise.runs.files import (
    locked_folder,
    new_folder,
    require_outside_data,
    require_writable,
    writable_folder,
    write_atomically,
)
from headwise.runs.json_result import JsonResult, is_number, require_each
from headwise.runs.rows import MeanEstimate

STAGES = "dense", "pruned", "merged", "healed"
"""Names of the dense model and of the models after each step, in their order."""

LOADERS = "transformers", "headwise"
"""Packages that load a smaller model."""

RECIPE, PLAN, REPORT, BEFORE_AFTER = "recipe.json", "plan.json", "report.json", "before-after.json"
MODEL, HEALING = "model", "healing"
"""Names in the output folder, in addition to the folders of the steps."""

TRASH = ".replaced"
"""Folder of another run on its way to be deleted."""

ROUNDING = 16.0
"""Difference of outputs that counts as rounding, in units of the dtype's epsilon times the largest number."""


@dataclass(frozen=True)
class Stage:
    """Model after one step of a compression recipe, or before the first one: its number of parameters, its mean loss on
    held-out sequences, and the mean difference from the dense model's losses. Standard errors are clustered by
    document.

    Attributes:
        name: "dense", "pruned", "merged" or "healed".
        parameters: number of parameters.
        loss: mean loss of the held-out sequences, with its standard error clustered by document.
        difference: the same of the difference of each sequence's loss from that of the dense model.
    """

    name: str
    parameters: int
    loss: MeanEstimate
    difference: MeanEstimate


@dataclass(frozen=True)
class RecipeResult(JsonResult):
    """Result of `hw.compress`: parameters and held-out loss of the dense model, and of the model after each compression
    step.

    Attributes:
        model: name of the dense model.
        loader: what loads the smaller model: "transformers", or "headwise" where only `headwise.load` can.
        loss: name of the loss.
        documents: number of held-out documents.
        stages: the dense model, and the model after each step.
    """

    ARGUMENT, NOUN = "report", "a report of hw.compress"

    model: str
    loader: str
    loss: str
    documents: int
    stages: tuple[Stage, ...]

    def records(self) -> list[dict[str, Any]]:
        """Return one dictionary per step: its name, the number of parameters, the mean held-out loss, and the mean
        difference from the dense model's loss. For each mean, further keys state its standard error (`_sem`), sample
        size (`_n`) and degrees of freedom (`_df`).
        """
        return [
            {"step": each.name, "parameters": each.parameters}
            | each.loss.columns("loss")
            | each.difference.columns("difference")
            for each in self.stages
        ]

    def require_consistent(self) -> None:
        """Raise `InputError` if a field has the wrong type, or if the steps are not "dense" followed by compression
        steps in their order.
        """
        names = [each.name for each in self.stages]
        are_in_order = names[:1] == ["dense"] and names == [name for name in STAGES if name in names]
        values = [
            (self.model, isinstance(self.model, str), "the name of the model"),
            (self.loader, self.loader in LOADERS, f"a loader of {', '.join(LOADERS)}"),
            (self.loss, isinstance(self.loss, str), "the name of the loss"),
            (self.documents, is_whole(self.documents, 1), "a number of documents"),
            (names, are_in_order, f"some of {', '.join(STAGES)}"),
        ]
        for each in self.stages:
            count = each.parameters
            values.append((count, is_whole(count, 0), f"a number of parameters of {each.name}"))
        for each in self.stages:
            for mean in (each.loss, each.difference):
                are_numbers = is_number(mean.value) and is_number(mean.sem, 0.0) and is_number(mean.df, 0.0)
                expected = f"mean, standard error, number and degrees of freedom for {each.name}"
                values.append((mean, are_numbers and is_whole(mean.n, 0), expected))
        require_each(self.ARGUMENT, values)


def compress(recipe: str | Path, out: str | Path, *, force: bool = False, progress: bool = False) -> RecipeResult:
    """Compress a model by the steps of a recipe file: prune heads by scores, merge key/value heads, and heal (train the
    smaller model by the dense one); each step is optional. Write the model to the folder `model` in `out`, and return
    the held-out loss after each step.

    An interrupted run resumes when it is called again: finished steps are not repeated, and the healing continues from
    its checkpoint. Each folder of a model is complete, and its model was loaded again with equal outputs.

    Args:
        recipe: TOML file with the recipe.
        out: folder for the results.
        force: replace the run of another recipe in that folder.
        progress: show progress bars on standard error.

    Raises:
        InputError: the recipe, or a file that it names, cannot be used; `out` contains another run, or cannot be
            written; a model that is loaded again returns something else.
        MissingExtra: a package that a step needs is not installed.

    Example:
        >>> report = headwise.compress("recipe.toml", "smaller", progress=True)  # doctest: +SKIP
    """
    flag("force", force)
    flag("progress", progress)
    content = read_recipe(recipe)
    for section in (content.data, content.verify):
        require_outside_data(out, section.path)
        require_first_document(Path(section.path), section.column or content.data.column or "text")
    require_writable(out)
    plan = None
    if content.prune is not None and content.prune.plan is not None:
        plan = PruningPlan.load(content.prune.plan)
    device = LocalProcess(True, 0).device(content.device)
    if not force:
        _require_same_run(Path(out), recipe_settings(content))
    inputs = load_inputs(content, plan, device, shown=progress)
    is_new = not Path(out).exists()
    folder = writable_folder(out)
    try:
        with locked_folder(folder):
            try:
                _claim_run(folder, inputs.settings(plan), force=force)
                with shown_progress(progress):
                    return _Run(folder, inputs, plan).finish()
            except InputError:
                if not _results_in(folder):
                    (folder / RECIPE).unlink(missing_ok=True)
                raise
    finally:
        if is_new:
            with suppress(OSError):  # it contains results
                folder.rmdir()


class _Run:
    """Run of a compression recipe (pruning, merging and training a model) in a locked output folder. `plan` is the
    saved pruning plan that the recipe names; if it is None, the run makes a new one.
    """

    def __init__(self, folder: Path, inputs: RecipeInputs, plan: PruningPlan | None) -> None:
        self._folder, self._inputs, self._given_plan = folder, inputs, plan
        self._lm_head = inputs.source.lm_head()
        self._device = next(inputs.dense.parameters()).device

    def finish(self) -> RecipeResult:
        """Run the steps whose results are not in the folder yet, and return the result of all steps. If the recipe has
        a section [report], also measure the sizes and times of the models.
        """
        model, report = self._folder / MODEL, self._folder / REPORT
        if not (model.exists() and report.exists()):
            self._finish_steps()
        section, inputs = self._inputs.recipe.report, self._inputs
        if section is not None:
            options: dict[str, Any] = asdict(section) | {"batches": list(section.batches)}
            try:
                saved = CompressionReport.load(self._folder / BEFORE_AFTER).metadata["settings"]
            except (InputError, KeyError):
                saved = {}
            if any(saved.get(name) != value for name, value in options.items()):
                # The cosine of outputs takes the place of a loss that compares embeddings.
                loss = None if hasattr(inputs.loss, "prepare") else inputs.loss
                measured = compression_report(inputs.dense, self._load(model), inputs.verify, loss=loss, **options)
                measured.save(self._folder / BEFORE_AFTER)
        return RecipeResult.load(report)

    def _finish_steps(self) -> None:
        """Run each step whose model is not in the folder yet, and measure the losses after each step. Write the result,
        and rename the folder of the last step to that of the final model.
        """
        final, steps = self._folder / MODEL, self._inputs.recipe.stages
        dense, verify, loss = self._inputs.dense, self._inputs.verify, self._inputs.loss
        documents, baseline = verify.document_numbers(), self._losses(dense)

        def stage(name: str, model: nn.Module, losses: list[float]) -> Stage:
            differences = [after - before for after, before in zip(losses, baseline, strict=True)]
            means = (MeanEstimate.of(values, documents) for values in (losses, differences))
            return Stage(name, count_parameters(model), *means)

        stages = [stage("dense", dense, baseline)]
        current = dense
        for name in steps:
            # The folder of the last step has its final name if a run ended after it was renamed.
            path = final if name == steps[-1] and final.exists() else self._folder / name
            if not path.exists():
                self._save(getattr(self, f"_{name}")(current), path)
            current = self._load(path)
            stages.append(stage(name, current, self._losses(current)))
        shutil.rmtree(self._folder / HEALING, ignore_errors=True)  # the trained weights are saved as a model
        config: Any = current.config
        loader, title = "headwise" if has_record(config) else "transformers", self._inputs.source.title
        result = RecipeResult(title, loader, name_of_loss(loss), len(set(documents)), tuple(stages))
        write_atomically(self._folder / REPORT, result.to_json().encode())
        last = self._folder / steps[-1]
        if last.exists():
            last.rename(final)

    def _losses(self, model: nn.Module) -> list[float]:
        """Return the loss of a model on each held-out sequence; NaN for a sequence in which no token has a loss."""
        dense = self._inputs.dense
        with evaluation_mode(model), evaluation_mode(dense):
            batches = (to_device(batch, self._device) for batch in self._inputs.verify)
            (losses,) = losses_of([model], dense, self._inputs.loss, batches)
        return losses

    def _save(self, model: nn.Module, path: Path) -> None:
        """Save the model of a step to the folder `path`. The model is first written to a hidden folder, and loaded from
        it. The hidden folder becomes `path` only if the loaded model has equal weights and outputs.
        """
        with new_folder(path) as part:
            write_model(model, self._inputs.tokenizer, part)
            _require_equal_after_loading(model, part, self._lm_head, next(iter(self._inputs.verify)))

    def _load(self, path: Path, dtype: torch.dtype | None = None) -> nn.Module:
        """Load the model of a finished step from the folder `path`."""
        loaded: nn.Module = find_model(str(path)).model(self._lm_head, dtype).to(self._device)
        return loaded

    def _pruned(self, model: nn.Module) -> nn.Module:
        """Return the pruned model. It is pruned by the plan in the output folder or, if there is none, by the plan that
        the recipe names. If the recipe names no plan either, a new plan is made. In each case, the plan is saved in the
        output folder.
        """
        section, path = self._inputs.recipe.prune, self._folder / PLAN
        assert section is not None  # the recipe has this step
        if path.exists():
            plan = PruningPlan.load(path)
        elif self._given_plan is not None:
            plan = self._given_plan
        else:
            assert section.keep is not None  # checked by the recipe
            plan = plan_by_name(
                section.scores,
                model,
                self._inputs.texts,
                self._inputs.loss,
                keep=section.keep,
                constraint=section.constraint,
                fitted=section.fit,
                rounds=section.rounds,
            )
            plan.save(path)
        pruned = prune(model, plan, calibration=self._inputs.texts if section.fit else None)
        plan.save(path)
        return pruned

    def _merged(self, model: nn.Module) -> nn.Module:
        """Return a copy of the model with fewer key/value heads, as the section [merge] of the recipe states."""
        section = self._inputs.recipe.merge
        assert section is not None  # the recipe has this step
        options: Any = {"method": section.method, "grouping": section.grouping}
        return merge_kv(model, num_kv_heads=section.kv_heads, calibration=self._inputs.texts, **options)

    def _healed(self, model: nn.Module) -> nn.Module:
        """Return the model after healing, which is its training by the dense model. A model in float16 or bfloat16 is
        trained in float32, and its weights are then converted back.
        """
        section = self._inputs.recipe.heal
        assert section is not None  # the recipe has this step
        stages = self._inputs.recipe.stages
        dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
        is_short = dtype in (torch.float16, torch.bfloat16)
        student = self._load(self._folder / stages[-2], torch.float32) if is_short else model
        heal(student, self._inputs.dense, self._inputs.texts, out=self._folder / HEALING, **asdict(section))
        if is_short:
            model.load_state_dict(student.state_dict())
        return model


def _require_equal_after_loading(model: nn.Module, folder: Path, lm_head: str | None, batch: Mapping[str, Any]) -> None:
    """Load a saved model, and raise `InputError` if it differs from the model in memory: in its weights, or in its
    outputs on a batch by more than rounding. If the configuration of the saved model lists the remaining heads,
    `headwise.load` loads it; otherwise, plain `transformers` does.
    """
    loaded = find_model(str(folder)).model(lm_head).to(device_of(model))
    expected, weights = model.state_dict(), loaded.state_dict()
    different = [name for name in expected if name not in weights or not torch.equal(expected[name], weights[name])]
    different += [name for name in weights if name not in expected]
    inputs = with_cache_disabled(model, to_device(batch, device_of(model)))
    got = f"other weights {min(different)}" if different else None
    if got is None:
        with evaluation_mode(model), torch.no_grad():
            outputs, others = (floating_tensors(call_model(each, copied(inputs))) for each in (model, loaded))
        is_close = [
            relative_difference(other, output) <= ROUNDING * torch.finfo(output.dtype).eps
            for other, output in zip(others, outputs, strict=False)
        ]
        if len(outputs) != len(others) or not all(is_close):
            got = "other outputs of the same weights"
    if got is not None:
        raise InputError("model", expected="a saved model that is unchanged when it is loaded", got=got)


def _claim_run(folder: Path, settings: Mapping[str, Any], *, force: bool) -> None:
    """Write the settings of a run to its output folder. If the folder contains an earlier run with other settings,
    raise `InputError`; with `force`, delete any earlier run instead. If the process is killed during the deletion, each
    model folder is either complete or absent.
    """
    trash = folder / TRASH
    for leftover in (trash, *(folder / f".{name}.part" for name in STAGES[1:])):  # of a process that was killed
        shutil.rmtree(leftover, ignore_errors=True)
    present = _results_in(folder)
    if (folder / RECIPE).exists():
        if not force:
            _require_same_run(folder, settings)
            return
        try:
            for path in present:
                if path.is_dir():
                    path.rename(trash)
                    shutil.rmtree(trash, ignore_errors=True)
                else:
                    path.unlink()
        except OSError as error:
            got = f"{error.strerror} in {str(folder)!r}"
            raise InputError("out", expected="a folder whose files can be replaced", got=got) from None
    elif present:
        got = f"{present[0].name} of something else in {str(folder)!r}"
        raise InputError("out", expected="a folder of its own, or that of the run to resume", got=got)
    write_atomically(folder / RECIPE, json.dumps(settings, indent=1).encode())


def _require_same_run(folder: Path, known: Mapping[str, Any]) -> None:
    """Raise `InputError` if a folder contains a run whose settings differ from `known`, the settings of a new run."""
    path = folder / RECIPE
    if not path.exists():
        return
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        difference = first_difference({name: saved.get(name) for name in known}, known)
    except (OSError, ValueError, AttributeError):
        difference = RECIPE
    if difference is not None:
        raise other_run_error(folder, difference)


def _results_in(folder: Path) -> list[Path]:
    """Return the paths of all files and folders in a folder that have the name of a result of `compress`."""
    names = (REPORT, BEFORE_AFTER, PLAN, MODEL, HEALING, *STAGES[1:])
    return [folder / name for name in names if (folder / name).exists()]
