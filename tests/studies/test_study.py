"""Studies of toy models: reproducible, resumable at any point, and within their budget."""

import math
import re
import shutil
import statistics
from collections import Counter
from types import SimpleNamespace

import optuna
import pytest
import torch
from torch import nn

import headwise as hw
from headwise.analysis.losses import loss_per_example
from headwise.studies import scheduler, training, trials
from headwise.studies.space import MAX_TRIALS
from headwise.studies.study import split_batches

pytestmark = pytest.mark.usefixtures("as_user")

ONE, TWO, FOUR = hw.Setting(1, 8, 1), hw.Setting(2, 4, 2), hw.Setting(4, 2, 4)
STEPS, TRIALS, SEEDS = 10, 2, 2


class Toy(nn.Module):
    """Predicts the next byte with one attention layer."""

    def __init__(self, setting):
        super().__init__()
        self.setting = setting
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        options = {"num_kv_heads": setting.num_kv_heads, "head_dim": setting.head_dim, "mask": hw.causal()}
        self.attention = hw.MultiHeadAttention(8, setting.num_heads, **options)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.out(x + self.attention(x))


class EmbeddingToy(nn.Module):
    """Predicts the next byte from an embedding alone: for tests in which only the duration of a step matters."""

    def __init__(self, setting):
        super().__init__()
        self.setting, self.logits = setting, nn.Embedding(11, 11)

    def forward(self, input_ids):
        return self.logits(input_ids)


def sequences(number, seed=0, first=0):
    """Batches of sequences that count upwards; the first byte is the number of the batch."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randint(0, 11, (2, 1), generator=generator) + torch.arange(7)) % 11
    return [{"input_ids": torch.cat([torch.full((2, 1), (n + first) % 11), made], 1)} for n in range(number)]


DATA, HELD_OUT = sequences(7), sequences(3, 1)


class Loss:
    """The next-token loss; it records its batches, and raises `Stopped` after a number of training steps."""

    def __init__(self, stops_after=math.inf):
        self.trained, self.evaluated, self.steps, self.stops_after = [], [], 0, stops_after

    def __call__(self, model, batch):
        if model.training:
            self.steps += 1
            if self.steps > self.stops_after:
                raise Stopped
        (self.trained if model.training else self.evaluated).append(batch["input_ids"])
        return hw.next_token_loss(model, batch)

    __name__ = "toy_loss"


class Stopped(Exception):
    pass


class Callback:
    """Records the setting and seed of each compared model, and raises `Stopped` at one of them."""

    def __init__(self, stops_at=None):
        self.calls, self.stops_at = [], stops_at

    def __call__(self, model, setting, seed):
        if len(self.calls) == self.stops_at:
            raise Stopped
        assert (model.setting, model.training) == (setting, False)
        self.calls.append((setting, seed))


def study(space=(ONE, TWO), data=None, seconds=None, steps=STEPS, trials=TRIALS, seeds=SEEDS, model=Toy, **options):
    budget = hw.StudyBudget(seconds, steps, trials=trials, seeds=seeds)
    options = {"held_out": HELD_OUT, "loss": Loss(), "budget": budget} | options
    return hw.study(model, DATA if data is None else data, space, **options)


def study_in_memory(*arguments, **options):
    """A study whose trials are in memory instead of a database, for tests in which nothing is read back from it."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trials, "open_storage", lambda url: optuna.storages.InMemoryStorage())
        return study(*arguments, **options)


def outcome(result):
    """The part of the results that does not depend on the clock."""
    trained = [(run["rate"], run["train_loss"]) for run in result.metadata["runs"]]
    return result.losses, trained, result.metadata["search"]


@pytest.fixture(scope="module")
def complete_folder(tmp_path_factory):
    """Output folder of the study `complete`, which no test may change."""
    return tmp_path_factory.mktemp("complete")


@pytest.fixture(scope="module")
def uninterrupted(complete_folder):
    """A study without interruption, and the number of its training steps."""
    return study(loss=(loss := Loss()), out=complete_folder), loss.steps


