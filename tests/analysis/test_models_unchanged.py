"""Measurements of the effects of heads leave a model unchanged, also if they fail, and run it in evaluation mode."""

import pytest
import torch

import headwise as hw
from headwise.analysis.importance.importance import METHODS
from prompt_models import ASKED, CLEAN, CORRUPTED, language_model

pytestmark = pytest.mark.usefixtures("as_user")


def of_loss(function, **options):
    batches = [{"input_ids": ids} for ids in CLEAN.split([2, 1])]
    return lambda model: function(model, batches, hw.next_token_loss, **options)


def of_prompts(function, **options):
    return lambda model: function(model, CLEAN, CORRUPTED, **ASKED, **options)


MEASUREMENTS = {
    "ablate": of_loss(hw.ablate),
    **{name: of_loss(hw.importance, method=name) for name in METHODS},
    "integrated": of_loss(hw.importance, method="integrated", steps=2, most_steps=2),
    "hard_concrete": of_loss(hw.importance, method="hard_concrete", epochs=2),
    "logit_attribution": lambda model: hw.logit_attribution(model, CLEAN, answer=7),
    "activation_patching": of_prompts(hw.activation_patching, heads=[(0, 1)]),
    "attribution_patching": of_prompts(hw.attribution_patching, steps=1),
    "path_patching": of_prompts(hw.path_patching, senders=[(0, 1)], mlps="freeze"),
    "circuits": hw.circuits,  # of a copy of the model, which may have no hooks
}


def state_of(model):
    """Return the weights of a model, and all that a measurement might leave in its modules and parameters."""
    modules = [
        (
            module.training,
            sorted(vars(module)),
            {name: list(each) for name, each in vars(module).items() if "_hooks" in name},
        )
        for module in model.modules()
    ]
    parameters = [(parameter.requires_grad, parameter.grad) for parameter in model.parameters()]
    return {name: each.clone() for name, each in model.state_dict().items()}, modules, parameters


def is_same(state, other):
    return state[1:] == other[1:] and all(torch.equal(state[0][name], each) for name, each in other[0].items())


@pytest.mark.filterwarnings("ignore:integrated gradients did not converge")
@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("name", MEASUREMENTS)
def test_a_model_is_unchanged(name, fails):
    model, runs = language_model("llama").train(), []
    model.model.layers[0].eval()
    model.model.embed_tokens.weight.requires_grad_(False)

    def on_run(*_):
        is_training = any(module.training for module in model.modules())
        is_learning = any(parameter.requires_grad for parameter in model.parameters())
        runs.append((is_training, is_learning and name in METHODS and name != "ablation"))
        if fails and len(runs) == 2:
            raise ZeroDivisionError

    if name != "circuits":
        model.register_forward_pre_hook(on_run)
    before = state_of(model)
    if fails and name != "circuits":
        with pytest.raises(ZeroDivisionError):
            MEASUREMENTS[name](model)
    else:
        MEASUREMENTS[name](model)
    assert is_same(state_of(model), before)
    assert torch.is_grad_enabled()
    assert set(runs) <= {(False, False)}
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1.0
    assert not is_same(state_of(model), before)  # the check detects a change
