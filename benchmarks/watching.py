"""What it costs to watch every head of a model: time and memory, against those who ask for the weight_statistics.

Regime: SmolLM2-135M-Instruct (30 layers of 9 heads on 3, 576 wide), float32, one text of 2,048 and of 8,192 tokens (the
documents of this project), no gradients and no cache; all statistics of `hw.watch`. Time: of the watched forward over
that of the plain one, which is fused; and against three ways to the same numbers at 2,048, each of which makes the
whole matrices and computes the statistics from them, vectorised, a layer at a time:

- `output_attentions=True`: the model under "eager" attention, from the matrices it returns.
- BertViz: from the same, stacked by its `format_attention`, as its views do before they draw.
- TransformerLens: from the patterns that `run_with_cache` of its bridge keeps. Of the logits, which the others do not
  compute, those of the last token only.

Memory: the peak of a forward beside that of the plain one, each once in an interpreter of its own, after a forward of a
short text that does not count; and that of one causal attention call of 32,768 tokens with statistics, 8 heads of 64,
beside its inputs and output. Every statistic of ours and of the peers is first compared, on 256 tokens, with that of
the eager matrices in float64. The ways that make matrices, and 8,192 tokens, have 3 rounds at most. A quick run has
512 tokens in 2 rounds, one peer and no memory. At 2,048 tokens BertViz's way takes 10 GB.

    python -m benchmarks.watching [--quick] [--rounds N] [--only "8192"]
"""

import copy
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import headwise as hw
from benchmarks import weight_statistics
from benchmarks.command_line import Options, arguments, require
from benchmarks.contestants import LeftOutError
from benchmarks.measure import Call, Ratio, Row, interleaved, report, show
from benchmarks.oracle import WrongError
from benchmarks.peak_memory import TOLD, UNTOLD, measured
from benchmarks.peak_memory import peak as peak_of
from benchmarks.peers import FEW_ROUNDS
from benchmarks.regime import Regime
from benchmarks.weight_statistics import Found, Text
from headwise.attention.backends.blockwise.call_context import CallContext
from headwise.attention.problem import Problem
from headwise.data.models import load
from headwise.statistics.attend_observed import attend_observed
from headwise.statistics.tally import Tally

PLAIN, OURS = "plain forward", "ours"
EAGER, BERTVIZ, LENS = "`output_attentions=True`", "BertViz", "TransformerLens"
SMOLLM2 = Regime(1, 2048, 576, 9, "causal", kv_heads=3, bias=False, rotary=True)
TINY = Regime(1, 40, 48, 6, "causal", kv_heads=2, bias=False, rotary=True)
LONG = 8192
CALL = Regime(1, 32768, 512, 8, "causal")
SHORT = 256
"""Tokens on which everything is compared with the definition, and which run ahead of a peak."""
MODEL_EXTRA, CALL_EXTRA = "300 MB of extra memory", "1 GB of extra memory"
LIMITS = {MODEL_EXTRA: 300e6, CALL_EXTRA: 1e9}
PEAKS = {name: f"peak of {name}" for name in (EAGER, BERTVIZ, LENS)}
MEMORY = {*LIMITS, *PEAKS.values()}
"""What rows in bytes are against."""

ROOT = Path(__file__).parent.parent
DOCUMENTS = ("README.md", "docs/layer.md", "docs/watch.md", "docs/lab-notes.md", "CONTRIBUTING.md")


# -- the model and its text -------------------------------------------------------------------------------------------


def sections() -> list[str]:
    """What is read: the documents from heading to heading."""
    return [part for name in DOCUMENTS for part in (ROOT / name).read_text(encoding="utf-8").split("\n## ")]


def words(length: int, kinds: int) -> Tensor:
    """The documents' words as numbers below `kinds`, `(length,)`, from the beginning again as often as it takes."""
    numbers: dict[str, int] = {}
    text = [numbers.setdefault(word, len(numbers)) % kinds for each in sections() for word in each.split()]
    return repeated(text, length)


