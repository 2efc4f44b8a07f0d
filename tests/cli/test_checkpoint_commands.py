"""fla-eval, fla-generate and fla-export in this process; test_quickstart.py starts them as commands."""

import json
import re
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from transformers import AutoModelForCausalLM, AutoTokenizer

from fla_train.cli import app, generate
from fla_train.cli.overrides import quote_values
from fla_train.data.config import TokenizerConfig
from fla_train.data.tokenizers import load_tokenizer
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import DeltaProductForCausalLM
from fla_train.utils.overrides import assign

Command = Callable[..., tuple[int, str, str]]
PATHS = ["runs/a-1/x.y", "r,1", "my runs/x y", "it's", "a=b", "[x]", "~/x", "/ü/日本", "/runs (old)/x[1]"]
PATHS += ["/lr=1e-3/x", "a\\b'", "x{y}", "no\\'", "C:\\x", "ï/${x}", "1_0", "'a"]
CODE = 'def f(a, b):  # it\'s "q" [x]\n'
TEXTS = [CODE, "", "a=b, c={d}", "it's", "'", "\\", "\\'", "end\\\\", "${x}", "$", "null", "3", " x ", "é"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("runs") / "first"
    config = DeltaProductConfig(vocab_size=320, hidden_size=32, num_hidden_layers=1, num_heads=1, head_dim=16)
    model, tokenizer = DeltaProductForCausalLM(config), load_tokenizer(TokenizerConfig("bytes"))
    export_model(model, tokenizer, folder / "hf/step-0000007", CardInfo(seq_len=64))
    return folder


def test_greedy_continuations_are_those_of_transformers(run, tmp_path, run_command, monkeypatch):
    """Prompts of a file, in batches, have the continuations that each has alone."""
    monkeypatch.setattr(generate, "BATCH", 3)
    prompts = ["def f(", "x", "", "a longer prompt, and é", "two\x0cpages\u2028of one line"]
    file = tmp_path / "prompts.txt"
    file.write_text("\ufeff" + "\n".join(prompts) + "\n")
    words = ("fla-generate", f"checkpoint={run}", "max_new_tokens=8", "temperature=0", "device=cpu")
    monkeypatch.setenv("HOME", str(tmp_path))
    code, out, err = run_command(*words, "prompt_file=~/prompts.txt")
    assert code == 0, err
    rows = [json.loads(line) for line in out.strip().split("\n")]
    assert [row["prompt"] for row in rows] == prompts
    model = AutoModelForCausalLM.from_pretrained(run / "hf/step-0000007")
    tokenizer = AutoTokenizer.from_pretrained(run / "hf/step-0000007")
    for prompt, row in zip(prompts, rows, strict=True):
        ids = [tokenizer.eos_token_id, *tokenizer.encode(prompt)]
        start = len(ids)
        while len(ids) < start + 8 and (ids[-1] != tokenizer.eos_token_id or len(ids) == start):
            with torch.no_grad():
                ids.append(model(torch.tensor([ids])).logits[0, -1].argmax().item())
        assert row["continuation"] == tokenizer.decode(ids[start:], skip_special_tokens=True)
    _, out, _ = run_command(*words, f"prompt={prompts[3]}")
    assert out.strip() == (prompts[3] + rows[3]["continuation"]).strip()
    for content in (b"", b"caf\xe9\n"):  # nothing, and Latin-1
        file.write_bytes(content)
        assert run_command(*words, f"prompt_file={file}")[0] == 2


def test_a_seed_determines_the_sampled_text(run: Path, capsys: pytest.CaptureFixture) -> None:
    generate.register()
    texts, wide = [], ["top_k=50", "top_p=0.9"]
    narrow = [["temperature=0"], ["temperature=1e-4"], ["top_k=1"], ["top_p=1e-6"]]  # all of them greedy
    for seed, options in [(1, wide), (1, wide), (2, wide), *enumerate(narrow)]:
        sampling = [f"checkpoint={run}", f"seed={seed}", "max_new_tokens=20", *options]
        assert generate.task(app.HydraJob(app.compose("generate", sampling))) == 0
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2] and len({*texts[3:]}) == 1


def test_any_text_and_path_pass_through_hydra() -> None:
    generate.register()
    typed = [(f"checkpoint={path}", path) for path in PATHS]
    typed += [(assign("checkpoint", Path(path)), path) for path in PATHS]
    for (override, path), text in zip(typed, cycle(TEXTS), strict=False):
        node = app.compose("generate", quote_values("generate", [override, f"prompt={text}"]))
        config = OmegaConf.to_object(node)
        assert (config.checkpoint, config.prompt) == (path, text)


def test_export_copies_and_needs_a_token_to_push(run, tmp_path, run_command, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    copy = tmp_path / "copy"
    words = [f"checkpoint={run}", f"output={copy}", "hub.repo_id=user/tiny"]
    code, out, err = run_command("fla-export", *words)
    assert code == 2 and "exported to" in out
    assert {f.name for f in copy.iterdir()} == {f.name for f in (run / "hf/step-0000007").iterdir()}
    assert err.count("\n") == 1 and err.startswith("error: no Hub token")


@pytest.mark.parametrize(
    ("words", "function", "line"),
    [
        (["fla-eval", "checkpoint=x"], "fla_train.eval.run.evaluate", "interrupted.* output=x/y\n"),
        (["fla-train"], "fla_train.cli.train.register", "interrupted\n"),  # It imports torch.
        (["fla-runs", "runs"], "fla_train.cli.runs.show", "interrupted\n"),
    ],
)
def test_an_interrupt_is_a_line(words: list[str], function: str, line: str, run_command, monkeypatch) -> None:
    def interrupt(*arguments: object, **options: object) -> None:
        raise KeyboardInterrupt(*(["x/y"] if words[0] == "fla-eval" else []))

    monkeypatch.setattr(function, interrupt)
    code, _, err = run_command(*words)
    assert code == 130 and re.fullmatch(f"error: {line}", err)
