"""The function `study_texts`: compare numbers of heads on a text, with small transformers made of headwise layers.

All models have the same number of parameters: the MLP uses those that attention does not. Every model that is compared
is saved to `out/models/SETTING-seed-N` in Hugging Face format, as a Llama or (encoders) a EuroBERT, on which `profile`,
`ablate` and `view` work.
"""

import shutil
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn

from headwise.checks import device_argument, whole_number
from headwise.errors import InputError, require
from headwise.runs.files import require_outside_data, require_writable, writable_folder
from headwise.studies.budget import StudyBudget
from headwise.studies.corpus import accuracy, make_corpus, train_tokenizer
from headwise.studies.definition import Measure, StudyDefinition
from headwise.studies.export import require_transformers, save_model
from headwise.studies.model import ModelShape, Transformer, cache_bytes_per_token, decode_speed
from headwise.studies.space import Setting, Space
from headwise.studies.study import DEFAULT_OPTUNA, check_requirements, run_study, settings_to_compare
from headwise.studies.study_result import Study
from headwise.studies.text_options import TextOptions
from headwise.studies.training import DEFAULT_RECIPE, Recipe
from headwise.studies.trials import OptunaOptions, require_database_url

DEFAULT_PARAMETERS = 1_500_000
"""Number of parameters of each model by default."""

DEFAULT_SPACE, DEFAULT_TEXT = Space(), TextOptions()


def study_texts(
    data: str | Path,
    out: str | Path,
    *,
    budget: StudyBudget,
    text: TextOptions = DEFAULT_TEXT,
    space: Space = DEFAULT_SPACE,
    baseline: str | None = None,
    params: int = DEFAULT_PARAMETERS,
    layers: int | None = None,
    recipe: Recipe = DEFAULT_RECIPE,
    seed: int = 0,
    device: torch.device | str | None = None,
    optuna: OptunaOptions = DEFAULT_OPTUNA,
    progress: bool = False,
    force: bool = False,
) -> Study:
    """Train small transformers with different heads on a text, at equal size and training length, and return a table
    that compares their held-out losses. The table, a plot and the trained models are saved in `out`.

    Args:
        data: file or folder: text, JSON lines, CSV or Parquet.
        out: folder for the table, the plot, the database and (in Hugging Face format) the compared models.
        budget: time limit or training length, and the numbers of learning rates and seeds per setting.
        text: task, tokenizer, and size of sequences and batches.
        space: heads to compare; its `embed_dim` is derived from `params` if it is None.
        baseline: the setting in use, such as `8`, `8x64` or `8x64/2`.
        params: number of parameters of each model; the MLP uses those that attention does not.
        layers: number of layers; by default derived from `params`.
        recipe: optimizer, learning-rate schedule and range of learning rates.
        seed: base seed of weights, batch order and learning-rate search.
        device: device to train on; by default torch's default device.
        optuna: database, name and pruner of the Optuna study.
        progress: show a progress bar on standard error.
        force: delete an existing study in `out`, and start again.

    Raises:
        InputError: the data cannot be read or is too small; see also `study` and `Space`.
        MissingExtra: transformers, optuna, scipy, pyarrow or matplotlib is not installed.
    """
    check_requirements(budget)
    require_transformers()
    new_figure = require("matplotlib.figure", purpose="drawing a study", extra="plot").Figure
    whole_number("params", params, least=1)
    for name, value, kind in (("text", text, TextOptions), ("space", space, Space), ("optuna", optuna, OptunaOptions)):
        if not isinstance(value, kind):
            raise InputError(name, expected=f"an hw.{kind.__name__}", got=repr(value))
    if optuna.storage is not None:
        require_database_url(optuna.storage)
    if not isinstance(data, str | Path):
        raise InputError("data", expected="the path of a file or folder", got=repr(data))
    require_writable(out)
    require_outside_data(out, data)
    target = device_argument("device", torch.get_default_device() if device is None else device)
    tokenizer = train_tokenizer(data, text.column, text.vocabulary) if text.tokenizer is None else text.tokenizer
    corpus = make_corpus(data, tokenizer, text)
    shape = ModelShape.of_size(
        params,
        len(tokenizer),
        space.heads,
        embed_dim=space.embed_dim,
        layers=layers,
        causal=text.task == "lm",
        classes=len(corpus.labels) or None,
    )
    space = replace(space, embed_dim=shape.embed_dim)
    setting_in_use = None if baseline is None else space.parse(baseline)
    for setting in space.settings():
        shape.mlp_dim(setting)  # raises before anything is trained
    settings = settings_to_compare(space, setting_in_use)
    measures: dict[str, Measure] = {}
    if text.task == "classify":
        measures["accuracy"] = lambda model: accuracy(model, corpus.held_out)
    if text.task == "lm":
        measures["decode_tokens_s"] = lambda model: decode_speed(model, text.context)  # type: ignore[arg-type]
        measures["cache_bytes"] = cache_bytes_per_token
    models, has_old_models = writable_folder(out) / "models", force

    def save(model: nn.Module, setting: Setting, seed: int) -> None:
        """Save a trained transformer with its tokenizer in Hugging Face format, to a folder such as `8x64-kv2-seed-1`
        (head setting and seed). With `force`, first delete the models of an earlier study, once.
        """
        nonlocal has_old_models
        if has_old_models:
            shutil.rmtree(models, ignore_errors=True)
            has_old_models = False
        assert isinstance(model, Transformer)
        folder = models / f"{setting.name.replace('/', '-kv')}-seed-{seed}"
        save_model(model, tokenizer, folder, context=text.context, labels=corpus.labels)

    def build_model(setting: Setting) -> Transformer:
        """Return an untrained transformer with the heads of `setting`, on the chosen device."""
        return Transformer(shape, setting).to(target)

    definition = StudyDefinition(
        build_model, settings, corpus.training, corpus.held_out, corpus.loss, recipe, measures, save, seed
    )
    result = run_study(
        definition,
        budget.in_steps(text.batch * text.context),
        title=Path(data).name,
        baseline=setting_in_use,
        left_out=space.left_out(),
        out=out,
        optuna=optuna,
        progress=progress,
        force=force,
    )
    if result.frontier:  # empty if the time ended before the first training
        figure = new_figure(figsize=(9.4, 3.8), layout="constrained")
        by_heads, by_time = figure.subplots(1, 2, sharey=True)
        result.plot(ax=by_heads)
        result.plot(kind="time", ax=by_time)
        by_time.set_ylabel("")
        figure.savefig(Path(out) / "study.png", dpi=120)
    return result
