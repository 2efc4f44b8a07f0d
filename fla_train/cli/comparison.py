"""Plan and read the runs of `fla-runs compare`: equal sizes, best learning rates, numbers of each run."""

import argparse
import json
import math
import signal
import time
from bisect import bisect_left
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pandas as pd
from omegaconf import OmegaConf

from fla_train.api import check_suite, compose
from fla_train.cli.comparison_config import FIRST, MULTIPLE, ComparisonConfig, SizeConfig, read_comparison
from fla_train.cli.train_list import Job, exit_status, gpu_slots, run_jobs, status, training_job
from fla_train.eval.model_comparison import DECODE, FALL, LOSS, fall_per_doubling, write_report
from fla_train.eval.result import EvalResult
from fla_train.models.build import countable, is_zoo
from fla_train.models.flops import count_parameters
from fla_train.run.resolve import resolve
from fla_train.run.results import Run
from fla_train.training.plan import RunPlan
from fla_train.utils.filesystem import write_whole
from fla_train.utils.overrides import assign
from fla_train.utils.safe_files import read_json

SINGLE_PROCESS = ("launch.num_processes=1", "logger=none")
MOST_STEPS = 2**14  # limit of a size that is solved for, in steps of `multiple`
# Limits of small models on an H100 or H200, measured with 50M parameters: seconds until a run's first step
# (20 to 37), and tokens/s of a run that has the GPU to itself (400,000 to 900,000).
START, SPEED = 30, 600_000
DECODING_CONTEXT = 2048  # tokens before the generated ones, whose time is measured
DECODING = "decoding/decoding.json"
METRICS = ["tokens", "loss", "validation_loss", "validation_bits_per_byte", "tokens_per_second", "memory_gib"]


def solve_size(node: Mapping[str, Any], size: SizeConfig, target: int) -> int:
    """Return the value of `size.field` at which a model's number of parameters is nearest to `target`.

    Args:
        node: resolved `model` node of a config.

    Raises:
        ValueError: the field does not exist, or its values give more or fewer parameters.
    """

    @cache
    def count(steps: int) -> int:
        changed = OmegaConf.create(node)
        OmegaConf.update(changed, size.field.removeprefix("model."), steps * size.multiple, force_add=True)
        return count_parameters(countable(OmegaConf.to_container(changed))).total

    most = 1
    while count(most) < target and most < MOST_STEPS:
        most *= 2
    if not count(1) <= target <= count(most):
        span = f"{size.field} gives {count(1):,} to {count(most):,} parameters, not {target:,}"
        raise ValueError(f"{span}: name another field in `sizes`, or change the model")
    upper = bisect_left(range(most), target, lo=1, key=count)
    return size.multiple * min(max(1, upper - 1), upper, key=lambda steps: abs(count(steps) - target))


def plan_model(
    overrides: Sequence[str], size: SizeConfig | None, target: int | None, data: str
) -> tuple[RunPlan, list[str]]:
    """Return the plan of a model's run, and the override that sets its solved size, if there is one.

    Args:
        size: what to solve for; None: the MLP's width.
        target: number of parameters, None: as they are.
        data: `prepare` or `none`.

    Raises:
        ValueError: the overrides do not fit, the validation split is too short, or the size can't be solved.
    """
    plan = resolve(compose(*overrides, *SINGLE_PROCESS), data=data)
    if plan.config.task is not None:
        raise ValueError("models are compared on text: write tasks in `tasks`")
    if plan.validation_tokens and max(plan.validation_tokens.values()) < plan.config.trainer.seq_len:
        raise ValueError("the validation split is shorter than a sequence: raise data.validation_fraction")
    prefix = "model.config." if is_zoo(plan.config.model) else "model."
    size = size or SizeConfig(f"{prefix}intermediate_size", MULTIPLE)
    if size.field is None or target in (None, plan.parameters_held):
        return plan, []
    solved = assign(size.field, solve_size(plan.config.model, size, target))
    return resolve(compose(*overrides, solved, *SINGLE_PROCESS), data=data), [solved]


