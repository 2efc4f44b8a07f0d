"""Model classes for transformers: the backbone of residual blocks, the language model and task heads."""

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    PreTrainedModel,
    StoppingCriteriaList,
)
from transformers import initialization as init
from transformers.cache_utils import Cache
from transformers.generation.streamers import BaseStreamer
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_layers import (
    GenericForQuestionAnswering,
    GenericForSequenceClassification,
    GenericForTokenClassification,
    GradientCheckpointingLayer,
)
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, logging

from fla_train.kernels.context_parallel import ContextPart
from fla_train.models.cache import CACHE_NAME, cache_for, count_tokens
from fla_train.models.carried_states import CarriedStates
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import Masks, SequenceContext, document_bounds, masks
from fla_train.models.decoding import PREFILL_TOKENS, generate_tokens, takes_loop
from fla_train.models.layers import (
    GatedMLP,
    RMSNorm,
    ScaledEmbedding,
    ShortConvolution,
    is_plain,
    matmul_dtype,
    norm_mlp,
)
from fla_train.models.loss import (
    linear_cross_entropy,
    losses_of_logits,
    next_tokens,
    target_count,
    token_losses,
)
from fla_train.models.mixers.registry import build_mixer, check_output, linear_mixer, takes_cache

logger = logging.get_logger(__name__)


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the residual stream has the dtype of its widest addend.

    The residual stream is the sum of two tensors, x and update, which the next norm adds in its kernel. With
    `config.norm_after` attention blocks, or all, compute x + norm(mixer(x)), then x + norm(mlp(x)).
    """

    def __init__(self, config: DeltaProductConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = build_mixer(config, layer)
        self.linear = config.layer_types[layer] == "linear_attention"
        self.custom_mixer = config.mixer if self.linear else None
        self.norm_after = config.norm_after == "all" or (config.norm_after == "attention" and not self.linear)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)
        for projection in (getattr(self.attn, "o_proj", None), self.mlp.down_proj):
            if isinstance(projection, nn.Linear):  # a custom mixer may have no o_proj
                projection.writes_residual = True

    def forward(
        self, x: Tensor, update: Tensor | None, context: SequenceContext, cache: Cache | None = None
    ) -> tuple[Tensor, Tensor]:
        """Map the stream x + update [B, T, hidden_size] (`update` may be None) to the next x and update."""
        if self.norm_after:
            y = x = x if update is None else x + update
        elif update is None:
            y = self.attn_norm(x)
        else:
            y, x = self.attn_norm(update, residual=x)
        if self.linear and context.states is not None:
            cache = context.states
        y = self.attn(y, context) if cache is None else self.attn(y, context, cache=cache)
        if self.custom_mixer is not None:
            check_output(self.custom_mixer, y, x.shape)
        if self.norm_after:
            x = x + self.attn_norm(y)
            return x, self.mlp_norm(self.mlp(x))
        return norm_mlp(self.mlp_norm, y, x, self.mlp)


class DeltaProductPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by the backbone and the language model."""

    config_class = DeltaProductConfig
    base_model_prefix = "model"
    _input_embed_layer = "embeddings"
    supports_gradient_checkpointing = True
    _supports_sdpa = True
    _can_record_outputs = {"hidden_states": Block}  # noqa: RUF012  as transformers names what it can return
    _no_split_modules = ("Block",)
    _skip_keys_device_placement = ("past_key_values", "cache")
    _is_stateful = True
    _can_compile_fullgraph = True
    # Trainer would pass `num_items_in_batch` to the task heads, which pass all keywords to the backbone.
    accepts_loss_kwargs = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the parameters of one module. `init.*` skip tensors that a checkpoint has filled."""
        if isinstance(module, nn.Linear | nn.Embedding | ShortConvolution):
            init.normal_(module.weight, mean=0.0, std=self._initial_std(module))
            if getattr(module, "bias", None) is not None:  # a task head may have one
                init.zeros_(module.bias)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif type(module) is linear_mixer(self.config) and hasattr(module, "init_weights"):
            module.init_weights(self.config.initializer_range)

    def _initial_std(self, module: nn.Module) -> float:
        """Return the standard deviation of a layer's initial weights."""
        config = self.config
        tied_head = config.tie_word_embeddings and module is self.get_output_embeddings()
        if config.embedding_init_std is not None and (tied_head or isinstance(module, nn.Embedding)):
            return config.embedding_init_std
        if config.scale_output_init and getattr(module, "writes_residual", False):
            return config.initializer_range / math.sqrt(2 * config.num_hidden_layers)
        return config.initializer_range

    @classmethod
    def from_pretrained(
        cls, *args: Any, trust_remote_code: bool | None = None, **options: Any
    ) -> "DeltaProductPreTrainedModel":
        """Load a model. `trust_remote_code` also permits importing a mixer that only the files name."""
        if trust_remote_code:
            if hasattr(config := options.get("config"), "mixer_permitted"):
                config.mixer_permitted = True
            else:
                options["mixer_permitted"] = True
        return super().from_pretrained(*args, **options)


