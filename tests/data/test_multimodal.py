"""Every model of `multimodal` reads its prompt and its pictures, and generates."""

import pytest
import torch

import multimodal


def result(outputs):
    """Return the main result of a model; the first output can be a loss, or missing."""
    names = ("logits", "logits_per_image", "prediction_outputs", "last_hidden_state")
    return next(outputs[name] for name in names if name in outputs)


@pytest.mark.parametrize("name", multimodal.NAMES)
def test_reads_prompt_and_pictures(name):
    case = multimodal.case(name)
    small, wide, high = ([case.picture(size, seed) for seed in (0, 1)] for size in case.sizes)
    prompts = [([small[0]], [small[1]]), ([wide[0]], [wide[1]]), ([high[0]], [high[1]])]
    if case.several:
        prompts.append(([wide[0], high[0]], [wide[0], high[1]]))
    for pictures, others in prompts:
        inputs = case.inputs(*pictures)
        with torch.no_grad():
            outputs, other_outputs = (result(case.model(**each)) for each in (inputs, case.inputs(*others)))
        assert outputs.isfinite().all()
        assert (outputs - other_outputs).abs().max() > 1e-3
        if "input_ids" in inputs:
            assert inputs["input_ids"].shape[1] < 150
            assert case.processor.tokenizer.unk_token_id not in inputs["input_ids"]
    if case.generates:
        generated = case.model.generate(**inputs, max_new_tokens=3, min_new_tokens=3, do_sample=False)
        assert generated.shape[1] >= 3