def run_state(folder: Path) -> str:
    """Return the status of a run; `diverged` if it stopped because too many steps in a row were skipped."""
    if (state := status(folder)) != "stopped":
        return state
    run = Run(folder)
    most = run.settings["trainer.max_skipped_steps"]
    # Skipped steps are always logged, with their number so far. Between two of them that follow each other
    # the number of steps that were not skipped is the same.
    records = [record for record in run.records if "skipped_steps" in record][-most:]
    trained_steps = {record["step"] - record["skipped_steps"] for record in records}
    diverged = len(records) == most and len(trained_steps) == 1 and records[-1]["skipped_steps"] >= most
    return "diverged" if diverged else state


def _state_of_file(file: Path) -> str:
    return "finished" if file.is_file() else "new"


class Comparison:
    """Runs of a comparison and their results.

    A run is called `MODEL/lr-RATE/seed-N`, on a task `MODEL/TASK/seed-N`, as its folder. Its evaluations are
    in `eval/SUITE` below it.

    Args:
        prepare: prepare the data, which decide the vocabulary, before several runs do it at once.

    Raises:
        ValueError: names the model or the suite that has an error.
    """

    def __init__(self, config: ComparisonConfig, folder: Path, *, prepare: bool):
        self.config, self.folder, self.first_seed = config, folder, f"seed-{config.seeds[0]}"
        suites = {name: check_suite(name, texts, f"suites.{name}") for name, texts in config.suites.items()}
        self.suites = {name: json.loads(json.dumps(asdict(suite))) for name, suite in suites.items()}
        # Plan of each model's run, and the override of its solved size.
        self.plans: dict[str, tuple[RunPlan, list[str]]] = {}
        # Overrides of all runs that may be needed.
        self.overrides: dict[str, list[str]] = {}
        target = None if config.parameters == FIRST else config.parameters
        data = "prepare" if prepare else "none"
        for name, of_model in config.models.items():
            on_text = [*config.base, *of_model, f"trainer.max_tokens={config.tokens}"]
            tasks = {task: [*of_model, *content.overrides] for task, content in config.tasks.items()}
            try:
                plan, size = plan_model(on_text, config.sizes.get(name), target, data)
                for overrides in tasks.values():
                    resolve(compose(*overrides, *SINGLE_PROCESS))
            except ValueError as error:
                raise ValueError(f"{name}: {error}") from error
            self.plans[name] = plan, size
            if config.parameters == FIRST:
                target = target or plan.parameters_held
            runs = {f"lr-{r}": [*on_text, *size, f"optimizer.lr={r}"] for r in config.learning_rates}
            for run, overrides in (runs | tasks).items():
                for seed in config.seeds:
                    self.overrides[f"{name}/{run}/seed-{seed}"] = [*overrides, f"seed={seed}"]

    def plan_text(self) -> str:
        """Return the models with their sizes, and the number of runs on text, of their tokens and hours."""
        lines, seconds, tokens, jobs = [], 0.0, self.config.tokens, self.config.jobs
        for name, (plan, size) in self.plans.items():
            lines.append(f"{name:26} {plan.parameters_held:>11,} parameters  {''.join(size)}".rstrip())
            # Runs that share a GPU overlap their starts and gaps, up to the utilization of a plan.
            seconds += START / jobs + max(3600 * plan.gpu_hours, tokens / SPEED / jobs)
        of_model = len(self.config.learning_rates) + len(self.config.seeds) - 1  # runs
        runs, hours = of_model * len(self.plans), of_model * seconds / 3600
        total = f"{runs} runs, {runs * tokens:,} tokens, about {hours:,.1f} hours of an H100"
        return "\n".join([*lines, f"{total}, besides tasks and suites ({START} s to start a run)"])

    def record_overrides(self) -> None:
        """Write the overrides of all runs to runs.json, so that a later call does not mix requests.

        Raises:
            ValueError: a run in the folder was started with other overrides.
        """
        file = self.folder / "runs.json"
        earlier = read_json(file) if file.is_file() else {}
        for name, overrides in self.overrides.items():
            if earlier.get(name, overrides) != overrides and status(self.folder / name) != "new":
                changed = ", ".join(sorted({*earlier[name]} ^ {*overrides}))
                raise ValueError(f"{self.folder / name} has other overrides ({changed}): give a new --folder")
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(file, json.dumps(earlier | self.overrides, indent=1) + "\n")

    def sweep(self) -> dict[str, Job]:
        """Return the jobs of the first seed at each learning rate, and of all tasks."""
        return self._training(lambda _, run, seed: seed == self.first_seed or run in self.config.tasks)

    def seeds(self) -> dict[str, Job]:
        """Return the jobs of all seeds at the best learning rate of each model whose sweep is complete."""
        best = {(row.model, row.run) for row in self.best(self.numbers()).itertuples() if row.complete}
        return self._training(lambda model, run, seed: (model, run) in best)

    def evaluations(self) -> dict[str, Job]:
        """Return the jobs that evaluate finished runs of `seeds`, and time generation of the first ones."""
        jobs = {}
        for name, training in self.seeds().items():
            if training.status() != "finished":
                continue
            for suite, options in self.config.suites.items():
                output = training.folder / "eval" / suite
                ours = [assign("checkpoint", training.folder), assign("output", output), f"suite={suite}"]
                state = partial(self._evaluation_state, output)
                jobs[f"{name}/eval/{suite}"] = Job("eval", [*ours, *options], output, state)
            if name.endswith(self.first_seed):
                file = training.folder / DECODING
                vocabulary = self.plans[name.split("/")[0]][0].config.model["vocab_size"]
                arguments = ["generate", "--batch=1", f"--contexts={DECODING_CONTEXT}", f"--json={file}"]
                arguments += [*self.overrides[name], f"model.vocab_size={vocabulary}"]
                jobs[f"{name}/decoding"] = Job("bench", arguments, file.parent, partial(_state_of_file, file))
        return jobs

    def _training(self, chosen: Callable[[str, str, str], bool]) -> dict[str, Job]:
        names = [name for name in self.overrides if chosen(*name.split("/"))]
        return {name: training_job(self.folder / name, self.overrides[name], run_state) for name in names}

    def _evaluation_state(self, output: Path) -> str:
        """Return `finished` if the evaluation is complete and has the settings of the suite."""
        if not (output / "results.json").is_file():
            return "new"
        result = EvalResult.load(output / "results.json")
        return "stopped" if result.errors or result.suite != self.suites[output.name] else "finished"

    def numbers(self) -> pd.DataFrame:
        """Return each number of each run that is over: `model`, `run`, `seed`, `metric`, `value`."""
        rows = [(*n.split("/"), *item) for n in self.overrides for item in self._numbers(n).items()]
        return pd.DataFrame(rows, columns=["model", "run", "seed", "metric", "value"])

    def _numbers(self, name: str) -> dict[str, float]:
        folder, task = self.folder / name, name.split("/")[1]
        if (state := run_state(folder)) not in ("finished", "diverged"):
            return {}
        metrics = Run(folder).metrics
        if task in self.config.tasks:
            metric = self.config.tasks[task].metric
            if state == "diverged":
                return {f"{task} {metric}": math.nan}
            if metric not in metrics:
                raise ValueError(f"tasks.{task}.metric={metric} is not in {folder / 'metrics.jsonl'}")
            return {f"{task} {metric}": float(metrics[metric].iloc[-1])}
        metrics = metrics.reindex(columns=METRICS).astype(float)
        loss, bits = metrics[["validation_loss", "validation_bits_per_byte"]].iloc[-1]
        numbers = {
            LOSS: loss if state == "finished" and math.isfinite(loss) else math.inf,
            "bits per byte": bits,
            FALL: fall_per_doubling(metrics.tokens, metrics.loss),
            "tokens/s": metrics.tokens_per_second.median(),
            "memory (GiB)": metrics.memory_gib.max(),
        }
        if (folder / DECODING).is_file():
            numbers[DECODE] = read_json(folder / DECODING)["rows"][0].get("token_ms", math.nan)
        for output in (folder / "eval" / suite for suite in self.suites):
            if self._evaluation_state(output) == "finished":
                for score in EvalResult.load(output / "results.json").scores:
                    if score.section != "perplexity" or score.metric == "perplexity":
                        length = "" if score.length is None else f" at {score.length:,}"
                        numbers[f"{score.data} {score.metric}{length}"] = score.value
        return numbers

    def losses(self, numbers: pd.DataFrame) -> pd.DataFrame:
        """Return the loss of each run of the sweep, NaN if it is not over, with its `learning_rate`."""
        pairs = product(self.plans, self.config.learning_rates)
        runs = pd.DataFrame(pairs, columns=["model", "learning_rate"])
        runs["run"] = runs.learning_rate.map("lr-{}".format)
        return runs.assign(seed=self.first_seed, metric=LOSS).merge(numbers, how="left")

    def best(self, numbers: pd.DataFrame) -> pd.DataFrame:
        """Return the best finite row of `losses` of each model, and whether its sweep is `complete`."""
        losses = self.losses(numbers).sort_values("value", kind="stable")
        losses["complete"] = losses.value.notna().groupby(losses.model).transform("all")
        return losses[losses.value < math.inf].drop_duplicates("model")

    def report(self, left: int) -> None:
        """Write and print the table and draw the figure, as far as the runs are finished.

        Args:
            left: number of runs and evaluations that are not.
        """
        numbers = self.numbers()
        best = self.best(numbers).set_index("model")
        notes = [f"{self.config.tokens:,} tokens a run, {self.config.jobs} run(s) at once on each device"]
        if left:
            notes += [f"Not complete: at least {left} runs or evaluations are left: call the command again"]
        if best.empty:
            print(*notes[1:], "No run on text has finished with a finite loss", sep="\n")
            return
        for column, field in (("parameters", "parameters_held"), ("entropy", "unigram_entropy")):
            best[column] = [getattr(self.plans[model][0], field) for model in best.index]
        folders = {row.Index: self.folder / row.Index / row.run / row.seed for row in best.itertuples()}
        curves = {name: Run(folder).metrics[["tokens", "loss"]] for name, folder in folders.items()}
        chosen = numbers.model.map(best.run) == numbers.run
        chosen |= numbers.run.isin(self.config.tasks) & numbers.model.isin(best.index)
        write_report(self.folder, numbers[chosen], best, self.losses(numbers), curves, notes)
        print((self.folder / "table.md").read_text())
        print(*(self.folder / name for name in ("table.csv", "comparison.png")), sep="\n")


