"""Tokens per second of a run's model in plain DDP: no engine, no checkpoints, random tokens.

    torchrun --standalone --nproc-per-node 2 scripts/time_ddp.py RUN/config.yaml 60 FOLDER

Model, optimizer, precision and batch are those of the run. Rank 0 writes the speed of each step to
FOLDER/metrics.jsonl, as a run does. `scripts/time_scaling.py` runs it beside `fla-train`.
"""

import json
import os
import sys
import time
from collections import defaultdict
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from fla_train.training.build import build_model
from fla_train.training.optimizer import build_optimizer
from fla_train.training.resolve import accumulation_steps
from fla_train.training.schema import load_config


def main() -> None:
    config, steps, folder = load_config(Path(sys.argv[1])), int(sys.argv[2]), Path(sys.argv[3])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo")
    no_tokenizer = SimpleNamespace(manifest={"tokenizer": defaultdict(lambda: None)})
    model = DistributedDataParallel(build_model(config, no_tokenizer).to(device))
    optimizer = build_optimizer(model.module, config.optimizer)
    accumulation, shape = (
        accumulation_steps(config),
        (config.trainer.micro_batch_size, config.trainer.seq_len),
    )
    began = time.perf_counter()
    for step in range(1, steps + 1):
        optimizer.zero_grad()
        for micro_batch in range(accumulation):
            tokens = torch.randint(config.model["vocab_size"], shape, device=device)
            last = micro_batch == accumulation - 1
            bf16 = torch.autocast(device.type, torch.bfloat16, enabled=config.trainer.precision == "bf16")
            with nullcontext() if last else model.no_sync(), bf16:
                loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss / accumulation
            with nullcontext() if last else model.no_sync():
                loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        loss = loss.item()  # waits for the device
        seconds, began = time.perf_counter() - began, time.perf_counter()
        if dist.get_rank() == 0:
            speed = config.trainer.global_batch_tokens / seconds
            memory = torch.cuda.max_memory_allocated() / 2**30 if on_gpu else 0.0
            record = {"step": step, "loss": loss, "tokens_per_second": speed, "memory_gib": memory}
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
