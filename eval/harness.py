"""Bridge to lm-eval: our checkpoints as an lm-eval model, and a job for each task."""

import json
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import torch
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, handle_non_serializable, make_disjoint_window
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.eval.config import SuiteConfig
from fla_train.eval.likelihood import Answer, log_likelihoods
from fla_train.eval.memory import in_halves
from fla_train.eval.parallel import ALONE, OTHER_RANK, Ranks
from fla_train.eval.result import Measured
from fla_train.eval.result_cache import Job
from fla_train.eval.scores import task_scores
from fla_train.eval.sets import local_datasets, remedy
from fla_train.hub.card import PREFIX
from fla_train.hub.load import document_prefix, resolve_checkpoint, trained_length
from fla_train.models.modeling import DeltaProductForCausalLM
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
        max_batch_size: first batch size that `auto` tries with other models.
        device: of a model that is loaded here; None: CUDA if there is one.
        dtype: of the weights of a model that is loaded here; `auto`: as stored.
        add_bos_token: begin each request with the tokenizer's special tokens; None: only for models that were
            not trained here.
        prefix_token_id: the empty context; None: EOS for models trained here, else BOS, else EOS.
        share_contexts: False computes log-likelihoods of our models by `HFLM` too, which is slower.
        trust_remote_code: run the Python files of a model that is loaded here.
        ranks: processes that evaluate together, each with the model loaded; None leaves parallelism to `HFLM`
            and `accelerate launch`.
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
        share_contexts: bool = True,
        trust_remote_code: bool = False,
        ranks: Ranks | None = None,
    ) -> None:
        loaded = isinstance(pretrained, PreTrainedModel)
        device = (
            str(pretrained.device) if loaded else device or ("cuda" if torch.cuda.is_available() else "cpu")
        )
        if str(batch_size).startswith("auto") and device == "cpu":  # also auto:4
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
            trust_remote_code=trust_remote_code,
        )
        self._max_length = max_length or trained_length(self.model)
        if add_bos_token is None and hasattr(self.model.config, PREFIX):
            self.add_bos_token = False
        if prefix_token_id is None:
            self.custom_prefix_token_id = next(iter(document_prefix(self.model, self.tokenizer)), None)
        ours = isinstance(self.model, DeltaProductForCausalLM) and self.model.config.mixer is None
        self._share_contexts = share_contexts and ours
        self._encoded: dict[str, list[int]] = {}
        if self._share_contexts and self.batch_size == "auto":
            self.batch_size_per_gpu = max(AUTO_TOKENS // self._max_length, 1)

        self._asked: Sequence[Instance] = ()
        self._truncated: set[tuple[str | None, int | None]] = set()
        self._ranks = ranks
        if ranks is not None:
            self._rank, self._world_size = ranks.rank, ranks.world

    def all_gather(self, tensor: Tensor) -> Tensor:
        """Return every rank's values, one after the other."""
        if self._ranks is None:
            return super().all_gather(tensor)
        return torch.cat([values.reshape(-1) for values in self._ranks.gather(tensor.cpu())])

    def barrier(self) -> None:
        """Wait for the other ranks."""
        if self._ranks is None:
            super().barrier()
        else:
            self._ranks.gather(None)

    def gather_object(self, obj: Any, dst: int = 0) -> list | None:
        """Return every rank's `obj` on rank `dst`, None on the others."""
        if self._ranks is None:
            return super().gather_object(obj, dst)
        values = self._ranks.gather(obj)
        return values if self.rank == dst else None

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """Return log-likelihoods of continuations.

        For our models all texts are tokenized beforehand in one call, which uses every core and encodes the
        context of several answers once.
        """
        pairs = {request.args for request in requests if request.args[0]} if self._share_contexts else set()
        self._asked = requests
        try:
            with self._encoding({text for head, tail in pairs for text in (head + tail, head.rstrip())}):
                return super().loglikelihood(requests, disable_tqdm)
        finally:
            self._asked = ()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate as `HFLM` does, and count prompts that lose their beginning."""
        for request in requests:
            prompt, settings = request.args
            room = self.max_length - normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
            if len(self.tok_encode(prompt)) > room:
                self._truncated.add((request.task_name, request.doc_id))
        return super().generate_until(requests, disable_tqdm)

    def pop_truncated(self) -> int:
        """Return the number of examples whose prompt lost its beginning since the last call, on all ranks."""
        found = set().union(*(self._ranks or ALONE).gather(self._truncated))
        self._truncated = set()
        return len(found)

    @contextmanager
    def _encoding(self, texts: set[str]) -> Iterator[None]:
        """Make `tok_encode` look up these texts. It handles those that begin with the prefix by itself."""
        prefix = self.tokenizer.decode(self.prefix_token_id)
        plain = [text for text in texts if text and not text.startswith(prefix)]
        special = {} if self.add_bos_token is None else {"add_special_tokens": self.add_bos_token}
        try:
            if plain:
                self._encoded = dict(zip(plain, self.tokenizer(plain, **special)["input_ids"], strict=True))
            yield
        finally:
            self._encoded = {}

    def tok_encode(
        self,
        string: str,
        add_special_tokens: bool | None = None,
        left_truncate_len: int | None = None,
        **options: Any,
    ) -> list[int]:
        """Return the token ids of a text."""
        if add_special_tokens is None and left_truncate_len is None and string in self._encoded:
            return self._encoded[string]
        return super().tok_encode(string, add_special_tokens, left_truncate_len, **options)

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        override_bs: int | None = None,
    ) -> list[Answer]:
        for asked, (_, context, continuation) in zip(self._asked, requests, strict=False):
            if len(context) + len(continuation) > self.max_length + 1:
                self._truncated.add((asked.task_name, asked.doc_id))
        if not self._share_contexts:
            return super()._loglikelihood_tokens(requests, disable_tqdm, override_bs)
        pairs = [(context, continuation) for _, context, continuation in requests]
        answers = self._answer(pairs, disable_tqdm)
        for (texts, _, _), answer in zip(requests, answers, strict=True):
            self.cache_hook.add_partial("loglikelihood", texts, answer)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of each text, in disjoint windows of at most `max_length` tokens."""
        if not self._share_contexts:
            return super().loglikelihood_rolling(requests, disable_tqdm)
        texts = [request.args[0] for request in requests]
        with self._encoding(set(texts)):
            windows = [[make_disjoint_window(window) for window in self._windows(text)] for text in texts]
        answers = iter(self._answer([window for text in windows for window in text], disable_tqdm))
        totals = [sum(value for value, _ in islice(answers, len(text))) for text in windows]
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        """Generate as `HFLM` does; a batch that exceeds the GPU's memory is generated in halves."""
        generate, mask = super()._model_generate, options.pop("attention_mask")

        def work(rows: Sequence[int]) -> list[Tensor]:
            rows = list(rows)
            return list(generate(context[rows], max_length, stop, attention_mask=mask[rows], **options))

        pad = self.tokenizer.pad_token_id
        return pad_sequence(in_halves(work, range(len(context))), batch_first=True, padding_value=pad)

    def _windows(self, text: str) -> Iterable[tuple[list[int], list[int]]]:
        tokens, prefix = self.tok_encode(text), self.prefix_token_id
        return get_rolling_token_windows(tokens, prefix, max_seq_len=self.max_length, context_len=1)

    def _answer(self, pairs: list[tuple[list[int], list[int]]], quiet: bool) -> list[Answer]:
        return log_likelihoods(
            self.model,
            pairs,
            max_length=self.max_length,
            batch_tokens=self.batch_size * self.max_length,
            progress=not quiet and self.rank == 0,
        )


def task_jobs(
    lm: FlaTrainLM, suite: SuiteConfig, *, mirror: str | None = None, samples: Path | None = None
) -> Iterator[Job]:
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
    manager = task_manager(suite.tasks, suite.include_path)
    keys = ("num_fewshot", "limit", "gen_kwargs", "apply_chat_template", "system_instruction")
    options = {key: getattr(suite, key) for key in keys}
    settings = options | {key: getattr(suite, key) for key in ("seed", "max_length", "save_samples")}
    settings |= {"mirror": mirror, "definitions": _definitions(suite.include_path)}
    seeds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")
    if suite.seed is not None:
        options |= dict.fromkeys(seeds, suite.seed)

    def run(name: str) -> Measured:
        lm.pop_truncated()  # of a task that failed
        loaded = manager.load([name])
        children = {child for names in loaded["group_map"].values() for child in names}
        everything = {**loaded["groups"], **loaded["tasks"]}
        with redirect_stdout(sys.stderr):  # lm-eval prints; stdout is for the table
            results = simple_evaluate(
                lm,
                tasks=[item for key, item in everything.items() if key not in children],
                task_manager=manager,
                bootstrap_iters=BOOTSTRAP,
                log_samples=True,  # for their hashes and contributions
                **options,
            )
        truncated = lm.pop_truncated()
        if results is None:  # lm-eval collects the results on rank 0
            return Measured()
        if samples is not None:
            _write_samples(samples, results["samples"])
        scores = task_scores(results, loaded["tasks"], loaded["groups"])
        notes = []
        if suite.limit:
            notes.append(f"Only some examples of each task (suite.limit={suite.limit:g}): not comparable.")
        if suite.num_fewshot:
            notes.append(f"{suite.num_fewshot} examples in each prompt (suite.num_fewshot).")
        if truncated:
            notes.append(
                f"{name}: {truncated} prompts are longer than the window of {lm.max_length} tokens and lost "
                "their beginning (suite.max_length)."
            )
        return Measured(scores, notes=notes)

    def work(name: str) -> Measured:
        try:
            with local_datasets(mirror):
                return run(name)
        except OTHER_RANK:
            raise
        except Exception as failure:  # a data set's code may raise anything; the other tasks still run
            line = described(failure)[:300]
            if isinstance(failure, ConnectionError | FileNotFoundError):
                line += f"; {remedy(mirror)}"
            raise ValueError(line) from failure

    for name in suite.tasks:
        yield Job("tasks", name, settings, partial(work, name))


def task_manager(names: Sequence[str], include_path: str | Path | None) -> TaskManager:
    """Return a manager that knows every name. Index lm-eval's tasks, which takes seconds, only if needed."""
    if include_path is not None:
        if not Path(include_path).is_dir():
            raise ValueError(f"suite.include_path={include_path} is not a folder")
        local = TaskManager(include_path=str(include_path), include_defaults=False)
        if all(local.match_tasks([name]) for name in names):
            return local
    manager = TaskManager(include_path=include_path and str(include_path))
    if unknown := [name for name in names if not manager.match_tasks([name])]:
        raise ValueError(
            f"lm-eval has no task {', '.join(unknown)}: see `lm-eval ls tasks`, or set suite.include_path"
        )
    return manager


def _definitions(include_path: str | None) -> list:
    """Return name, size and time of the files behind the user's tasks: edited files are other tasks."""
    files = Path(include_path).rglob("*") if include_path else ()
    kept = sorted(f for f in files if f.suffix in (".yaml", ".py", ".jsonl", ".parquet"))
    return [[f.name, f.stat().st_size, f.stat().st_mtime_ns] for f in kept]


def _write_samples(folder: Path, samples: dict[str, list[dict]]) -> None:
    """Write a file for each task, one line per example and filter, in the order of the data set."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, rows in samples.items():
        with (folder / f"{task}.jsonl").open("w", encoding="utf-8") as file:
            for row in sorted(rows, key=lambda row: row["doc_id"]):
                file.write(json.dumps(row, default=handle_non_serializable, ensure_ascii=False) + "\n")