class DeltaProductModel(DeltaProductPreTrainedModel):
    """Embedding, blocks and final norm, from input_ids [B, T] to hidden states [B, T, hidden_size]."""

    def __init__(self, config: DeltaProductConfig) -> None:
        super().__init__(config)
        sizes = config.vocab_size, config.hidden_size
        self.embeddings = ScaledEmbedding(*sizes, config.embedding_multiplier)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.supports_cache = takes_cache(linear_mixer(config))
        if config.use_forget_gate:
            self._keep_in_fp32_modules_strict = ("A_log", "dt_bias")
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Masks | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: Cache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        position_ids: Tensor | None = None,
        output_hidden_states: bool | int | list[int] | None = None,
        output_attentions: bool | None = None,
        context_part: ContextPart | None = None,
        states: CarriedStates | None = None,
        **packing: Tensor | int | None,
    ) -> BaseModelOutputWithPast:
        """Run the backbone over T new tokens.

        Args:
            input_ids: [B, T], or `inputs_embeds` [B, T, hidden_size] instead.
            attention_mask: [B, seen + T], 0 at padding (left or right); masked positions change no other
                position. Or the result of `create_masks_for_generate`.
            past_key_values: the cache of earlier tokens, a `DynamicCache(config=model.config)` or
                `StaticCache(config=model.config, max_cache_len=...)`; updated in place. transformers 5.24
                renamed it to `cache`; both names work.
            use_cache: make a `DynamicCache` when none is passed. Default: `config.use_cache`, off in training
                mode.
            cu_seqlens: [S + 1] bounds of the documents packed in one row (B = 1); nothing crosses them.
            position_ids: [B or 1, T], counting up by one; a packed document starts at each 0 (needs B = 1).
                The first value has no effect, because positions are relative.
            output_hidden_states: return the embeddings and each block's output, [B, T, hidden_size] each, the
                last one after the final norm; or some of these by index, with None for the others.
                Default: the config's.
            output_attentions: return the softmax weights [B, H, T, keys] of each attention layer. Default:
                the config's.
            context_part: the tokens are this part of their rows, and all ranks of its group call the model
                with theirs. `cu_seqlens` has the bounds of the whole row. Excludes padding, cache and states.
            states: initial states of the linear layers in training, and the place for their final states; for
                B rows, or with `cu_seqlens` for R rows of equal length. They carry no gradient and replace
                the cache.
            packing: the bounds of packed documents by the names that collators of transformers and TRL use;
                see `document_bounds`.

        Raises:
            ValueError: arguments contradict each other, or the model does not support them.
        """
        past_key_values = packing.pop("cache", past_key_values)
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if not self.config.residual_in_fp32:
            hidden = hidden.to(matmul_dtype(hidden))
        padding = attention_mask["padding_mask"] if isinstance(attention_mask, dict) else attention_mask
        cu_seqlens = document_bounds(hidden.shape[1], padding, cu_seqlens, position_ids, **packing)
        checkpointing = self.training and self.layers[0].gradient_checkpointing
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and states is None and cu_seqlens is None
        use_cache = use_cache and self.supports_cache and not checkpointing and context_part is None
        has_cache = past_key_values is not None
        caching = has_cache or use_cache
        conflicts = {
            "past_key_values: gradient checkpointing would update it twice": has_cache and checkpointing,
            f"past_key_values: {self.config.mixer} keeps no states": has_cache and not self.supports_cache,
            "a cache with packed documents: set use_cache=False": caching and cu_seqlens is not None,
            "initial states with a cache, or with a mixer that has none": states is not None
            and (caching or not self.supports_cache),
            "context_part with attention_mask, cache, states or a custom mixer": context_part is not None
            and (caching or padding is not None or states is not None or self.config.mixer is not None),
        }
        if errors := [error for error, conflict in conflicts.items() if conflict]:
            raise ValueError(f"not supported: {'; '.join(errors)}")
        if context_part is not None and checkpointing:
            context_part = context_part.remembering()
        cache = cache_for(past_key_values, self.config, use_cache, hidden.device, len(hidden))
        if output_attentions is None:
            output_attentions = self.config.output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        attentions = [] if output_attentions else None
        wanted = _indices(output_hidden_states, 1 + len(self.layers))
        longest = packing.get("max_length_q")
        context = SequenceContext.build(
            self.config,
            hidden,
            attention_mask,
            cu_seqlens,
            cache,
            attentions,
            longest=longest if isinstance(longest, int) else None,
            part=context_part,
            states=states,
        )

        update, hidden_states = None, [hidden if 0 in wanted else None]
        for index, block in enumerate(self.layers):
            if update is not None and checkpointing:  # one tensor per block to keep instead of two
                hidden, update = hidden + update, None
            hidden, update = block(hidden, update, context, cache=cache)
            hidden_states.append(hidden + update if index + 1 in wanted else None)
        if cache is not None:
            count_tokens(cache, hidden.shape[1])
        normed, _ = self.norm(update, residual=hidden)
        if hidden_states[-1] is not None:
            hidden_states[-1] = normed
        return BaseModelOutputWithPast(
            last_hidden_state=normed,
            past_key_values=cache,
            hidden_states=tuple(hidden_states) if wanted else None,
            attentions=None if attentions is None else tuple(attentions),
        )


