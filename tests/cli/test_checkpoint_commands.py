"""fla-eval, fla-generate and fla-export as commands, in process; test_quickstart.py starts them for real."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from fla_train.cli import app, eval, export, generate
from fla_train.cli.overrides import as_written
from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.models import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.utils.overrides import assign

Command = Callable[..., tuple[int, str, str]]
ODD = ["/ü/日本", "/runs (old)/x[1]", "/lr=1e-3/x", "a\\b'", "x{y}", "no\\'", "C:\\x", "ï/${x}", "1_0", "'a"]
TEXT = 'def f(a, b):  # it\'s "q" [x]\n'


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "first"
    config = DeltaProductConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_heads=1, head_dim=16)
    model = DeltaProductForCausalLM(config)
    export_model(
        model, load_tokenizer(TokenizerConfig("bytes")), folder / "hf/step-0000007", CardInfo(seq_len=64)
    )
    return folder


def test_eval(run: Path, tmp_path: Path, run_command: Command) -> None:
    documents = tmp_path / "documents.jsonl"
    documents.write_text("".join(json.dumps({"text": TEXT * n}) + "\n" for n in range(1, 9)))
    (tmp_path / "tasks").mkdir()
    task = {"task": "lines", "output_type": "loglikelihood_rolling", "test_split": "test"}
    task |= {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(documents)}}}
    task |= {"doc_to_text": "", "doc_to_target": "{{text}}", "metric_list": [{"metric": "byte_perplexity"}]}
    (tmp_path / "tasks/lines.yaml").write_text(json.dumps(task))
    output = tmp_path / "output"
    suite = ["suite=demo", f"suite.perplexity.sets=[{documents}]", "suite.tasks=[lines]"]
    suite.append(f"suite.include_path={tmp_path / 'tasks'}")
    code, out, err = run_command("fla-eval", f"checkpoint={run}", f"output={output}", *suite)
    assert code == 0, err
    results = json.loads((output / "results.json").read_text())
    scores = results["scores"]
    assert {score["length"] for score in scores if score["section"] == "perplexity"} == {128}
    # A model that knows nothing has 320 choices for each byte.
    (value,) = [score["value"] for score in scores if score["metric"] == "byte_perplexity"]
    assert 200 < value < 400
    assert (output / "table.md").read_text() in out
    assert str(output / "perplexity.png") in out


def test_generate(run: Path, run_command: Command) -> None:
    greedy = ("max_new_tokens=16", "temperature=0", "device=cpu")
    code, out, err = run_command("fla-generate", f"checkpoint={run}", f"prompt={TEXT}", *greedy)
    assert code == 0, err
    model = AutoModelForCausalLM.from_pretrained(run / "hf/step-0000007")
    tokenizer = AutoTokenizer.from_pretrained(run / "hf/step-0000007")
    ids = [tokenizer.eos_token_id, *tokenizer.encode(TEXT)]
    start = len(ids)
    for _ in range(16):
        with torch.no_grad():
            ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        if ids[-1] == tokenizer.eos_token_id:
            break
    assert out.rstrip("\n") == TEXT + tokenizer.decode(ids[start:], skip_special_tokens=True).rstrip("\n")


def test_prompts_of_a_file_get_what_each_gets_alone(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    generate.register()
    monkeypatch.setattr(generate, "BATCH", 3)
    prompts = ["def f(", "x", "", "a longer prompt, and é", "two\x0cpages\u2028of one line"]
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeff" + "\n".join(prompts) + "\n")
    options = [f"checkpoint={run}", "temperature=0", "max_new_tokens=8", "device=cpu"]

    def printed(override: str) -> str:
        assert generate.task(app.compose("generate", [*options, override])) == 0
        return capsys.readouterr().out

    rows = [json.loads(line) for line in printed(f"prompt_file={file}").strip().split("\n")]
    assert [row["prompt"] for row in rows] == prompts
    for prompt, row in zip(prompts, rows, strict=True):
        (alone,) = as_written("generate", [f"prompt={prompt}"])
        assert printed(alone).strip() == (prompt + row["continuation"]).strip()
    for content in (b"", b"caf\xe9\n"):  # nothing, and Latin-1
        file.write_bytes(content)
        with pytest.raises(ValueError, match=str(file)):
            printed(f"prompt_file={file}")


@pytest.mark.parametrize(
    "text",
    [TEXT, "", "a=b, c={d}", "it's", "'", "\\", "\\'", "end\\\\", "${x}", "$", "null", "3", " x ", "é"],
)
def test_any_prompt_passes_through_hydra(text: str) -> None:
    generate.register()
    config = app.compose("generate", as_written("generate", [f"prompt={text}"]))
    assert OmegaConf.to_object(config).prompt == text


@pytest.mark.parametrize("path", ["runs/a-1/x.y", "r,1", "my runs/x y", "it's", "a=b", "[x]", "~/x", *ODD])
@pytest.mark.parametrize("program", [True, False])
def test_any_path_passes_through_hydra(path: str, program: bool) -> None:
    generate.register()
    given = assign("checkpoint", Path(path)) if program else f"checkpoint={path}"
    config = app.compose("generate", as_written("generate", [given, "prompt=x"]))
    assert OmegaConf.to_object(config).checkpoint == path


def test_export(run: Path, tmp_path: Path, run_command: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    copy = tmp_path / "copy"
    words = [f"checkpoint={run}", f"output={copy}", "hub.repo_id=user/tiny"]
    code, out, err = run_command("fla-export", *words)
    assert code == 2
    assert {f.name for f in copy.iterdir()} == {f.name for f in (run / "hf/step-0000007").iterdir()}
    assert "exported to" in out
    assert err.count("\n") == 1 and err.startswith("error: no Hub token")


@pytest.mark.parametrize(
    ("module", "name", "overrides", "message"),
    [
        (export, "export", [], "give checkpoint="),
        (export, "export", ["checkpoint=RUN"], "nothing to do"),
        (export, "export", ["checkpoint=user/model", "output=x"], "on the Hub already"),
        (export, "export", ["checkpoint=absent", "output=x"], "absent does not exist"),
        (export, "export", ["checkpoint=absent", "hub.repo_id=../x"], r"hub\.repo_id=\.\./x is not a name"),
        (generate, "generate", ["temperature=-1", "top_p=0"], r"temperature(.|\n)*top_p"),
        (generate, "generate", ["checkpoint=RUN", "prompt_file=absent"], "prompt_file=absent is no file"),
        (generate, "generate", ["checkpoint=RUN", f"seed={2**65}"], "seed"),
        (generate, "generate", ["checkpoint=RUN", "device=abacus"], "device=abacus"),
        (eval, "eval", [], "give checkpoint="),
        (eval, "eval", ["checkpoint=RUN", "suite=tasks"], "suite"),
        (eval, "eval", ["checkpoint=RUN", "suite=perplexity"], "not in a run folder"),
    ],
)
def test_requests_that_cannot_work(run: Path, module, name, overrides, message) -> None:
    module.register()
    config = app.compose(name, [o.replace("RUN", str(run)) for o in overrides])
    with pytest.raises(ValueError, match=message):
        module.task(config)


@pytest.mark.parametrize(
    ("words", "place", "line"),
    [
        (
            ["fla-eval", "checkpoint=x"],
            "fla_train.eval.run.evaluate",
            "interrupted; finished sets and tasks are kept: add output=x/y",
        ),
        (["fla-generate", "checkpoint=x"], "fla_train.hub.load.load_model", "interrupted\n"),
        (["fla-train"], "fla_train.cli.train.register", "interrupted\n"),  # which imports torch
        (["fla-doctor"], "fla_train.bench.backend_checks.run_checks", "interrupted\n"),
        (["fla-runs", "runs"], "fla_train.cli.runs.show", "interrupted\n"),
        (["fla-bench", "kernels"], "fla_train.cli.bench.run", "interrupted\n"),
    ],
)
def test_an_interrupt_is_a_line(words: list[str], place: str, line: str, run_command, monkeypatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt(*(["x/y"] if words[0] == "fla-eval" else []))

    monkeypatch.setattr(place, interrupt)
    code, _, err = run_command(*words)
    assert code == 130 and err.startswith(f"error: {line}")


@pytest.mark.parametrize("suite", ["perplexity", "tasks", "demo", "zero_shot", "recall", "paper"])
def test_every_suite_composes(suite: str) -> None:
    eval.register()
    assert OmegaConf.to_object(app.compose("eval", [f"suite={suite}"])).suite.name == suite


def test_generate_draws_the_same_text_for_the_same_seed(run: Path, capsys: pytest.CaptureFixture) -> None:
    texts = []
    for seed in (1, 1, 2):
        sampling = ["max_new_tokens=20", "top_k=50", "top_p=0.9"]
        generate.register()
        assert generate.task(app.compose("generate", [f"checkpoint={run}", f"seed={seed}", *sampling])) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]
