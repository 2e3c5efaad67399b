"""A whole study of toys: the same again, gone on with wherever it stopped, within its budget."""

import math
import re
import statistics
from collections import Counter
from types import SimpleNamespace

import pytest
import torch
from torch import nn

import headwise as hw
from headwise.analysis.losses import loss_per_example
from headwise.studies import budget as budget_module
from headwise.studies import scheduler as scheduler_module
from headwise.studies import training as of_training
from headwise.studies import trial_store

pytestmark = pytest.mark.usefixtures("as_user")

ONE, TWO, FOUR = hw.Setting(1, 8, 1), hw.Setting(2, 4, 2), hw.Setting(4, 2, 4)
STEPS, TRIALS, SEEDS = 10, 2, 2


class Toy(nn.Module):
    """The next byte, by attention of these heads."""

    def __init__(self, setting):
        super().__init__()
        self.setting = setting
        self.embed, self.out = nn.Embedding(11, 8), nn.Linear(8, 11)
        options = {"num_kv_heads": setting.num_kv_heads, "head_dim": setting.head_dim, "mask": hw.causal()}
        self.attention = hw.MultiHeadAttention(8, setting.num_heads, **options)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        return self.out(x + self.attention(x))


def sequences(number, seed=0, first=0):
    """Batches of bytes that count; the first of each says which batch it is."""
    generator = torch.Generator().manual_seed(seed)
    made = (torch.randint(0, 11, (2, 1), generator=generator) + torch.arange(7)) % 11
    return [{"input_ids": torch.cat([torch.full((2, 1), (n + first) % 11), made], 1)} for n in range(number)]


DATA, HELD_OUT = sequences(7), sequences(3, 1)


class Loss:
    """The next-token loss, which remembers who was trained on what, and may stop."""

    def __init__(self, stops_after=math.inf):
        self.trained, self.judged, self.steps, self.stops_after = [], [], 0, stops_after

    def __call__(self, model, batch):
        if model.training:
            self.steps += 1
            if self.steps > self.stops_after:
                raise Stopped
        (self.trained if model.training else self.judged).append(batch["input_ids"])
        return hw.next_token_loss(model, batch)

    __name__ = "toy_loss"


class Stopped(Exception):
    pass


class Keep:
    def __init__(self, stops_at=None):
        self.kept, self.stops_at = [], stops_at

    def __call__(self, model, setting, seed):
        if len(self.kept) == self.stops_at:
            raise Stopped
        assert (model.setting, model.training) == (setting, False)
        self.kept.append((setting, seed))


def study(space=(ONE, TWO), data=None, **options):
    given = {"held_out": HELD_OUT, "loss": Loss(), "steps": STEPS, "trials": TRIALS, "seeds": SEEDS} | options
    return hw.study(Toy, DATA if data is None else data, space, **given)


def outcome(found):
    """All that does not depend on the clock."""
    return (
        found.losses,
        [(each["rate"], each["train_loss"]) for each in found.metadata["runs"]],
        found.metadata["search"],
    )


@pytest.fixture(scope="module")
def whole():
    """A study that nobody interrupted."""
    return study()


@pytest.fixture(scope="module")
def total():
    """Steps of all its trainings."""
    study(loss=(loss := Loss()))
    return loss.steps


def test_the_same_arguments_give_the_same_losses(whole):
    torch.randn(7)
    state = torch.get_rng_state()
    again = study()
    assert outcome(again) == outcome(whole)
    assert torch.equal(torch.get_rng_state(), state)
    other = study(seed=1)
    assert all(other.losses[setting] != whole.losses[setting] for setting in (ONE, TWO))
    assert {loss for runs in whole.losses.values() for loss in runs.values()}.__len__() == 4


def test_the_table(whole):
    assert [row.setting for row in whole.rows] == [ONE, TWO]
    for row in whole.rows:
        losses = list(whole.losses[row.setting].values())
        assert list(whole.losses[row.setting]) == [1, 2]
        sem = statistics.stdev(losses) / 2**0.5
        assert row.statistics["loss"] == pytest.approx((statistics.fmean(losses), sem, 2))
        assert row.statistics["parameters"].value == sum(each.numel() for each in Toy(row.setting).parameters())
        assert row.statistics["step_ms"].value > 0
        assert list(row.statistics) == ["loss", "train_loss", "step_ms", "parameters", "rate"]
    metadata = whole.metadata
    assert (metadata["steps"], metadata["seeds"], metadata["baseline"], metadata["left_out"]) == (
        STEPS,
        SEEDS,
        None,
        (),
    )
    settings = metadata["settings"]
    assert (settings["space"], settings["loss"], settings["seed"]) == (["1x8", "2x4"], "toy_loss", 0)
    assert (settings["training batches"], settings["held-out batches"]) == (7, 3)


