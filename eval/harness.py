"""Bridge to lm-eval: our checkpoints as an lm-eval model, and a task list run one task at a time."""

from collections.abc import Callable, Iterable
from pathlib import Path

import torch
from lm_eval import simple_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.eval.mirror import DatasetUnavailable, hub_datasets
from fla_train.hub.load import document_prefix, resolve_checkpoint, trained_length, training_record

CPU_BATCH = 8  # what `auto` means there: a CPU has no out-of-memory error to find the limit by


@register_model("fla_train")
class FlaTrainLM(HFLM):
    """A causal language model for lm-eval, with the choices that recurrent models need.

    What differs from `HFLM`: a run folder may be given as `pretrained`; log-likelihoods are always taken in
    fp32 (in bf16 they are off by up to 0.07 nats per token); the context window is the training length unless
    `max_length` says otherwise, since a recurrent model has no limit of its own; and an empty context is the
    token that stood between documents in training, while BOS, which training never showed, is not added.

    Args:
        pretrained: run folder, exported folder or Hub name; or a loaded model.
        tokenizer: needed with a loaded model; else a path, or None for the checkpoint's own.
        max_length: tokens of context and continuation together; longer requests lose their beginning.
        batch_size: requests per forward, or `auto`: the most that fit, on a CPU 8.
        max_batch_size: where `auto` starts.
        device: used when the model is loaded here; None is CUDA if there is one.
        dtype: of the weights when loaded here; `auto` keeps the stored one.
        add_bos_token: begin each request with the tokenizer's special tokens; None: only for models not
            trained here.
        prefix_token_id: stands for an empty context; None is EOS for models trained here, else BOS, else EOS.
    """

    def __init__(
        self,
        pretrained: str | Path | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        max_length: int | None = None,
        batch_size: int | str = 1,
        max_batch_size: int = 64,
        device: str | None = None,
        dtype: str | torch.dtype = "auto",
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
    ) -> None:
        loaded = isinstance(pretrained, PreTrainedModel)
        device = (
            str(pretrained.device) if loaded else device or ("cuda" if torch.cuda.is_available() else "cpu")
        )
        if batch_size == "auto" and device == "cpu":
            batch_size = CPU_BATCH
        super().__init__(
            pretrained if loaded else str(resolve_checkpoint(pretrained)),
            backend="causal",
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
            max_batch_size=max_batch_size,
            device=device,
            dtype=dtype,
            softmax_dtype=torch.float32,
            add_bos_token=add_bos_token,
            prefix_token_id=prefix_token_id,
        )
        self._max_length = max_length or trained_length(self.model)
        if add_bos_token is None and training_record(self.model):
            self.add_bos_token = False
        if prefix_token_id is None:
            self.custom_prefix_token_id = next(iter(document_prefix(self.model, self.tokenizer)), None)


def run_tasks(
    lm: FlaTrainLM,
    tasks: Iterable[str],
    *,
    include_path: str | Path | None = None,
    mirror: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | None = None,
    bootstrap_iters: int = 1000,
    part: Callable[[str, Callable[[], dict]], dict] = lambda name, work: work(),
) -> dict[str, dict]:
    """Evaluate `lm` on lm-eval tasks, groups or tags, one after the other.

    Args:
        lm: the model.
        tasks: names known to lm-eval or defined by YAML files under `include_path`.
        include_path: folder with local task definitions.
        mirror: folder with the tasks' data sets, see `fla_train.eval.mirror`; None: the Hub or its cache.
        num_fewshot: examples in the prompt; None is each task's own number.
        limit: examples per task; None is all. Limited results are not comparable with published ones.
        bootstrap_iters: resamples for the standard errors of metrics that have no closed form.
        part: called with the task's name and the work; lets the caller keep finished results.

    Returns:
        By task asked for: `{"scores": {task: {metric: value}}}`, or `{"error": line}` for a task that could
        not run (no data, no network); the others go on.

    Raises:
        ValueError: a name that lm-eval does not know, or `mirror` is no folder; nothing was run.
    """
    names = list(tasks)
    place = None if mirror is None else Path(mirror).expanduser()
    if place is not None and not place.is_dir():
        raise ValueError(f"mirror={mirror} is no folder: build one with scripts/build_eval_mirror.py")
    manager = _task_manager(names, include_path)

    def evaluate(name: str) -> dict:
        results = simple_evaluate(
            lm,
            tasks=[name],
            task_manager=manager,
            num_fewshot=num_fewshot,
            limit=limit,
            bootstrap_iters=bootstrap_iters,
            log_samples=False,
        )
        return {"scores": {task: _scores(results, task) for task in results["results"]}}

    finished = {}
    for name in names:
        try:
            with hub_datasets(place):
                finished[name] = part(f"task-{name}", lambda name=name: evaluate(name))
        except DatasetUnavailable as failure:
            finished[name] = {"error": str(failure)}
        except Exception as failure:  # a data set's code may raise anything; the other tasks go on
            finished[name] = {"error": f"{type(failure).__name__}: {' '.join(str(failure).split())[:300]}"}
    return finished


def _task_manager(names: list[str], include_path: str | Path | None) -> TaskManager:
    """A manager that knows every name. lm-eval's own tasks are slow to index: only if one is asked for."""
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"suite.include_path={include_path} is no folder")
        local = TaskManager(include_path=str(include_path), include_defaults=False)
        if all(local.match_tasks([name]) for name in names):
            return local
    manager = TaskManager(include_path=include_path and str(include_path))
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ValueError(
            f"lm-eval knows no task {', '.join(unknown)}: see `lm-eval ls tasks`, or set suite.include_path"
        )
    return manager


def _scores(results: dict, task: str) -> dict[str, float | int]:
    """A task's metrics as plain numbers: `acc`, `acc_stderr`, ..., plus `examples` and `num_fewshot`."""
    scores = {}
    for key, value in results["results"][task].items():
        metric, _, filtered = key.partition(",")
        if filtered and isinstance(value, int | float):
            base = metric.removesuffix("_stderr")
            kind = "" if filtered == "none" else f"_{filtered}"
            scores[base + kind + metric[len(base) :]] = value
    scores["examples"] = results["n-samples"].get(task, {}).get("effective", 0)
    scores["num_fewshot"] = results["n-shot"].get(task, 0)
    return scores
