"""`fla-generate`: continue a prompt with streamed output, or all prompts of a file.

fla-generate checkpoint=runs/my-run prompt="def main(" max_new_tokens=200 temperature=0.8 top_p=0.95 seed=1
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf

from fla_train.cli.app import HydraJob, run_hydra
from fla_train.eval.config import CHECKPOINT, DTYPES
from fla_train.utils.keys import key, require_valid

BATCH = 64  # prompts of a file that are generated at once


@dataclass
class GenerateConfig:
    """Schema of configs/generate.yaml."""

    checkpoint: str | None = key(None, required=CHECKPOINT)
    prompt: str = ""
    prompt_file: str | None = None
    max_new_tokens: int = key(200, at_least=1)
    temperature: float = key(0.8, at_least=0)
    top_k: int = key(0, at_least=0)
    top_p: float = key(1.0, above=0, at_most=1)
    seed: int = 0
    device: str = "auto"
    dtype: str = key("auto", choices=DTYPES)
    mixer: str | None = None
    trust_remote_code: bool = False

    def check(self) -> Iterator[str]:
        if self.prompt and self.prompt_file:
            yield "prompt and prompt_file are both set: give one of them"


def register() -> None:
    ConfigStore.instance().store(name="generate_schema", node=GenerateConfig)


def task(job: HydraJob) -> int:
    settings: GenerateConfig = OmegaConf.to_object(job.config)
    require_valid(settings)
    prompts = [] if settings.prompt_file is None else _lines(Path(os.path.expanduser(settings.prompt_file)))
    # These imports take seconds, which --help and an invalid request do not need.
    import torch

    from fla_train.hub.generate import generate
    from fla_train.hub.load import load_model
    from fla_train.utils.device import pick_device, pick_dtype

    device, dtype = pick_device(settings.device), pick_dtype(settings.dtype)
    code = {"mixer": settings.mixer, "trust_remote_code": settings.trust_remote_code}
    model, tokenizer = load_model(settings.checkpoint, device, dtype, **code)
    torch.manual_seed(settings.seed)
    options = {name: getattr(settings, name) for name in ("max_new_tokens", "temperature", "top_k", "top_p")}
    if settings.prompt_file is None:
        generate(model, tokenizer, [settings.prompt], stream=True, **options)
        return 0
    for first in range(0, len(prompts), BATCH):
        batch = prompts[first : first + BATCH]
        for prompt, text in zip(batch, generate(model, tokenizer, batch, **options), strict=True):
            print(json.dumps({"prompt": prompt, "continuation": text}, ensure_ascii=False), flush=True)
    return 0


def _lines(file: Path) -> list[str]:
    """Return the lines of a file. Other separators, such as a form feed, belong to a line."""
    text = file.read_text("utf-8-sig")
    if not text:
        raise ValueError(f"prompt_file={file} is empty: write a prompt on each line")
    return text.removesuffix("\n").split("\n")


def main() -> None:
    run_hydra("generate", register, task)


if __name__ == "__main__":
    main()