def repeated(tokens: Sequence[int], length: int) -> Tensor:
    """As many as are wanted."""
    return torch.tensor(tokens).repeat(-(-length // len(tokens)))[:length]


@dataclass(frozen=True, eq=False)
class Subject:
    """A model, the ids of its special tokens, and the longest text that is wanted of it; a part is its beginning."""

    model: nn.Module
    special: Sequence[int]
    tokens: Tensor
    tokenizer: Any = None

    def text(self, length: int) -> Text:
        """So many tokens, as the plain statistics read them."""
        tokens = self.tokens[:length]
        return Text(tokens, torch.isin(tokens, torch.tensor(self.special)))

    @cached_property
    def eager(self) -> nn.Module:
        """The model with attention that makes its matrices; the weights are the same tensors."""
        model = copy.deepcopy(self.model, {id(parameter): parameter for parameter in self.model.parameters()})
        model.set_attn_implementation("eager")
        return model

    @property
    def written(self) -> list[Tensor]:
        """Each layer's output projection by heads, `(heads, head_dim, embed)`."""
        heads = self.model.config.num_attention_heads
        return [layer.self_attn.o_proj.weight.T.unflatten(0, (heads, -1)) for layer in self.model.layers]


def subject(regime: Regime) -> Subject:
    """SmolLM2, or where the sizes are others a small model of random weights."""
    import transformers

    transformers.utils.logging.disable_progress_bar()
    length = max(regime.length, SHORT)
    if regime.embed == SMOLLM2.embed:
        loaded = load("smollm2")
        end = loaded.tokenizer.eos_token_id
        ids = [token for each in sections() for token in (*loaded.tokenizer(each)["input_ids"], end)]
        return Subject(loaded.model, loaded.tokenizer.all_special_ids, repeated(ids, length), loaded.tokenizer)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=regime.embed,
        num_hidden_layers=2,
        num_attention_heads=regime.heads,
        num_key_value_heads=regime.kv_heads,
        intermediate_size=37,
        max_position_embeddings=length,
    )
    torch.manual_seed(0)
    return Subject(transformers.AutoModel.from_config(config).eval(), [0, 3], words(length, config.vocab_size))


def _note(regime: Regime) -> str:
    return f"{'SmolLM2' if regime.embed == SMOLLM2.embed else 'a random model'}, all statistics"


# -- ways to the numbers ----------------------------------------------------------------------------------------------

Way = Callable[[int], Found]
"""From a number of tokens to every statistic, `(layers, heads)`; of the plain forward to none."""


def plain(of: Subject) -> Way:
    """The model as it comes, of which nothing is asked."""

    def run(length: int) -> Found:
        of.model(input_ids=of.tokens[None, :length], use_cache=False)
        return {}

    return run


def ours(of: Subject) -> Way:
    """`hw.watch`, as a user writes it."""

    def run(length: int) -> Found:
        with hw.watch(of.model, special=of.special) as heads:
            of.model(input_ids=of.tokens[None, :length], use_cache=False)
        return weight_statistics.of_layers(
            [{name: each.value for name, each in record.statistics.items()} for record in heads.records]
        )

    return run


def _matrices(of: Subject, length: int) -> tuple[tuple[Tensor, ...], list[Tensor]]:
    """Every layer's matrices `(1, heads, length, length)`, and what its heads return, `(1, length, embed)`."""
    out: list[Tensor] = []
    handles = [
        layer.self_attn.o_proj.register_forward_pre_hook(lambda _, given: out.append(given[0]))
        for layer in of.eager.layers
    ]
    try:
        returned = of.eager(input_ids=of.tokens[None, :length], use_cache=False, output_attentions=True)
    finally:
        for handle in handles:
            handle.remove()
    return returned.attentions, out


def _of_matrices(of: Subject, length: int, weights: Sequence[Tensor], out: Sequence[Tensor]) -> Found:
    """The statistics of a model; of each layer `(heads, length, length)`, and `(1, length, ...)` of all heads."""
    text = of.text(length)
    found = []
    for layer, returned, written in zip(weights, out, of.written, strict=True):
        by_head = returned.reshape(length, layer.shape[0], -1).transpose(0, 1)
        found.append(weight_statistics.statistics(layer, by_head, text, written))
    return weight_statistics.of_layers(found)


def eager(of: Subject) -> Way:
    """The matrices that the model returns."""

    def run(length: int) -> Found:
        weights, out = _matrices(of, length)
        return _of_matrices(of, length, [layer[0] for layer in weights], out)

    return run


def bertviz(of: Subject) -> Way:
    """The same, as one tensor of all layers."""
    from bertviz.util import format_attention

    def run(length: int) -> Found:
        weights, out = _matrices(of, length)
        return _of_matrices(of, length, format_attention(weights), out)

    return run


def lens(of: Subject) -> Way:
    """What TransformerLens keeps of the model, which it wraps with its output layer; the weights are the same."""
    from transformer_lens.model_bridge import TransformerBridge
    from transformers import LlamaForCausalLM

    if of.tokenizer is None:
        raise LeftOutError("wants a model with a tokenizer")
    inner = copy.deepcopy(of.eager, {id(parameter): parameter for parameter in of.eager.parameters()})
    with torch.device("meta"):
        whole = LlamaForCausalLM(inner.config)
    whole.model, whole.lm_head.weight = inner, inner.embed_tokens.weight
    bridge = TransformerBridge.boot_transformers("SmolLM2-135M-Instruct", hf_model=whole, tokenizer=of.tokenizer)

    def run(length: int) -> Found:
        _, cache = bridge.run_with_cache(
            of.tokens[None, :length],
            names_filter=lambda name: name.endswith(("attn.hook_pattern", "attn.hook_z")),
            use_cache=False,
            logits_to_keep=1,
        )
        weights, out = (
            [cache[f"blocks.{number}.attn.hook_{name}"] for number in range(len(inner.layers))]
            for name in ("pattern", "z")
        )
        return _of_matrices(of, length, [layer[0] for layer in weights], out)

    return run


WAYS: dict[str, Callable[[Subject], Way]] = {PLAIN: plain, OURS: ours, EAGER: eager, BERTVIZ: bertviz, LENS: lens}


def exact(of: Subject, length: int) -> Found:
    """The statistics in float64 of the eager weight_statistics."""
    weights, out = _matrices(of, length)
    text = of.text(length)
    found = []
    for layer, returned, written in zip(weights, out, of.written, strict=True):
        by_head = returned[0].double().unflatten(-1, (layer.shape[1], -1)).transpose(0, 1)
        found.append(weight_statistics.statistics(layer[0].double(), by_head, text, written.double()))
    return weight_statistics.of_layers(found)


def checked(of: Subject, names: Sequence[str], length: int) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways that are right, and why others are left out; the script ends where ours is not."""
    ways, left_out, right = {}, {}, exact(of, length)
    for name in names:
        try:
            way = WAYS[name](of)
            if name != PLAIN:
                weight_statistics.check(way(length), right)
        except WrongError as reason:
            if name == OURS:
                raise SystemExit(f"watched, {length} tokens: {reason}") from reason
            left_out[name] = str(reason)
        except LeftOutError as reason:
            left_out[name] = str(reason)
        else:
            ways[name] = way
    for name, reason in left_out.items():
        print(f"LEFT OUT  {name}: {reason}", flush=True)
    return ways, left_out


# -- one call of attention --------------------------------------------------------------------------------------------


def one_call(regime: Regime) -> tuple[Callable[[], Tally], Problem, Tensor]:
    """Causal attention over a text, with statistics; what is computed, and of which tokens."""
    drawn = torch.Generator().manual_seed(0)
    shape = (regime.batch, regime.heads, regime.length, regime.head_dim)
    q, k, v = (torch.randn(shape, generator=drawn) for _ in range(3))
    problem, tokens = Problem.checked(q, k, v, mask=hw.causal()), words(regime.length, 2**31)

    def run() -> Tally:
        tally = Tally()
        attend_observed(problem, tally.add, CallContext(tokens[None]))
        return tally

    return run, problem, tokens


def check_call(regime: Regime) -> None:
    """End with a sentence unless the call measures what the whole matrix does."""
    run, problem, tokens = one_call(regime)
    q, k, v = (tensor[0].double() for tensor in (problem.q, problem.k, problem.v))
    hidden = torch.ones(regime.length, regime.length, dtype=torch.bool).triu(1)
    weights = (q @ k.mT / regime.head_dim**0.5).masked_fill(hidden, -torch.inf).softmax(-1)
    found = {name: values[0] for name, values in run().means().items()}
    try:
        weight_statistics.check(found, weight_statistics.statistics(weights, weights @ v, Text(tokens)))
    except WrongError as reason:
        raise SystemExit(f"{regime.name}, one call: {reason}") from reason


# -- memory, in an interpreter of its own -----------------------------------------------------------------------------


def child(name: str, regime: Regime) -> dict[str, int]:
    """What the interpreter that is measured reports: its peak, less what it returns."""
    with torch.no_grad():
        if name == CALL_EXTRA:
            short = one_call(replace(regime, length=min(SHORT, regime.length)))[0]
            run, problem, _ = one_call(regime)
            # The output is as large as the values; less than a page is not seen.
            return {"peak": max(peak_of(run, short) - problem.v.nbytes, 4096)}
        run = WAYS[name](subject(regime))
        return {"peak": peak_of(lambda: run(regime.length), lambda: run(min(SHORT, regime.length)))}


def of_memory(regime: Regime, names: Sequence[str]) -> list[Row]:
    """What ours takes beside the plain forward, of what it may; and the peaks of the others over that of ours.

    Measured once: a peak hardly varies, and an interpreter with the model in it takes up to a minute.
    """
    peaks = {name: measured("watching", name, regime)["peak"] for name in (PLAIN, OURS, *names)}
    rows = [_limited(regime, MODEL_EXTRA, max(peaks[OURS] - peaks[PLAIN], 4096), _note(regime))]
    for name in names:
        ratio = Ratio.of([peaks[name]], [peaks[OURS]])
        rows.append(Row(regime, PEAKS[name], ratio, peaks[OURS], peaks[name], _note(regime)))
    return rows


def _limited(regime: Regime, limit: str, taken: int, note: str) -> Row:
    return Row(regime, limit, Ratio.of([taken], [LIMITS[limit]]), taken, LIMITS[limit], note)


# -- time -------------------------------------------------------------------------------------------------------------


def of_time(regime: Regime, ways: dict[str, Way], rounds: int) -> list[Row]:
    """The watched forward over the plain one, and the others over the watched one."""
    taken = interleaved({name: Call(lambda way=way: way(regime.length)) for name, way in ways.items()}, rounds)
    rows = []
    for name in ways:
        pair = (taken[OURS], taken[name]) if name == PLAIN else (taken[name], taken[OURS])
        if name != OURS:
            of_both = (statistics.median(taken[each]) for each in (OURS, name))
            rows.append(Row(regime, name, Ratio.of(*pair), *of_both, _note(regime)))
    return rows


def _names(options: Options) -> list[str]:
    """The ways that are compared."""
    if options.peers == "torch" or options.quick:
        return [PLAIN, OURS, EAGER]
    require("bertviz", "transformer_lens")
    return list(WAYS)


def timed(regime: Regime, options: Options, left_out: dict[str, str]) -> list[Row]:
    """Of one length, the checks ahead."""
    names = _names(options) if regime.length < LONG else [PLAIN, OURS]
    of = subject(regime)
    with torch.no_grad():
        ways, without = checked(of, names, min(SHORT, regime.length))
        left_out.update({f"{name}, {regime.name}": reason for name, reason in without.items()})
        if options.quick:
            return of_time(regime, ways, min(options.rounds, 2))
        # The others take so much longer that more rounds of them would be most of the time.
        few = min(options.rounds, FEW_ROUNDS)
        fused = {name: ways[name] for name in (PLAIN, OURS)}
        rows = of_time(regime, fused, few if regime.length >= LONG else options.rounds)
        peers = {name: way for name, way in ways.items() if name != PLAIN}
        return rows + (of_time(regime, peers, few) if len(peers) > 1 else [])


def main(given: Sequence[str] | None = None) -> dict:
    """Every length, and a line of JSON last."""
    options = arguments(__doc__, given)
    found: list[Row] = []
    left_out: dict[str, str] = {} if TOLD else {"memory": UNTOLD}

    def keep(rows: Sequence[Row]) -> None:
        for row in rows:
            show(row)
        found.extend(rows)

    base = TINY if options.tiny else SMOLLM2
    lengths = [base.length] if options.tiny else [512] if options.quick else [base.length, LONG]
    for regime in (replace(base, length=length) for length in lengths):
        if not options.wants(regime):
            continue
        keep(timed(regime, options, left_out))
        if TOLD and not options.quick:
            peers = [name for name in _names(options)[2:] if f"{name}, {regime.name}" not in left_out]
            keep(of_memory(regime, peers if regime.length < LONG else []))
    call = replace(CALL, length=300) if options.tiny else CALL
    if options.wants(call) and TOLD and not options.quick:
        check_call(replace(call, length=SHORT))
        keep([_limited(call, CALL_EXTRA, measured("watching", CALL_EXTRA, call)["peak"], "one call of attention")])
    return report("watching", found, options, left_out)


if __name__ == "__main__":
    main()
