"""Retrieval score: how often a head attends most to the token of a needle that the model repeats (Wu et al. 2024)."""

from collections import Counter
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headwise.analysis.causality import require_causal_decoder
from headwise.analysis.head_pass import SiteValues, measure_sequences, pass_data
from headwise.analysis.head_tests.haystacks import Haystack, Needle, draw_needles, haystacks, read_haystack
from headwise.analysis.head_tests.token_spans import prompt_with_spans, require_fast
from headwise.analysis.head_tests.weight_reader import WeightReader, batch_of_ids, require_finite_weights
from headwise.analysis.viewer import DISAGREEMENT
from headwise.attention.backends.blockwise.row_block import RowBlock
from headwise.checks import collection_of, probability, require_module, whole_number
from headwise.data.batches import NumberedBatches, device_of, digest_of
from headwise.data.tokenization import max_input_tokens
from headwise.errors import InputError
from headwise.intercept.interceptor import Call, SiteKey
from headwise.intercept.sites import SiteRecord, SiteRegistry
from headwise.runs.head_table import HeadTable
from headwise.runs.rows import HeadRow, MeanEstimate
from headwise.runs.significance import false_discovery_rates, one_sided_p_values
from headwise.settings import CONTINUATIONS, NEEDLE_DEPTHS, NEEDLE_LENGTHS, NEEDLES
from headwise.shapes import Int
from headwise.statistics.columns import Column

THRESHOLD = 0.1
"""Score from which Wu et al. call a head a retrieval head."""

RECALL = 0.5
"""Share of the answer that the model must repeat for a text to count, as in Wu et al."""

CHECKED = 24
"""Number of tokens on which it is checked that a model is causal."""


SCORE, RECALLED = "score", "recall"
"""Names of the values of each text."""


class Retrieval(HeadTable[HeadRow]):
    """Table of the retrieval score of each head (Wu et al. 2024, section 2), one row per head. A long text contains the
    answer to a question. The score is the share of the answer's tokens that the head copies from the text while the
    model repeats the answer.

    A text hides a needle, whose answer consists of the tokens at the places N. The model repeats the answer after a
    question. At the step that produces token w, a head copies place j of N if j is the key with the largest attention
    weight of the last token, and the token at j is w. The score of a head on a text is

        score  number of places of N that the head copies in some step / number of places of N

    and the column is its mean over texts. `score_256` is the mean over texts of 256 tokens, if there are several
    lengths. Standard errors are clustered by needle; `n` counts needles.

    With the continuation "generated", as in the paper, the model generates its answer, always taking the token with the
    largest logit, and texts count if it repeats more than half of the answer's tokens. The paper measures this by
    ROUGE-1 of words. With "forced", the model reads the answer after the question, token by token, and all texts count.

    `tests()` has the p-value of a one-sided t-test over needles that the score is above 0.1, from which the paper calls
    heads retrieval heads, and `score_q`, adjusted for the number of heads (Benjamini and Hochberg 1995). A score that
    is the same for all n needles has no variance; above 0.1, its p-value is that of the sign test, 2^-n.
    """

    NAME = "retrieval"
    COLUMNS = (Column("score", "Share of the needle's places that the head copies.", "share"),)
    SAMPLES = "text"

    def tests(self) -> dict[str, list[float]]:
        """Return the p-value of each head for a retrieval score above 0.1 (`score_p`), and the p-value adjusted for the
        number of heads (`score_q`).

        Raises:
            MissingExtra: scipy is not installed.
        """
        scores = [row.statistics["score"] for row in self.rows]
        p = one_sided_p_values(scores, above=THRESHOLD)
        return {"score_p": p, "score_q": false_discovery_rates(p)}


