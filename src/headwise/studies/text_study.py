"""The function `study_texts`: compare numbers of heads on a text, with small transformers made of headwise layers.

The text becomes training data of the task: tokenizer, training batches, held-out batches, and a loss. All models have
the same number of parameters: the MLP uses those that attention does not. Every model that is compared is saved to
`out/models/SETTING-seed-N` in Hugging Face format, as a Llama or (encoders) a EuroBERT, on which `profile`, `ablate`
and `view` work.
"""

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from headwise.analysis.losses import Loss, MaskedTokenLoss, next_token_loss
from headwise.checks import device_argument, whole_number
from headwise.data.batches import device_of, evaluation_mode, to_device
from headwise.data.documents import JSON_LINES, SEPARATORS, list_files, read_documents
from headwise.data.texts import Texts
from headwise.errors import InputError, require
from headwise.runs.files import require_outside_data, require_writable, writable_folder
from headwise.shapes import Float
from headwise.studies.model import (
    ModelShape,
    Transformer,
    cache_bytes_per_token,
    decode_speed,
    require_transformers,
    save_model,
)
from headwise.studies.space import Setting, Space, StudyBudget
from headwise.studies.study import (
    DEFAULT_OPTUNA,
    HELD_OUT,
    check_requirements,
    every_nth,
    run_study,
    settings_to_compare,
)
from headwise.studies.study_result import Study
from headwise.studies.text_options import TextOptions
from headwise.studies.training import DEFAULT_RECIPE, Batches, Corpus, Measure, Recipe, StudyDefinition
from headwise.studies.trials import OptunaOptions, require_database_url

MAX_HELD_OUT = 64
"""Largest number of examples that are held out."""

PAD, END, MASK = "<|pad|>", "<|end|>", "<|mask|>"
"""Special tokens of a trained tokenizer."""