def test_each_training_is_what_it_says(whole):
    """A final training done by hand: weights of its seed, its rate, its loss on what is held out."""
    for run in whole.metadata["runs"]:
        setting = hw.Setting(*run["setting"])
        torch.manual_seed(run["seed"])
        model = Toy(setting)
        options = {"steps": STEPS, "rate": run["rate"], "seed": run["seed"]}
        of_training.train(model, DATA, hw.next_token_loss, **options)
        with torch.no_grad():
            by_hand = [loss_per_example(hw.next_token_loss, model.eval(), batch) for batch in HELD_OUT]
            in_training = [loss_per_example(hw.next_token_loss, model, batch) for batch in DATA[:3]]
        assert run["loss"] == pytest.approx(torch.cat(by_hand).mean().item(), rel=1e-6)
        assert run["train_loss"] == pytest.approx(torch.cat(in_training).mean().item(), rel=1e-6)


def test_the_finals_have_the_rate_of_the_lowest_loss_of_the_search():
    found = study((ONE, TWO, FOUR), trials=4, rates=(1e-5, 1.0))
    for row in found.rows:
        searched = [each for each in found.metadata["search"] if each["setting"] == row.name]
        assert len(searched) == 4
        best = min((each for each in searched if not each["pruned"]), key=lambda each: each["loss"])
        rates = [run["rate"] for run in found.metadata["runs"] if run["setting"] == list(vars(row.setting).values())]
        assert rates == [best["rate"]] * SEEDS
        assert row.statistics["rate"].value == best["rate"]
        assert searched[0]["rate"] == pytest.approx(10**-2.5)
        assert sorted(each["rate"] for each in searched[:3]) == pytest.approx([10**-3.75, 10**-2.5, 10**-1.25])


def test_what_is_held_out_is_never_trained_on():
    loss = Loss()
    study(loss=loss, held_out=None, data=(data := sequences(11)))
    held_out = data[5]["input_ids"]
    assert not any(torch.equal(ids, held_out) for ids in loss.trained)
    seen = {n for ids in loss.trained for n, each in enumerate(data) if torch.equal(ids, each["input_ids"])}
    assert seen == {*range(11)} - {5}
    assert any(torch.equal(ids, held_out) for ids in loss.judged)
    # On their way trainings are judged by what is held out; afterwards also by the first of what was trained on.
    judged = Counter(n for ids in loss.judged for n, each in enumerate(data) if torch.equal(ids, each["input_ids"]))
    assert judged[0] == 2 * SEEDS
    assert set(judged) == {0, 5}


def test_which_batches_are_held_out():
    from headwise.studies.study import divided

    for number, held_out in ((6, [5]), (15, [5]), (16, [5, 15]), (27, [5, 15, 25])):
        training, judged = divided([torch.tensor([[n]]) for n in range(number)], None)
        assert [each[""].item() for each in judged] == held_out
        assert [each[""].item() for each in training] == [n for n in range(number) if n not in held_out]


@pytest.mark.parametrize("stop", range(4))
def test_stopped_while_a_model_is_kept(stop, whole, tmp_path):
    kept = Keep(stop)
    with pytest.raises(Stopped):
        study(keep=kept, out=tmp_path)
    assert len(kept.kept) == stop
    loss, rest = Loss(), Keep()
    found = study(keep=rest, loss=loss, out=tmp_path)
    assert outcome(found) == outcome(whole)
    assert [*kept.kept, *rest.kept] == [(ONE, 1), (TWO, 1), (ONE, 2), (TWO, 2)]
    assert loss.steps == STEPS * (4 - stop)
    loss = Loss()
    assert outcome(study(keep=Keep(0), loss=loss, out=tmp_path)) == outcome(whole)
    assert not loss.trained
    assert not loss.judged


