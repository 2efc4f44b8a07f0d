"""Bridge to lm-eval: our checkpoints as an lm-eval model, and a job for each task."""

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.evaluator_utils import get_sample_size
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import handle_non_serializable
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.eval.config import SuiteConfig
from fla_train.eval.likelihood import Answer, log_likelihoods
from fla_train.eval.memory import in_halves
from fla_train.eval.parallel import OTHER_RANK, Ranks
from fla_train.eval.result import Measurements
from fla_train.eval.result_cache import EvalJob
from fla_train.eval.scores import task_scores
from fla_train.eval.sets import local_datasets, remedy
from fla_train.hub.card import PREFIX
from fla_train.hub.checkpoint_config import resolve_checkpoint
from fla_train.hub.load import document_prefix, trained_length
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.utils.device import pick_device
from fla_train.utils.environment import git_commit
from fla_train.utils.errors import described

CPU_BATCH = 8  # what `auto` means on a CPU, which has no out-of-memory error to find the limit by
AUTO_TOKENS = 131_072  # tokens of a forward pass that `auto` means for our models on a GPU
BOOTSTRAP = 1000  # resamples for standard errors without a closed form; lm-eval's 100,000 take minutes

# lm-eval's version asks git about the current folder, and git complains if that is not a checkout.
lm_eval.evaluator.get_git_commit_hash = git_commit


