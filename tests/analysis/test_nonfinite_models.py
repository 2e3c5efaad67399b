"""NaN and infinity in what is measured on a model: an error that names the first module in which they appear."""

import math
import sys

import pytest
import torch

import headwise as hw
import tiny
from headwise.analysis.nonfinite import nonfinite_error
from headwise.cli import app as cli

pytestmark = pytest.mark.usefixtures("as_user")

MEASUREMENTS = {
    "profile": hw.profile,
    "ablate": lambda model, data: hw.ablate(model, data, hw.next_token_loss),
    "gradient": lambda model, data: hw.importance(model, data, hw.next_token_loss),
    "hard_concrete": lambda model, data: hw.importance(model, data, hw.next_token_loss, "hard_concrete", epochs=1),
    "ablation": lambda model, data: hw.importance(model, data, hw.next_token_loss, "ablation"),
}


def texts():
    return hw.Texts(tiny.texts(11, 5, 11), tiny.tokenizer("decoder"), batch=2)


def causal(path="", name="weight", value=math.nan):
    """Return a model in which the first number of a parameter is not finite."""
    model = tiny.model("decoder", top="ForCausalLM")
    if path:
        with torch.no_grad():
            getattr(model.get_submodule(path), name).view(-1)[0] = value
    return model


@pytest.mark.parametrize("measure", MEASUREMENTS)
@pytest.mark.parametrize("value", [math.nan, math.inf], ids=["nan", "inf"])
def test_the_module_with_the_parameter_is_named(measure, value):
    path = "model.layers.0.mlp.up_proj"
    place = rf"the parameter weight of {path}"
    with pytest.raises(hw.InputError, match=rf"model: expected finite .*, got NaN or infinity, first in {place}$"):
        MEASUREMENTS[measure](causal(path, value=value), texts())


@pytest.mark.parametrize("measure", MEASUREMENTS)
def test_the_module_that_overflows_is_named(measure):
    model = causal()
    model.model.layers[0].post_attention_layernorm.register_forward_hook(lambda module, args, output: output / 0.0)
    with pytest.raises(hw.InputError, match=r"first in the output of model\.layers\.0\.post_attention_layernorm$"):
        MEASUREMENTS[measure](model, texts())


def test_code_between_modules_is_named_by_the_module_that_it_is_in():
    class Divides(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = torch.nn.Linear(3, 3)

        def forward(self, x):
            return self.inner(x / 0.0)

    model, x = torch.nn.Sequential(Divides()), torch.ones(2, 3)
    assert "first in 0" in str(nonfinite_error(model, lambda: model(x), {}))
    assert "first in its inputs" in str(nonfinite_error(model, lambda: model(x * math.nan), {}))
    finite = torch.nn.Sequential(torch.nn.Linear(3, 3))
    assert nonfinite_error(finite, lambda: finite(x), {}) is None
    assert not finite[0]._forward_hooks


def test_padding_and_masks_are_not_named():
    model, x = torch.nn.Sequential(torch.nn.Identity()), torch.ones(2, 3, 5)
    x[1, 2], x[0, 0, 0] = math.nan, -math.inf
    mask = torch.tensor([[1, 1, 1], [1, 1, 0]])
    assert nonfinite_error(model, lambda: model(x), {"attention_mask": mask}) is None
    assert nonfinite_error(model, lambda: model(x), {}) is not None
    assert nonfinite_error(model, lambda: model(x), {}, torch.tensor([True, False])) is None


def test_examples_without_a_loss_are_left_out():
    data = hw.Texts(tiny.texts(11, 1, 5), tiny.tokenizer("decoder"), batch=1)
    assert hw.ablate(causal(), data, hw.next_token_loss).baseline.n == 2
    assert all(row.statistics["gradient"].n == 2 for row in hw.importance(causal(), data, hw.next_token_loss).rows)


def test_a_loss_that_is_not_finite_without_a_head_is_refused():
    def loss(model, batch):
        losses = hw.next_token_loss(model, batch)
        return losses.masked_fill(losses.ne(whole) & torch.tensor(is_nan), math.nan)

    with torch.no_grad():
        batch = next(iter(texts()))
        whole = hw.next_token_loss(causal(), batch)
    is_nan = True
    with pytest.raises(hw.InputError, match="loss: expected a number for each example .* got NaN without head 0.0"):
        hw.ablate(causal(), [batch], loss)

    def infinite(model, batch):
        return hw.next_token_loss(model, batch) / 0.0

    with pytest.raises(hw.InputError, match="loss: expected finite numbers.*, got infinity"):
        hw.ablate(causal(), [batch], infinite)


@pytest.mark.parametrize("command", ["profile", "ablate", "importance"])
def test_the_commands_exit_with_the_error(command, tmp_path, monkeypatch, capsys):
    causal("model.layers.1.self_attn.o_proj").save_pretrained(tmp_path / "model")
    tiny.tokenizer("decoder").save_pretrained(tmp_path / "model")
    (tmp_path / "data.txt").write_text("\n".join(tiny.texts(11, 5, 11)))
    common = ["--data", tmp_path / "data.txt", "--model", tmp_path / "model", "--out", tmp_path / "out"]
    monkeypatch.setattr(sys, "argv", ["headwise", command, *map(str, common)])
    assert cli.run() == 2
    path = "layers.1.self_attn.o_proj" if command == "profile" else "model.layers.1.self_attn.o_proj"
    assert f"got NaN or infinity, first in the parameter weight of {path}\n" in capsys.readouterr().err
    assert not list((tmp_path / "out").glob("*.parquet"))
