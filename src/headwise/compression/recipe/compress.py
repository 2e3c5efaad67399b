"""`compress`: the steps of a recipe, from the scores of heads to the verified smaller model, in one resumable run.

The output folder contains, in this order:

    recipe.json   the recipe, and hashes of model and texts, by which another run is detected
    plan.json     the heads that remain
    pruned, merged, healed    the model after each step, each complete, and loaded again with equal outputs
    healing       checkpoints of the healing, until it ends
    report.json   the loss on held-out text after each step
    model         the folder of the last step, renamed
"""

import json
import shutil
import warnings
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.analysis.causality import require_causal
from headwise.checks import flag
from headwise.compression.healing.heal import heal
from headwise.compression.merging.merge_kv import merge_kv
from headwise.compression.pruning.prune import prune
from headwise.compression.pruning.pruning_plan import PruningPlan
from headwise.compression.recipe.common_text import count_common_sequences
from headwise.compression.recipe.held_out import HeldOutText
from headwise.compression.recipe.merge_check import require_merge
from headwise.compression.recipe.recipe import DTYPES, CompressionRecipe, read_recipe
from headwise.compression.recipe.reloading import require_equal_after_loading
from headwise.compression.recipe.result import RecipeResult, Stage, stage_of
from headwise.compression.recipe.whole_model import load_whole_model, loss_of
from headwise.compression.saving import write_model
from headwise.compression.scores.named_scores import plan_by_name, require_scores
from headwise.data.batches import digest_of, to_device
from headwise.data.documents import require_first_document
from headwise.data.models import ModelSource, find_model
from headwise.data.texts import Texts
from headwise.errors import InputError
from headwise.runs.checkpoint import FORCE_REMEDY, first_difference
from headwise.runs.data_pass import tokenize
from headwise.runs.distributed import LocalProcess
from headwise.runs.files import require_outside_data, require_writable, writable_folder, write_atomically
from headwise.runs.fingerprint import run_settings
from headwise.runs.folders import new_folder
from headwise.runs.lock import locked_folder
from headwise.wording import counted

RECIPE, PLAN, REPORT, MODEL, HEALING = "recipe.json", "plan.json", "report.json", "model", "healing"
"""Names in the output folder."""

TRASH = ".replaced"
"""Folder of another run on its way to be deleted."""

STAGES = ("pruned", "merged", "healed")
"""Folders of the steps, in their order."""


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
    inputs = _load_inputs(content, plan, device, shown=progress)
    is_new = not Path(out).exists()
    folder = writable_folder(out)
    try:
        with locked_folder(folder):
            try:
                _claim(folder, inputs.settings(plan), force=force)
                return _Run(folder, inputs, plan, shown=progress).finish()
            except InputError:
                if not _results(folder):
                    (folder / RECIPE).unlink(missing_ok=True)
                raise
    finally:
        if is_new:
            with suppress(OSError):  # it contains results
                folder.rmdir()


@dataclass(frozen=True)
class _Inputs:
    """Model, texts and loss of a recipe.

    Attributes:
        recipe: the recipe.
        source: location of the dense model.
        dense: the dense model.
        tokenizer: its tokenizer.
        texts: texts for scores, fitting and healing.
        held_out: other text, for the report.
        loss: loss of the model.
    """

    recipe: CompressionRecipe
    source: ModelSource
    dense: nn.Module
    tokenizer: Any
    texts: Texts
    held_out: HeldOutText
    loss: Any

    def settings(self, plan: PruningPlan | None) -> dict[str, Any]:
        """Return everything that the results depend on, JSON-compatible: the recipe, versions of packages, and hashes
        of the model, the texts and a plan that the recipe names.
        """
        run = run_settings(self.dense, None, self.source.title)
        hashes = {
            "data": digest_of(self.texts.sequences),
            "verify": self.held_out.digest,
            "plan": None if plan is None else digest_of([plan.to_json()]),
        }
        settings = {"recipe": asdict(self.recipe), "model": run["model"], "versions": run["versions"], "hashes": hashes}
        normalized: dict[str, Any] = json.loads(json.dumps(settings))
        return normalized


