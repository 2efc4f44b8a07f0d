"""`fla-bench first_step`: time the first passes of a fresh process with empty compile caches."""

import os
import tempfile
import time

import torch

from fla_train.bench.ranks import on_ranks
from fla_train.models import DeltaProductForCausalLM, build_config
from fla_train.training.config import TrainConfig, resolve_device


def time_first_step(config: TrainConfig) -> dict[str, float]:
    """Seconds by phase: imports and the device's start, the first pass, and the second one.

    The batch has `trainer.micro_batch_size` sequences of `trainer.seq_len` random tokens.
    """
    with tempfile.TemporaryDirectory() as cache:
        return on_ranks(1, _measure, config, cache, time.perf_counter())


def _measure(config: TrainConfig, cache: str, began: float) -> dict[str, float]:
    """In a new process; its clock is that of the parent."""
    os.environ |= {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
    device = torch.device(resolve_device(config))
    torch.zeros(1, device=device)
    seconds = {"imports and the device's start": time.perf_counter() - began}
    model = DeltaProductForCausalLM(build_config(config.model)).to(device)
    shape = (config.trainer.micro_batch_size, config.trainer.seq_len)
    ids = torch.randint(model.config.vocab_size, shape, device=device)
    for name in ("first", "second"):
        begun = time.perf_counter()
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = model(ids, labels=ids).loss
        loss.backward()
        loss.item()  # waits for the device
        seconds[f"{name} forward and backward"] = time.perf_counter() - begun
    return seconds
