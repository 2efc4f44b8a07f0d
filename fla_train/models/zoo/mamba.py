"""Mamba (arXiv 2312.00752) with eigenvalues in [0, 1] or [-1, 1] (arXiv 2411.12537, table 2).

A diagonal state transition s = exp(dt A) becomes 2 s - 1; nothing else changes. Parameter names are those of
transformers' Mamba.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, GenerationConfig, GenerationMixin, PreTrainedModel
from transformers import initialization as init
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import BaseModelOutput, CausalLMOutput
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
from transformers.utils import can_return_tuple, logging

from fla_train.kernels.fused_ops.backend import without_autocast
from fla_train.kernels.fused_ops.selective_scan import selective_scan
from fla_train.models.layers import RMSNorm, draw_time_steps
from fla_train.models.zoo.mamba_configuration import SignedMambaConfig

logger = logging.get_logger(__name__)


class SignedMambaMixer(nn.Module):
    """Selective state space of Mamba over [B, T, hidden_size]. Left padding has no effect."""

    def __init__(self, config: SignedMambaConfig) -> None:
        super().__init__()
        self.config, inner, width = config, config.inner_size, config.conv_kernel
        self.in_proj = nn.Linear(config.hidden_size, 2 * inner, bias=False)
        self.conv1d = nn.Conv1d(inner, inner, width, groups=inner, padding=width - 1)
        self.x_proj = nn.Linear(inner, config.time_step_rank + 2 * config.state_size, bias=False)
        self.dt_proj = nn.Linear(config.time_step_rank, inner)
        self.A_log = nn.Parameter(torch.empty(inner, config.state_size))
        self.A_log._no_weight_decay = True
        self.D = nn.Parameter(torch.empty(inner))
        self.out_proj = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        rank, size = self.config.time_step_rank, self.config.state_size
        kept = 1 if padding_mask is None else padding_mask[..., None].to(x)
        u, z = self.in_proj(kept * x).chunk(2, dim=-1)
        u = kept * F.silu(self.conv1d(u.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2))
        dt, b, c = self.x_proj(u).split([rank, size, size], dim=-1)
        wide = torch.promote_types(x.dtype, torch.float32)
        with without_autocast(x):
            u, b, c = u.to(wide), b.to(wide), c.to(wide)
            weight, bias = self.dt_proj.weight.to(wide), self.dt_proj.bias.to(wide)
            dt = F.softplus(F.linear(dt.to(wide), weight, bias))  # [B, T, D]
            rate = self.A_log.to(wide).exp()  # [D, N]
            y = selective_scan(u, dt, rate, b, c, signed=self.config.allow_neg_eigval) + self.D * u
            y = y * F.silu(z.to(wide))
        return self.out_proj(y.to(x.dtype))


class _Block(GradientCheckpointingLayer):
    def __init__(self, config: SignedMambaConfig) -> None:
        super().__init__()
        self.norm = RMSNorm(config.hidden_size, config.norm_eps)
        self.mixer = SignedMambaMixer(config)

    def forward(self, x: Tensor, padding_mask: Tensor | None = None) -> Tensor:
        return x + self.mixer(self.norm(x), padding_mask)


class _Backbone(nn.Module):
    def __init__(self, config: SignedMambaConfig) -> None:
        super().__init__()
        self.embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(_Block(config) for _ in range(config.num_hidden_layers))
        self.norm_f = RMSNorm(config.hidden_size, config.norm_eps)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool | None = None
    ) -> BaseModelOutput:
        """Return hidden states [B, T, hidden_size]."""
        if use_cache:
            raise ValueError("signed_mamba has no cache: use_cache must be off")
        x = self.embeddings(input_ids)
        for layer in self.layers:
            x = layer(x, attention_mask)
        return BaseModelOutput(self.norm_f(x))


class SignedMambaForCausalLM(PreTrainedModel, GenerationMixin):
    """Language model of Mamba blocks without a cache, so each new token reads all tokens again."""

    config_class = SignedMambaConfig
    base_model_prefix = "backbone"
    supports_gradient_checkpointing = True

    def __init__(self, config: SignedMambaConfig) -> None:
        super().__init__(config)
        self.backbone = _Backbone(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_input_embeddings(self) -> nn.Embedding:
        return self.backbone.embeddings

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear | nn.Embedding):
            init.normal_(module.weight, std=self.config.initializer_range)
        elif isinstance(module, RMSNorm):
            init.ones_(module.weight)
        elif isinstance(module, SignedMambaMixer):
            counts = torch.arange(1.0, self.config.state_size + 1).expand_as(module.A_log)
            init.copy_(module.A_log, counts.log())
            init.ones_(module.D)
            bound = self.config.time_step_rank**-0.5
            init.uniform_(module.dt_proj.weight, -bound, bound)
            init.copy_(module.dt_proj.bias, draw_time_steps(torch.empty(self.config.inner_size)))

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        labels: Tensor | None = None,
        num_items_in_batch: Tensor | None = None,
        use_cache: bool | None = None,
    ) -> CausalLMOutput:
        """Return logits [B, T, V] and, with labels (shifted inside), the loss over `num_items_in_batch`."""
        logits = self.lm_head(self.backbone(input_ids, attention_mask, use_cache).last_hidden_state).float()
        loss = None
        if labels is not None:
            loss = self.loss_function(logits, labels, self.config.vocab_size, num_items_in_batch)
        return CausalLMOutput(loss=loss, logits=logits)

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, object], *_: object
    ) -> None:
        logger.warning_once("signed_mamba has no cache: each new token reads all tokens again")
        generation_config.use_cache = model_kwargs["use_cache"] = False


AUTO_CLASSES = {AutoModelForCausalLM: SignedMambaForCausalLM}
# Trainer shifts the labels for label smoothing only for the classes in this table.
MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[SignedMambaConfig.model_type] = SignedMambaForCausalLM.__name__