def retrieval_score(
    model: nn.Module,
    tokenizer: Any,
    *,
    haystack: str | Path | None = None,
    lengths: Collection[int] = NEEDLE_LENGTHS,
    depths: Collection[float] = NEEDLE_DEPTHS,
    needles: int | Collection[Needle] = NEEDLES,
    continuation: str = "generated",
    recall: float = RECALL,
    seed: int = 0,
    out: str | Path | None = None,
    force: bool = False,
    progress: bool = False,
    title: str | None = None,
) -> Retrieval:
    """Measure the retrieval score of each head (Wu et al. 2024). A sentence is hidden in a long text, and a question
    about it follows. The score is the share of the answer's tokens that the head copies from the sentence. `Retrieval`
    defines the score and its test.

        model, tokenizer = hw.load("smollm2", lm_head="causal")
        retrieval = hw.retrieval_score(model, tokenizer)
        retrieval.plot(kind="ranking")

    A needle is a sentence such as "The motto of Lima is velvet anchor candle tiger pepper." The question after the text
    ends with "The motto of Lima is". The model runs in evaluation mode: once to generate an answer, and once over text
    and answer, where the key with the largest weight is kept for each row that produces a token.

    Args:
        model: a causal decoder with a language-model head, of which `watch` sees the attention.
        tokenizer: its tokenizer, a fast one.
        haystack: file or folder with the text that hides needles; by default the help topics of Python.
        lengths: numbers of tokens of text, needle, question and answer, about.
        depths: shares of the text before the needle, from 0 to 1.
        needles: number of needles, which are drawn, or your own `Needle` objects.
        continuation: "generated" or "forced".
        recall: share of the answer's tokens of which a generated answer must repeat more; 0 to count all texts in
            which it repeats one.
        seed: seed of needles and of the parts of the haystack.
        out: folder for the table; an interrupted run resumes there with the same arguments.
        force: replace another run in that folder.
        progress: show a progress bar on standard error.
        title: the model's name for display.

    Raises:
        InputError: the model is no causal decoder, or repeats no answer; a text is longer than its limit; or an
            argument has another form.
        MissingExtra: a package that `out` or `progress` needs is not installed.
    """
    require_module(model)
    if continuation not in CONTINUATIONS:
        raise InputError("continuation", expected=" or ".join(map(repr, CONTINUATIONS)), got=repr(continuation))
    probability("recall", recall)
    require_fast(tokenizer)
    texts = _texts(tokenizer, haystack, lengths, depths, needles, seed)
    forced = [forced_answer(tokenizer, text) for text in texts]
    require_causal_decoder(model, [batch_of_ids(model, forced[0][0][None, :CHECKED])])
    limit = max_input_tokens(model, tokenizer)
    for text, (ids, _, _) in zip(texts, forced, strict=True):
        if limit is not None and len(ids) > limit:
            raise InputError("lengths", expected=f"at most {limit} tokens, the model's limit", got=text.length)
    reader, needle_of = _TopKeys(model), list(dict.fromkeys(text.needle for text in texts))
    batches = [{"input_ids": ids[None], "text": torch.tensor([index])} for index, (ids, _, _) in enumerate(forced)]
    numbered = NumberedBatches(batches, [needle_of.index(text.needle) for text in texts])
    data = pass_data(model, numbered, (), out=out, shown=progress)

    def measure_batch(batch: dict[str, Any]) -> tuple[list[SiteRecord], SiteValues]:
        ids, places, first = forced[int(batch["text"])]
        if continuation == "generated":
            ids = generated_answer(model, tokenizer, ids, first)
        needle = ids[places]
        # Each token of the answer that the continuation repeats counts as often as it occurs in both.
        expected = Counter(needle.tolist())
        repeated = (expected & Counter(ids[first:].tolist())).total() / expected.total()
        reader.rows = range(first - 1, len(ids) - 1)
        output = reader.run(ids[None])
        if continuation == "generated":
            require_same_tokens(ids, first, output)
        values: SiteValues = {}
        for site, keys in reader.found.items():
            is_copy = (keys[:, None] == places[:, None]) & (ids[first:] == needle[:, None])
            scores = is_copy.any(2).double().mean(1, keepdim=True).mT
            values[site] = {
                SCORE: scores if continuation == "forced" or repeated > recall else torch.full_like(scores, torch.nan),
                RECALLED: scores.new_full((1, 1), repeated),
            }
        return reader.records, values

    def make_table(registry: SiteRegistry, values: SiteValues, metadata: dict[str, Any]) -> Retrieval:
        of_site = next(iter(values.values()))
        recalls, counting = of_site[RECALLED][:, 0].tolist(), (~of_site[SCORE][:, 0].isnan()).tolist()
        counted = [text for text, counts in zip(texts, counting, strict=True) if counts]
        if not counted:
            raise InputError(
                "model",
                expected=f"one that repeats more than {recall:.0%} of the answer to some text",
                got=f"{max(recalls):.0%} at most",
                remedy='continuation="forced" makes it read the answers',
            )
        chosen, distinct = {SCORE: list(range(len(texts)))}, sorted({text.length for text in counted})
        for length in distinct if len(distinct) > 1 else ():
            chosen[f"{SCORE}_{length}"] = [index for index, text in enumerate(texts) if text.length == length]
        rows = []
        for record, labels in registry.head_labels():
            of_head = values[record.site][SCORE][:, labels["head"]].tolist()
            statistics = {
                name: MeanEstimate.of([of_head[i] for i in indices], [texts[i].needle for i in indices])
                for name, indices in chosen.items()
            }
            rows.append(HeadRow(**labels, statistics=statistics))
        measured = {
            "sequences": len(counted),
            "texts": len(texts),
            "needles": len({text.needle for text in counted}),
            "recall": sum(recalls) / len(recalls),
        }
        return Retrieval(tuple(rows), {**metadata, "measured": metadata["measured"] | measured})

    options: dict[str, Any] = {
        "lengths": sorted({text.length for text in texts}),
        "depths": sorted({text.depth for text in texts}),
        # Other needles may be the same tokens in a text.
        "needles": needles if isinstance(needles, int) else {"digest": digest_of(needles)},
        "continuation": continuation,
        "recall": recall,
        "seed": seed,
    }
    options |= {"out": out, "force": force, "progress": progress, "title": title}
    table = measure_sequences(data, measure_batch, Retrieval, make_table, **options)
    reader.warn_of_unread(stacklevel=3)
    return table