@pytest.mark.parametrize("stop", [0, 4, 10, 19, 27, 47, 59])
def test_stopped_in_any_training(stop, whole, total, tmp_path):
    """After any of its steps, it is done again from its beginning, and no other."""
    assert 60 < total <= STEPS * 2 * (TRIALS + SEEDS)
    with pytest.raises(Stopped):
        study(loss=Loss(stop), out=tmp_path)
    loss = Loss()
    assert outcome(study(loss=loss, out=tmp_path)) == outcome(whole)
    assert total - stop <= loss.steps < total - stop + STEPS
    assert {path.name for path in tmp_path.iterdir()} == {"study.db", "study.parquet"}
    assert outcome(hw.Study.load(tmp_path)) == outcome(whole)


def test_more_seeds_later_go_on(whole, tmp_path):
    study(out=tmp_path)
    kept = Keep()
    found = study(out=tmp_path, seeds=4, keep=kept)
    assert kept.kept == [(ONE, 3), (TWO, 3), (ONE, 4), (TWO, 4)]
    assert outcome(found) == outcome(study(seeds=4))
    assert found.losses[ONE].items() >= whole.losses[ONE].items()


OTHERS = {
    "data": {"data": sequences(7, 2)},
    "space": {"space": (ONE, FOUR)},
    "loss": {"loss": hw.next_token_loss},
    "steps": {"steps": 11},
    "trials": {"trials": 2},
    "rates": {"rates": (1e-4, 1e-2)},
    "recipe": {"recipe": hw.Recipe(clip=2.0)},
    "seed": {"seed": 1},
}


@pytest.mark.parametrize("name", OTHERS)
def test_another_study_in_the_folder_is_refused(name, tmp_path):
    first = study((ONE,), trials=1, seeds=1, out=tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.glob("study.[jp]*")}
    options = {"space": (ONE,), "trials": 1, "seeds": 1, "out": tmp_path} | OTHERS[name]
    sentence = (
        f"out: expected a study that was begun with the same {name}, got another; --force (force=True) begins again"
    )
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        study(**options)
    assert {path.name: path.read_bytes() for path in tmp_path.glob("study.[jp]*")} == before
    assert outcome(study((ONE,), trials=1, seeds=1, out=tmp_path)) == outcome(first)
    loss = Loss()
    again = study(**{"loss": loss} | options, force=True)
    assert outcome(again) == outcome(study(**options | {"out": None}))
    assert loss.steps > 0 or name == "loss"


def test_models_of_another_size_are_another_study(tmp_path):
    class Larger(Toy):
        def __init__(self, setting):
            super().__init__(setting)
            self.out = nn.Sequential(nn.Linear(8, 5), nn.Linear(5, 11))

    study((ONE,), trials=1, seeds=1, out=tmp_path)
    sentence = (
        "out: expected a study that was begun with the same model, got another; --force (force=True) begins again"
    )
    options = {"held_out": HELD_OUT, "loss": Loss(), "steps": STEPS, "trials": 1, "seeds": 1, "out": tmp_path}
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        hw.study(Larger, DATA, (ONE,), **options)


def test_held_out_batches_are_of_the_study(tmp_path):
    study((ONE,), trials=1, seeds=1, out=tmp_path)
    sentence = "out: expected a study that was begun with the same data, got another; --force (force=True) begins again"
    for held_out in (sequences(3, 5), sequences(2, 1)):
        with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
            study((ONE,), trials=1, seeds=1, out=tmp_path, held_out=held_out)


def test_a_rate_with_which_training_diverges_is_not_taken():
    """The loss of large rates is not a number: those are given up, whatever came first."""

    def loss(model, batch):
        found = hw.next_token_loss(model, batch)
        return found * (math.nan if model.out.weight.abs().max() > 0.9 else 1.0)

    found = study((ONE,), trials=3, rates=(1e-4, 1.0), loss=loss)
    first, second, third = found.metadata["search"]
    assert (first["rate"], second["rate"], third["rate"]) == pytest.approx((1e-2, 1e-3, 1e-1))
    assert third["pruned"]
    assert not first["pruned"]
    (rate,) = {run["rate"] for run in found.metadata["runs"]}
    assert rate < 0.05
    assert all(math.isfinite(run["loss"]) for run in found.metadata["runs"])


def test_nothing_trains():
    def loss(model, batch):
        return hw.next_token_loss(model, batch) * math.nan

    sentence = "rates: expected one with which 1x8 trains, got no loss that is finite"
    with pytest.raises(hw.InputError, match=f"^{sentence}$"):
        study((ONE,), loss=loss)