def train_tokenizer(source: str | Path, column: str, vocabulary: int) -> Any:
    """Train a byte-level byte-pair tokenizer (Sennrich et al. 2016) on the texts of a file or folder, and return it as
    a `transformers` tokenizer with at most `vocabulary` tokens, some of them for padding, end of text and masking. The
    same texts yield the same tokenizer.
    """
    require("transformers", purpose="training a tokenizer", extra="hf")
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    alphabet, special = pre_tokenizers.ByteLevel.alphabet(), [PAD, END, MASK]
    smallest = len(alphabet) + len(special)
    if vocabulary < smallest:
        raise InputError("vocabulary", expected=f"at least {smallest}, for bytes and special tokens", got=vocabulary)
    texts = [document.text for document in read_documents(source, column)]
    if not any(text.strip() for text in texts):
        raise InputError("data", expected="at least one document", got=f"no text in {source}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=special, initial_alphabet=sorted(alphabet), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token=PAD, eos_token=END, mask_token=MASK)


def make_corpus(source: str | Path, tokenizer: Any, options: TextOptions) -> Corpus:
    """Return the training and held-out batches for the task of `options`, with its loss, from the text in a file or
    folder.
    """
    if options.task == "classify":
        return _classification_corpus(source, tokenizer, options)
    if options.task == "mlm" and tokenizer.mask_token_id is None:
        raise InputError("tokenizer", expected="a tokenizer with a mask token", got="one without")
    context, batch = options.context, options.batch
    texts = Texts(source, tokenizer, context, "pack", batch, None, options.column)
    sequences = [sequence for sequence in texts.sequences if len(sequence) == context]
    if len(sequences) < HELD_OUT:
        expected = (
            f"text of at least {HELD_OUT * context:,} tokens, for {HELD_OUT} sequences of {context} with one held out"
        )
        raise InputError("data", expected=expected, got=f"{texts.tokens:,} tokens in {source}")
    loss: Loss = next_token_loss
    if options.task == "mlm":
        loss = MaskedTokenLoss(tokenizer.mask_token_id, special=tokenizer.all_special_ids)
    training, held_out = (
        [{"input_ids": torch.stack(list(group)).long()} for group in _grouped(part, batch)]
        for part in _split(sequences)
    )
    return Corpus(training, held_out, loss)


def _classification_corpus(source: str | Path, tokenizer: Any, options: TextOptions) -> Corpus:
    """Return the batches and the loss for text classification, from JSON lines, CSV or Parquet with a label for each
    text. Blank texts are left out. A class number is the index of the label in the sorted list of labels.
    """
    Texts(source, tokenizer, options.context, "truncate", options.batch, None, options.column)  # checks its arguments
    label = options.label
    if plain := next(
        (file for file in list_files(source) if file.suffix not in (*JSON_LINES, *SEPARATORS, ".parquet")), None
    ):
        raise InputError("data", expected=f"JSON lines, CSV or Parquet with a column {label!r}", got=str(plain))
    labels = [document.text for document in read_documents(source, label, (str, int))]
    documents = [document.text for document in read_documents(source, options.column)]
    pairs = [(text, name) for text, name in zip(documents, labels, strict=True) if text.strip()]
    classes = tuple(sorted({name for _, name in pairs}))
    if len(pairs) < HELD_OUT or len(classes) < 2:
        expected = f"at least {HELD_OUT} texts, of which one is held out, with at least two labels"
        raise InputError("data", expected=expected, got=f"{len(pairs)} texts with {len(classes)} labels in {source}")
    examples = []
    for text, name in pairs:
        ids = tokenizer(text, truncation=True, max_length=options.context, verbose=False)["input_ids"]
        examples.append((torch.tensor(ids, dtype=torch.int64), classes.index(name)))

    def padded(group: Sequence[tuple[Tensor, int]]) -> dict[str, Any]:
        """Return labelled texts as one batch: token ids padded to equal length (`input_ids`), `attention_mask`, and the
        number of each text's class (`label`).
        """
        sequences = [ids for ids, _ in group]
        ids = nn.utils.rnn.pad_sequence(sequences, batch_first=True, padding_value=tokenizer.pad_token_id or 0)
        lengths = torch.tensor([len(sequence) for sequence in sequences])
        attention_mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        return {
            "input_ids": ids,
            "attention_mask": attention_mask,
            "label": torch.tensor([number for _, number in group]),
        }

    training, held_out = ([padded(group) for group in _grouped(part, options.batch)] for part in _split(examples))
    return Corpus(training, held_out, class_loss, classes)


def _split(examples: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """Split examples into training and held-out ones. Every n-th example is held out, where n is 10 or, with more than
    640 examples, so large that about 64 are held out. The training examples are shuffled, always in the same order.
    """
    training, held_out = every_nth(examples, max(HELD_OUT, -(-len(examples) // MAX_HELD_OUT)))
    order = torch.randperm(len(training), generator=torch.Generator().manual_seed(0)).tolist()
    return [training[index] for index in order], held_out


def _grouped(examples: Sequence[Any], batch: int) -> Iterator[Sequence[Any]]:
    """Yield consecutive groups of exactly `batch` examples; the last few examples may be left out. If there are fewer
    than `batch`, yield one group of all.
    """
    for start in range(0, max(1, len(examples) - batch + 1), batch):
        yield examples[start : start + batch]


def class_loss(model: nn.Module, batch: dict[str, Any]) -> Float[Tensor, " batch"]:
    """Return the cross-entropy, in nats, between a classifier's logits and the correct class of each text."""
    inputs = {name: value for name, value in batch.items() if name != "label"}
    return F.cross_entropy(model(**inputs), batch["label"], reduction="none")


def accuracy(model: nn.Module, batches: Batches) -> float:
    """Return the share of texts in all batches for which a classifier's largest logit is that of the correct class."""
    correct = total = 0
    with evaluation_mode(model), torch.no_grad():
        for batch in batches:
            inputs = to_device(batch, device_of(model))
            label = inputs.pop("label")
            correct, total = correct + int((model(**inputs).argmax(-1) == label).sum()), total + len(label)
    return correct / total


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
    """Train small transformers with different heads on a text. All have about the same number of parameters, and are
    trained for the same number of steps. Return a table that compares their held-out losses. The table, a plot and the
    trained models are saved in `out`.

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
        """Save a model to a folder such as `8x64-kv2-seed-1`. With `force`, delete earlier models first."""
        nonlocal has_old_models
        if has_old_models:
            shutil.rmtree(models, ignore_errors=True)
            has_old_models = False
        assert isinstance(model, Transformer)
        folder = models / f"{setting.name.replace('/', '-kv')}-seed-{seed}"
        save_model(model, tokenizer, folder, context=text.context, labels=corpus.labels)

    def build_model(setting: Setting) -> Transformer:
        return Transformer(shape, setting).to(target)

    definition = StudyDefinition(build_model, settings, corpus, recipe, measures, save, seed)
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
