import itertools
import json
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import datasets
import numpy as np
import pytest
import torch
import yaml
from lm_eval.api.model import LM
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel, PreTrainedTokenizerBase

from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.eval.config import SuiteConfig
from fla_train.eval.harness import task_jobs
from fla_train.eval.parallel import ALONE, Ranks
from fla_train.eval.result import EvalResult
from fla_train.eval.result_cache import EvalJob, run_eval_jobs
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM

SIZE = {"vocab_size": 320, "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96}


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerBase:
    return load_tokenizer(TokenizerConfig(name="bytes"))


@pytest.fixture(params=["delta_product", "llama"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """Weights wide enough that no two logits tie: a random model of the usual width is nearly uniform."""
    if request.param == "llama":
        model = LlamaForCausalLM(LlamaConfig(num_attention_heads=2, initializer_range=0.3, **SIZE))
    else:
        model = delta_product(initializer_range=0.3)
    return model.eval()


def delta_product(**settings: object) -> DeltaProductForCausalLM:
    shape = {"num_heads": 2, "head_dim": 16, "num_householder": 2, "use_forget_gate": True}
    return DeltaProductForCausalLM(DeltaProductConfig(**(SIZE | shape | settings)))


@pytest.fixture(scope="session")
def build_model() -> Callable[..., DeltaProductForCausalLM]:
    """`build_model(**config)`: a small Gated DeltaProduct with random weights."""
    return delta_product


TaskWriter = Callable[..., Path]
CHOICES = {
    "output_type": "multiple_choice",
    "doc_to_text": "{{question}}",
    "doc_to_choice": "{{choices}}",
    "doc_to_target": "{{answer}}",
    "metric_list": [{"metric": "acc"}],
}
RECITE = {
    "output_type": "generate_until",
    "doc_to_text": "{{question}}",
    "doc_to_target": "{{choices[answer]}}",
    "generation_kwargs": {"until": ["n"], "max_gen_toks": 10, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
    "filter_list": [
        {"name": "word", "filter": [{"function": "remove_whitespace"}, {"function": "take_first"}]}
    ],
}
ROLLING = {
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "{{text}}",
    "metric_list": [{"metric": "word_perplexity"}],
}


@pytest.fixture
def write_task(tmp_path: Path) -> TaskWriter:
    """`write_task(name, rows, output_type=..., ...)` defines a local lm-eval task; returns its folder."""

    def write(name: str, rows: list[dict], **definition: object) -> Path:
        folder = tmp_path / "tasks"
        folder.mkdir(exist_ok=True)
        data = folder / f"{name}.jsonl"
        data.write_text("".join(json.dumps(row) + "\n" for row in rows))
        task = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}},
            "test_split": "test",
            **definition,
        }
        (folder / f"{name}.yaml").write_text(yaml.safe_dump(task))
        return folder

    return write


@pytest.fixture(autouse=True)
def datasets_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
    monkeypatch.setattr("lm_eval.evaluator.add_env_info", lambda results: None)  # it runs `pip list`


def write_mirror(folder: Path, sets: dict[tuple[str, str, str], list[dict]]) -> Path:
    """Write rows, by (name on the Hub, config, split), as folders of the Hub; return `folder`."""
    headers: dict[str, dict[str, list[dict]]] = {}
    for (name, config, split), rows in sets.items():
        file = folder / name / config / f"{split}.jsonl"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        files = headers.setdefault(name, {}).setdefault(config, [])
        files.append({"split": split, "path": f"{config}/{split}.jsonl"})
    for name, configs in headers.items():
        entries = [{"config_name": config, "data_files": files} for config, files in configs.items()]
        (folder / name / "README.md").write_text(f"---\n{yaml.safe_dump({'configs': entries})}---\n")
    return folder


def measure(jobs: Iterable[EvalJob], folder: Path, ranks: Ranks = ALONE) -> EvalResult:
    """Run the jobs with a cache in `folder`."""
    result = EvalResult(name="model", suite={"name": "test", "tasks": []})
    run_eval_jobs(jobs, result, folder, {}, ranks)
    return result


@pytest.fixture
def run_tasks(tmp_path: Path) -> Callable[..., EvalResult]:
    """`run_tasks(lm, names, **options of the suite)`: results of tasks of lm-eval; nothing is kept."""
    numbers = itertools.count()

    def run(lm: LM, names: Sequence[str], *, mirror: Path | None = None, **options: object) -> EvalResult:
        if "include_path" in options:
            options["include_path"] = str(options["include_path"])
        suite = SuiteConfig(name="tasks", tasks=list(names), **options)
        samples = tmp_path / "samples" if suite.save_samples else None
        jobs = task_jobs(lm, suite, mirror=mirror and str(mirror), samples=samples)
        return measure(jobs, tmp_path / f"parts-{next(numbers)}")

    return run


def value(result: EvalResult, data: str, metric: str, length: int | None = None) -> float:
    """Return a number of the result."""
    (score,) = [s for s in result.scores if (s.data, s.metric, s.length) == (data, metric, length)]
    return score.value


def short_of_memory(patch: pytest.MonkeyPatch, owner: object, name: str, most: int) -> list[int]:
    """`owner.NAME` has memory for `most` sequences; returns the list of the numbers it is called with."""
    function, sizes = getattr(owner, name), []

    def run(*args: object, **options: object) -> object:
        batch = options.get("input_ids", next((x for x in args if isinstance(x, torch.Tensor | list)), None))
        sizes.append(len(batch))
        if len(batch) > most:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return function(*args, **options)

    patch.setattr(owner, name, run)
    return sizes


@torch.no_grad()
def token_losses(model: PreTrainedModel, ids: Sequence[int]) -> np.ndarray:
    """Losses of all tokens but the first, in fp64, by one pass over them."""
    logits = model(torch.tensor([list(ids)]), use_cache=False).logits[0, :-1].double()
    return -logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].numpy()


def train(model: PreTrainedModel, ids: torch.Tensor, labels: torch.Tensor, steps: int) -> None:
    """Fit `labels` until the loss is small; fails if it stays large."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(steps):
        loss = model.train()(ids, labels=labels).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.05, f"the model did not learn the answers: loss {loss.item():.3f}"
    model.eval()


@pytest.fixture(scope="session")
def quiz() -> list[dict]:
    """Questions that nothing but the answer key helps with: 16 names, each with one of 4 colours."""
    colours = ["red", "blue", "green", "pink"]
    return [
        {"question": f"{a}{b}:", "choices": colours, "answer": (5 * i + 3 * j) % 4}
        for i, a in enumerate("kmtz")
        for j, b in enumerate("aeou")
    ]


@pytest.fixture(scope="session")
def scholar(quiz: list[dict], tokenizer: PreTrainedTokenizerBase) -> DeltaProductForCausalLM:
    """A model that has seen the answers of `quiz`."""
    torch.manual_seed(0)
    model = delta_product()
    texts = [f"{row['question']} {row['choices'][row['answer']]}{tokenizer.eos_token}" for row in quiz]
    batch = tokenizer(texts, padding=True, add_special_tokens=False, return_tensors="pt")
    ids = batch["input_ids"]
    labels = ids.masked_fill(batch["attention_mask"] == 0, -100)
    labels[:, :3] = -100  # the question itself
    train(model, ids, labels, steps=100)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model