def test_a_setting_in_use_is_compared_whatever_the_space(tmp_path):
    found = study((ONE,), baseline=FOUR, trials=1, out=tmp_path)
    assert [row.setting for row in found.rows] == [ONE, FOUR]
    assert found.baseline == hw.Study.load(tmp_path).baseline == FOUR
    space = hw.Space(8, (1, 3))
    assert study(space, trials=1, seeds=1).metadata["left_out"] == ("num_heads 3, which does not divide embed_dim 8",)


def test_more_that_is_measured(tmp_path):
    found = study((ONE, TWO), trials=1, measures={"heads": lambda model: model.setting.num_heads}, out=tmp_path)
    assert [row.statistics["heads"] for row in found.rows] == [(1.0, 0.0, 2), (2.0, 0.0, 2)]
    assert hw.Study.load(tmp_path).row(TWO).statistics["heads"].value == 2.0


def test_a_database_of_ones_own(whole, tmp_path):
    storage = f"sqlite:///{tmp_path}/mine.db"
    with pytest.raises(Stopped):
        study(storage=storage, name="a", keep=Keep(1))
    loss = Loss()
    found = study(storage=storage, name="a", out=tmp_path / "out", loss=loss, title="a text")
    assert outcome(found) == outcome(whole)
    assert loss.steps == STEPS * 3
    assert found.metadata["model"]["name"] == "a text"
    assert {path.name for path in (tmp_path / "out").iterdir()} == {"study.parquet"}
    assert study(storage=storage, name="b", seed=1).metadata["model"]["name"] == "b"  # beside the other one


# -- budgets ----------------------------------------------------------------------------------------------------------


class Clock:
    """In the place of `time` wherever a study looks at it: only what is computed takes time."""

    def __init__(self):
        self.now, self.seconds, self.steps, self.slower_after, self.by = 1000.0, 0.1, 0, math.inf, 2.0

    def time(self):
        return self.now

    perf_counter = time

    def sleep(self, seconds):
        self.now += seconds

    def takes(self, model):
        """A step takes a tenth of a second, a batch that is judged a third; of four heads, twice as long."""
        self.steps += model.training
        factor = (self.by if self.steps > self.slower_after else 1.0) * (2 if model.setting == FOUR else 1)
        self.now += factor * self.seconds * (1.0 if model.training else 1 / 3)


@pytest.fixture
def clock(monkeypatch):
    made = Clock()
    for module in (trial_store, budget_module, of_training, scheduler_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(time=made.time, perf_counter=made.time, sleep=made.sleep))
    return made


def timed(clock, budget, stops_after=math.inf, **options):
    loss = Loss(stops_after)

    def takes(model, batch):
        clock.takes(model)
        return loss(model, batch)

    takes.__name__ = "toy_loss"
    given = {"steps": None, "trials": None, "budget": budget, "loss": takes, "data": sequences(40)}
    return study(**given | options)


@pytest.mark.parametrize(("budget", "speed"), [(30.0, 0.1), (60.0, 0.1), (40.0, 0.06), (70.0, 0.12)])
def test_a_study_ends_with_its_budget(budget, speed, clock):
    clock.seconds, start = speed, clock.now
    found = timed(clock, budget)
    assert 0.8 * budget <= clock.now - start <= 1.1 * budget
    assert all(len(found.losses[setting]) == SEEDS for setting in (ONE, TWO))
    assert found.metadata["steps"] >= 20
    searches = Counter(each["setting"] for each in found.metadata["search"])
    assert all(2 <= number <= scheduler_module.MOST_TRIALS for number in searches.values())


def test_settings_that_take_longer_are_reckoned_with(clock):
    start = clock.now
    found = timed(clock, 90.0, space=(ONE, FOUR))
    assert 72.0 <= clock.now - start <= 99.0
    assert [len(found.losses[setting]) for setting in (ONE, FOUR)] == [SEEDS, SEEDS]
    one, four = (found.row(setting).statistics["step_ms"].value for setting in (ONE, FOUR))
    assert (one, four) == pytest.approx((100.0, 200.0))


def test_data_is_seen_four_times_at_most(clock):
    start = clock.now
    found = timed(clock, 5_000.0, data=sequences(7))
    assert found.metadata["steps"] == 28
    assert Counter(each["setting"] for each in found.metadata["search"]) == {
        "1x8": scheduler_module.MOST_TRIALS,
        "2x4": scheduler_module.MOST_TRIALS,
    }
    assert clock.now - start < 200.0


