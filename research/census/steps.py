"""Runs in steps: prompts that are processed in chunks with a cache, and generation."""

import inspect
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from research.census.batches import SHORTER, Batch, padding_id
from research.tiny_models.builder import modeling_modules, randomise, tiny_config
from research.tiny_models.inputs import BATCH

CHUNKS = (6, 4, 1, 1, 1)
"""Lengths of the pieces in which a text is processed."""
NEW_TOKENS = 4


@dataclass(frozen=True)
class Steps:
    """A run in several calls of the model, and the single call over the same tokens that is its truth.

    Attributes:
        name: name of the run.
        run: runs all calls and returns the outputs to compare, `(batch, tokens, ...)`.
        whole: the single call.
        read: returns the same outputs from the result of the single call.
    """

    name: str
    run: Callable[[], Tensor]
    whole: Batch
    read: Callable[[Any], Tensor]


def is_plain_text(batch: Batch) -> bool:
    """Return whether token ids and their mask are the only inputs."""
    return "input_ids" in batch.inputs and not set(batch.inputs) - {"input_ids", "attention_mask"}


def cached(model: nn.Module, batch: Batch) -> Iterator[Steps]:
    """Yield runs in chunks, with a cache that grows and with a static one."""
    if not is_plain_text(batch) or "past_key_values" not in inspect.signature(model.forward).parameters:
        return
    from transformers import DynamicCache, StaticCache

    ids = batch.inputs["input_ids"]
    if ids.shape != (BATCH, sum(CHUNKS)):
        return
    mask = torch.ones_like(ids)
    whole = Batch("whole", {"input_ids": ids, "attention_mask": mask, "use_cache": False}, batch.real, batch.tokens)
    caches = {
        "dynamic cache": lambda: DynamicCache(config=model.config),
        "static cache": lambda: StaticCache(config=model.config, max_cache_len=17),
    }
    for name, make in caches.items():

        def run(make: Callable[[], Any] = make) -> Tensor:
            cache, outputs, start = make(), [], 0
            for length in CHUNKS:
                end = start + length
                result = model(
                    input_ids=ids[:, start:end], attention_mask=mask[:, :end], past_key_values=cache, use_cache=True
                )
                outputs.append(first_output(result))
                start = end
            return torch.cat(outputs, 1)

        yield Steps(name, run, whole, first_output)


def first_output(result: Any) -> Tensor:
    """Return the first tensor of a model's output."""
    if isinstance(result, Tensor):
        return result
    return next(iter(result.values())) if hasattr(result, "values") else result[0]


# -- generation -------------------------------------------------------------------------------------------------------


def generator_of(model_type: str, seed: int = 0) -> nn.Module | None:
    """Return a tiny model with a head that generates text; None if the type has none."""
    from transformers.models.auto import modeling_auto

    config = tiny_config(model_type)
    for table in ("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"):
        name = getattr(modeling_auto, table).get(model_type)
        for module in modeling_modules(type(config)) if isinstance(name, str) else ():
            if hasattr(module, name):
                torch.manual_seed(seed)
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")
                    model = getattr(module, name)._from_config(config)
                randomise(model, seed)
                return model.eval()
    return None


def generated(model: nn.Module, batch: Batch) -> Iterator[Steps]:
    """Yield greedy generation from left-padded prompts, with a cache that grows and with a static one."""
    if not is_plain_text(batch):
        return
    ids, mask = batch.inputs["input_ids"].clone(), torch.ones_like(batch.inputs["input_ids"])
    pad = padding_id(model, "")
    ids[-1, SHORTER:], ids[-1, :SHORTER] = ids[-1, :-SHORTER].clone(), pad
    mask[-1, :SHORTER] = 0
    generator: Any = model
    is_decoder = not getattr(model.config, "is_encoder_decoder", False)
    options = {"max_new_tokens": NEW_TOKENS, "min_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": pad}
    options |= {"return_dict_in_generate": True, "output_logits": True}
    for name in ("dynamic", "static"):
        if not is_decoder and name == "static":
            continue

        def generate(name: str = name) -> Any:
            extra = {} if name == "dynamic" else {"cache_implementation": name}
            return generator.generate(input_ids=ids, attention_mask=mask, **options, **extra)

        def run(generate: Callable[[], Any] = generate) -> Tensor:
            return torch.stack(generate().logits, 1)

        with torch.no_grad():
            result = generate()
        cache = result.get("past_key_values")
        if cache is None or not cache.get_seq_length():
            continue  # without a cache of keys, each call is a batch of sequences of its own
        text = result.sequences
        whole = _continued(ids, mask, text, model) if is_decoder else _decoded(ids, mask, text)
        yield Steps(f"generation, {name} cache", run, whole, lambda result: result.logits[:, -NEW_TOKENS:])


def _continued(ids: Tensor, mask: Tensor, text: Tensor, model: nn.Module) -> Batch:
    """Return the call of a decoder over all tokens that generation gave to the model."""
    fed = text[:, :-1]
    whole_mask = torch.cat([mask, mask.new_ones(BATCH, fed.shape[1] - ids.shape[1])], 1)
    inputs = {"input_ids": fed, "attention_mask": whole_mask, "use_cache": False}
    if "position_ids" in inspect.signature(model.forward).parameters:
        inputs["position_ids"] = (whole_mask.cumsum(-1) - 1).clamp(min=0)
    return Batch("whole", inputs, {fed.shape[1]: whole_mask.bool()}, {fed.shape[1]: fed})


def _decoded(ids: Tensor, mask: Tensor, text: Tensor) -> Batch:
    """Return the call of an encoder-decoder over all tokens that generation gave to the decoder."""
    fed = text[:, :-1]
    inputs = {"input_ids": ids, "attention_mask": mask, "decoder_input_ids": fed, "use_cache": False}
    real = {ids.shape[1]: mask.bool(), fed.shape[1]: torch.ones_like(fed, dtype=torch.bool)}
    return Batch("whole", inputs, real, {ids.shape[1]: ids, fed.shape[1]: fed})
