"""The mask that interceptors read from an attention call, against the mask that the model passed."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from headwise.intercept.install import intercepted
from headwise.intercept.interceptor import Interceptor

QUERIES, KEYS = 5, 7
VISIBLE = torch.rand(2, 1, QUERIES, KEYS, generator=torch.Generator().manual_seed(4)) < 0.6


class Attends(nn.Module):
    def forward(self, q, k, **options):
        return F.scaled_dot_product_attention(q, k, k, **options)


class Reader(Interceptor):
    def observe(self, call):
        self.received = call.mask().block(range(QUERIES))


@pytest.mark.parametrize("hidden", [False, -torch.inf, torch.finfo(torch.float32).min, -1e9, -1e4])
def test_interceptors_read_the_mask_of_a_call(hidden):
    mask = VISIBLE if hidden is False else torch.zeros(VISIBLE.shape).masked_fill(~VISIBLE, hidden)
    model, reader = Attends(), Reader()
    with intercepted(model, reader):
        model(torch.randn(2, 3, QUERIES, 11), torch.randn(2, 3, KEYS, 11), attn_mask=mask)
    assert torch.equal(reader.received, VISIBLE)


def test_a_causal_flag_is_a_mask_that_starts_at_the_first_key():
    model, reader = Attends(), Reader()
    with intercepted(model, reader):
        model(torch.randn(2, 3, QUERIES, 11), torch.randn(2, 3, KEYS, 11), is_causal=True)
    assert torch.equal(reader.received[0, 0], torch.ones(QUERIES, KEYS, dtype=torch.bool).tril())