@pytest.fixture(scope="module")
def complete(uninterrupted):
    return uninterrupted[0]


@pytest.fixture(scope="module")
def total(uninterrupted):
    return uninterrupted[1]


def test_equal_arguments_give_equal_losses(complete):
    torch.randn(7)
    state = torch.get_rng_state()
    again = study()
    assert outcome(again) == outcome(complete)
    assert torch.equal(torch.get_rng_state(), state)
    other = study_in_memory(seed=1)
    assert all(other.losses[setting] != complete.losses[setting] for setting in (ONE, TWO))
    assert len({loss for runs in complete.losses.values() for loss in runs.values()}) == 4


def test_the_table_has_means_over_seeds_and_lists_every_training(complete, complete_folder):
    assert [row.setting for row in complete.rows] == [ONE, TWO]
    for row in complete.rows:
        losses = list(complete.losses[row.setting].values())
        assert list(complete.losses[row.setting]) == [1, 2]
        sem = statistics.stdev(losses) / 2**0.5
        assert row.statistics["loss"] == pytest.approx((statistics.fmean(losses), sem, 2, 1))
        assert row.statistics["parameters"].value == sum(each.numel() for each in Toy(row.setting).parameters())
        assert row.statistics["step_ms"].value > 0
        assert list(row.statistics) == ["loss", "train_loss", "step_ms", "parameters", "rate"]
    metadata, settings = complete.metadata, complete.metadata["settings"]
    assert (metadata["steps"], metadata["seeds"]) == (STEPS, SEEDS)
    assert (metadata["baseline"], metadata["left_out"]) == (None, ())
    saved = hw.Study.load_metadata(complete_folder)["runs"][0]
    assert list(saved) == ["setting", "seed", "rate", "loss", "train_loss", "step_ms", "seconds"]
    assert saved["setting"] == [1, 8, 1]
    assert (settings["space"], settings["loss"], settings["seed"]) == (["1x8", "2x4"], "toy_loss", 0)
    assert (settings["training batches"], settings["held-out batches"]) == (7, 3)


def test_each_final_training_equals_one_by_hand(complete):
    """Weights from its seed, its learning rate, and its losses on held-out and on training batches."""
    for run in complete.metadata["runs"]:
        setting = hw.Setting(*run["setting"])
        torch.manual_seed(run["seed"])
        model = Toy(setting)
        options = {"steps": STEPS, "rate": run["rate"], "seed": run["seed"]}
        training.train(model, DATA, hw.next_token_loss, **options)
        with torch.no_grad():
            held_out = [loss_per_example(hw.next_token_loss, model.eval(), batch) for batch in HELD_OUT]
            in_training = [loss_per_example(hw.next_token_loss, model, batch) for batch in DATA[:3]]
        assert run["loss"] == pytest.approx(torch.cat(held_out).mean().item(), rel=1e-6)
        assert run["train_loss"] == pytest.approx(torch.cat(in_training).mean().item(), rel=1e-6)


def test_final_trainings_use_the_best_learning_rate_of_the_search():
    result = study_in_memory((ONE, TWO, FOUR), trials=4, recipe=hw.Recipe(rates=(1e-5, 1.0)))
    for row in result.rows:
        searched = [each for each in result.metadata["search"] if each["setting"] == row.name]
        assert len(searched) == 4
        best = min((each for each in searched if not each["pruned"]), key=lambda each: each["loss"])
        rates = [run["rate"] for run in result.metadata["runs"] if run["setting"] == list(vars(row.setting).values())]
        assert rates == [best["rate"]] * SEEDS
        assert row.statistics["rate"].value == best["rate"]
        assert searched[0]["rate"] == pytest.approx(10**-2.5)
        assert sorted(each["rate"] for each in searched[:3]) == pytest.approx([10**-3.75, 10**-2.5, 10**-1.25])


