"""Caches that drop keys, or move them to other places, one token at a time, against each whole sequence in float64."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import headwise as hw
from sequences_alone import COMMON_POSITIONS, WIDTH, Attention, mean_statistics, require_statistics, weights_alone

pytestmark = pytest.mark.usefixtures("no_grad")

LENGTH = 11
SELF = [hw.Site("", kind="self")]
NO_POSITIONS = "positions of queries among the keys could not be established"
UNKNOWN_SEQUENCES = "it is unknown which sequences some calls with cached keys continue"


class Cached(nn.Module):
    """Attention to the tokens that a cache keeps: `places` returns their numbers, in the order of the keys."""

    def __init__(self, places, fused):
        super().__init__()
        self.attention, self.places, self.fused = Attention(), places, fused

    def forward(self, x, state):
        q, k, v = self.attention.split(x, x)
        tokens = state.get("tokens", [])
        kept = self.places(len(tokens) and max(tokens) + 1)
        old = [(tokens + [each for each in kept if each not in tokens]).index(token) for token in kept]
        for name, new in (("k", k), ("v", v)):
            state[name] = torch.cat([state[name], new], 2)[:, :, old] if tokens else new
        state["tokens"] = kept
        k, v = state["k"], state["v"]
        out = F.scaled_dot_product_attention(q, k, v) if self.fused else (q @ k.mT * 7**-0.5).softmax(-1) @ v
        return self.attention.out(out.transpose(1, 2).flatten(2))


def last(token):
    """Return the last 4 tokens."""
    return list(range(max(token - 3, 0), token + 1))


def ring(token):
    """Return the last 4 tokens: a new one takes the place of the oldest one."""
    return sorted(last(token), key=lambda each: each % 4)


def sink(token):
    """Return the first 2 and the last 3 tokens."""
    return [each for each in range(token + 1) if each < 2 or each > token - 3]


def front(token):
    """Return all tokens, the latest one first."""
    return list(range(token, -1, -1))


def in_order(token):
    """Return all tokens."""
    return list(range(token + 1))


def statistics_alone(model, sequences):
    weights = []
    for x in sequences:
        whole = weights_alone(model.attention, x, causal=True)
        for token in range(len(x)):
            whole[:, token, [each for each in range(len(x)) if each not in model.places(token)]] = 0
        weights.append(whole / whole.sum(-1, keepdim=True))
    return mean_statistics(weights)


def run(model, sequences):
    for x in sequences:
        state = {}
        for token in x.split(1, 1):
            model(token, state)


@pytest.mark.parametrize("fused", [True, False])
def test_the_last_keys_have_positions(fused):
    torch.manual_seed(4)
    model, sequences = Cached(last, fused), (torch.randn(2, LENGTH, WIDTH), torch.randn(2, 7, WIDTH))
    with hw.watch(model, sites=SELF) as heads:
        run(model, sequences)
    expected = statistics_alone(model, [*sequences[0], *sequences[1]])
    assert {row.pop("next") for row in expected} == {0}  # no query has a next key
    require_statistics(heads.rows(), expected)


@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("places", [ring, sink, front])
def test_steps_with_moved_keys_continue_their_sequences(places, fused):
    torch.manual_seed(4)
    model, sequences = Cached(places, fused), (torch.randn(2, LENGTH, WIDTH), torch.randn(2, 7, WIDTH))
    with pytest.warns(UserWarning, match=NO_POSITIONS), hw.watch(model, sites=SELF) as heads:
        run(model, sequences)
    expected = statistics_alone(model, [*sequences[0], *sequences[1]])
    require_statistics(heads.rows(), expected, without=COMMON_POSITIONS | {"first", "received"})


@pytest.mark.parametrize("fused", [True, False])
def test_new_sequences_after_the_same_cached_keys_are_sequences_of_their_own(fused):
    torch.manual_seed(4)
    model, prompt, x = Cached(in_order, fused), torch.randn(1, 1, WIDTH), torch.randn(3, 1, 1, WIDTH)
    state = {}
    model(prompt, state)
    warnings = pytest.warns(UserWarning, match=NO_POSITIONS), pytest.warns(UserWarning, match=UNKNOWN_SEQUENCES)
    with warnings[0], warnings[1], hw.watch(model, sites=SELF) as heads:
        for each in x:
            model(each, dict(state))
    assert not {"entropy", "received", "distance", "first"} & heads.rows()[0].keys()
