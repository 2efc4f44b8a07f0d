"""Bridge to lm-eval: our checkpoints as an lm-eval model, and a task list run one task at a time."""

import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, redirect_stdout
from itertools import islice
from pathlib import Path
from typing import Any

import lm_eval.evaluator
import torch
import torch.nn.functional as F
from lm_eval import simple_evaluate
from lm_eval.api.instance import Instance
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.tasks import TaskManager
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from fla_train.eval.likelihood import Answer, log_likelihoods
from fla_train.eval.mirror import DatasetMissing, hub_datasets, mirror_folder
from fla_train.eval.parallel import ALONE, Ranks
from fla_train.eval.report import write_samples
from fla_train.eval.scores import LoadedTasks, task_scores
from fla_train.hub.load import document_prefix, resolve_checkpoint, trained_length, trained_prefix_of
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.utils.environment import git_commit

CPU_BATCH = 8  # what `auto` means there: a CPU has no out-of-memory error to find the limit by
NO_SHOTS = "no documents available for sampling"  # lm-eval, where nothing can fill a few-shot prompt
AUTO_TOKENS = 131_072  # tokens of a forward pass that `auto` means for our models on a GPU

# lm-eval's own asks git about the current folder, and git complains where that is no checkout.
lm_eval.evaluator.get_git_commit_hash = git_commit


@register_model("fla_train")
class FlaTrainLM(HFLM):
    """A causal language model for lm-eval, with the choices that recurrent models need.

    What differs from `HFLM`: a run folder may be given as `pretrained`; log-likelihoods are always taken in
    fp32 (in bf16 they are off by up to 0.07 nats per token); the context window is the training length unless
    `max_length` says otherwise, since a recurrent model has no limit of its own; and an empty context is the
    token that stood between documents in training, while BOS, which training never showed, is not added.
    Log-likelihoods of our recurrent models are computed by `log_likelihoods`, which reads a shared context
    once; those of all other models by `HFLM` itself.

    Args:
        pretrained: run folder, exported folder or Hub name; or a loaded model.
        tokenizer: needed with a loaded model; else a path, or None for the checkpoint's own.
        max_length: tokens of context and continuation together; longer requests lose their beginning.
        batch_size: requests of full length per forward (more of shorter ones, with our models), or `auto`:
            with our models what fills a GPU, with others the most that fit, on a CPU 8. What exceeds the
            GPU's memory is done in halves.
        max_batch_size: where `auto` starts, with other models.
        device: used when the model is loaded here; None is CUDA if there is one.
        dtype: of the weights when loaded here; `auto` keeps the stored one.
        add_bos_token: begin each request with the tokenizer's special tokens; None: only for models not
            trained here.
        prefix_token_id: stands for an empty context; None is EOS for models trained here, else BOS, else EOS.
        share_contexts: False takes our models through `HFLM` too: equal to it to the last digit, and slower.
        trust_remote_code: run the Python files that a model loaded here may bring along.
        ranks: processes that evaluate together, each with the model loaded; None leaves that to `HFLM`, which
            sees what `accelerate launch` started when the model is loaded here.
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
        if str(batch_size).startswith("auto") and device == "cpu":  # auto:4, too
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
        if add_bos_token is None and trained_prefix_of(self.model, self.tokenizer) is not None:
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
        """Every rank's values, one after the other."""
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
        """Every rank's `obj` on rank `dst`, None on the others."""
        if self._ranks is None:
            return super().gather_object(obj, dst)
        values = self._ranks.gather(obj)
        return values if self.rank == dst else None

    def together(self) -> AbstractContextManager[None]:
        """A block that ends on every rank if it fails on one, see `Ranks.together`."""
        return (self._ranks or ALONE).together()

    @property
    def prefix_token_id(self) -> int:
        """What stands for an empty context.

        Raises:
            ValueError: there is no such token.
        """
        token = super().prefix_token_id
        if token is None:
            raise ValueError(
                "an empty context needs a token, and the tokenizer has neither BOS nor EOS: name one of its "
                "tokens as eos_token in the checkpoint's tokenizer_config.json"
            )
        return token

    @property
    def _has_prefix(self) -> bool:
        return super().prefix_token_id is not None

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[Answer]:
        """As lm-eval's; for our models, each text that it will ask the tokenizer for is encoded beforehand,
        all in one call, which uses every core and takes the context of several answers once.
        """
        pairs = {request.args for request in requests if request.args[0]} if self._share_contexts else set()
        self._asked = requests
        try:
            with self._encoding({text for head, tail in pairs for text in (head + tail, head.rstrip())}):
                return super().loglikelihood(requests, disable_tqdm)
        finally:
            self._asked = ()

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """As `HFLM`'s.

        Raises:
            ValueError: the window leaves no room for a prompt beside the answer.
        """
        rooms: dict[str, int] = {}  # tokens left for a prompt, by settings of the generation
        for request in requests:
            prompt, settings = request.args
            key = repr(settings)
            if key not in rooms:
                answer = normalize_gen_kwargs(settings, self.max_gen_toks)["max_gen_toks"]
                rooms[key] = self.max_length - answer
                if rooms[key] <= 0:
                    longest = max(len(self.tok_encode(other.args[0])) for other in requests)
                    raise ValueError(
                        f"an answer of up to {answer} tokens leaves no room for a prompt in a window of "
                        f"{self.max_length}: set suite.max_length={answer + longest} (the longest prompt has "
                        f"{longest} tokens), or fewer tokens by suite.gen_kwargs={{max_gen_toks:...}}"
                    )
            if len(self.tok_encode(prompt)) > rooms[key]:
                self._truncated.add((request.task_name, request.doc_id))
        return super().generate_until(requests, disable_tqdm)

    def pop_truncated(self) -> dict[str, int]:
        """By task the examples, of all ranks, of which a prompt lost its beginning since the last call."""
        found = set().union(*(self._ranks or ALONE).gather(self._truncated))
        self._truncated = set()
        return dict(Counter(task for task, _ in found))

    @contextmanager
    def _encoding(self, texts: set[str]) -> Iterator[None]:
        """A block in which `tok_encode` looks up these texts, but for those it has to treat by itself."""
        prefix = self.tokenizer.decode(self.prefix_token_id) if self._has_prefix else None
        plain = [text for text in texts if text and not (prefix and text.startswith(prefix))]
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
        """Token ids of a text, looked up if they are there already."""
        if add_special_tokens is None and left_truncate_len is None and string in self._encoded:
            return self._encoded[string]
        if add_special_tokens is None and not self._has_prefix:  # `HFLM` asks whether the text begins with it
            add_special_tokens = self.add_bos_token is not False
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
        """Log-likelihood of each whole text, in disjoint windows of at most `max_length` tokens."""
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
        """As `HFLM`'s; a batch that exceeds the GPU's memory is generated in halves."""
        try:
            return super()._model_generate(context, max_length, stop, **options)
        except torch.OutOfMemoryError:
            if len(context) == 1:
                raise
        torch.cuda.empty_cache()
        masks = options.pop("attention_mask").chunk(2)
        halves = [
            self._model_generate(half, max_length, stop, attention_mask=mask, **options)
            for half, mask in zip(context.chunk(2), masks, strict=True)
        ]
        width, pad = max(half.shape[1] for half in halves), self.tokenizer.pad_token_id
        return torch.cat([F.pad(half, (0, width - half.shape[1]), value=pad) for half in halves])

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


