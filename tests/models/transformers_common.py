"""Our models under transformers' common model tests; docs/dev/models.md has the command.

The mixins come from a checkout of transformers, whose package `tests` is, and run as they are.
"""

import copy
import unittest

import torch
from tests.causal_lm_tester import CausalLMModelTest, CausalLMModelTester
from tests.test_configuration_common import ConfigTester
from transformers.cache_utils import Cache, LinearAttentionLayer
from transformers.models.auto import modeling_auto

from fla_train.models.cache import CountingLayer
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import (
    DeltaProductForCausalLM,
    DeltaProductForQuestionAnswering,
    DeltaProductForSequenceClassification,
    DeltaProductForTokenClassification,
    DeltaProductModel,
)

# The mixins tell by these tables of class names what kind of labels a model takes.
for task, model_class in {
    "": DeltaProductModel,
    "FOR_CAUSAL_LM_": DeltaProductForCausalLM,
    "FOR_QUESTION_ANSWERING_": DeltaProductForQuestionAnswering,
    "FOR_SEQUENCE_CLASSIFICATION_": DeltaProductForSequenceClassification,
    "FOR_TOKEN_CLASSIFICATION_": DeltaProductForTokenClassification,
}.items():
    names = getattr(modeling_auto, f"MODEL_{task}MAPPING_NAMES")
    names[DeltaProductConfig.model_type] = model_class.__name__


class DeltaProductModelTester(CausalLMModelTester):
    """Small models; `settings` are the variant's own."""

    base_model_class = DeltaProductModel
    config_class = DeltaProductConfig
    causal_lm_class = DeltaProductForCausalLM
    question_answering_class = DeltaProductForQuestionAnswering
    sequence_classification_class = DeltaProductForSequenceClassification
    token_classification_class = DeltaProductForTokenClassification
    settings: dict[str, object] = {}  # noqa: RUF012

    def get_config(self) -> DeltaProductConfig:
        names = "vocab_size hidden_size num_hidden_layers intermediate_size max_position_embeddings".split()
        names += ["bos_token_id", "eos_token_id", "pad_token_id"]
        shared = {name: getattr(self, name) for name in names}
        return DeltaProductConfig(num_heads=2, head_dim=8, **shared, **self.settings)


def without_count(cache: Cache) -> Cache:
    """Return a copy whose first layer has the class that the mixins know, instead of `CountingLayer`."""
    changed = copy.copy(cache)
    changed.layers = [copy.copy(layer) for layer in cache.layers]
    for layer in changed.layers:
        if isinstance(layer, CountingLayer):
            layer.__class__ = LinearAttentionLayer
    return changed


class CommonTest(CausalLMModelTest):
    """Names of the config and shapes in the cache, which the mixins leave to a model."""

    has_attentions = False
    test_can_init_all_missing_weights_before_2023 = True  # runs that test though no file has a year on top

    def setUp(self) -> None:
        super().setUp()
        names = ["hidden_size", "num_hidden_layers"]  # the heads are those of the mixer and of attention
        self.config_tester = ConfigTester(self, config_class=DeltaProductConfig, common_properties=names)

    def _check_caches_are_equal(self, cache1: Cache, cache2: Cache) -> None:
        super()._check_caches_are_equal(without_count(cache1), without_count(cache2))

    def _check_past_key_values_for_generate(
        self, batch_size: int, past_key_values: Cache, seq_length: int, config: DeltaProductConfig
    ) -> None:
        self.assertEqual(past_key_values.get_seq_length(), seq_length)
        cache = without_count(past_key_values)
        super()._check_past_key_values_for_generate(batch_size, cache, seq_length, config)

    def _get_attention_shape(
        self, batch_size: int, seq_length: int, config: DeltaProductConfig
    ) -> tuple[tuple[int, ...], ...]:
        size = config.hidden_size // config.num_attention_heads
        shape = batch_size, config.num_key_value_heads, seq_length, size
        return shape, shape

    def _get_conv_state_shape(self, batch_size: int, config: DeltaProductConfig) -> list[tuple[int, ...]]:
        keys, values = config.num_heads * config.head_dim, config.num_heads * config.head_v_dim
        channels = keys, config.num_householder * keys, config.num_householder * values
        return [(batch_size, count, config.conv_size - 1) for count in channels]

    def _get_recurrent_state_shape(self, batch_size: int, config: DeltaProductConfig) -> tuple[int, ...]:
        return (batch_size, config.num_heads, config.head_dim, config.head_v_dim)


def tester(**settings: object) -> type[DeltaProductModelTester]:
    return type("Tester", (DeltaProductModelTester,), {"settings": settings})


ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2}


class DeltaNetTest(CommonTest, unittest.TestCase):
    model_tester_class = tester(num_householder=1)


class GatedDeltaNetTest(CommonTest, unittest.TestCase):
    model_tester_class = tester(num_householder=1, use_forget_gate=True, use_output_gate=True)


class DeltaProductTest(CommonTest, unittest.TestCase):
    model_tester_class = tester(num_householder=2)


class HybridTest(CommonTest, unittest.TestCase):
    model_tester_class = tester(
        num_householder=2,
        use_forget_gate=True,
        layer_types=["linear_attention", "full_attention"],
        **ATTENTION,
    )
    has_attentions = True

    @unittest.skip("a mask of four axes is refused: the recurrent layers could not honour it")
    def test_custom_4d_attention_mask(self) -> None:
        pass

    def test_attention_outputs(self) -> None:
        """In place of the mixin's, which expects weights from every layer."""
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        length = self.model_tester.seq_length
        for model_class in self.all_model_classes:
            model = model_class._from_config(config, attn_implementation="eager").eval()
            weights = self.model_tester.batch_size, config.num_attention_heads, length, length
            expected = [weights] * len(config.attention_layers)
            asked = model(**inputs, output_attentions=True, output_hidden_states=True)
            self.assertEqual([tuple(weights.shape) for weights in asked.attentions], expected)
            self.assertEqual(list(asked.keys())[-2:], ["hidden_states", "attentions"])
            model.config.output_attentions = True
            torch.testing.assert_close(model(**inputs).attentions, asked.attentions)
            model.config.output_attentions = False


class TransformerTest(HybridTest):
    model_tester_class = tester(num_householder=1, layer_types=["full_attention"], **ATTENTION)