def _texts(
    tokenizer: Any,
    haystack: str | Path | None,
    lengths: Collection[int],
    depths: Collection[float],
    needles: int | Collection[Needle],
    seed: int,
) -> Sequence[Haystack]:
    """Check the arguments of `retrieval_score`, and return the long texts with hidden sentences."""
    sizes = sorted({whole_number("lengths", each, least=1) for each in collection_of("lengths", lengths, of="numbers")})
    shares = sorted({_share(each) for each in collection_of("depths", depths, of="shares")})
    if not sizes or not shares:
        raise InputError("lengths" if not sizes else "depths", expected="at least one number", got="none")
    whole_number("seed", seed, least=0)
    if isinstance(needles, Collection):
        own = list(needles)
        if not own or not all(isinstance(needle, Needle) and needle.answer.strip() for needle in own):
            raise InputError("needles", expected="a number, or Needle objects with an answer", got=repr(needles)[:80])
    else:
        own = draw_needles(whole_number("needles", needles, least=1), seed)
    return list(haystacks(tokenizer, read_haystack(haystack), own, sizes, shares, seed))


def _share(value: Any) -> float:
    """Return a depth (the share of the text before a hidden sentence) as a float; raise `InputError` unless it is from
    0 to 1.
    """
    number = float(value) if isinstance(value, int | float) and not isinstance(value, bool) else -1.0
    if not 0.0 <= number <= 1.0:
        raise InputError("depths", expected="numbers from 0 to 1", got=repr(value))
    return number


