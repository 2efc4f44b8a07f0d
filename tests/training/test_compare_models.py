"""`fla-runs compare`: equal sizes, best rates and seeds, and what its table says about them."""

import json
import os
import re
import signal
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pandas as pd
import pytest
import yaml
from omegaconf import OmegaConf
from scipy import stats
from warm_ranks import WarmRanks

from fla_train.api import compose
from fla_train.cli import app, bench, train_list
from fla_train.cli.comparison import Comparison, compare, solve_size
from fla_train.cli.comparison_config import ComparedTask, SizeConfig, build_parser, read_comparison
from fla_train.cli.comparison_config import ComparisonConfig as Config
from fla_train.eval import model_comparison
from fla_train.eval.run import evaluate
from fla_train.models.build import build_on_meta

ROOT = Path(__file__).parents[2]
SUITE = ["suite.perplexity.lengths=[16,32]", "suite.perplexity.bucket=16", "device=cpu"]
COMPARISON = {
    "models": {
        "DeltaNet": ["model=delta_net/tiny", "model.num_heads=2", "model.head_dim=16"],
        "Llama, small": ["model=hf/llama/tiny"],
    },
    "tokens": 1600,
    "learning_rates": [1e-3, 1e-2],
    "seeds": [0, 1],
    "sizes": {"Llama, small": {"field": "model.config.intermediate_size", "multiple": 4}},
    "suites": {"perplexity": SUITE},
}


@pytest.fixture
def file(overrides: list[str], tmp_path: Path) -> Path:
    """A comparison of two tiny models."""
    ours = ("model.num_heads", "model.head_dim", "model.vocab_size", "optimizer.lr", "trainer.max_steps")
    base = [text for text in overrides if text.split("=")[0] not in ours]
    base += ["launch.device=cpu", "trainer.micro_batch_size=8", "trainer.checkpoint_every=0"]
    path = tmp_path / "sizes.yaml"
    path.write_text(yaml.safe_dump({"base": base, **COMPARISON}, sort_keys=False))
    return path


