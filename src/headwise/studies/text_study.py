"""How many heads for a text of one's own: small models made of our layer, trained on it and compared."""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from headwise.checks import whole_number
from headwise.runs.files import writable_folder
from headwise.studies.budget import Measure
from headwise.studies.conclusions import Study, require_scipy
from headwise.studies.corpus import accuracy, corpus, make_tokenizer
from headwise.studies.decode_speed import cache_bytes, decoding
from headwise.studies.export import require_transformers, save
from headwise.studies.model import Shape, Transformer
from headwise.studies.space import HEADS, Setting, Space
from headwise.studies.study import study
from headwise.studies.study_plot import require_matplotlib
from headwise.studies.trial_store import require_optuna

PARAMETERS, CONTEXT, BATCH, VOCABULARY = 1_500_000, 128, 8, 1024
"""Of the models, and of what they are trained on, where nobody says otherwise."""


def study_texts(
    data: str | Path,
    out: str | Path,
    *,
    task: str = "lm",
    heads: Sequence[int] = HEADS,
    head_dims: Sequence[int] | None = None,
    kv_heads: Sequence[int] | None = None,
    tensor_parallel: int = 1,
    baseline: str | None = None,
    params: int = PARAMETERS,
    embed_dim: int | None = None,
    layers: int | None = None,
    context: int = CONTEXT,
    batch: int = BATCH,
    vocabulary: int = VOCABULARY,
    tokenizer: Any = None,
    tokens: int | None = None,
    column: str = "text",
    label: str = "label",
    force: bool = False,
    **options: Any,
) -> Study:
    """Train small transformers on a text and compare their heads: the same parameters, the same tokens.

    What the heads of a model leave of its parameters its MLP gets. Every model that is compared is kept in
    `out/models/SETTING-seed-N`, in the format of Hugging Face: a Llama, or an encoder of that kind (EuroBERT), which
    `profile`, `ablate` and `view` run on.

    Args:
        data: a file or folder: text, JSON lines, parquet.
        out: the folder for the table, the picture, the database and the models.
        task: "lm", the next token; "mlm", tokens that are masked; "classify", the label of a text.
        heads: numbers of query heads.
        head_dims: widths of a head; by default `embed_dim / heads`.
        kv_heads: numbers of key/value heads; by default as many as query heads.
        tensor_parallel: over how many ranks heads are divided.
        baseline: the setting in use, as `8`, `8x64` or `8x64/2`.
        params: parameters of each model.
        embed_dim: width of the models; by default what suits `params`.
        layers: their depth, likewise.
        context: tokens of a sequence.
        batch: sequences of a batch.
        vocabulary: tokens of a tokenizer that is made for the text.
        tokenizer: one of `transformers` to be used instead.
        tokens: of each training; set by the budget if not given.
        column: where the text is, in JSON lines and parquet.
        label: where its label is.
        force: begin again where there is a study in `out`.
        **options: of `study`.

    Raises:
        InputError: data that cannot be read or is too little; see `study` and `Space`.
        MissingExtra: transformers, optuna, scipy, pyarrow or matplotlib is not installed.
    """
    for require in (require_optuna, require_scipy, require_transformers, require_matplotlib):
        require()  # before anything is read
    for name, value in (("params", params), ("context", context), ("batch", batch)):
        whole_number(name, value, least=1)
    space = Space(embed_dim or 1, heads, head_dims, kv_heads, tensor_parallel)
    tokenizer = make_tokenizer(data, column, vocabulary) if tokenizer is None else tokenizer
    found = corpus(task, data, tokenizer, context=context, batch=batch, column=column, label=label)
    classes = len(found.labels) or None
    given: Any = {"embed_dim": embed_dim, "layers": layers, "causal": task == "lm", "classes": classes}
    shape = Shape.of_size(params, len(tokenizer), heads, **given)
    space = replace(space, embed_dim=shape.embed_dim)
    for setting in space.settings():
        shape.mlp_dim(setting)  # refused before anything is trained
    models, others = writable_folder(out) / "models", force

    def keep(model: nn.Module, setting: Setting, seed: int) -> None:
        nonlocal others
        if others:  # of the study that was there
            shutil.rmtree(models, ignore_errors=True)
            others = False
        assert isinstance(model, Transformer)
        folder = models / f"{setting.name.replace('/', '-kv')}-seed-{seed}"
        save(model, tokenizer, folder, context=context, labels=found.labels)

    measures: dict[str, Measure] = {}
    if task == "classify":
        measures = {"accuracy": lambda model: accuracy(model, found.held_out)}
    if task == "lm":
        measures = {"decode_tokens_s": lambda model: decoding(model, context), "cache_bytes": cache_bytes}  # type: ignore[arg-type]
    made = study(
        lambda setting: Transformer(shape, setting),
        found.training,
        space,
        held_out=found.held_out,
        loss=found.loss,
        steps=None if tokens is None else -(-whole_number("tokens", tokens, least=1) // (batch * context)),
        baseline=None if baseline is None else space.read(baseline),
        measures=measures,
        keep=keep,
        out=out,
        title=Path(data).name,
        force=force,
        **options,
    )
    made.plot().savefig(Path(out) / "study.png", dpi=120)
    return made
