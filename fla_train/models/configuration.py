"""Config of all DeltaProduct models for transformers. `settings` defines and checks its fields."""

from typing import Any

from transformers import PreTrainedConfig

from fla_train.models.settings import ATTN_KEYS, FIELDS, MACHINE_KEYS, DeltaProductSettings


class DeltaProductConfig(DeltaProductSettings, PreTrainedConfig):
    """Configuration of the models that `DeltaProductSettings` describes.

    Raises:
        ValueError: with all errors at once.
    """

    mixer_permitted = True  # whether the mixer may be imported; not saved
    number_of_conv_states = 3  # convolutions of a mixer, for q, k and v; transformers' caches read this name
    keys_to_ignore_at_inference = ["past_key_values", "cache"]  # noqa: RUF012  Trainer adds a list to it
    auto_map = {}  # noqa: RUF012  TRL reads it of every model that transformers does not define

    def __post_init__(self, **kwargs: Any) -> None:
        super().__post_init__()
        PreTrainedConfig.__post_init__(self, **kwargs)

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **options: Any) -> "DeltaProductConfig":
        """Make the config of a file. Its mixer is permitted if `options` name one.

        transformers would set `options` after `__post_init__` has checked and completed the fields.
        """
        permitted = options.pop("mixer_permitted", options.get("mixer") is not None)
        given = {name: options.pop(name) for name in FIELDS if name in options}
        content = drop_auto_map(cls, config_dict) | given | {"mixer_permitted": permitted}
        return super().from_dict(content, **options)

    def to_dict(self) -> dict[str, Any]:
        """Return the fields. The permission to import the mixer is not one of them."""
        return {key: value for key, value in super().to_dict().items() if key != "mixer_permitted"}

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what `save_pretrained` writes: no settings of the machine or of absent layers."""
        unused = MACHINE_KEYS
        if not self.attention_layers:
            unused += ("layer_types", *ATTN_KEYS.values())
        elif "sliding_attention" not in self.layer_types:
            unused += ("sliding_window",)
        return {key: value for key, value in super().to_diff_dict().items() if key not in unused}


def drop_auto_map(cls: type[PreTrainedConfig], content: dict[str, Any]) -> dict[str, Any]:
    """Return a config's content without `auto_map`, unless the class was loaded from the files it names.

    `save_pretrained` copies these files only for such a class.
    """
    return {key: value for key, value in content.items() if key != "auto_map" or cls._auto_class}
