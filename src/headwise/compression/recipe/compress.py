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

import shutil
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.checks import flag
from headwise.compression.healing.heal import heal
from headwise.compression.merging.merge_kv import merge_kv
from headwise.compression.pruning.prune import prune
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.compression.recipe.before_after import write_before_after
from headwise.compression.recipe.inputs import RecipeInputs, load_inputs, recipe_settings
from headwise.compression.recipe.recipe import read_recipe
from headwise.compression.recipe.recipe_result import RecipeResult, Stage, stage_of
from headwise.compression.recipe.reloading import require_equal_after_loading
from headwise.compression.recipe.run_folder import (
    BEFORE_AFTER,
    HEALING,
    MODEL,
    PLAN,
    RECIPE,
    REPORT,
    claim_run,
    require_same_run,
    results_in,
)
from headwise.compression.saving import write_model
from headwise.compression.scores.named_scores import plan_by_name
from headwise.data.documents import require_first_document
from headwise.data.models import find_model
from headwise.errors import InputError
from headwise.progress import shown_progress
from headwise.runs.distributed import LocalProcess
from headwise.runs.files import (
    locked_folder,
    new_folder,
    require_outside_data,
    require_writable,
    writable_folder,
    write_atomically,
)


def compress(recipe: str | Path, out: str | Path, *, force: bool = False, progress: bool = False) -> RecipeResult:
    """Make a model smaller by the steps of a recipe: score the heads, plan, prune, merge key/value heads, heal, verify
    and save. The model is in the folder `model` of `out`, and the losses on held-out text are in the report.

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
        require_same_run(Path(out), recipe_settings(content))
    inputs = load_inputs(content, plan, device, shown=progress)
    is_new = not Path(out).exists()
    folder = writable_folder(out)
    try:
        with locked_folder(folder):
            try:
                claim_run(folder, inputs.settings(plan), force=force)
                with shown_progress(progress):
                    return _Run(folder, inputs, plan).finish()
            except InputError:
                if not results_in(folder):
                    (folder / RECIPE).unlink(missing_ok=True)
                raise
    finally:
        if is_new:
            with suppress(OSError):  # it contains results
                folder.rmdir()


class _Run:
    """Steps of a recipe in a locked output folder.

    Args:
        folder: the output folder.
        inputs: model, texts and loss.
        plan: the plan that the recipe names; None to make one.
    """

    def __init__(self, folder: Path, inputs: RecipeInputs, plan: PruningPlan | None) -> None:
        self._folder, self._inputs, self._given_plan = folder, inputs, plan
        self._lm_head = inputs.source.lm_head()
        self._device = next(inputs.dense.parameters()).device

    def finish(self) -> RecipeResult:
        """Run the steps that are not finished, and return the report."""
        model, report = self._folder / MODEL, self._folder / REPORT
        if not (model.exists() and report.exists()):
            self._finish_steps()
        section, inputs = self._inputs.recipe.report, self._inputs
        if section is not None:
            before_after = self._folder / BEFORE_AFTER
            models = inputs.dense, lambda: self._load(model)
            write_before_after(before_after, section, *models, inputs.verify, inputs.loss)
        return RecipeResult.load(report)

    def _finish_steps(self) -> None:
        """Run the steps that are not finished, write the losses after each, and put the model in place."""
        model, report = self._folder / MODEL, self._folder / REPORT
        dense, held_out, loss = self._inputs.dense, self._inputs.held_out, self._inputs.loss
        baseline = held_out.losses(dense, dense, loss)
        stages: list[Stage] = [stage_of("dense", dense, held_out, baseline, baseline)]
        current = dense
        for name in self._inputs.recipe.stages:
            path = self._path(name)
            if not path.exists():
                self._save(getattr(self, f"_{name}")(current), path)
            current = self._load(path)
            stages.append(stage_of(name, current, held_out, held_out.losses(current, dense, loss), baseline))
        shutil.rmtree(self._folder / HEALING, ignore_errors=True)  # the trained weights are saved as a model
        result = RecipeResult.of(self._inputs.source.title, current, stages, held_out, loss)
        write_atomically(report, result.to_json().encode())
        last = self._folder / self._inputs.recipe.stages[-1]
        if last.exists():
            last.rename(model)

    def _path(self, name: str) -> Path:
        """Return the folder of a step, which for the last step may have its final name."""
        final = self._folder / MODEL
        return final if name == self._inputs.recipe.stages[-1] and final.exists() else self._folder / name

    def _save(self, model: nn.Module, path: Path) -> None:
        """Put the folder of a step in place, if the saved model returns the same as the model in memory."""
        with new_folder(path) as part:
            write_model(model, self._inputs.tokenizer, part)
            batch = next(self._inputs.held_out.batches())
            require_equal_after_loading(model, part, self._lm_head, batch)

    def _load(self, path: Path, dtype: torch.dtype | None = None) -> nn.Module:
        """Load the model of a finished step."""
        loaded: nn.Module = find_model(str(path)).model(self._lm_head, dtype).to(self._device)
        return loaded

    def _pruned(self, model: nn.Module) -> nn.Module:
        """Return the pruned model, by the plan in the folder or a new one."""
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
        """Return the model with fewer key/value heads."""
        section = self._inputs.recipe.merge
        assert section is not None  # the recipe has this step
        options: Any = {"method": section.method, "grouping": section.grouping}
        return merge_kv(model, num_kv_heads=section.kv_heads, calibration=self._inputs.texts, **options)

    def _healed(self, model: nn.Module) -> nn.Module:
        """Return the model after its training, in the dtype that it had before."""
        section = self._inputs.recipe.heal
        assert section is not None  # the recipe has this step
        stages = self._inputs.recipe.stages
        dtype = next(weight.dtype for weight in model.parameters() if weight.is_floating_point())
        is_short = dtype in (torch.float16, torch.bfloat16)
        student = self._load(self._folder / stages[-2], torch.float32) if is_short else model
        heal(
            student,
            self._inputs.dense,
            self._inputs.texts,
            out=self._folder / HEALING,
            **asdict(section),
        )
        if is_short:
            model.load_state_dict(student.state_dict())
        return model