def _indices(chosen: bool | int | list[int], count: int) -> set[int]:
    """Return the requested indices of `count` hidden states; True: all, negative ones count from the end."""
    if isinstance(chosen, bool):
        return set(range(count)) if chosen else set()
    chosen = [chosen] if isinstance(chosen, int) else chosen
    return {index % count for index in chosen if -count <= index < count}


class DeltaProductForCausalLM(DeltaProductPreTrainedModel, GenerationMixin):
    """Language model of backbone and linear head, which the config can tie to the embedding."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012  transformers wants a dict
    accepts_loss_kwargs = True  # Trainer passes `num_items_in_batch`

    def __init__(self, config: DeltaProductConfig) -> None:
        super().__init__(config)
        self.model = DeltaProductModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | Masks | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
        **inputs: Any,
    ) -> CausalLMOutputWithPast:
        """Return logits, the loss of `labels`, or both, for T new tokens; see `DeltaProductModel`.

        Args:
            labels: [B, T], aligned with `input_ids` and shifted inside; -100 where there is no target. The
                labels of the first tokens of packed documents should be -100; otherwise each document
                predicts the next one.
            logits_to_keep: positions with logits: the last n (0: all), or an index tensor. Default: all, but
                none with labels in training mode, where [B, T, vocabulary] logits are never made.
            num_items_in_batch: divisor of the summed loss: the number of targets of the *global* batch (over
                the ranks, if gradients are averaged), so that gradients summed over micro-batches are exact.
                Default: the number of targets in `labels`. 0 counts as 1.
            inputs: further arguments of the backbone. `shift_labels` [B, T], the target of each position,
                replaces `labels` (an explicit argument would make Trainer require it of every batch).

        Returns:
            `loss` (fp32 scalar) with labels, `logits` [B, kept, vocabulary], `past_key_values`, and
            `hidden_states` and `attentions` if requested.
        """
        inputs.pop("tokenizer", None)  # `generate(tokenizer=...)` passes it to the model
        shift_labels = inputs.pop("shift_labels", None)
        if shift_labels is None and labels is not None:
            if inputs.get("context_part") is not None:
                raise ValueError("the label of a part's last token is in the next part: pass shift_labels")
            shift_labels = next_tokens(labels)
        if shift_labels is not None and inputs.get("use_cache") is None:
            inputs["use_cache"] = False
        inputs |= {"position_ids": position_ids, "return_dict": True}
        outputs = self.model(input_ids, attention_mask, inputs_embeds, **inputs)
        hidden = outputs.last_hidden_state

        loss = logits = None
        if shift_labels is not None:
            total = self._losses(linear_cross_entropy, hidden, shift_labels).sum()
            loss = total / target_count(shift_labels, num_items_in_batch)
        if shift_labels is None or not self.training or logits_to_keep is not None:
            indices = isinstance(logits_to_keep, Tensor)
            kept = logits_to_keep if indices else slice(-(logits_to_keep or 0), None)
            logits = self.lm_head(hidden[:, kept])
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    @torch.no_grad()
    def token_losses(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        shift_labels: Tensor | None = None,
        context_part: ContextPart | None = None,
    ) -> Tensor:
        """Return -log p(input_ids[:, t + 1] | input_ids[:, : t + 1]) at each t, fp32 [B, T - 1].

        With `shift_labels` [B, T], return the losses of these targets, [B, T], and 0 where it is -100.
        """
        inputs = {"cu_seqlens": cu_seqlens, "context_part": context_part, "return_dict": True}
        outputs = self.model(input_ids, attention_mask, use_cache=False, **inputs)
        labels = next_tokens(input_ids) if shift_labels is None else shift_labels
        losses = self._losses(token_losses, outputs.last_hidden_state, labels).view(input_ids.shape)
        return losses[:, :-1] if shift_labels is None else losses

    def _losses(
        self, fused: Callable[[Tensor, Tensor, Tensor], Tensor], hidden: Tensor, targets: Tensor
    ) -> Tensor:
        """Return `fused` of hidden states, weight and targets; for a head that is not plain, [B T] losses."""
        tokens, targets = hidden.flatten(0, 1), targets.flatten()
        if is_plain(self.lm_head):
            return fused(tokens, self.lm_head.weight, targets)
        # Offloaded, adapted or hooked weights exist only during a call.
        return losses_of_logits(self.lm_head(tokens), targets)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, object], *rest: object
    ) -> None:
        """Check the cache of `generate` and make it count tokens before `generate` reads the count."""
        if not self.model.supports_cache:
            logger.warning_once(f"{self.config.mixer} keeps no states: each new token reads all tokens again")
            generation_config.use_cache = model_kwargs["use_cache"] = False
            return
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *rest)
        # Offloaded embeddings are on the meta device. A count on the CPU works with tensors on any device.
        device = torch.device("cpu") if self.device.type == "meta" else self.device
        cache_for(model_kwargs.get(CACHE_NAME), self.config, False, device)

    def _get_static_cache_init_shape(self) -> None:
        """Return None, so that the first pass sizes a static cache; `config.head_dim` is the recurrence's."""

    def _prefill(
        self,
        input_ids: Tensor,
        generation_config: GenerationConfig,
        model_kwargs: dict[str, object],
        *rest: object,
        **options: object,
    ) -> CausalLMOutputWithPast:
        """Read a long prompt in chunks, unless outputs of all its positions are requested.

        transformers' chunks (5.17) would read the tokens in a cache again. Embeddings are read at once.
        """
        cache, mask = model_kwargs.get(CACHE_NAME), model_kwargs.get("attention_mask")
        wanted = generation_config.output_attentions or generation_config.output_hidden_states
        tuned = "prepare_inputs_for_generation" in vars(self)  # PEFT has set it, and puts its prompt in front
        if cache is not None and not (wanted or tuned):
            chunk = generation_config.prefill_chunk_size or max(1, PREFILL_TOKENS // len(input_ids))
            generation_config.prefill_chunk_size = None
            tokens = input_ids.shape[1] if model_kwargs.get("inputs_embeds") is None else 0
            known = getattr(generation_config, "_mask_length", tokens) if mask is None else mask.shape[1]
            # `input_ids` are either all tokens or only the new ones.
            begin = int(cache.get_seq_length()) if known == tokens else 0
            if 0 < tokens <= begin:
                raise ValueError("past_key_values contains the whole prompt: fill it without the last token")
            while tokens - begin > chunk:
                ids, seen = input_ids[:, begin : begin + chunk], known - tokens + begin + chunk
                self.model(ids, None if mask is None else mask[:, :seen], past_key_values=cache)
                begin += chunk
            input_ids = input_ids[:, begin:] if begin < tokens else input_ids
        return super()._prefill(input_ids, generation_config, model_kwargs, *rest, **options)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: LogitsProcessorList,
        stopping_criteria: StoppingCriteriaList,
        generation_config: GenerationConfig,
        synced_gpus: bool = False,
        streamer: BaseStreamer | None = None,
        **model_kwargs: object,
    ) -> GenerateDecoderOnlyOutput | Tensor:
        """Run greedy search or sampling, with `decoding` if it supports the request."""
        arguments = (input_ids, logits_processor, stopping_criteria, generation_config)
        if synced_gpus or not takes_loop(self, generation_config, stopping_criteria, model_kwargs):
            return super()._sample(*arguments, synced_gpus, streamer, **model_kwargs)
        sequences, cache = generate_tokens(self, *arguments, streamer, model_kwargs)
        if not generation_config.return_dict_in_generate:
            return sequences
        return GenerateDecoderOnlyOutput(sequences=sequences, past_key_values=cache)

    @staticmethod
    def create_masks_for_generate(
        config: DeltaProductConfig,
        inputs_embeds: Tensor,
        attention_mask: Tensor | None,
        past_key_values: Cache | None = None,
        cache: Cache | None = None,
        **_: object,
    ) -> Masks | None:
        """Make the masks of a step before a compiled forward, because the attention mask grows."""
        if attention_mask is None:  # PEFT reads what is returned
            return None
        return masks(config, inputs_embeds, attention_mask, past_key_values if cache is None else cache)


