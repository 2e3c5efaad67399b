"""Tiny models of the model types of `transformers`: sizes, padding, and types that cannot be built."""

import pytest

from research.tiny_models.builder import build, tiny_config
from research.tiny_models.inputs import attempts


def test_nested_configs_are_shrunk():
    config = tiny_config("gemma3")
    assert config.text_config.hidden_size < 100
    assert set(config.text_config.layer_types) == {"sliding_attention", "full_attention"}


@pytest.mark.parametrize("side", ["left", "right"])
def test_one_sequence_is_padded(side):
    model = build("bert")
    mask = next(attempts("bert", model, side))["attention_mask"]
    assert mask.sum(-1).tolist() == [13, 9]
    assert bool(mask[1, -1]) == (side == "left")


def test_a_model_type_without_a_class_is_named():
    with pytest.raises(LookupError, match="no model class for glmga"):
        build("glmga")