def compare(request: argparse.Namespace) -> int:
    """Run the command for the options of `comparison_config.build_parser`; return its exit status.

    Raises:
        ValueError: the file, a model or a run in the folder has an error.
    """
    config = read_comparison(request.file, request.overrides)
    folder = request.folder or Path("runs", request.file.stem)
    comparison = Comparison(config, folder, prepare=not request.dry_run)
    print(comparison.plan_text())
    stages = (comparison.sweep, comparison.seeds, comparison.evaluations)
    if request.dry_run:
        print(*(f"{job.status():10} {name}" for stage in stages for name, job in stage().items()), sep="\n")
        return 0
    comparison.record_overrides()
    failed, number, end = {}, None, time.monotonic() + request.seconds
    for stage in stages:
        if number is None:
            jobs = stage()
            errors, number = run_jobs(jobs, gpu_slots(request.gpus, config.jobs), end - time.monotonic())
            failed |= {name: error for name, error in errors.items() if jobs[name].status() != "diverged"}
    states = [job.status() for stage in stages for job in stage().values()]
    left = sum(state not in ("finished", "diverged") for state in states)
    comparison.report(left)
    if failed:
        print(*(f"failed     {name}  {error}" for name, error in failed.items()), sep="\n")
        return 1
    return exit_status(number or signal.SIGTERM) if left else 0
