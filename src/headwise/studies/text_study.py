"""The function `study_texts`: compare numbers of heads on a text, with small transformers made of headwise layers.

All models have the same number of parameters: the MLP uses those that attention does not. Every model that is compared
is saved to `out/models/SETTING-seed-N` in Hugging Face format, as a Llama or (encoders) a EuroBERT, on which `profile`,
`ablate` and `view` work.
"""

import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from headwise.checks import device_argument, whole_number
from headwise.errors import InputError
from headwise.runs.files import require_outside_data, require_writable, writable_folder
from headwise.studies.budget import StudyBudget
from headwise.studies.classification import accuracy
from headwise.studies.corpus import Corpus, make_corpus
from headwise.studies.decode_speed import cache_bytes_per_token, decode_speed
from headwise.studies.definition import Measure, StudyDefinition, TrainedCallback
from headwise.studies.export import require_transformers, save_model
from headwise.studies.model import Transformer
from headwise.studies.model_shape import ModelShape
from headwise.studies.optuna_storage import OptunaOptions, require_database_url
from headwise.studies.space import Setting, Space
from headwise.studies.study import DEFAULT_OPTUNA, RunOptions, check_requirements, run_study, settings_to_compare
from headwise.studies.study_plot import new_panels, require_matplotlib
from headwise.studies.study_result import Study
from headwise.studies.text_options import TextOptions
from headwise.studies.tokenizer import train_tokenizer
from headwise.studies.training import DEFAULT_RECIPE, Recipe

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
    _check_text_requirements(budget, params)
    _check_options(text, space, optuna)
    _check_paths(data, out)
    target = device_argument("device", torch.get_default_device() if device is None else device)
    tokenizer = train_tokenizer(data, text.column, text.vocabulary) if text.tokenizer is None else text.tokenizer
    corpus = make_corpus(data, tokenizer, text)
    shape = _model_shape(params, layers, space, text, vocabulary=len(tokenizer), classes=len(corpus.labels) or None)
    space = replace(space, embed_dim=shape.embed_dim)
    setting_in_use = None if baseline is None else space.parse(baseline)
    build_model = _model_builder(shape, space, target)
    save = _model_saver(writable_folder(out) / "models", tokenizer, text.context, corpus.labels, clear=force)
    settings, measures = settings_to_compare(space, setting_in_use), _measures(text, corpus)
    definition = StudyDefinition(
        build_model, settings, corpus.training, corpus.held_out, corpus.loss, recipe, measures, save, seed
    )
    budget, options = budget.in_steps(text.batch * text.context), RunOptions(out, optuna, progress, force)
    title, left_out = Path(data).name, space.left_out()
    result = run_study(definition, budget, options, title=title, baseline=setting_in_use, left_out=left_out)
    if result.frontier:  # empty if the time ended before the first training
        _save_plot(result, Path(out) / "study.png")
    return result


def _save_plot(result: Study, path: Path) -> None:
    """Save both plots of a study, next to each other, as a picture."""
    figure, axes = new_panels()
    for kind, ax in zip(("heads", "time"), axes, strict=True):
        result.plot(kind=kind, ax=ax)
    axes[1].set_ylabel("")
    figure.savefig(path, dpi=120)


def _check_text_requirements(budget: Any, params: Any) -> None:
    """Raise an error, before any data is read, if optuna, scipy, transformers or matplotlib is not installed, if
    `budget` is not a `StudyBudget`, or if the number of parameters, `params`, is not a positive integer.

    Raises:
        InputError: the budget is not a `StudyBudget`, or the number of parameters is not a positive integer.
        MissingExtra: optuna, scipy, transformers or matplotlib is not installed.
    """
    check_requirements(budget)
    require_transformers()
    require_matplotlib()
    whole_number("params", params, least=1)