def test_held_out_batches_are_never_trained_on():
    loss = Loss()
    study_in_memory(loss=loss, held_out=None, data=(data := sequences(11)))
    held_out = data[5]["input_ids"]
    assert not any(torch.equal(ids, held_out) for ids in loss.trained)
    seen = {n for ids in loss.trained for n, each in enumerate(data) if torch.equal(ids, each["input_ids"])}
    assert seen == {*range(11)} - {5}
    assert any(torch.equal(ids, held_out) for ids in loss.evaluated)
    # Trainings are evaluated on held-out batches; compared models also on the first training batches.
    counts = Counter(n for ids in loss.evaluated for n, each in enumerate(data) if torch.equal(ids, each["input_ids"]))
    assert counts[0] == 2 * SEEDS
    assert set(counts) == {0, 5}


def test_every_tenth_batch_is_held_out():
    for number, held_out in ((6, [5]), (15, [5]), (16, [5, 15]), (27, [5, 15, 25])):
        kept, judged = split_batches([torch.tensor([[n]]) for n in range(number)], None)
        assert [each[""].item() for each in judged] == held_out
        assert [each[""].item() for each in kept] == [n for n in range(number) if n not in held_out]


@pytest.mark.parametrize("stop", [1, *(pytest.param(n, marks=pytest.mark.slow) for n in (0, 2, 3))])
def test_a_study_that_stopped_in_the_callback_resumes(stop, complete, tmp_path):
    before = Callback(stop)
    with pytest.raises(Stopped):
        study(on_trained=before, out=tmp_path)
    assert len(before.calls) == stop
    loss, after = Loss(), Callback()
    result = study(on_trained=after, loss=loss, out=tmp_path)
    assert outcome(result) == outcome(complete)
    assert [*before.calls, *after.calls] == [(ONE, 1), (TWO, 1), (ONE, 2), (TWO, 2)]
    assert loss.steps == STEPS * (4 - stop)
    loss = Loss()
    assert outcome(study(on_trained=Callback(0), loss=loss, out=tmp_path)) == outcome(complete)
    assert not loss.trained
    assert not loss.evaluated


@pytest.mark.parametrize("stop", [0, 19, 59, *(pytest.param(n, marks=pytest.mark.slow) for n in (4, 10, 27, 47))])
def test_a_study_that_stopped_at_any_step_resumes(stop, complete, total, tmp_path):
    """The training that was stopped is repeated from its beginning, and no other."""
    assert 60 < total <= STEPS * 2 * (TRIALS + SEEDS)
    with pytest.raises(Stopped):
        study(loss=Loss(stop), out=tmp_path)
    loss = Loss()
    assert outcome(study(loss=loss, out=tmp_path)) == outcome(complete)
    assert total - stop <= loss.steps < total - stop + STEPS
    assert {path.name for path in tmp_path.iterdir()} == {"study.db", "study.parquet"}
    assert outcome(hw.Study.load(tmp_path)) == outcome(complete)


def test_seeds_can_be_added_to_a_finished_study(complete, complete_folder, tmp_path):
    shutil.copytree(complete_folder, tmp_path, dirs_exist_ok=True)
    callback = Callback()
    result = study(out=tmp_path, seeds=4, on_trained=callback)
    assert callback.calls == [(ONE, 3), (TWO, 3), (ONE, 4), (TWO, 4)]
    assert outcome(result) == outcome(study_in_memory(seeds=4))
    assert result.losses[ONE].items() >= complete.losses[ONE].items()


OTHERS = {
    "data": {"data": sequences(7, 2)},
    "space": {"space": (ONE, FOUR)},
    "loss": {"loss": hw.next_token_loss},
    "steps": {"steps": 11},
    "trials": {"trials": 2},
    "recipe": {"recipe": hw.Recipe(clip=2.0)},
    "recipe ": {"recipe": hw.Recipe(rates=(1e-4, 1e-2))},
    "seed": {"seed": 1},
}


@pytest.fixture(scope="module")
def smallest(tmp_path_factory):
    """A study of one setting with one learning rate and one seed, and its output folder, which no test may change."""
    folder = tmp_path_factory.mktemp("smallest")
    return study((ONE,), trials=1, seeds=1, out=folder), folder


