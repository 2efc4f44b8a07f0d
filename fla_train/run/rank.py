"""Train as one rank of a run: join the other ranks, build the model, record the start, run the trainer."""

import json
import os
import secrets
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import TextIO

import torch
import torch.distributed as dist

from fla_train.kernels.delta_product.selfcheck import check_backend, model_cases
from fla_train.models.build import build_model_config, is_zoo
from fla_train.models.mixers.registry import runs_operator
from fla_train.training.checkpoint import TrainState, read_state, world_size
from fla_train.training.config import TrainConfig, to_yaml
from fla_train.training.failures import report
from fla_train.training.log import log_both
from fla_train.training.model import build_model, load_initial_weights
from fla_train.training.plan import RunPlan, plan_lines
from fla_train.training.preemption import StopRequest
from fla_train.training.process_group import join
from fla_train.training.resume import agree_on_checkpoint
from fla_train.training.run_folder import RunFolder, RunLock
from fla_train.training.trainer import Trainer
from fla_train.utils.environment import describe_environment
from fla_train.utils.filesystem import write_whole
from fla_train.utils.timeline import Timeline
from fla_train.utils.watchdog import Watchdog


def train(plan: RunPlan, console: TextIO, request: StopRequest, timeline: Timeline) -> bool:
    """Train as the rank that the environment names. Return False if `request` ended it early.

    Args:
        timeline: phases of the start, logged after the first step.
    """
    timeline.mark("imports")
    config = plan.config
    world = int(os.environ["WORLD_SIZE"])
    # Torch's rendezvous drops a machine whose clock differs by 15 s, and starts the others.
    assert config.launch.num_processes == world, f"{world} ranks started: do the clocks of machines differ?"
    folder = RunFolder(Path(config.run.dir))
    watchdog = Watchdog(config.trainer.hang_timeout, report)
    data = plan.open_data()
    # Draw the weights in a thread, because that occupies one core for seconds. Concurrent work must not use
    # the global random state.
    thread = ThreadPoolExecutor(1, "model")
    building = thread.submit(build_model, config, data, fresh=True)
    join(on_gpu=config.launch.device == "cuda")
    lock = RunLock(folder) if dist.get_rank() == 0 else None
    log = partial(log_both, console)
    with closing(lock) if lock else nullcontext():
        resume = agree_on_checkpoint(folder.store, config.trainer.resume, log)
        if config.trainer.check_backend and os.environ["LOCAL_RANK"] == "0":
            _check_backend(config, log)
            timeline.mark("backend check")
        model = building.result()
        thread.shutdown()
        if resume is None:
            load_initial_weights(config, model)
        timeline.mark("model")
        if lock is not None:
            _record(plan, folder, resume, log)
        timeline.mark("run folder")
        finished = Trainer(plan, data, model, resume, console, watchdog, request, lock, timeline).run()
    watchdog.close()
    return finished


def _check_backend(config: TrainConfig, log: Callable[[str], None]) -> None:
    """Check that the kernels agree with the fp64 reference on this machine.

    The launcher does not check it, because starting CUDA and loading the kernels there would cost seconds.

    Raises:
        ValueError: contains the report's verdict, and how to train despite it.
    """
    model = config.model
    if is_zoo(model) or not runs_operator(build_model_config(model)):
        return
    checks = check_backend(
        model["backend"],
        config.launch.device,
        torch.bfloat16 if config.trainer.autocasts else torch.float32,
        cases=model_cases(model["num_householder"], model["use_forget_gate"]),
        head_dims=(model["head_dim"], int(model["head_dim"] * model["expand_v"])),
    )
    if not checks.ok:
        raise ValueError(f"backend check failed: {checks.summary()}; set model.backend or TRITON_PTXAS_PATH")
    if os.environ["RANK"] == "0":
        log(f"backend      {checks.summary()}")


def _record(plan: RunPlan, folder: RunFolder, resume: Path | None, log: Callable[[str], None]) -> None:
    """Write the files of a start, and log the step at which it begins."""
    # A folder with a config.yaml counts as a run, so the plan comes first.
    write_whole(folder.plan, plan.to_json())
    write_whole(folder.config, to_yaml(plan.request))
    environment = describe_environment(plan.config.launch.device)
    write_whole(folder.environment, json.dumps(environment, indent=2) + "\n")
    state = TrainState() if resume is None else read_state(resume)
    if folder.id() is None:
        continued = resume is not None and folder.owns(resume)
        write_whole(folder.run_id, (state.run if continued else None) or secrets.token_hex(8))
    world = plan.config.launch.num_processes
    folder.record_start(state.step, state.tokens, world)
    with suppress(OSError):
        print(*plan_lines(plan), sep="\n", flush=True)
    log(f"run          {folder.root}" + (f", from {resume}" if resume else ""))
    if resume is not None and (saved := world_size(resume)) != world:
        log(f"resume       checkpoint of {saved} process(es), optimizer state resharded for {world}")
