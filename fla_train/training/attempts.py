"""Attempts to train, until one ends well: each from the newest checkpoint that all machines can read."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from fla_train.data import PreparedData
from fla_train.kernels.delta_product.check import check_backend, model_cases
from fla_train.training import checkpoint
from fla_train.training.checkpoint import TrainState
from fla_train.training.console import say
from fla_train.training.machines import AttemptEnded, Failure, Machines
from fla_train.training.plan import Plan, plan_lines
from fla_train.training.resuming import (
    agree_on_checkpoint,
    check_same_run,
    completion_lines,
    is_complete,
    where_to_begin,
)
from fla_train.training.runfolder import RunFolder, write_environment, write_whole
from fla_train.training.schema import LaunchConfig, TrainConfig, to_yaml
from fla_train.training.supervise import choose_port, run_workers


class Attempts:
    """The attempts of one run, on this machine.

    Args:
        machines: have met.
        greeting: what this machine says when they meet again.
        lock: descriptor of the run's lock, on machine 0.
    """

    def __init__(
        self,
        config: TrainConfig,
        data: PreparedData,
        plan: Plan,
        folder: RunFolder,
        machines: Machines,
        greeting: dict[str, Any],
        lock: int | None,
    ):
        self._config, self._data, self._plan, self._folder = config, data, plan, folder
        self._machines, self._greeting, self._lock = machines, greeting, lock
        self._begun = 0  # the step that the newest attempt went on from
        self._ready = False  # what is done once, before the first workers, has been

    def train(self) -> Failure | None:
        """Train until an attempt ends well; None, or why that was given up.

        Raises:
            ValueError: the run folder, its checkpoints or this machine's kernels do not allow it.
            Preempted: asked to leave; a checkpoint has been saved.
        """
        limit, restarts = self._config.launch.max_restarts, 0
        folder = self._folder.checkpoints
        resume = where_to_begin(self._config, self._folder)
        self._begun = _state(resume).step
        failure = self._attempt(resume)
        while failure is not None:
            failure = self._machines.fail(failure)
            if failure.final or not limit:
                break
            if missing := self._meet_again(failure):
                return missing
            try:  # only now that no machine has workers, which write checkpoints and delete them
                resume = checkpoint.newest_intact(folder) or resume
            except ValueError as fault:
                return self._given_up(fault)
            if _state(resume).step > self._begun:  # it got on: what went wrong before counts no more
                restarts = 0
            if restarts == limit:
                break
            restarts += 1
            say(f"restart      {restarts} of {limit}, {failure}")
            failure = self._attempt(resume)
        return failure

    def _meet_again(self, failure: Failure) -> Failure | None:
        """Meet after `failure`, waiting up to `launch.max_restarts` times; None, or why it can't be done."""
        launch = self._config.launch
        for _ in range(launch.max_restarts):
            if launch.num_machines > 1:
                say(f"failed       {failure}")
            try:
                meet(self._machines, launch, self._greeting)
            except AttemptEnded as ended:
                failure = ended.failure
                if failure.final:
                    break
            except ValueError as fault:
                return self._given_up(fault)
            else:
                return None
        return failure

    def _attempt(self, resume: Path | None) -> Failure | None:
        try:
            return self._try(resume)
        except AttemptEnded as ended:
            return ended.failure
        except ValueError as fault:
            if not self._ready:  # nothing was started: a fault of the request
                raise
            return self._given_up(fault)

    def _given_up(self, fault: ValueError) -> Failure:
        return Failure(f"machine {self._config.launch.machine_rank}", str(fault), final=True)

    def _try(self, resume: Path | None) -> Failure | None:
        """Train once, from `resume` if all machines can read it, with this machine's workers."""
        config, folder, machines = self._config, self._folder, self._machines
        launch, main = config.launch, self._lock is not None
        if main:  # no machine has workers now, so nothing is being written
            checkpoint.clean(folder.checkpoints)
        resume = agree_on_checkpoint(machines, folder.checkpoints, resume, say)
        state = _state(resume)
        self._begun = state.step
        complete = is_complete(folder, resume, config)
        if not self._ready:
            self._get_ready(resume, complete)
        # One port for each attempt: ranks of an earlier one may live on where a network has been cut.
        own = {"complete": complete, "port": choose_port(launch)} if main else None
        first = machines.gather("start", own)[0]
        if first["complete"]:
            for line in completion_lines(folder, resume, config):
                say(line)
            return None
        say(f"run          {folder.root}" + (f", from {resume}" if resume else ""))
        processes = launch.num_processes
        if resume is not None and (saved := checkpoint.world_size(resume)) != processes:
            say(f"resume       checkpoint of {saved} process(es), optimizer state cut anew for {processes}")
        if main:
            folder.record_start(state.step, state.tokens, processes)
        config_file = folder.config(launch.machine_rank)
        failure = run_workers(
            [str(config_file), str(self._data.folder), *([str(resume)] if resume else [])],
            launch,
            port=first["port"],
            attempt=machines.attempt,
            elsewhere=machines.failure,
            inherited=(self._lock,) if main else (),
        )
        if failure is None:
            machines.gather("done", True)  # a rank that fails in its last moments needs the others again
        return failure

    def _get_ready(self, resume: Path | None, complete: bool) -> None:
        """Check, and write, what is checked and written once."""
        config, folder = self._config, self._folder
        if resume is not None:
            check_same_run(config, self._data, resume, say)
        if complete:
            return
        if config.trainer.check_backend and config.baseline is None:
            _check_backend(config)
        write_whole(folder.config(config.launch.machine_rank), to_yaml(config))
        if self._lock is not None:
            write_environment(folder, config.launch.device)
            write_whole(folder.plan, json.dumps(asdict(self._plan), indent=2) + "\n")
            with folder.log(0).open("a") as log:
                log.writelines(line + "\n" for line in plan_lines(config, self._plan))
        self._ready = True


def meet(machines: Machines, launch: LaunchConfig, greeting: dict[str, Any]) -> None:
    """`Machines.meet`, and say so."""
    if launch.num_machines > 1:
        say(f"machines     waiting for all {launch.num_machines} at {machines.place}")
    machines.meet(greeting)


def _state(resume: Path | None) -> TrainState:
    return TrainState() if resume is None else checkpoint.read_state(resume)


def _check_backend(config: TrainConfig) -> None:
    """Refuse to train with kernels that disagree with the fp64 reference on this machine.

    Raises:
        ValueError: with the report's verdict, and how to go on all the same.
    """
    model = config.model
    report = check_backend(
        model["backend"],
        config.launch.device,
        torch.bfloat16 if config.trainer.precision == "bf16" else torch.float32,
        cases=model_cases(model["num_householder"], model["use_forget_gate"]),
        head_dims=(model["head_dim"], int(model["head_dim"] * model["expand_v"])),
    )
    if not report.ok:
        raise ValueError(
            f"backend check failed: {report.summary()}; unset TRITON_PTXAS_PATH if it is set, set another "
            "model.backend, or trainer.check_backend=false to train all the same"
        )
    say(f"backend      {report.summary()}")