@register_model("fla_train")
class FlaTrainLM(HFLM):
    """A causal language model for lm-eval, with the choices that recurrent models need.

    Differences from `HFLM`: `pretrained` may be a run folder. Log-likelihoods are always taken in fp32 (in
    bf16 they are off by up to 0.07 nats per token). The context window is the training length unless
    `max_length` says otherwise, since a recurrent model has no limit. An empty context is the token that
    separated documents in training, and no BOS is added, which training never showed. `log_likelihoods`
    computes the log-likelihoods of our recurrent models and reads a shared context once; `HFLM` computes
    those of all others.

    Args:
        pretrained: run folder, exported folder or Hub name; or a loaded model.
        tokenizer: needed with a loaded model; else a path, or None for the checkpoint's tokenizer.
        max_length: tokens of context and continuation together; longer requests lose their beginning.
        batch_size: requests of full length per forward pass (more if they are shorter, with our models), or
            `auto`: what fills a GPU with our models, the most that fit with others, 8 on a CPU. A batch that
            exceeds the GPU's memory is computed in halves.
        device: of a model that is loaded here; None: CUDA if there is one.
        ranks: processes that evaluate together, each with the model loaded; None: those that `HFLM` finds, as
            under `accelerate launch`.
        options: further arguments of `HFLM`. By default, `add_bos_token` and `prefix_token_id` are those of
            the training for models that were trained here.
    """

    def __init__(
        self,
        pretrained: str | Path | PreTrainedModel,
        tokenizer: str | PreTrainedTokenizerBase | None = None,
        *,
        max_length: int | None = None,
        batch_size: int | str = 1,
        device: str | None = None,
        ranks: Ranks | None = None,
        **options: Any,
    ) -> None:
        loaded = isinstance(pretrained, PreTrainedModel)
        device = str(pretrained.device if loaded else device or pick_device("auto"))
        if str(batch_size).startswith("auto") and device == "cpu":  # also auto:4
            batch_size = CPU_BATCH
        super().__init__(
            pretrained if loaded else str(resolve_checkpoint(pretrained)),
            backend="causal",
            tokenizer=tokenizer,
            max_length=max_length,
            batch_size=batch_size,
            device=device,
            softmax_dtype=torch.float32,
            **options,
        )
        self._max_length = max_length or trained_length(self.model)
        if self.add_bos_token is None and hasattr(self.model.config, PREFIX):
            self.add_bos_token = False
        if self.custom_prefix_token_id is None:
            self.custom_prefix_token_id = next(iter(document_prefix(self.model, self.tokenizer)), None)
        # The choices of a question follow each other, so a few texts are enough to encode a context once.
        self.tok_encode = lru_cache(64)(self.tok_encode)
        self._ours = isinstance(self.model, DeltaProductForCausalLM) and self.model.config.mixer is None
        if self._ours and self.batch_size == "auto":
            self.batch_size_per_gpu = max(AUTO_TOKENS // self._max_length, 1)
        self._truncated: set[str] = set()
        self.ranks = ranks or Ranks(self.rank, self.world_size)
        self._rank, self._world_size = self.ranks.rank, self.ranks.world  # lm-eval reads these

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's values, one after the other."""
        return torch.cat([values.reshape(-1) for values in self.ranks.gather(tensor.cpu())])

    def barrier(self) -> None:
        """Wait for the other ranks."""
        self.ranks.gather(None)

    def gather_object(self, obj: Any, dst: int = 0) -> list | None:
        """Return every rank's `obj` on rank `dst`, None on the others."""
        values = self.ranks.gather(obj)
        return values if self.rank == dst else None

    def evaluate(self, loaded: dict, manager: TaskManager, options: dict[str, Any]) -> dict | None:
        """Return lm-eval's results of tasks and groups that `manager` has loaded; None if not on rank 0."""
        tasks, groups, limit = loaded["tasks"], loaded["groups"], options["limit"]
        children = {child for names in loaded["group_map"].values() for child in names}
        # lm-eval fails on a rank without examples, so rank 0 runs small tasks alone.
        sizes = (min(len(t.eval_docs), get_sample_size(t, limit) or math.inf) for t in tasks.values())
        alone = min(sizes, default=math.inf) < self.ranks.world
        self._world_size = 1 if alone else self.ranks.world
        if alone and self.rank:
            return None
        return simple_evaluate(
            self,
            tasks=[task for name, task in (groups | tasks).items() if name not in children],
            task_manager=manager,
            bootstrap_iters=BOOTSTRAP,
            log_samples=True,  # samples have the hashes and contributions
            **options,
        )

    def pop_truncated(self) -> int:
        """Return the number of prompts that lost their beginning since the last call, on all ranks."""
        prompts = set().union(*self.ranks.gather(self._truncated))
        self._truncated = set()
        return len(prompts)

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate as `HFLM` does, and remember prompts that lose their beginning."""
        for request in requests:
            prompt, settings = request.args
            room = self.max_length - normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
            if len(self.tok_encode(prompt)) > room:
                self._truncated.add(prompt)
        return super().generate_until(requests, disable_tqdm)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str] | None, list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        # Windows of a longer text, whose requests have no texts, are never too long.
        for texts, context, continuation in requests:
            if texts and len(context) + len(continuation) > self.max_length + 1:
                self._truncated.add(texts[0])
        if not self._ours:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        answers = log_likelihoods(
            self.model,
            [(context, continuation) for _, context, continuation in requests],
            max_length=self.max_length,
            batch_tokens=self.batch_size * self.max_length,
            progress=not disable_tqdm and self.rank == 0 and override_bs is None,
        )
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            if texts:
                self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Generate as `HFLM` does; a batch that exceeds the GPU's memory is generated in halves."""
        generate, mask = super()._model_generate, options.pop("attention_mask")

        def work(rows: Sequence[int]) -> list[Tensor]:
            rows = list(rows)
            return list(generate(context[rows], max_length, stop, attention_mask=mask[rows], **options))

        pad = self.tokenizer.pad_token_id
        return pad_sequence(in_halves(work, range(len(context))), batch_first=True, padding_value=pad)


def task_jobs(
    lm: FlaTrainLM, suite: SuiteConfig, *, mirror: str | None = None, samples: Path | None = None
) -> Iterator[EvalJob]:
    """Yield a job for each of `suite.tasks`: tasks, groups or tags of lm-eval.

    Args:
        lm: the model.
        suite: its options of tasks.
        mirror: folder with local copies of data sets, see `local_datasets`; None: the Hub or its cache.
        samples: folder that gets `<task>.jsonl` with prompts, answers and scores of each example; None: they
            are not written.

    Raises:
        ValueError: a name that lm-eval does not know, or the tokenizer has no chat template.
    """
    if suite.apply_chat_template and not getattr(lm.tokenizer, "chat_template", None):
        raise ValueError("suite.apply_chat_template: the checkpoint's tokenizer has no chat template")
    include_path = Path(os.path.expanduser(suite.include_path)) if suite.include_path else None
    manager = task_manager(suite.tasks, include_path)
    keys = ("num_fewshot", "limit", "gen_kwargs", "apply_chat_template", "system_instruction")
    options = {key: getattr(suite, key) for key in keys}
    settings = options | {key: getattr(suite, key) for key in ("seed", "max_length", "save_samples")}
    settings |= {"mirror": mirror, "definitions": _definitions(include_path)}
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    if suite.seed is not None:
        options |= dict.fromkeys(seeds, suite.seed)

    def work(name: str) -> Measurements:
        lm.pop_truncated()  # a failed task may have left prompts there
        try:
            with local_datasets(mirror), redirect_stdout(sys.stderr):  # stdout is for the table
                loaded = manager.load([name])
                results = lm.evaluate(loaded, manager, options)
        except OTHER_RANK:
            raise
        except Exception as failure:  # a data set's code may raise anything; the other tasks still run
            line = described(failure)[:300]
            if isinstance(failure, ConnectionError | FileNotFoundError):
                line += f"; {remedy(mirror)}"
            raise ValueError(line) from failure
        truncated = lm.pop_truncated()
        if results is None:  # lm-eval collects the results on rank 0
            return Measurements()
        if samples is not None:
            _write_samples(samples, results["samples"])
        notes = []
        if suite.limit:
            notes.append(f"Only some examples of each task (suite.limit={suite.limit:g}): not comparable.")
        if suite.num_fewshot:
            notes.append(f"{suite.num_fewshot} examples in each prompt (suite.num_fewshot).")
        if truncated:
            notes.append(f"{name}: {truncated} prompts are cut to {lm.max_length} tokens (suite.max_length).")
        return Measurements(task_scores(results, loaded["tasks"], loaded["groups"]), notes=notes)

    for name in suite.tasks:
        yield EvalJob("tasks", name, settings, partial(work, name))


def task_manager(names: Sequence[str], include_path: Path | None) -> TaskManager:
    """Return a manager that knows every name. Index lm-eval's tasks, which takes seconds, only if needed."""
    if include_path is not None and not include_path.is_dir():
        raise ValueError(f"suite.include_path={include_path} is not a folder")
    for defaults in (False, True) if include_path else (True,):
        manager = TaskManager(include_path=include_path and str(include_path), include_defaults=defaults)
        unknown = [name for name in names if not manager.match_tasks([name])]
        if not unknown:
            return manager
    raise ValueError(f"lm-eval has no {', '.join(unknown)}: see `lm-eval ls tasks` or suite.include_path")


def _definitions(include_path: Path | None) -> list:
    """Return name, size and time of the files behind the user's tasks: edited files are other tasks."""
    files = include_path.rglob("*") if include_path else ()
    kept = sorted(f for f in files if f.suffix in (".yaml", ".py", ".jsonl", ".parquet"))
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in kept]


def _write_samples(folder: Path, samples: dict[str, list[dict]]) -> None:
    """Write a file for each task, one line per example and filter, in the order of the data set."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in samples.items():
        with (folder / f"{task}.jsonl").open("w", encoding="utf-8") as file:
            for row in sorted(rows, key=lambda row: row["doc_id"]):
                file.write(json.dumps(row, default=handle_non_serializable, ensure_ascii=False) + "\n")