@pytest.fixture
def started(warm_ranks: WarmRanks, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The runs and evaluations that were started, done by warm ranks. After the second, Ctrl-C arrives."""
    names = []

    def start(command: str, words: list[str], log: Path, **variables: str) -> SimpleNamespace:
        log.touch()
        names.append(str(log.parent))
        if command == "train":
            warm_ranks.launch(compose(*words))
        elif command == "bench":
            bench.run(words)
        else:
            evaluate(OmegaConf.to_object(app.compose("eval", words)), progress=False)
        if len(names) == 2:
            os.kill(os.getpid(), signal.SIGINT)
        return SimpleNamespace(poll=lambda: 0, returncode=0, send_signal=lambda number: None)

    monkeypatch.setattr(train_list, "start_command", start)
    monkeypatch.setattr(train_list, "POLL", 0)
    return names


def test_an_interrupted_comparison_continues(file: Path, started: list[str], tmp_path: Path, capsys) -> None:
    folder = tmp_path / "runs"
    words = [str(file), "--folder", str(folder), "--gpus", "none"]
    request, dry = (build_parser().parse_args([*words, *more]) for more in ([], ["--dry-run"]))
    assert compare(dry) == 0 and not folder.exists()
    assert "6 runs, 9,600 tokens" in capsys.readouterr().out
    assert compare(request) == app.INTERRUPTED and len(started) == 2
    assert "Not complete" in (folder / "table.md").read_text()
    assert compare(request) == 0 and len(started) == len(set(started)) == 6 + 4 + 2
    table = pd.read_csv(folder / "table.csv").set_index(["model", "metric"])
    for model in COMPARISON["models"]:
        row = table.loc[model, "validation loss"]
        runs = [folder / model / f"lr-{row.learning_rate}" / f"seed-{seed}" for seed in (0, 1)]
        lines = [(run / "metrics.jsonl").read_text().splitlines() for run in runs]
        records = [[json.loads(line) for line in content] for content in lines]
        losses = [[r["validation_loss"] for r in run if "validation_loss" in r][-1] for run in records]
        assert row.value == pytest.approx(np.mean(losses)) and row.seeds == 2
        interval = stats.t.interval(0.95, 1, np.mean(losses), stats.sem(losses))
        assert (row.low, row.high) == pytest.approx(interval)
        assert {r["tokens"] for r in records[0]} == {256 * step for step in range(1, 7)}
        results = [json.loads((run / "eval/perplexity/results.json").read_text()) for run in runs]
        values = [r["value"] for result in results for r in result["scores"] if r["metric"] == "perplexity"]
        assert table.loc[model, "validation perplexity at 32"].value == pytest.approx(np.mean(values[1::2]))
        assert table.loc[model, "decode ms/token"].value > 0
    counts = table.parameters.groupby("model").first()
    assert abs(counts["DeltaNet"] - counts["Llama, small"]) <= 2 * 3 * 2 * 32
    text = (folder / "table.md").read_text()
    assert text.count("initial transient") == 2  # six steps, and the loss falls by 0.35 nats per doubling
    assert text.count("is at the edge of the sweep") == 2 and (folder / "comparison.png").is_file()


def test_the_hours_of_small_models_are_near_measured_ones(tmp_path: Path) -> None:
    """100 runs of 50M parameters. An H100 or H200 starts one in 20 to 37 s; alone, it trains at 0.4M to 0.9M
    tokens/s. With six at once, recipes-50m.json has 186,000 tokens/s for each.
    """
    config = read_comparison(ROOT / "docs/examples/compare_50m.yaml", ["model.vocab_size=32000"])
    config.models = {"DeltaNet": config.models["DeltaNet"]}
    config.seeds, spans = [*range(97)], [(20 + 30e6 / 9e5, 37 + 30e6 / 4e5), (30e6 / 186e3 / 6, 40)]
    for config.jobs, span in zip((1, 6), spans, strict=True):
        text = Comparison(config, tmp_path, prepare=False).plan_text()
        hours = float(re.search(r"([\d.]+) hours", text)[1])
        assert span[0] < 36 * hours < span[1]


@pytest.mark.parametrize(
    ("model", "prefix"), [("gated_delta_product/tiny", "model."), ("hf/llama/tiny", "model.config.")]
)
def test_the_solved_width_is_the_nearest(model: str, prefix: str) -> None:
    node = compose(f"model={model}").model | {"vocab_size": 320}
    size = SizeConfig(f"{prefix}intermediate_size", 8)
    width = solve_size(node, size, 900_000)

    def distance(value: int) -> int:
        changed = json.loads(json.dumps(node))
        (changed.get("config") or changed)["intermediate_size"] = value
        return abs(sum(p.numel() for p in build_on_meta(changed).parameters()) - 900_000)

    assert width % 8 == 0 and min((width - 8, width, width + 8), key=distance) == width
    for field, target in (("intermediate_size", 1000), ("max_position_embeddings", 900_000)):
        with pytest.raises(ValueError, match=f"{field} gives"):
            solve_size(node, SizeConfig(prefix + field, 8), target)
    with pytest.raises(ValueError, match="widht"):
        solve_size(node, SizeConfig(f"{prefix}widht", 8), 900_000)


def test_the_detectable_difference_is_detected_four_times_in_five() -> None:
    draw = np.random.default_rng(0)
    groups = draw.normal(0, 0.3, (2, 5))
    groups *= 0.3 / np.sqrt(groups.var(axis=1, ddof=1).mean())  # the pooled deviation is the true one
    least = model_comparison.detectable_difference(list(groups))
    first, second = draw.normal(0, 0.3, (20_000, 5)), draw.normal(least, 0.3, (20_000, 5))
    detected = stats.ttest_ind(first, second, axis=1).pvalue < 0.05
    assert detected.mean() == pytest.approx(0.8, abs=0.02)
    # The model with the fewest seeds decides: at least by the quantiles of a normal distribution.
    more = [groups[0], np.tile(groups[1], 4)]
    variance = sum(len(values) * values.var() for values in more) / (4 + 19)
    assert model_comparison.detectable_difference(more) > 2.8016 * np.sqrt(2 * variance / 5)
    assert model_comparison.detectable_difference([np.ones(1), np.array([1.0, np.inf])]) is None


def test_the_fall_of_a_power_law_is_its_slope() -> None:
    tokens = pd.Series(np.arange(1, 2001) * 1000.0)
    fall = model_comparison.fall_per_doubling(tokens, 2 + 3 * (tokens / tokens.max()) ** -0.3)
    middle = 3 * 0.3 * np.log(2) * 0.72**-0.3
    assert fall == pytest.approx(middle, rel=0.02)
    assert np.isnan(model_comparison.fall_per_doubling(tokens[-2:], tokens[-2:]))


def test_doubtful_comparisons_are_warned_of() -> None:
    models = pd.DataFrame({"parameters": 1, "learning_rate": 1e-3}, index=["early", "settled", "short"])
    models["entropy"] = [None, 2.5, 6.0]
    numbers = [("validation loss", 3.0), ("loss fall per doubling", 0.6)]
    rows = [("early", seed, *number) for seed in (0, 1) for number in numbers]
    rows += [("settled", 0, "validation loss", 2.0), ("settled", 1, "validation loss", np.inf)]
    rows += [("settled", 0, "loss fall per doubling", 0.4)]
    rows += [("short", 0, "validation loss", 9.0), ("short", 0, "loss fall per doubling", 0.1)]
    runs = pd.DataFrame(rows, columns=["model", "seed", "metric", "value"])
    sweep = [("early", 1e-3, 3.0), ("early", 3e-3, 3.5), ("settled", 3e-4, 2.5), ("settled", 1e-3, 2.0)]
    sweep += [("settled", 3e-3, np.inf)]
    sweep += [("short", 3e-4, 9.5), ("short", 1e-3, 9.0), ("short", 3e-3, np.nan)]
    sweep = pd.DataFrame(sweep, columns=["model", "learning_rate", "value"])
    warnings = model_comparison.find_warnings(model_comparison.mean_table(runs, models), models, sweep)
    names = ["short", "settled", "early", "settled", "short", "early"]
    assert [text.split(":")[0] for text in warnings] == names
    facts = ["0.003", "rate 0.003", "edge", "seed diverged", "transient", "0.60 nats"]
    for text, expected in zip(warnings, facts, strict=True):
        assert expected in text


def write_run(folder: Path, values: dict, *, skips: tuple[int, ...] = (0, 0, 0, 0)) -> None:
    """A run whose last step has these values, finished unless some of the `skips` up to each step."""
    for name in ("hf/step-0000004", "plots")[: 0 if any(skips) else 2]:
        (folder / name).mkdir(parents=True)
        (folder / name / "loss.png").touch()
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text("trainer: {max_steps: 4, max_skipped_steps: 3}")
    records = [{"step": step, "tokens": step, "skipped_steps": n} for step, n in enumerate(skips, 1)]
    records[-1] |= {"loss": 1.0, **values}
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))


def test_rates_that_diverge_and_tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Config({"a": [], "b": []}, 4, [0.1, 0.2, 0.3], [0, 1])
    config.tasks = {"S5": ComparedTask([], "accuracy")}
    plan = SimpleNamespace(parameters_held=10, gpu_hours=0.1, unigram_entropy=None)
    monkeypatch.setattr("fla_train.cli.comparison.plan_model", lambda *_: (plan, []))
    for name in ("compose", "resolve"):
        monkeypatch.setattr(f"fla_train.cli.comparison.{name}", lambda *_: None)
    runs = Comparison(config, tmp_path, prepare=False)
    assert len(runs.sweep()) == 2 * 3 + 2 * 2 and not runs.seeds()
    for rate, loss in ((0.1, 2.0), (0.2, 1.0)):
        write_run(tmp_path / f"a/lr-{rate}/seed-0", {"validation_loss": loss})
        write_run(tmp_path / f"b/lr-{rate}/seed-0", {"validation_loss": 3 - loss})
        write_run(tmp_path / f"a/S5/seed-{loss - 1:.0f}", {"accuracy": rate})
    write_run(tmp_path / "a/lr-0.3/seed-0", {}, skips=(0, 1, 2, 3))
    write_run(tmp_path / "b/lr-0.3/seed-0", {}, skips=(1, 2, 2, 3))  # not three in a row
    states = [runs.sweep()[f"{model}/lr-0.3/seed-0"].status() for model in "ab"]
    assert states == ["diverged", "stopped"]
    assert [*runs.seeds()] == ["a/lr-0.2/seed-0", "a/lr-0.2/seed-1"]
    runs.report(left=4)
    table = pd.read_csv(tmp_path / "table.csv").set_index(["model", "metric"])
    assert table.loc["a", "S5 accuracy"].value == pytest.approx(0.15)
    # The stopped run of b is left, so its rate is that of the runs that have finished.
    assert table.loc["b", "validation loss"][["learning_rate", "value"]].tolist() == [0.1, 1.0]
    text = (tmp_path / "table.md").read_text()
    assert "diverged at learning rate 0.3" in text and text.count("edge") == 1 and "4 runs" in text
    # Another request must not use the runs that have started; others may be added.
    runs.record_overrides()
    config.learning_rates.append(0.4)
    runs = Comparison(config, tmp_path, prepare=False)
    runs.record_overrides()
    # No sweep is complete now, but every model keeps its row.
    assert not runs.seeds()
    (tmp_path / "table.csv").unlink()
    runs.report(left=6)
    table = pd.read_csv(tmp_path / "table.csv").set_index(["model", "metric"])
    assert [table.loc[model, "validation loss"].learning_rate for model in "ab"] == [0.2, 0.1]
    config.tokens = 8
    with pytest.raises(ValueError, match=r"max_tokens=4, trainer\.max_tokens=8"):
        Comparison(config, tmp_path, prepare=False).record_overrides()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rates": [1e-3]}, "rates"),
        ({"tokens": None}, "tokens"),
        ({"models": {"a": "model=x"}}, r"models\.a"),
        ({"models": {"a/b": []}}, "a/b"),
        ({"seeds": [0, 0]}, "seeds"),
        ({"sizes": {"Mamba": {}}}, r"sizes\.Mamba"),
        ({"base": ["optimizer.lr=1"]}, r"optimizer\.lr=1"),
    ],
)
def test_errors_of_a_file_name_the_key(tmp_path: Path, change: dict, message: str) -> None:
    (tmp_path / "a.yaml").write_text(yaml.safe_dump(COMPARISON | change))
    with pytest.raises(ValueError, match=rf"a\.yaml.*{message}"):
        read_comparison(tmp_path / "a.yaml")
