"""Choice of the backend and its explanation."""

import pytest
import torch

import headwise as hw
from headwise.attention.backends.blockwise import backend as blockwise
from headwise.attention.backends.blockwise import plan as block_plan

FULL = "where nothing is hidden, or the causal flag says it, products in float32 are the kernel's"


def problem(batch=1, heads=8, length=1024, width=16, dtype=torch.float32, **options):
    q = torch.randn(batch, heads, length, width, dtype=dtype)
    return {"q": q, "k": q, "v": q, **options}


CASES = {
    "full": (problem(), "fused", FULL),
    "causal": (problem(mask=hw.causal()), "fused", FULL),
    "window": (problem(mask=hw.window(64)), "blockwise", "it is expected to take 1/"),
    "chunks": (problem(mask=hw.chunked(128)), "blockwise", "it is expected to take 1/"),
    "half the heads": (problem(mask=hw.window([32] * 4 + [None] * 4)), "blockwise", "it is expected to take 1/"),
    "a matrix that hides much": (
        problem(mask=torch.eye(1024, dtype=torch.bool)),
        "blockwise",
        "it is expected to take 1/",
    ),
    "a matrix that hides little": (
        problem(mask=torch.rand(1024, 1024) < 0.9),
        "fused",
        "blocks are expected to take 1.3 times as long",
    ),
    "matrices": (
        problem(mask=torch.eye(1024, dtype=torch.bool).expand(1, 8, -1, -1)),
        "fused",
        "a matrix for each sequence or head would take long to read",
    ),
    "little": (problem(length=128, mask=hw.window(2)), "fused", "fewer than 1,048,576 scores are not worth a plan"),
    "bfloat16": (problem(dtype=torch.bfloat16), "blockwise", "it is expected to take 1/"),
    "bfloat16, with a bias": (
        problem(dtype=torch.bfloat16, bias=torch.zeros(1024, 1024)),
        "fused",
        FULL,
    ),
    "dropout": (problem(dropout=0.1), "blockwise", "it is expected to take 1/"),
    "softcap": (problem(softcap=3.0), "blockwise", "the kernels cannot"),
    "weights": (
        problem(mask=hw.window(64), return_weights=True),
        "fused",
        "the matrix is asked for, which every backend makes alike",
    ),
    "by name": (problem(mask=hw.window(64), backend="fused"), "fused", "it was asked for by name"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_choice_and_its_reason(case):
    options, backend, because = CASES[case]
    choice = hw.explain(**options)
    assert choice.backend == backend
    assert choice.because.startswith(because)


def test_fused_is_chosen_on_other_devices():
    q = torch.empty(1, 8, 1024, 16, device="meta")
    choice = hw.explain(q, q, q, mask=hw.window(64))
    # A tensor on meta has no values to plan with.
    assert (choice.backend, choice.because) == (
        "fused",
        "its blocks are planned from sizes and masks, which are not known while compiling or under vmap",
    )


def test_a_choice_prints_the_costs_compared():
    assert str(hw.explain(**problem(mask=hw.window(64)))) == (
        "fused      8,388,608 scores, at a cost of 8,388,608\n"
        "blockwise  1,507,328 scores, at a cost of 3,067,085\n"
        "blockwise: it is expected to take 1/2.7 of the kernel's time"
    )


def test_attend_uses_the_explained_backend_and_plans_once(monkeypatch):
    plans = []
    plan_of = block_plan.plan_of
    monkeypatch.setattr(blockwise, "plan_of", lambda *args: plans.append(args) or plan_of(*args))
    options = problem(mask=hw.window(64))
    out = hw.attend(**options)
    assert len(plans) == 1
    monkeypatch.undo()
    assert torch.equal(out, hw.attend(**options, backend="blockwise"))


def test_explain_refuses_what_attend_refuses():
    talking = (torch.eye(8), torch.eye(8))
    with pytest.raises(hw.InputError, match="backend: expected one that can do this, got fused: .*; blockwise: "):
        hw.explain(**problem(talking_heads=talking))
    with pytest.raises(hw.InputError, match="scale: expected a finite number, got inf"):
        hw.explain(**problem(scale=float("inf")))