def _check_options(text: Any, space: Any, optuna: Any) -> None:
    """Raise `InputError` if one of the options of a study has a wrong type, or if Optuna's database cannot be used."""
    for name, value, kind in (("text", text, TextOptions), ("space", space, Space), ("optuna", optuna, OptunaOptions)):
        if not isinstance(value, kind):
            raise InputError(name, expected=f"an hw.{kind.__name__}", got=repr(value))
    if optuna.storage is not None:
        require_database_url(optuna.storage)


def _check_paths(data: Any, out: Any) -> None:
    """Raise `InputError` if `data` is not a path, or if the folder `out` cannot be written or is inside of `data`."""
    if not isinstance(data, str | Path):
        raise InputError("data", expected="the path of a file or folder", got=repr(data))
    require_writable(out)
    require_outside_data(out, data)


def _model_shape(
    params: int, layers: int | None, space: Space, text: TextOptions, *, vocabulary: int, classes: int | None
) -> ModelShape:
    """Return a `ModelShape`, which states the width, depth and kind of the models of a study, each with about `params`
    parameters. The models are decoders for the task "lm", otherwise encoders.

    Args:
        params: number of parameters of each model.
        layers: number of layers; None to derive it from `params`.
        space: numbers of heads, by which the width is divisible where possible, and the width if it is set.
        text: the task.
        vocabulary: number of tokens.
        classes: number of classes of a classifier; None for other tasks.
    """
    is_decoder = text.task == "lm"
    return ModelShape.of_size(
        params, vocabulary, space.heads, embed_dim=space.embed_dim, layers=layers, causal=is_decoder, classes=classes
    )


def _model_builder(shape: ModelShape, space: Space, device: torch.device) -> Callable[[Setting], Transformer]:
    """Return a function that builds the untrained transformer of a head setting on `device`. First check that each
    setting of `space` leaves parameters for the MLP.

    Args:
        shape: width, depth, vocabulary and number of parameters of the models.
        space: settings to compare.
        device: device of the models.

    Raises:
        InputError: a setting of the space leaves no parameters for the MLP.
    """
    for setting in space.settings():
        shape.mlp_dim(setting)  # raises before anything is trained

    def build(setting: Setting) -> Transformer:
        """Return an untrained transformer with the heads of `setting`, on the chosen device."""
        return Transformer(shape, setting).to(device)

    return build


def _measures(text: TextOptions, corpus: Corpus) -> dict[str, Measure]:
    """Return the functions that measure a trained model, by column name of the study's table: accuracy for a
    classifier, decoding speed and cache size for a decoder, none for a masked language model.
    """
    if text.task == "classify":
        return {"accuracy": lambda model: accuracy(model, corpus.held_out)}
    if text.task == "lm":
        return {
            "decode_tokens_s": lambda model: decode_speed(model, text.context),  # type: ignore[arg-type]
            "cache_bytes": cache_bytes_per_token,
        }
    return {}


def _model_saver(models: Path, tokenizer: Any, context: int, labels: Sequence[str], *, clear: bool) -> TrainedCallback:
    """Return a callback that saves each trained model that it receives, with its tokenizer, to a folder of its own in
    the folder `models`. If `clear`, the models of an earlier study are deleted before the first model is saved.

    Args:
        models: folder with one folder per model.
        tokenizer: tokenizer saved with each model.
        context: tokens per training sequence.
        labels: labels of a classifier.
        clear: delete the models of an earlier study before the first one is saved.
    """

    def save(model: nn.Module, setting: Setting, seed: int) -> None:
        """Save a trained transformer with its tokenizer in Hugging Face format, to a folder such as `8x64-kv2-seed-1`
        (head setting and seed) in the folder `models`. If `clear`, a variable of the enclosing function, is True, the
        first call deletes the models of an earlier study.
        """
        nonlocal clear
        if clear:
            shutil.rmtree(models, ignore_errors=True)
            clear = False
        assert isinstance(model, Transformer)
        folder = models / f"{setting.name.replace('/', '-kv')}-seed-{seed}"
        save_model(model, tokenizer, folder, context=context, labels=labels)

    return save
