#!/usr/bin/env python
"""python scripts/time_first_step.py [model=gated_delta_product/340m] [override ...]

How long a fresh process takes to its first forward and backward pass when no kernel has been compiled before:
imports and the device's start, the first pass, the second. Overrides are those of `fla-train`;
`trainer.seq_len` and `trainer.micro_batch_size` are the size of the batch.
"""

import os
import sys
import tempfile
import time


def main() -> None:
    if {"-h", "--help"} & set(sys.argv):
        print(__doc__)
        return
    began = time.perf_counter()
    with tempfile.TemporaryDirectory() as cache:
        os.environ |= {"TRITON_CACHE_DIR": f"{cache}/triton", "TORCHINDUCTOR_CACHE_DIR": f"{cache}/inductor"}
        import torch

        from fla_train.cli.app import compose
        from fla_train.models import DeltaProductForCausalLM, build_config
        from fla_train.training import schema
        from fla_train.training.resolve import resolve_device
        from fla_train.training.validate import validate

        schema.register()
        config = schema.to_config(compose("train", sys.argv[1:]))
        validate(config)
        device = torch.device(resolve_device(config))
        torch.zeros(1, device=device)
        print(f"imports and the device's start: {time.perf_counter() - began:.1f} s")
        model = DeltaProductForCausalLM(build_config(config.model)).to(device)
        shape = (config.trainer.micro_batch_size, config.trainer.seq_len)
        ids = torch.randint(model.config.vocab_size, shape, device=device)
        for name in ("first", "second"):
            begun = time.perf_counter()
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                loss = model(ids, labels=ids).loss
            loss.backward()
            loss.item()  # waits for the device
            print(f"{name} forward and backward: {time.perf_counter() - begun:.1f} s", flush=True)


if __name__ == "__main__":
    main()