@pytest.fixture
def smallest_copy(smallest, tmp_path):
    """A copy of the output folder of the study `smallest`."""
    shutil.copytree(smallest[1], tmp_path, dirs_exist_ok=True)
    return tmp_path


@pytest.mark.parametrize("name", OTHERS)
def test_a_folder_with_another_study_is_refused(name, smallest, smallest_copy):
    first, tmp_path = smallest[0], smallest_copy
    before = {path.name: path.read_bytes() for path in tmp_path.glob("study.p*")}
    options = {"space": (ONE,), "trials": 1, "seeds": 1, "out": tmp_path} | OTHERS[name]
    sentence = (
        f"out: expected a study that was started with the same {name.strip()}, got another; "
        "--force (force=True) starts again"
    )
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        study(**options)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("study.p*")} == before
    if name == "data":  # the refusal has changed no trial
        assert outcome(study((ONE,), trials=1, seeds=1, out=tmp_path)) == outcome(first)
    loss = Loss()
    again = study(**{"loss": loss} | options, force=True)
    assert outcome(again) == outcome(study_in_memory(**options | {"out": None}))
    assert loss.steps > 0 or name == "loss"


class LargerToy(Toy):
    def __init__(self, setting):
        super().__init__(setting)
        self.out = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 11))


@pytest.mark.parametrize(
    ("name", "options"),
    [("model", {"model": LargerToy}), *(("data", {"held_out": each}) for each in (sequences(3, 5), sequences(2, 1)))],
)
def test_other_models_and_held_out_batches_make_another_study(name, options, smallest_copy):
    with pytest.raises(hw.InputError, match=f"^out: expected a study that was started with the same {name}, got anot"):
        study((ONE,), trials=1, seeds=1, out=smallest_copy, **options)


def test_other_options_of_the_loss_make_another_study(tmp_path):
    options = {"trials": 1, "seeds": 1, "steps": 1, "out": tmp_path}
    study((ONE,), loss=hw.MaskedTokenLoss(10, share=0.4), **options)
    sentence = "^out: expected a study that was started with the same loss options, got another; "
    with pytest.raises(hw.InputError, match=sentence):
        study((ONE,), loss=hw.MaskedTokenLoss(10, share=0.2), **options)


def test_a_learning_rate_with_which_training_diverges_is_not_used():
    """The loss is NaN at large learning rates: these trials are pruned."""

    def loss(model, batch):
        losses = hw.next_token_loss(model, batch)
        return losses * (math.nan if model.out.weight.abs().max() > 0.9 else 1.0)

    result = study((ONE,), trials=3, recipe=hw.Recipe(rates=(1e-4, 1.0)), loss=loss)
    first, second, third = result.metadata["search"]
    assert (first["rate"], second["rate"], third["rate"]) == pytest.approx((1e-2, 1e-3, 1e-1))
    assert third["pruned"]
    assert not first["pruned"]
    (rate,) = {run["rate"] for run in result.metadata["runs"]}
    assert rate < 0.05
    assert all(math.isfinite(run["loss"]) for run in result.metadata["runs"])


def test_a_setting_that_never_trains_is_an_error():
    def loss(model, batch):
        return hw.next_token_loss(model, batch) * math.nan

    sentence = "rates: expected at least one learning rate with which 1x8 trains, got no finite loss in the search"
    with pytest.raises(hw.InputError, match=f"^{sentence}$"):
        study((ONE,), loss=loss)


def test_the_baseline_is_always_compared(tmp_path):
    result = study_in_memory((ONE,), baseline=FOUR, trials=1, out=tmp_path)
    assert [row.setting for row in result.rows] == [ONE, FOUR]
    assert result.baseline == hw.Study.load(tmp_path).baseline == FOUR
    space = hw.Space(8, (1, 3))
    assert study_in_memory(space, trials=1, seeds=1).metadata["left_out"] == ("3 heads do not divide embed_dim 8",)


def test_additional_measures(tmp_path):
    result = study_in_memory(
        (ONE, TWO), trials=1, measures={"heads": lambda model: model.setting.num_heads}, out=tmp_path
    )
    assert [row.statistics["heads"] for row in result.rows] == [(1.0, 0.0, 2, 1), (2.0, 0.0, 2, 1)]
    assert hw.Study.load(tmp_path).row(TWO).statistics["heads"].value == 2.0