def _load_inputs(recipe: CompressionRecipe, plan: PruningPlan | None, device: torch.device, *, shown: bool) -> _Inputs:
    """Load the model and the texts of a recipe; mistakes that can be seen without the weights are reported before."""
    source = find_model(recipe.model, recipe.revision)
    tokenizer = source.tokenizer()
    loss = loss_of(source, tokenizer)
    if recipe.prune is not None and recipe.prune.keep is not None:
        require_scores(recipe.prune.scores, recipe.prune.constraint, loss)
    texts = Texts(recipe.data.path, tokenizer, **recipe.data.options())
    tokenize(texts, shown=shown)
    options = recipe.data.options() | {"limit": None} | recipe.verify.options()
    HeldOutText.of(Texts(recipe.verify.path, tokenizer, **options))
    dense = load_whole_model(source, DTYPES.get(recipe.dtype or "")).to(device)
    verify, texts = Texts(recipe.verify.path, tokenizer, **options).within(dense), texts.within(dense)
    held_out = HeldOutText.of(verify)
    require_causal(loss, dense, (to_device(batch, device) for batch in held_out.batches()))
    require_merge(recipe, dense, to_device(next(iter(texts)), device), plan)
    _warn_of_common_text(texts, verify)
    return _Inputs(recipe, source, dense, tokenizer, texts, held_out, loss)


def _warn_of_common_text(texts: Texts, held_out: Texts) -> None:
    """Warn if the held-out text is among that which the model is made smaller with."""
    common = count_common_sequences(texts, held_out)
    if common:
        of_all = f"{common} of {counted(len(held_out.sequences), 'sequence')}"
        share = "shares" if common == 1 else "share"
        warnings.warn(f"{of_all} in [verify] {share} text with [data], so that the report is too good", stacklevel=4)


def _claim(folder: Path, settings: Mapping[str, Any], *, force: bool) -> None:
    """Write the settings of a run to its folder, or compare them with those of the run that is there. With `force`,
    delete another run.
    """
    path = folder / RECIPE
    for leftover in (TRASH, *(f".{name}.part" for name in STAGES)):  # of a process that was killed
        shutil.rmtree(folder / leftover, ignore_errors=True)
    if not path.exists():
        if present := _results(folder):
            got = f"{present[0]} of something else in {str(folder)!r}"
            raise InputError("out", expected="a folder of its own, or that of the run to resume", got=got)
    else:
        try:
            difference = first_difference(json.loads(path.read_text(encoding="utf-8")), settings)
        except (OSError, ValueError):
            difference = RECIPE
        if difference is None and not force:
            return
        if not force:
            raise InputError(
                "out",
                expected="a folder of its own, or that of the run to resume",
                got=f"another run ({difference} differs) in {str(folder)!r}",
                remedy=FORCE_REMEDY,
            )
        _delete_run(folder)
    write_atomically(path, json.dumps(settings, indent=1).encode())


def _results(folder: Path) -> list[str]:
    """Return the names of all results of a run in a folder."""
    return [name for name in (REPORT, PLAN, MODEL, HEALING, *STAGES) if (folder / name).exists()]


def _delete_run(folder: Path) -> None:
    """Delete the results of a run, so that at any moment each folder of a model is complete or absent."""
    trash = folder / TRASH
    try:
        for name in _results(folder):
            path = folder / name
            shutil.rmtree(trash, ignore_errors=True)
            if path.is_dir():
                path.rename(trash)
            else:
                path.unlink()
        shutil.rmtree(trash, ignore_errors=True)
    except OSError as error:
        got = f"{error.strerror} in {str(folder)!r}"
        raise InputError("out", expected="a folder whose files can be replaced", got=got) from None


class _Run:
    """Steps of a recipe in a locked output folder.

    Args:
        folder: the output folder.
        inputs: model, texts and loss.
        plan: the plan that the recipe names; None to make one.
        shown: show progress bars.
    """

    def __init__(self, folder: Path, inputs: _Inputs, plan: PruningPlan | None, *, shown: bool) -> None:
        self._folder, self._inputs, self._given_plan, self._shown = folder, inputs, plan, shown
        self._lm_head = inputs.source.lm_head()
        self._device = next(inputs.dense.parameters()).device

    def finish(self) -> RecipeResult:
        """Run the steps that are not finished, and return the report."""
        model, report = self._folder / MODEL, self._folder / REPORT
        if model.exists() and report.exists():
            return RecipeResult.load(report)
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
        return result

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
                rounds=section.rounds,
                progress=self._shown,
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
            progress=self._shown,
            **asdict(section),
        )
        if is_short:
            model.load_state_dict(student.state_dict())
        return model
