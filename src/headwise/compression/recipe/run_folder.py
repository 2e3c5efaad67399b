"""Output folder of a recipe: the settings of its run, and its results."""

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headwise.errors import InputError
from headwise.runs.checkpoint import first_difference
from headwise.runs.files import FORCE_REMEDY, write_atomically

RECIPE, PLAN, REPORT, BEFORE_AFTER = "recipe.json", "plan.json", "report.json", "before-after.json"
MODEL, HEALING = "model", "healing"
"""Names in the output folder."""

TRASH = ".replaced"
"""Folder of another run on its way to be deleted."""

STAGES = ("pruned", "merged", "healed")
"""Folders of the steps, in their order."""


def claim_run(folder: Path, settings: Mapping[str, Any], *, force: bool) -> None:
    """Write the settings of a run to its folder, or compare them with those of the run that is there. With `force`,
    delete another run.
    """
    for leftover in (TRASH, *(f".{name}.part" for name in STAGES)):  # of a process that was killed
        shutil.rmtree(folder / leftover, ignore_errors=True)
    path = folder / RECIPE
    if not path.exists():
        if present := results_in(folder):
            got = f"{present[0]} of something else in {str(folder)!r}"
            raise InputError("out", expected="a folder of its own, or that of the run to resume", got=got)
    elif not force:
        require_same_run(folder, settings)
        return
    else:
        _delete_run(folder)
    write_atomically(path, json.dumps(settings, indent=1).encode())


def require_same_run(folder: Path, known: Mapping[str, Any]) -> None:
    """Raise `InputError` if a folder has a run whose settings differ from `known`, settings of a new run."""
    path = folder / RECIPE
    if not path.exists():
        return
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
        difference = first_difference({name: saved.get(name) for name in known}, known)
    except (OSError, ValueError, AttributeError):
        difference = RECIPE
    if difference is not None:
        raise InputError(
            "out",
            expected="a folder of its own, or that of the run to resume",
            got=f"another run ({difference} differs) in {str(folder)!r}",
            remedy=FORCE_REMEDY,
        )


def results_in(folder: Path) -> list[str]:
    """Return the names of all results of a run in a folder."""
    return [name for name in (REPORT, BEFORE_AFTER, PLAN, MODEL, HEALING, *STAGES) if (folder / name).exists()]


def _delete_run(folder: Path) -> None:
    """Delete the results of a run, so that at any moment each folder of a model is complete or absent."""
    trash = folder / TRASH
    try:
        for name in results_in(folder):
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