def test_two_studies_in_one_database(complete, tmp_path):
    storage = f"sqlite:///{tmp_path}/mine.db"
    with pytest.raises(Stopped):
        study(optuna=hw.OptunaOptions(storage, "a"), on_trained=Callback(1))
    loss = Loss()
    result = study(optuna=hw.OptunaOptions(storage, "a"), out=tmp_path / "out", loss=loss)
    assert outcome(result) == outcome(complete)
    assert loss.steps == STEPS * 3
    assert result.metadata["model"]["name"] == "a"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"study.parquet"}
    other = study((ONE,), trials=1, seeds=1, optuna=hw.OptunaOptions(storage, "b"), seed=1)
    assert other.metadata["model"]["name"] == "b"
    assert outcome(study(optuna=hw.OptunaOptions(storage, "a"))) == outcome(complete)


# -- budgets ----------------------------------------------------------------------------------------------------------


class Clock:
    """Replacement of the module `time` in which only training and evaluation take time."""

    def __init__(self):
        self.now, self.seconds, self.steps, self.slower_after, self.by = 1000.0, 0.1, 0, math.inf, 2.0

    def time(self):
        return self.now

    perf_counter = time

    def sleep(self, seconds):
        self.now += seconds

    def takes(self, model):
        """A step takes `seconds`, the evaluation of a batch a third of that; with four heads, twice as long."""
        self.steps += model.training
        factor = (self.by if self.steps > self.slower_after else 1.0) * (2 if model.setting == FOUR else 1)
        self.now += factor * self.seconds * (1.0 if model.training else 1 / 3)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (trials, training, scheduler):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=made.time, perf_counter=made.time, sleep=made.sleep))
    return made


def timed(clock, seconds, stops_after=math.inf, **options):
    """A study with a time limit, whose clock advances with each batch; without `out`, its trials are in memory."""
    loss = Loss(stops_after)

    def takes(model, batch):
        clock.takes(model)
        return loss(model, batch)

    takes.__name__ = "toy_loss"
    defaults = {"steps": None, "trials": None, "seconds": seconds, "loss": takes, "data": sequences(40)}
    start = study if "out" in options else study_in_memory
    return start(**defaults | {"model": EmbeddingToy} | options)


@pytest.mark.parametrize(
    ("budget", "speed", "slower_after", "other"),
    [
        *((*each, math.inf, TWO) for each in ((30.0, 0.1), (60.0, 0.1), (40.0, 0.06), (70.0, 0.12))),
        *((60.0, 0.1, after, TWO) for after in (20, 250)),
        (90.0, 0.1, math.inf, FOUR),
    ],
)
def test_a_study_uses_its_time(budget, speed, slower_after, other, clock):
    """Also if steps become slower, and if those of one setting take twice as long."""
    clock.seconds, clock.slower_after, start = speed, slower_after, clock.now
    result = timed(clock, budget, space=(ONE, other))
    assert 0.8 * budget <= clock.now - start <= 1.1 * budget
    if slower_after == math.inf:
        assert [len(result.losses[setting]) for setting in (ONE, other)] == [SEEDS, SEEDS]
        assert result.metadata["steps"] >= 20
        steps = [result.row(setting).statistics["step_ms"].value for setting in (ONE, other)]
        assert steps == pytest.approx([1000 * speed, 1000 * speed * (2 if other == FOUR else 1)])
    if slower_after == math.inf and other == TWO:
        searches = Counter(each["setting"] for each in result.metadata["search"])
        assert all(2 <= number <= MAX_TRIALS for number in searches.values())


def test_a_time_limit_allows_four_passes_over_the_data_at_most(clock):
    start = clock.now
    result = timed(clock, 5_000.0, data=sequences(7))
    assert result.metadata["steps"] == 28
    assert Counter(each["setting"] for each in result.metadata["search"]) == {"1x8": MAX_TRIALS, "2x4": MAX_TRIALS}
    assert clock.now - start < 200.0