class _TopKeys(WeightReader):
    """Interceptor that finds, for each head and each query in `rows`, the key with the largest attention weight. The
    model reads a single sequence, and other queries are skipped. For each attention module, the indices of the keys are
    a tensor `(heads, rows)`.
    """

    rows = range(0)

    def start(self, call: Call) -> Int[Tensor, "heads rows"]:
        """Return the tensor for the key indices of one attention module, filled with -1 before the weights are read."""
        return torch.full((call.grid.heads, len(self.rows)), -1)

    def read(self, site: SiteKey, block: RowBlock) -> None:
        """Store, for the query rows of a block, the index of the key with the largest attention weight. Unnormalised
        weights (`powers`) are sufficient, since all weights of a row have the same divisor.
        """
        start, stop = max(block.rows.start, self.rows.start), min(block.rows.stop, self.rows.stop)
        if start >= stop:
            return
        powers = block.tile.by_head(block.powers)[0, :, start - block.rows.start : stop - block.rows.start]
        require_finite_weights(site, powers)
        keys = block.visibility.key_indices[powers.argmax(-1)].cpu()
        self.found[site][block.tile.heads, start - self.rows.start : stop - self.rows.start] = keys


MORE = 4
"""Number of tokens that are generated in addition to as many as the answer has."""


def forced_answer(tokenizer: Any, text: Haystack) -> tuple[Int[Tensor, " tokens"], Int[Tensor, " places"], int]:
    """Return three things for a text that hides a needle (sentence) and ends with a question. The first is the tokens
    of the text, followed by the correct answer. The second is the positions of the needle's tokens that contain the
    answer. The third is the position of the first token of the answer after the question.
    """
    prompt, spans = prompt_with_spans(tokenizer, text.text)
    whole, _ = prompt_with_spans(tokenizer, text.text + text.continuation)
    first = len(prompt)
    if whole[:first] != prompt or len(whole) == first:
        remedy = "choose needles whose answers are tokens of their own"
        raise InputError(
            "tokenizer", expected="tokens of an answer after those of the question", got="others", remedy=remedy
        )
    start, stop = text.answer
    places = [index for index, (begin, end) in enumerate(spans) if begin < stop and end > start]
    return torch.tensor(whole), torch.tensor(places), first


def generated_answer(
    model: Any, tokenizer: Any, forced: Int[Tensor, " tokens"], first: int
) -> Int[Tensor, " generated_tokens"]:
    """Let the model generate an answer of at most 4 tokens more than the correct one. Return the tokens of the text,
    the question and the generated answer.
    """
    if not (hasattr(model, "can_generate") and model.can_generate()):
        remedy = 'load it with a language-model head, as hw.load(name, "causal") does'
        raise InputError("model", expected="a model that generates text", got=type(model).__name__, remedy=remedy)
    ids = forced[None, :first].to(device_of(model))
    pad = tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id
    generate: Any = model.generate
    result = generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=len(forced) - first + MORE,
        do_sample=False,
        num_beams=1,
        pad_token_id=pad,
    )
    if len(result) != 1 or result.shape[1] <= ids.shape[1]:
        raise InputError("model", expected="a generation config that returns one sequence", got=f"{len(result)}")
    answered: Tensor = result[0].cpu()
    return answered


def require_same_tokens(ids: Int[Tensor, " tokens"], first: int, output: Any) -> None:
    """Raise `InputError` unless each token of a generated answer has the largest logit in `output`, up to rounding.
    `output` is the model's output for the text and the answer together. If it predicts other tokens than during
    generation, attention may differ, too.
    """
    logits = output.logits[0, first - 1 : -1].float().cpu()
    below = (logits.amax(1) - logits.gather(1, ids[first:, None])[:, 0]) / logits.abs().amax(1)
    if not bool((below <= max(DISAGREEMENT, 8 * torch.finfo(output.logits.dtype).eps)).all()):
        raise InputError(
            "model",
            expected="one that generates the tokens with the largest logits in one call for all tokens",
            got="other tokens",
            remedy='use continuation="forced", or change its generation config',
        )
