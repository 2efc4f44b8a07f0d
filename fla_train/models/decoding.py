"""Fast decoding for `model.generate`: one CUDA graph runs a step of one token and chooses the next.

`generate` uses it for greedy search and sampling (see `takes_loop`). After transformers' prefill a `Decoder`
keeps the states at fixed addresses. Its step reads the newest token, computes logits, chooses the next token
and marks finished sequences on the device, so the host only launches one graph per token. Without a GPU the
same step runs without a graph.
"""

from collections.abc import Hashable
from dataclasses import dataclass
from threading import Lock
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessor,
    LogitsProcessorList,
    PreTrainedModel,
    StaticCache,
    StoppingCriteriaList,
)
from transformers.cache_utils import LinearAttentionLayer
from transformers.generation import (
    EosTokenCriteria,
    MaxLengthCriteria,
    MinPLogitsWarper,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.generation.streamers import BaseStreamer

from fla_train.kernels.sizes import ceil_div, next_power_of_2
from fla_train.models.cache import CACHE_NAME, CountingLayer, WindowLayer, cache_for
from fla_train.models.context import Masks, attention_kinds
from fla_train.models.fused_step import fused_step, takes_fused_step
from fla_train.models.layers import is_plain

PREFILL_TOKENS = 16384  # tokens of a pass over all prompts, unless `prefill_chunk_size` is set
CHECK_EVERY = 16  # steps between checks on the host whether all sequences have finished
PURE = (TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper, MinPLogitsWarper)  # read the scores only
SIZE_UNIT = 1024  # tokens; capacities are rounded up to it, so that calls of similar length share a graph
RECORDING = Lock()  # only one graph can be recorded at a time
# The last unused decoder of each model, with the key of its graph.
DECODERS: WeakKeyDictionary[PreTrainedModel, tuple[Hashable, "Decoder"]] = WeakKeyDictionary()


def takes_loop(
    model: PreTrainedModel,
    generation_config: GenerationConfig,
    stopping_criteria: StoppingCriteriaList,
    model_kwargs: dict[str, Any],
) -> bool:
    """Return whether `generate_tokens` can replace transformers' loop, which needs a plain `DynamicCache`.

    Requests with returned scores, adapters, hooks or weights on several devices keep transformers' loop.
    """
    cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
    returned = ("scores", "logits", "attentions", "hidden_states")
    returns_them = any(getattr(generation_config, f"output_{name}") for name in returned)
    return (
        type(cache) is DynamicCache
        and not cache.offloading
        and not (generation_config.return_dict_in_generate and returns_them)
        and not generation_config.is_assistant
        and stopping_criteria.max_length is not None
        and _is_plain_model(model)  # so its device is not meta, for which torch knows no autocast
        and not torch.is_autocast_enabled(model.device.type)
        # With attention layers all padding must be on the left.
        and (mask is None or not model.config.attention_layers or not (mask.bool().int().diff() < 0).any())
    )


def _is_plain_model(model: PreTrainedModel) -> bool:
    """Return whether the model runs without hooks, adapters and custom mixers on one device."""
    if model.config.mixer is not None or hasattr(model, "peft_config"):
        return False
    if any(hasattr(p, "device_mesh") or p.device != model.device for p in model.parameters()):
        return False
    hooked = (m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules())
    return not any(hooked) and all(is_plain(m) for m in model.modules() if isinstance(m, nn.Linear))


def generate_tokens(
    model: PreTrainedModel,
    input_ids: Tensor,
    logits_processor: LogitsProcessorList,
    stopping_criteria: StoppingCriteriaList,
    generation_config: GenerationConfig,
    streamer: BaseStreamer | None,
    model_kwargs: dict[str, Any],
) -> tuple[Tensor, DynamicCache]:
    """Return prompt and new tokens [B, T] and the cache, as `GenerationMixin._sample` does.

    Finished sequences get `pad_token_id`. The host checks every `CHECK_EVERY` steps whether all have
    finished, and in each step if it needs the tokens.
    """
    mask, cache = model_kwargs.get("attention_mask"), model_kwargs[CACHE_NAME]
    returned = generation_config.return_dict_in_generate or getattr(cache, "_is_user_defined", False)
    logits = model._prefill(input_ids, generation_config, model_kwargs).logits[:, -1]
    known, limit, generated = input_ids.shape[1], stopping_criteria.max_length, 1
    criteria = StoppingCriteriaList(
        x for x in stopping_criteria if not isinstance(x, EosTokenCriteria | MaxLengthCriteria)
    )
    ends = [x.eos_token_id.tolist() for x in stopping_criteria if isinstance(x, EosTokenCriteria)]
    pad = generation_config._pad_token_tensor
    choice = Choice(
        tuple(logits_processor),
        generation_config.do_sample,
        tuple(token for each in ends for token in each),
        0 if pad is None else int(pad),
    )
    key, decoder = _decoder(model, cache, len(logits), limit - known, mask, choice)
    ids = input_ids.to(model.device)
    every = 1 if returned or criteria or streamer is not None else CHECK_EVERY

    def so_far() -> Tensor:
        return torch.cat([ids, decoder.new_tokens[:, :generated]], dim=1)

    decoder.choose(logits, ids)
    while True:
        if streamer is not None:
            streamer.put(decoder.token[:, 0].cpu())
        if criteria:
            decoder.unfinished &= ~criteria(so_far(), None)
        finishing = (ends or criteria) and generated % every == 0
        if known + generated >= limit or (finishing and not decoder.unfinished.any()):
            break
        decoder.advance(model, None if choice.pure else so_far())
        generated += 1
    if returned:
        decoder.unload(cache, generated - 1)
    sequences = torch.cat([ids, decoder.new_tokens[:, : int(decoder.count)]], dim=1).to(input_ids.device)
    DECODERS[model] = key, decoder  # only now, because concurrent and nested calls need other decoders
    if streamer is not None:
        streamer.end()  # a waiting thread may call `generate` again
    return sequences, cache


@dataclass(frozen=True)
class Choice:
    """Describe how a token is chosen from logits."""

    processors: tuple[LogitsProcessor, ...]
    do_sample: bool  # draw from softmax(scores) instead of taking the largest
    ends: tuple[int, ...]  # tokens that finish a sequence
    pad: int  # token for finished sequences

    @property
    def pure(self) -> bool:
        """Return whether the scores depend only on the logits, so that the graph can include the choice."""
        return all(type(x) in PURE for x in self.processors)

    @property
    def key(self) -> Hashable:
        """Return the end tokens, and all settings if the graph includes the choice."""
        settings = tuple((type(x), *sorted(vars(x).items())) for x in self.processors)
        return (settings, self.do_sample, self.ends, self.pad) if self.pure else self.ends


def _decoder(
    model: PreTrainedModel,
    cache: DynamicCache,
    batch: int,
    new_tokens: int,
    mask: Tensor | None,
    choice: Choice,
) -> tuple[Hashable, "Decoder"]:
    """Return a key and a decoder with the states of `cache`, reused from an earlier call with this key."""
    config, cache_len = model.config, 1
    if config.attention_layers:
        cache_len = SIZE_UNIT * ceil_div(cache.get_seq_length() + new_tokens, SIZE_UNIT)
    new_len = max(SIZE_UNIT, next_power_of_2(new_tokens + 1))
    settings = config.backend, config._attn_implementation, torch.is_inference_mode_enabled()
    weights = tuple((p.data_ptr(), p.dtype) for p in model.parameters())
    key = batch, new_len, cache_len, choice.key, settings, weights
    previous, decoder = DECODERS.pop(model, (None, None))
    if previous != key:
        del decoder  # frees its memory for the next
        decoder = Decoder(model, batch, new_len, cache_len, choice)
        if model.device.type == "cuda":
            decoder.load(cache, mask)
            with RECORDING:
                decoder.record(model)
    decoder.choice = choice
    decoder.load(cache, mask)
    return key, decoder


class Decoder:
    """Steps of one token for B sequences, each one CUDA graph on a GPU.

    Args:
        batch: B.
        new_tokens: capacity for new tokens.
        cache_len: capacity for tokens of a sequence in layers of full attention.
        choice: how a token is chosen.
    """

    def __init__(
        self, model: PreTrainedModel, batch: int, new_tokens: int, cache_len: int, choice: Choice
    ) -> None:
        config, device = model.config, model.device
        self.cache = cache_for(StaticCache(config=config, max_cache_len=cache_len), config, True, device)
        for index, kind in enumerate(config.layer_types):
            if kind == "sliding_attention":
                self.cache.layers[index] = WindowLayer(config.sliding_window)
        self.kinds = attention_kinds(config)
        self.choice = choice
        self.ends = torch.tensor(choice.ends, dtype=torch.long, device=device)
        self.token = torch.zeros(batch, 1, dtype=torch.long, device=device)  # the newest of each sequence
        self.new_tokens = torch.zeros(batch, new_tokens, dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)  # number of `new_tokens`
        self.unfinished = torch.ones(batch, dtype=torch.bool, device=device)
        self.padding = torch.zeros(batch, dtype=torch.long, device=device)  # tokens before the prompt
        self.logits: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None

    def load(self, cache: DynamicCache, mask: Tensor | None) -> None:
        """Start new sequences from the states of a cache, with prompts left-padded by `mask`."""
        for static, layer in zip(self.cache.layers, cache.layers, strict=True):
            if isinstance(layer, LinearAttentionLayer):
                _copy_states(layer, static)
            else:
                static.reset()
                static.update(layer.keys, layer.values)
                static.cumulative_length.fill_(layer.get_seq_length())
        self.padding.zero_()
        if mask is not None:
            self.padding.copy_((mask == 0).cumprod(1).sum(1))
        self.count.zero_()
        self.unfinished.fill_(True)

    def unload(self, cache: DynamicCache, steps: int) -> None:
        """Add the last `steps` tokens to the loaded cache."""
        for static, layer in zip(self.cache.layers, cache.layers, strict=True):
            if isinstance(layer, LinearAttentionLayer):
                _copy_states(static, layer)
            elif steps:
                total = layer.get_seq_length() + steps
                end = static.max_cache_len if isinstance(static, WindowLayer) else total
                new = slice(max(end - steps, 0), end)  # a window has its newest tokens last
                layer.update(static.keys[:, :, new], static.values[:, :, new])
                layer.cumulative_length = total  # also for a window shorter than `steps`

    def record(self, model: PreTrainedModel) -> None:
        """Record the step as a CUDA graph. This changes the states, but not the random generator."""
        generator = torch.cuda.get_rng_state(self.token.device)
        current, stream = torch.cuda.current_stream(), torch.cuda.Stream()
        stream.wait_stream(current)
        with torch.cuda.stream(stream):
            self.step(model)  # compiles and tunes
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream, capture_error_mode="thread_local"):
            self.step(model)
        current.wait_stream(stream)
        torch.cuda.set_rng_state(generator, self.token.device)
        self.graph = graph

    def advance(self, model: PreTrainedModel, ids: Tensor | None) -> None:
        """Read the newest token of each sequence and choose the next.

        Args:
            ids: all tokens [B, T]; None if the choice is pure.
        """
        if self.graph is None:
            self.step(model)
        else:
            self.graph.replay()
        if not self.choice.pure:
            self.choose(self.logits, ids)

    def step(self, model: PreTrainedModel) -> None:
        """Compute the logits after the newest token and, if it is pure, the choice."""
        masks: Masks = {"padding_mask": None}
        for kind, layer in self.kinds.items():
            keys, first = self.cache.layers[layer].get_mask_sizes(1)
            positions = torch.arange(keys, device=self.token.device) + first
            masks[kind] = positions >= self.padding[:, None]
            masks["padding_mask"] = torch.ones_like(self.token, dtype=torch.bool)
        if takes_fused_step(model):
            self.logits = fused_step(model, self.token, masks, self.cache)
        else:
            outputs = model(self.token, masks, past_key_values=self.cache, use_cache=True, return_dict=True)
            self.logits = outputs.logits[:, -1]
        if self.choice.pure:
            self.choose(self.logits, None)

    def choose(self, logits: Tensor, ids: Tensor | None) -> None:
        """Choose the next token of each sequence from logits [B, vocabulary], after the tokens `ids`."""
        scores = logits.to(torch.float32, copy=True)
        for processor in self.choice.processors:
            scores = processor(ids, scores)
        if self.choice.do_sample:  # the draw of `torch.multinomial`, which would wait for the device
            probabilities = scores.softmax(-1)
            scores = probabilities / torch.empty_like(probabilities).exponential_()
        token = scores.argmax(-1)
        if self.choice.ends:  # transformers fills up nothing without an end token
            token = token.masked_fill(~self.unfinished, self.choice.pad)
        self.token.copy_(token[:, None])
        self.new_tokens.index_copy_(1, self.count, self.token)
        self.count += self.unfinished.any()
        self.unfinished &= ~(token[:, None] == self.ends).any(1)


def _copy_states(source: LinearAttentionLayer, target: LinearAttentionLayer) -> None:
    for i in range(source.number_of_states):
        if source.is_conv_states_initialized[i]:
            target.update_conv_state(source.conv_states[i], i)
        if source.is_recurrent_states_initialized[i]:
            target.update_recurrent_state(source.recurrent_states[i], i)
    if isinstance(source, CountingLayer):
        target.cumulative_length.copy_(source.cumulative_length)