@pytest.mark.parametrize("after", [30, 300])
def test_a_resumed_study_ends_in_time(after, clock, tmp_path):
    """The time between the interruption and the next start does not count."""
    start = clock.now
    with pytest.raises(Stopped):
        timed(clock, 70.0, after, out=tmp_path)
    stopped = clock.now
    clock.now += 10_000.0
    again = clock.now
    result = timed(clock, 70.0, out=tmp_path)
    assert 0.8 * 70 <= (stopped - start) + (clock.now - again) <= 1.1 * 70
    assert all(len(runs) >= 1 for runs in result.losses.values())


def test_a_time_limit_does_not_change_a_given_number_of_steps(clock):
    result = timed(clock, 60.0, steps=25, trials=3)
    assert result.metadata["steps"] == 25
    assert Counter(each["setting"] for each in result.metadata["search"]) == {"1x8": 3, "2x4": 3}


REMEDY = "fewer settings or seeds, or smaller models, need less time"


def test_a_time_limit_that_is_too_short_is_refused(clock):
    """Timing takes 7 steps and 1 evaluated batch per setting, a search trial 20 steps and 3 evaluated batches, and a
    final training 3 evaluated batches more."""
    clock.seconds = 4.0
    spent, needed = 2 * (7 + 1 / 3) * 4, ((2 + 0.85 * 3) * 2 * (20 + 3 / 3) + 2 * 2 * 3 / 3) * 4
    least = round(spent + needed / scheduler.MARGIN)
    for limit in (100.0, least - 2.0):
        expected = f"at least {least} s for trainings of 20 steps of 2 settings"
        sentence = f"budget: expected {expected}, got {limit:g} s; {REMEDY}"
        with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
            timed(clock, limit)
    assert timed(clock, least + 2.0).metadata["steps"] == 20


def test_a_time_limit_that_ends_during_the_timing_is_refused(clock):
    clock.seconds = 2.0
    sentence = f"budget: expected more time for trainings of 20 steps of 1 setting, got 3 s; {REMEDY}"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        timed(clock, 3.0, space=(ONE,))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": None}, "budget: expected seconds, or the steps or tokens of each training, got none of them"),
        ({"budget": 60}, "budget: expected a StudyBudget, such as hw.StudyBudget(seconds=3600), got 60"),
        (
            {"budget": hw.StudyBudget(tokens=60)},
            "tokens: expected steps: a batch may have any number of tokens, got 60",
        ),
        ({"seconds": 0.0}, "seconds: expected a finite number above 0, got 0.0"),
        ({"seconds": math.inf}, "seconds: expected a finite number above 0, got inf"),
        ({"steps": 0}, "steps: expected a whole number of 1 or more, got 0"),
        ({"trials": 0}, "trials: expected a whole number of 1 or more, got 0"),
        ({"seeds": 0}, "seeds: expected a whole number of 1 or more, got 0"),
        ({"space": ()}, "space: expected a Space or a sequence of settings, got ()"),
        ({"space": (1, 2)}, "space: expected a Space or a sequence of settings, got (1, 2)"),
        ({"space": hw.Space()}, "embed_dim: expected the width of the model, as in hw.Space(512), got None"),
        (
            {"data": sequences(5), "held_out": None},
            "data: expected at least 6 batches, of which one in 10 is held out, got 5 and 0",
        ),
        ({"out": __file__}, f"out: expected a folder that can be created and written, got {__file__!r}"),
        ({"held_out": []}, "data: expected at least one training batch and one held-out batch, got 7 and 0"),
        (
            {"data": ["text"]},
            "dataset: expected batches: tensors, or mappings of them, as the model takes them, got str; "
            "hw.Texts(source, tokenizer) makes batches of texts and files",
        ),
        (
            {"loss": lambda model, batch: hw.next_token_loss(model, batch).mean()},
            "loss: expected one number per example, a float tensor of shape (2,), got torch.float32 of shape ()",
        ),
    ],
)
def test_invalid_arguments_are_refused(options, sentence):
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        study(**options)