class DeltaProductTaskModel(DeltaProductPreTrainedModel):
    """Backbone of a task head.

    transformers' mixins would build it with `AutoModel`, which does not trust the code of an export.
    """

    def __init__(self, config: DeltaProductConfig) -> None:
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = DeltaProductModel(config)


class DeltaProductForSequenceClassification(GenericForSequenceClassification, DeltaProductTaskModel):
    """Backbone and a linear layer on the last token that is not padding."""

    def __init__(self, config: DeltaProductConfig) -> None:
        DeltaProductTaskModel.__init__(self, config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()


class DeltaProductForTokenClassification(GenericForTokenClassification, DeltaProductTaskModel):
    """Backbone, dropout (`config.classifier_dropout`, default 0.1) and a linear layer on every token."""

    def __init__(self, config: DeltaProductConfig) -> None:
        DeltaProductTaskModel.__init__(self, config)
        dropout = getattr(config, "classifier_dropout", None)
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()


class DeltaProductForQuestionAnswering(GenericForQuestionAnswering, DeltaProductTaskModel):
    """Backbone and start and end logits of a span for every token."""

    # The mixin's methods expect an embedding named embed_tokens.
    get_input_embeddings = PreTrainedModel.get_input_embeddings
    set_input_embeddings = PreTrainedModel.set_input_embeddings

    def __init__(self, config: DeltaProductConfig) -> None:
        DeltaProductTaskModel.__init__(self, config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()


AUTO_CLASSES = {
    AutoModel: DeltaProductModel,
    AutoModelForCausalLM: DeltaProductForCausalLM,
    AutoModelForSequenceClassification: DeltaProductForSequenceClassification,
    AutoModelForTokenClassification: DeltaProductForTokenClassification,
    AutoModelForQuestionAnswering: DeltaProductForQuestionAnswering,
}
# Trainer shifts the labels for label smoothing only for the classes in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[DeltaProductConfig.model_type] = DeltaProductForCausalLM.__name__
