"""`heal`: short training of a pruned or merged model, which learns the outputs of the dense one (distillation).

A run in a folder writes checkpoints of weights, optimizer, schedule and random numbers, from which it resumes with the
same numbers.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.checks import finite_number, flag, require_module, whole_number
from headwise.compression.healing.distillation import distillation_loss
from headwise.compression.healing.model_settings import model_settings
from headwise.compression.parameter_counts import memory_of
from headwise.data.batches import (
    call_model,
    copied,
    device_of,
    digest_of,
    digest_of_batches,
    evaluation_mode,
    iterate_batches,
    to_device,
    with_cache_disabled,
)
from headwise.data.texts import Texts, batches_of
from headwise.errors import InputError, require
from headwise.progress import progress_bar
from headwise.runs.checkpoint import load_state, save_state
from headwise.runs.data_pass import prepare_texts
from headwise.runs.files import locked_folder, writable_folder
from headwise.runs.fingerprint import run_settings

WARMUP, FLOOR = 0.1, 0.1
"""Share of the steps in which the learning rate rises to its peak, and share of the peak to which it falls."""

LARGEST_NORM = 1.0
"""Norm of all gradients together above which they are scaled down."""

LARGEST_SEED = 2**31 - 1

SEED_OF_EPOCH = 2**31
"""Distance of the seeds of consecutive epochs, larger than any seed."""

CHECKPOINT, FINISHED = "unfinished-heal.pt", "healed.pt"
"""Files in the folder: the latest checkpoint, and in its place the trained weights at the end."""


@dataclass(frozen=True)
class HealingOptions:
    """Options of `heal`, which trains a compressed model to have the same outputs as the dense one. Invalid values
    raise `InputError`.
    """

    steps: int
    lr: float = 1e-4
    temperature: float = 1.0
    checkpoint_every: int = 100
    seed: int = 0

    def __post_init__(self) -> None:
        whole_number("steps", self.steps, least=1)
        finite_number("lr", self.lr, above=0.0)
        finite_number("temperature", self.temperature, above=0.0)
        whole_number("checkpoint_every", self.checkpoint_every, least=1)
        whole_number("seed", self.seed, least=0, most=LARGEST_SEED)

    def rate_factor(self, step: int) -> float:
        """Return the learning rate of a training step as a share of the peak rate. The rate rises linearly during
        warmup, and then falls along half a cosine.
        """
        warmup = max(1, round(WARMUP * self.steps))
        if step < warmup:
            return (step + 1) / warmup
        fallen = min(1.0, (step - warmup) / max(1, self.steps - warmup))
        return FLOOR + (1.0 - FLOOR) * (1.0 + math.cos(math.pi * fallen)) / 2.0


def heal(
    model: nn.Module,
    teacher: nn.Module,
    data: Any,
    steps: int,
    *,
    out: str | Path | None = None,
    lr: float = 1e-4,
    batch: int | None = None,
    temperature: float = 1.0,
    checkpoint_every: int = 100,
    seed: int = 0,
    force: bool = False,
    progress: bool = False,
) -> nn.Module:
    """Train a pruned or merged model, in place, to reproduce the outputs of the dense model `teacher`. Return the
    trained model in evaluation mode. The teacher is unchanged.

    The loss is that of `distillation_loss`: the Kullback-Leibler divergence of distributions over the vocabulary
    (Hinton et al. 2015, section 2), or the relative squared error of other outputs. AdamW minimizes it, with the mixed
    precision that `accelerate` is configured for ("no" or "bf16").

    With `out`, an interrupted run resumes when it is called again with the same arguments and the untrained model. On
    the CPU in float32, the result has the same bits as that of an undisturbed run.

    Args:
        model: the model to train, in float32 or float64.
        teacher: the dense model, of any dtype.
        data: `Texts`, or batches of the models' arguments, which are read once.
        steps: number of optimizer steps, of one batch each.
        out: folder for checkpoints and, at the end, the trained weights; None for a run that cannot resume.
        lr: peak learning rate, between linear warmup and cosine decay.
        batch: sequences per batch, for `Texts`; by default as these state.
        temperature: divisor of the logits before the softmax. Larger ones give unlikely tokens more weight.
        checkpoint_every: number of steps between checkpoints.
        seed: seed of the order of the batches, and of dropout.
        force: replace another run in `out`.
        progress: show a progress bar on standard error.

    Raises:
        InputError: an argument cannot be used, a loss is not finite, the outputs of the models cannot be compared, or
            `out` contains another run or cannot be written.
        MissingExtra: accelerate is not installed, or a package that `out`, `progress` or the data need.

    Example:
        >>> smaller = headwise.heal(smaller, model, texts, 200, out="healing")  # doctest: +SKIP
    """
    options = HealingOptions(steps, lr, temperature, checkpoint_every, seed)
    accelerate = require("accelerate", purpose="healing", extra="heal")
    accelerator = accelerate.Accelerator(device_placement=False)  # the model stays on its device
    if accelerator.num_processes > 1 or accelerator.mixed_precision not in ("no", "bf16"):
        # Checkpoints would lose the scaling of float16.
        got = f"{accelerator.num_processes} with mixed precision {accelerator.mixed_precision}"
        raise InputError("accelerate", expected="one process, with mixed precision no or bf16", got=got)
    _require_trainable(model, teacher)
    flag("force", force)
    texts = prepare_texts(data, model, out, shown=progress)
    batches = TrainingBatches(texts, batch, options.seed)
    more = {"content": batches.digest, "batch": batch, "mixed_precision": accelerator.mixed_precision}
    folder = HealingFolder(out, _settings(model, teacher, texts, options, more))
    with folder.claimed(force=force):
        if (finished := folder.read(FINISHED)) is not None:
            model.load_state_dict(finished["model"])
        else:
            _train(model, teacher, batches, options, accelerator, folder, shown=progress)
    return model.eval()


def _settings(
    model: nn.Module, teacher: nn.Module, data: Any, options: HealingOptions, more: Mapping[str, Any]
) -> dict[str, Any]:
    """Return JSON-compatible values of everything that the trained weights depend on: the options, hashes of both
    models' weights and of the names of the trained weights, other settings of both models, and the values in `more`.
    """
    numbers = asdict(options) | {"lr": float(options.lr), "temperature": float(options.temperature)}
    of_teacher = run_settings(teacher, None, "teacher")["model"] | model_settings(teacher)
    texts = data if isinstance(data, Texts) else None
    del numbers["checkpoint_every"]  # the result does not depend on it
    trained = digest_of([name for name, weight in model.named_parameters() if weight.requires_grad])
    of_student = model_settings(model)
    more = {**more, "trained": trained, "student": of_student, "teacher": of_teacher}
    return run_settings(model, texts, "model", **numbers, **more)


def _require_trainable(model: Any, teacher: Any) -> None:
    """Raise `InputError` if a model has no trainable weights, or if a trainable weight is neither float32 nor float64.
    Also raise it if trainable weights of the model share memory with weights of the teacher.
    """
    require_module(model)
    if not isinstance(teacher, nn.Module):
        raise InputError("teacher", expected="a torch module", got=type(teacher).__name__)
    trained = {name: weight for name, weight in model.named_parameters() if weight.requires_grad}
    if not trained:
        raise InputError("model", expected="parameters that require gradients", got="none")
    for name, weight in trained.items():
        if weight.dtype not in (torch.float32, torch.float64):
            got, remedy = f"{weight.dtype} in {name}", "model.float() converts it, and smaller steps then count"
            raise InputError("model", expected="parameters of float32 or float64", got=got, remedy=remedy)
    of_teacher = set(map(memory_of, teacher.parameters()))
    shared = [name for name, weight in trained.items() if memory_of(weight) in of_teacher]
    if shared:
        got = f"one that shares {shared[0]}"
        raise InputError("teacher", expected="a model of its own", got=got, remedy="copy.deepcopy(model) makes one")


class TrainingBatches:
    """Training batches, addressed by the number of the training step. If the data are `Texts`, all sequences are
    shuffled in each epoch and grouped into new batches; otherwise, only the order of the batches is shuffled. The order
    depends on the seed and the epoch alone, so that a resumed training continues with the same batches.

    Attributes:
        digest: hash of the content.
    """

    def __init__(self, data: Any, batch: int | None, seed: int) -> None:
        if batch is not None and not isinstance(data, Texts):
            raise InputError("batch", expected="None for data that are batches already", got=batch)
        self._seed, self._sequences, self._size = seed, data.sequences if isinstance(data, Texts) else None, 0
        if isinstance(data, Texts):
            self._size = data.batch if batch is None else whole_number("batch", batch, least=1)
        self._batches = list(batches_of(self._sequences, self._size) if self._sequences else iterate_batches(data))
        if not self._batches:
            raise InputError("data", expected="at least one batch", got="none")
        self.digest = digest_of_batches(self._batches)
        self._epoch: tuple[int, list[dict[str, Any]]] = (-1, [])

    def at(self, step: int) -> Mapping[str, Any]:
        """Return the batch on which the model is trained in the step `step`. Steps are counted from 0."""
        epoch, place = divmod(step, len(self._batches))
        if self._epoch[0] != epoch:
            generator = torch.Generator().manual_seed(self._seed + epoch * SEED_OF_EPOCH)
            batches = self._batches
            if self._sequences:
                order = torch.randperm(len(self._sequences), generator=generator).tolist()
                batches = list(batches_of([self._sequences[index] for index in order], self._size))
            order = torch.randperm(len(batches), generator=generator).tolist()
            self._epoch = (epoch, [batches[index] for index in order])
        return self._epoch[1][place]


class HealingFolder:
    """Output folder of a healing run (training of a compressed model by the dense one), which can be stopped and
    resumed. A run resumes only from files that were written with the same JSON-compatible settings. Without a folder
    (None), nothing is read or written.
    """

    def __init__(self, folder: str | Path | None, settings: Mapping[str, Any]) -> None:
        self._folder, self._settings = folder, settings

    @contextmanager
    def claimed(self, *, force: bool) -> Iterator[None]:
        """Create the folder, and lock it while the context is open. With `force`, the files of an earlier run in the
        folder are deleted. Without it, an earlier run with other settings raises an error.
        """
        if self._folder is None:
            yield
            return
        self._folder = writable_folder(self._folder)
        with locked_folder(self._folder):
            for name in (CHECKPOINT, FINISHED):
                if force:
                    (self._folder / name).unlink(missing_ok=True)
                self.read(name, mmap=True)  # the settings alone
            yield

    def finish(self, model: nn.Module) -> None:
        """Write the trained weights to the folder, and delete the checkpoint."""
        self.write(FINISHED, {"model": model.state_dict()})
        if self._folder is not None:
            (Path(self._folder) / CHECKPOINT).unlink(missing_ok=True)

    def write(self, name: str, content: Mapping[str, Any]) -> None:
        """Write `content`, together with the settings of the run, to the file `name` in the folder."""
        if self._folder is not None:
            save_state(Path(self._folder) / name, self._settings, content)

    def read(self, name: str, *, mmap: bool = False) -> Any:
        """Return the content of the file `name` in the folder, or None if there is no such file. Raise an error if a
        run with other settings wrote the file.
        """
        if self._folder is None or not (path := Path(self._folder) / name).exists():
            return None
        return load_state(path, self._settings, map_location="cpu", mmap=mmap)


def _train(
    model: nn.Module,
    teacher: nn.Module,
    batches: TrainingBatches,
    options: HealingOptions,
    accelerator: Any,
    folder: HealingFolder,
    *,
    shown: bool,
) -> None:
    """Train a model in place to reproduce the teacher's outputs, from the first step or from the checkpoint in the
    folder. Write checkpoints during training, and the trained weights at the end.
    """
    device = device_of(model)
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=options.lr, betas=(0.9, 0.95), weight_decay=0.0)

    def rate_factor(step: int) -> float:  # torch would save the object of a method in checkpoints
        return options.rate_factor(step)

    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, rate_factor)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer, "schedule": schedule}
    student, prepared = accelerator.prepare(model, optimizer)
    shown_bar = progress_bar("healing", options.steps, "steps", shown=shown)
    with torch.random.fork_rng([device] if device.type == "cuda" else []), evaluation_mode(teacher), shown_bar as bar:
        torch.manual_seed(options.seed)
        start = 0
        if (checkpoint := folder.read(CHECKPOINT)) is not None:
            start, saved = int(checkpoint["step"]), checkpoint["state"]
            for name, part in state.items():
                part.load_state_dict(saved[name])
            torch.set_rng_state(saved["random"])
            if saved["random_on_device"] is not None:
                torch.cuda.set_rng_state(saved["random_on_device"], device)
        bar.resume(start)
        student.train()
        try:
            for step in bar.track(range(start, options.steps)):
                batch = batches.at(step)
                inputs, of_teacher = (
                    with_cache_disabled(each, to_device(copied(batch), device_of(each))) for each in (model, teacher)
                )
                with torch.no_grad():
                    target = call_model(teacher, of_teacher)
                loss = distillation_loss(call_model(student, inputs), target, model, inputs, options.temperature)
                _require_finite(loss, f"loss at step {step + 1}")
                accelerator.backward(loss)
                _require_finite(
                    accelerator.clip_grad_norm_(weights, LARGEST_NORM), f"norm of gradients at step {step + 1}"
                )
                prepared.step()
                schedule.step()
                prepared.zero_grad()
                if (step + 1) % options.checkpoint_every == 0 and step + 1 < options.steps:
                    states = {name: part.state_dict() for name, part in state.items()}
                    states["random"] = torch.get_rng_state()
                    on_device = torch.cuda.get_rng_state(device) if device.type == "cuda" else None
                    folder.write(CHECKPOINT, {"step": step + 1, "state": {**states, "random_on_device": on_device}})
        finally:
            accelerator.unwrap_model(student, keep_fp32_wrapper=False)
            accelerator.free_memory()
            vars(model).pop("_is_accelerate_prepared", None)
            for weight in weights:
                weight.grad = None
    folder.finish(model)


def _require_finite(value: Tensor, name: str) -> None:
    """Raise `InputError` if `value`, a loss or gradient norm of a training step, is not finite. The check takes place
    before the optimizer changes the weights.
    """
    if not bool(value.detach().isfinite()):
        remedy = "a smaller lr may help, or weights and inputs that are finite"
        raise InputError("model", expected=f"a finite {name}", got=float(value.detach()), remedy=remedy)