def run_tasks(
    lm: FlaTrainLM,
    tasks: Iterable[str],
    *,
    include_path: str | Path | None = None,
    mirror: str | Path | None = None,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    gen_kwargs: dict[str, Any] | None = None,
    apply_chat_template: bool | str = False,
    system_instruction: str | None = None,
    seed: int | None = None,
    samples: Path | None = None,
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
        limit: examples per task, or a fraction below 1 of them; None is all. Limited results are not
            comparable with published ones.
        gen_kwargs: settings of generation in place of the tasks', such as `max_gen_toks` or `temperature`.
        apply_chat_template: put prompts into the tokenizer's chat template, or into the one of this name.
        system_instruction: begin prompts with it.
        seed: of few-shot examples and sampling; None: lm-eval's own (0 for `random`, 1234 for the others).
        samples: folder that gets a `<task>.jsonl` with what was asked and answered of each example; None:
            they are not kept.
        bootstrap_iters: resamples for the standard errors of metrics that have no closed form.
        part: called with the task's name and the work; lets the caller keep finished results.

    Returns:
        By task asked for: `{"scores": {task: {metric: value}}}`, with a `note` where the mirror has one; or
        `{"error": line}` for a task that could not run, with `missing` (true) where its data are not here;
        the others go on.

    Raises:
        ValueError: a name that lm-eval does not know, `mirror` is no folder, or the tokenizer has no chat
            template; nothing was run.
    """
    names = list(tasks)
    place = mirror_folder(mirror)
    if apply_chat_template and not getattr(lm.tokenizer, "chat_template", None):
        raise ValueError("suite.apply_chat_template: the checkpoint's tokenizer has no chat template")
    manager = LoadedTasks(task_manager(names, include_path))
    kinds = ("random_seed", "numpy_random_seed", "torch_random_seed", "fewshot_random_seed")

    def evaluate(name: str, notes: list[str]) -> dict:
        with redirect_stdout(sys.stderr):  # it prints what it does; the console gets the table alone
            results = simple_evaluate(
                lm,
                tasks=[name],
                task_manager=manager,
                num_fewshot=num_fewshot,
                limit=limit,
                gen_kwargs=gen_kwargs,
                apply_chat_template=apply_chat_template,
                system_instruction=system_instruction,
                bootstrap_iters=bootstrap_iters,
                log_samples=True,  # for their hashes
                **(dict.fromkeys(kinds, seed) if seed is not None else {}),
            )
        truncated = lm.pop_truncated()
        if results is None:  # lm-eval collects them on rank 0
            return {}
        if samples is not None:
            write_samples(samples, results["samples"])
        scores = task_scores(results, **manager.loaded, truncated=truncated)
        return {"scores": scores} | ({"note": "; ".join(dict.fromkeys(notes))} if notes else {})

    finished = {}
    for name in names:
        try:
            with hub_datasets(place) as notes, lm.together():
                finished[name] = part(f"task-{name}", lambda name=name, notes=notes: evaluate(name, notes))
        except Exception as failure:  # a data set's code may raise anything; the other tasks go on
            line = " ".join(str(failure).split())
            if not isinstance(failure, ValueError):
                line = f"{type(failure).__name__}: {line[:300]}"
            if NO_SHOTS in line:
                line += " Few-shot prompts need the task's training split."
            elif num_fewshot:
                line += f" (suite.num_fewshot={num_fewshot}: has the split of its examples so many?)"
            finished[name] = {"error": line, "missing": isinstance(failure, DatasetMissing)}
    return finished


def task_manager(names: list[str], include_path: str | Path | None) -> TaskManager:
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