@pytest.mark.parametrize("after", [20, 250])
def test_a_study_ends_with_its_budget_also_where_steps_become_slower(after, clock):
    clock.slower_after, start = after, clock.now
    timed(clock, 60.0)
    assert 0.8 * 60 <= clock.now - start <= 1.1 * 60


@pytest.mark.parametrize("after", [30, 300])
def test_a_study_that_went_on_ends_with_its_budget(after, clock, tmp_path):
    """Nobody was at work in between: that does not count."""
    start = clock.now
    with pytest.raises(Stopped):
        timed(clock, 70.0, after, out=tmp_path)
    stopped = clock.now
    clock.now += 10_000.0
    again = clock.now
    found = timed(clock, 70.0, out=tmp_path)
    assert 0.8 * 70 <= (stopped - start) + (clock.now - again) <= 1.1 * 70
    assert all(len(runs) >= 1 for runs in found.losses.values())


def test_steps_that_are_given_stay(clock):
    found = timed(clock, 60.0, steps=25, trials=3)
    assert found.metadata["steps"] == 25
    assert Counter(each["setting"] for each in found.metadata["search"]) == {"1x8": 3, "2x4": 3}


REMEDY = "fewer settings, seeds or parameters take less"


def test_a_budget_that_is_too_small(clock):
    """Timing takes 2 settings of 7 steps and a batch that is judged, a search 20 steps and 3 batches that are judged, a
    training that is compared as many again."""
    clock.seconds = 4.0
    spent, needed = 2 * (7 + 1 / 3) * 4, ((2 + 0.85 * 3) * 2 * (20 + 3 / 3) + 2 * 2 * 3 / 3) * 4
    least = round(spent + needed / budget_module.MARGIN)
    for budget in (100.0, least - 2.0):
        expected = f"at least {least} s for trainings of 20 steps of 2 settings"
        sentence = f"budget: expected {expected}, got {budget:g} s; {REMEDY}"
        with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
            timed(clock, budget)
    assert timed(clock, least + 2.0).metadata["steps"] == 20


def test_a_budget_that_ends_before_anything_was_timed(clock):
    clock.seconds = 2.0
    sentence = f"budget: expected more for trainings of 20 steps of 1 setting, got 3 s; {REMEDY}"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        timed(clock, 3.0, space=(ONE,))


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"steps": None}, "budget: expected a budget, or steps of each training, got neither"),
        ({"budget": 0.0}, "budget: expected a finite number above 0, got 0.0"),
        ({"budget": math.inf}, "budget: expected a finite number above 0, got inf"),
        ({"steps": 0}, "steps: expected a whole number of 1 or more, got 0"),
        ({"trials": 0}, "trials: expected a whole number of 1 or more, got 0"),
        ({"seeds": 0}, "seeds: expected a whole number of 1 or more, got 0"),
        ({"rates": (1e-2, 1e-3)}, "rates: expected the least learning rate, then the largest, got (0.01, 0.001)"),
        ({"rates": (0.0, 1e-3)}, "rates: expected a finite number above 0, got 0.0"),
        ({"space": ()}, "space: expected a Space, or settings, got ()"),
        ({"space": (1, 2)}, "space: expected a Space, or settings, got (1, 2)"),
        (
            {"data": sequences(5), "held_out": None},
            "data: expected at least 6 batches, one of 10 to be held out, got 5 and 0",
        ),
        ({"held_out": []}, "data: expected at least one batch to train on and one to judge by, got 7 and 0"),
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
def test_arguments_that_are_none(options, sentence):
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        study(**options)


def test_a_folder_that_cannot_be_written(tmp_path):
    (tmp_path / "file").write_text("")
    sentence = f"out: expected a folder that can be created and written, got {str(tmp_path / 'file')!r}"
    with pytest.raises(hw.InputError, match=f"^{re.escape(sentence)}$"):
        study(out=tmp_path / "file")


def test_what_is_written_is_plain(tmp_path):
    study((ONE,), trials=1, seeds=1, out=tmp_path)
    metadata = hw.Study.load_metadata(tmp_path)
    assert list(metadata["runs"][0]) == ["setting", "seed", "rate", "loss", "train_loss", "step_ms", "seconds"]
    assert metadata["runs"][0]["setting"] == [1, 8, 1]
