"""`DeltaProductModel` and `DeltaProductForCausalLM`: pre-norm blocks around the mixer, for transformers."""

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModel, AutoModelForCausalLM, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils import can_return_tuple

from fla_train.models.attention import HybridAttention
from fla_train.models.cache import DeltaProductCache, cache_for
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.context import SequenceContext
from fla_train.models.layers import GatedMLP, RMSNorm, ShortConvolution, is_plain
from fla_train.models.loss import count_targets, linear_cross_entropy, shift_labels, token_losses
from fla_train.models.mixer import DeltaProductMixer

A_RANGE = (0.0, 16.0)  # A = exp(A_log) is drawn uniformly from here, and
DT_RANGE = (1e-3, 1e-1)  # the initial time step softplus(dt_bias) log-uniformly from here (both as in Mamba2)


class Block(GradientCheckpointingLayer):
    """x + mixer(norm(x)), then x + mlp(norm(x)); the residual stream keeps the dtype of the embeddings.

    The stream travels as a sum not yet taken, x + update, because the norm that follows takes it on its way.
    """

    def __init__(self, config: DeltaProductConfig, layer: int) -> None:
        super().__init__()
        self.attn_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.attn = HybridAttention(config) if config.is_attention_layer(layer) else DeltaProductMixer(config)
        self.mlp_norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mlp = GatedMLP(config.hidden_size, config.intermediate_size, config.hidden_act)

    def forward(
        self,
        x: Tensor,
        update: Tensor | None,
        context: SequenceContext,
        cache: dict[str, Tensor] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """From the stream x + update [B, T, hidden_size] (`update` None: x) to the next x and update."""
        if update is None:
            y = self.attn_norm(x)
        else:
            y, x = self.attn_norm(update, residual=x)
        y, x = self.mlp_norm(self.attn(y, context, cache=cache), residual=x)
        return x, self.mlp(y)


class DeltaProductPreTrainedModel(PreTrainedModel):
    """Loading, saving and initialisation shared by the backbone and the language model."""

    config_class = DeltaProductConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ("Block",)
    # accelerate hands dictionaries on as copies, in which what a layer writes to its cache would be lost.
    _skip_keys_device_placement = ("past_key_values", "cache")
    _keep_in_fp32_modules_strict = ("A_log", "dt_bias")
    _is_stateful = True

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        """Draw the parameters a module holds itself. `init.*` skip tensors that a checkpoint has filled."""
        if isinstance(module, nn.Linear | nn.Embedding | ShortConvolution):
            init.normal_(module.weight, mean=0.0, std=self.config.initializer_range)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, DeltaProductMixer) and self.config.use_forget_gate:
            empty = torch.empty_like(module.A_log, dtype=torch.float32)
            init.copy_(module.A_log, empty.uniform_(*A_RANGE).clamp(min=1e-4).log())
            dt = empty.uniform_(*map(math.log, DT_RANGE)).exp().clamp(min=1e-4)
            init.copy_(module.dt_bias, dt + torch.log(-torch.expm1(-dt)))  # the inverse of softplus


