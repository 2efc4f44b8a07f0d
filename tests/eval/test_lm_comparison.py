"""scripts/reproduce_lm.sh: sizes of its models, and two tiny runs from training to the page."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import fla_train
from fla_train.cli.config_files import ConfigFiles
from fla_train.eval.lm_comparison import TOLERANCE, plan, read_models, results, write
from fla_train.training.config import resolve
from fla_train.training.plan import make_plan

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "scripts" / "reproduce_lm.sh"
TINY = (
    "model.hidden_size=64 model.num_hidden_layers=2 model.head_dim=16 trainer.max_steps=4 trainer.seq_len=64 "
    "trainer.global_batch_tokens=512 trainer.micro_batch_size=8 trainer.eval_tokens=2048 trainer.log_every=1"
)


def test_the_models_have_equal_sizes() -> None:
    """Of those that can be built here: flash-linear-attention is an optional package."""
    options, counts = ConfigFiles("train").options("model"), {}
    for name, model in read_models().items():
        overrides = model["overrides"].split()
        if overrides[0].removeprefix("model=") in options and "=fla/" not in overrides[0]:
            config = fla_train.compose("experiment=compare_50m", *overrides, "model.vocab_size=32000")
            run_plan = make_plan(resolve(config), None)
            counts[name] = run_plan.parameters_held
            assert run_plan.tokens == pytest.approx(30e6, rel=0.01)
    assert len(counts) >= 7
    median = statistics.median(counts.values())
    assert all(abs(count / median - 1) < TOLERANCE for count in counts.values()), counts
    with pytest.raises(ValueError, match="there is no model lama: choose from transformer, llama"):
        plan(["lama"])


@pytest.mark.long
@pytest.mark.usefixtures("unwatched")
def test_two_models_are_trained_evaluated_and_merged(tmp_path: Path) -> None:
    home, page = tmp_path / "runs", tmp_path / "docs" / "page.md"
    page.parent.mkdir()
    page.write_text("# By hand\n\n<!-- What follows is written by fla_train.eval.lm_comparison. -->\nold\n")
    settings = {
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "HOME_DIR": str(home),
        "PAGE": str(page),
        "DATA": f"data.max_documents=80 data.tokenizer.name=bytes data.cache_dir={tmp_path / 'cache'}",
        "EXTRA": TINY,
        "EVAL": "lengths=[64,128] documents=4 bucket=32 chunk=64",
    }

    def reproduce(*names: str, **others: str) -> str:
        words = ["bash", str(SCRIPT), *names]
        return subprocess.check_output(words, env=os.environ | settings | others, text=True, timeout=300)

    broken = {"EXTRA": f"{TINY} trainer.micro_batch_size=7", "EVALUATE": "0"}
    assert "skipped " in reproduce("gated_delta_net", **broken)
    said = reproduce("delta_net", "transformer")
    assert said.count("done  ") == 2 and said.count("evaluated  ") == 2
    text = page.read_text()
    assert text.startswith("# By hand") and "old" not in text
    assert (
        "\n| Transformer++ | " in text
        and "\n| DeltaNet | " in text
        and "\n| perplexity at | 64 | 128 |\n" in text
    )
    assert "Gated DeltaNet did not run: trainer.global_batch_tokens=512 is not a multiple" in text
    assert (page.parent / "figures" / "page.png").read_bytes().startswith(b"\x89PNG")
    assert reproduce("delta_net", EVALUATE="0").startswith("complete ")
    found = results(home)
    merged = json.loads((home / "comparison.json").read_text())
    assert merged["delta_net"]["loss"] == found["delta_net"]["loss"]
    assert [row["length"] for row in merged["transformer"]["length"]["lengths"]] == [64, 128]

    file = home / "delta_net" / "plan.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"data_folder": "/other"}))
    with pytest.raises(ValueError, match=r"their data differ: .*delta_net other"):
        write(home, page)