class DeltaProductModel(DeltaProductPreTrainedModel):
    """Embedding, blocks and final norm: input_ids [B, T] -> hidden states [B, T, hidden_size]."""

    def __init__(self, config: DeltaProductConfig) -> None:
        super().__init__(config)
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(Block(config, layer) for layer in range(config.num_hidden_layers))
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        past_key_values: DeltaProductCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
    ) -> BaseModelOutputWithPast:
        """Run the backbone over T new tokens.

        Args:
            input_ids: [B, T], or `inputs_embeds` [B, T, hidden_size] in their place.
            attention_mask: [B, seen + T], 0 at padding (left or right); masked positions change no other
                position.
            past_key_values: the cache of the tokens before; updated in place.
            use_cache: make a cache when none is given. Default: `config.use_cache`, off in training mode.
            cu_seqlens: [S + 1] bounds of the documents packed in one row (B = 1); nothing crosses them.

        Raises:
            ValueError: for arguments that contradict each other.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("give either input_ids or inputs_embeds")
        hidden = self.embeddings(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache is None:
            use_cache = self.config.use_cache and not self.training and cu_seqlens is None
        checkpointing = self.training and self.layers[0].gradient_checkpointing
        if checkpointing:
            past_key_values, use_cache = None, False  # recomputing a block would update its cache twice
        cache = cache_for(past_key_values, self.config.num_hidden_layers, use_cache)
        if cache is not None and cu_seqlens is not None:
            raise ValueError(
                "cu_seqlens packs whole documents, which no cache continues: use_cache must be off"
            )
        seen = 0 if cache is None else cache.seen_tokens
        context = SequenceContext.build(self.config, hidden, attention_mask, cu_seqlens, seen)

        update = None
        for index, block in enumerate(self.layers):
            if update is not None and checkpointing:  # one tensor per block to keep instead of two
                hidden, update = hidden + update, None
            kept = None if cache is None else cache.layers[index]
            hidden, update = block(hidden, update, context, cache=kept)
        if cache is not None:
            cache.seen_tokens += hidden.shape[1]
        normed, _ = self.norm(update, residual=hidden)
        return BaseModelOutputWithPast(last_hidden_state=normed, past_key_values=cache)


class DeltaProductForCausalLM(DeltaProductPreTrainedModel, GenerationMixin):
    """The language model: backbone and linear head, tied to the embedding if the config says so."""

    _tied_weights_keys = {"lm_head.weight": "model.embeddings.weight"}  # noqa: RUF012  transformers wants a dict
    # transformers' Trainer hands `num_items_in_batch` to models that say so, or that take any keyword.
    accepts_loss_kwargs = True

    def __init__(self, config: DeltaProductConfig) -> None:
        super().__init__(config)
        self.model = DeltaProductModel(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.model.embeddings

    def set_input_embeddings(self, value: nn.Embedding) -> None:
        self.model.embeddings = value

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        past_key_values: DeltaProductCache | None = None,
        use_cache: bool | None = None,
        cu_seqlens: Tensor | None = None,
        logits_to_keep: int | Tensor | None = None,
        num_items_in_batch: int | Tensor | None = None,
    ) -> CausalLMOutputWithPast:
        """Logits, or the loss of `labels`, for T new tokens; see `DeltaProductModel.forward` for the rest.

        Args:
            labels: [B, T], aligned with `input_ids` and shifted inside; -100 where there is no target. With
                packed documents the labels of their first tokens should be -100, else a document predicts the
                next one.
            logits_to_keep: which positions get logits: the last n (0: all), or an index tensor. Default: all
                without labels, none with labels (training never makes the [B, T, vocabulary] logits).
            num_items_in_batch: what the summed loss is divided by: the number of targets of the *global*
                batch (over the ranks, where gradients are averaged), so that gradients summed over
                micro-batches are exact. Default: the number of targets in `labels`.

        Returns:
            `loss` (fp32 scalar) with labels, `logits` [B, kept, vocabulary], and `past_key_values`.
        """
        if use_cache is None and labels is not None:
            use_cache = False
        outputs = self.model(
            input_ids, attention_mask, inputs_embeds, past_key_values, use_cache, cu_seqlens, return_dict=True
        )
        hidden = outputs.last_hidden_state

        loss = logits = None
        if labels is not None:
            if num_items_in_batch is None:
                num_items_in_batch = count_targets(labels).clamp(min=1)
            if is_plain(self.lm_head):
                targets = shift_labels(labels).flatten()
                total = linear_cross_entropy(hidden.flatten(0, 1), self.lm_head.weight, targets)
            else:
                total = self._losses_of_logits(hidden, labels).sum()
            loss = total / num_items_in_batch
        if labels is None or logits_to_keep is not None:
            indices = isinstance(logits_to_keep, Tensor)
            logits = self.lm_head(
                hidden[:, logits_to_keep if indices else slice(-(logits_to_keep or 0), None)]
            )
        return CausalLMOutputWithPast(loss=loss, logits=logits, past_key_values=outputs.past_key_values)

    @torch.no_grad()
    def token_losses(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, cu_seqlens: Tensor | None = None
    ) -> Tensor:
        """For evaluation: -log p(input_ids[:, t + 1] | input_ids[:, : t + 1]) at each t, fp32 [B, T - 1]."""
        outputs = self.model(
            input_ids, attention_mask, use_cache=False, cu_seqlens=cu_seqlens, return_dict=True
        )
        hidden = outputs.last_hidden_state
        if is_plain(self.lm_head):
            targets = shift_labels(input_ids).flatten()
            losses = token_losses(hidden.flatten(0, 1), self.lm_head.weight, targets)
        else:
            losses = self._losses_of_logits(hidden, input_ids)
        return losses.view(input_ids.shape)[:, :-1]

    def _losses_of_logits(self, hidden: Tensor, labels: Tensor) -> Tensor:
        """[B * T] losses, 0 without a target, by a head that has to be called: offloaded, adapted, hooked."""
        logits = self.lm_head(hidden).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        targets = shift_labels(labels).flatten().to(logits.device)
        return F.cross_entropy(logits, targets, reduction="none")

    def prepare_inputs_for_generation(
        self,
        input_ids: Tensor,
        next_sequence_length: int | None = None,
        past_key_values: DeltaProductCache | None = None,
        attention_mask: Tensor | None = None,
        inputs_embeds: Tensor | None = None,
        **kwargs: object,
    ) -> dict[str, object]:
        """The forward arguments of one generation step: the tokens the cache has not seen.

        `generate` passes either all tokens so far, with `next_sequence_length` new ones or a mask of the same
        length, or (chunked prefill) only new tokens, whose mask is longer. Its other arguments do not concern
        this model.
        """
        seen = 0 if past_key_values is None else past_key_values.get_seq_length()
        if next_sequence_length is not None:
            input_ids = input_ids[:, -next_sequence_length:]
        elif seen and attention_mask is not None and attention_mask.shape[1] == input_ids.shape[1]:
            input_ids = input_ids[:, seen:]
        inputs = {"past_key_values": past_key_values, "attention_mask": attention_mask}
        if inputs_embeds is None or seen:
            inputs["input_ids"] = input_ids
        else:
            inputs["inputs_embeds"] = inputs_embeds
        return inputs | {key: kwargs[key] for key in ("use_cache", "logits_to_keep") if key in kwargs}


AutoModel.register(DeltaProductConfig, DeltaProductModel, exist_ok=True)
AutoModelForCausalLM.register(DeltaProductConfig, DeltaProductForCausalLM, exist_ok=True)
