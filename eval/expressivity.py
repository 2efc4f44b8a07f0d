"""`suite=expressivity`: accuracy on the task that a model was trained on, and its state transitions."""

import json
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import OmegaConf
from transformers import PreTrainedModel

import fla_train.models.auto  # noqa: F401  registers the models with the Auto classes
from fla_train.eval.config import EvalConfig, ExpressivityConfig
from fla_train.eval.expressivity_figures import draw_spread_ratio, draw_transitions
from fla_train.eval.report import output_lock
from fla_train.eval.run import check_request, output_folder
from fla_train.eval.separation import ACCURACY, SpreadTable, length_windows
from fla_train.eval.transitions import Transitions, transitions
from fla_train.hub.load import load_weights, resolve_checkpoint, training_record
from fla_train.hub.paths import own_name, run_folder
from fla_train.tasks import GroupWords, Score, Task, TaskConfig, make_task, tasks_for_testing
from fla_train.tasks.config import TEST_SEED, is_own, task_class
from fla_train.tasks.plots import plot_accuracy
from fla_train.utils.device import pick_device, pick_dtype
from fla_train.utils.environment import describe_environment
from fla_train.utils.ranks import world_size

REFLECTION = 1.9  # beta from which a step counts as a reflection
ROTATION = 0.1  # imaginary part from which a transition counts as a rotation


def evaluate_expressivity(config: EvalConfig) -> tuple[Path, dict[str, Any]]:
    """Test the model on its task, draw its transitions, and write results.json, table.md and the figures.

    Returns:
        The evaluation's folder and what results.json holds.

    Raises:
        ValueError: no such checkpoint, it was not trained on a task, only it names the task's class, or there
            are several processes.
    """
    check_request(config)
    if world_size() > 1:
        raise ValueError("suite=expressivity runs in one process: start it without torchrun")
    settings, started = config.suite.expressivity, time.time()
    source = resolve_checkpoint(config.checkpoint)
    device = pick_device(config.device)
    trust = {"mixer": config.mixer, "trust_remote_code": config.trust_remote_code}
    model = load_weights(source, device, pick_dtype(config.dtype), **trust)
    task = _trained_on(model, source)
    if is_own(task.kind) and settings.task != task.kind and not config.trust_remote_code:
        raise ValueError(
            f"the task is the Python class {task.kind}, which is imported only if you name it, too: give "
            f"suite.expressivity.task={task.kind}, or trust_remote_code=true"
        )
    run = run_folder(source)
    folder = output_folder(config, source)
    with output_lock(folder):
        tests = _tests(task, settings)
        spreads = {name: _spread_table(task, test) for name, test in tests.items()}
        scores = {name: _score(model, test, settings, spreads[name]) for name, test in tests.items()}
        spread_ratios = {name: table.report() for name, table in spreads.items() if table is not None}
        draw_spread_ratio(spread_ratios, folder)
        curves = {name: scores[name].curve(test) for name, test in tests.items()}
        plot_accuracy(curves, own_name(run or source), folder / "accuracy.png")
        sample = next(iter(tests.values())).batch(range(settings.contexts)).input_ids
        kept = _drawn_tokens(next(iter(tests.values())))
        layers = [layer.only(kept) for layer in transitions(model, sample.to(device))]
        for number, layer in enumerate(layers):
            draw_transitions(layer, f"layer-{number}", folder)
        record = {
            "checkpoint": str(source),
            "task": asdict(task),
            "model": model.config.to_dict() | {"class": type(model).__name__},
            "accuracy": {name: scores[name].scalars(test) for name, test in tests.items()},
            "chance": {
                name: test.against_chance(scores[name].tally.token_accuracy, settings.sequences)
                for name, test in tests.items()
            },
            "curves": curves,
            "spread_ratio": spread_ratios,
            "layers": [_summary(layer) for layer in layers],
            "environment": describe_environment(device),
            "seconds": round(time.time() - started, 1),
        }
        (folder / "results.json").write_text(json.dumps(record, indent=2, default=str) + "\n")
        (folder / "table.md").write_text(_table(record))
    return folder, record


def _trained_on(model: PreTrainedModel, source: Path | str) -> TaskConfig:
    """The task that the export's training config names."""
    text = training_record(model).get("config")
    node = OmegaConf.to_container(OmegaConf.create(text)).get("task") if text else None
    if node is None:
        raise ValueError(f"{source} was not trained on a task: train one with fla-train task=... first")
    return TaskConfig(**node)


def _tests(task: TaskConfig, settings: ExpressivityConfig) -> dict[str, Task]:
    """The training's own test sets, and those of the lengths that are asked for."""
    tests = tasks_for_testing(task)
    if settings.lengths and task_class(task.kind).length_option != "length":
        raise ValueError(
            f"suite.expressivity.lengths is for word problems and code traces; this is {task.kind}: leave it "
            "empty"
        )
    for length in settings.lengths:
        options = {**task.options, "length": length}
        tests[f"length_{length}"] = make_task(task.kind, options, seed=TEST_SEED)
    return tests


def _drawn_tokens(task: Task) -> list[int]:
    """The tokens whose transitions matter: a group's elements, without filler and beginning of sequence."""
    return task.elements.tolist() if isinstance(task, GroupWords) else list(range(task.vocab_size))


def _spread_table(task: TaskConfig, test: Task) -> SpreadTable | None:
    """Where words are longer than those of training: None for others, and for labels that are no products."""
    trained = {**task.options, **task.train}.get("length")
    if not isinstance(test, GroupWords) or test.tokens_per_element > 1 or test.length <= trained:
        return None
    return SpreadTable(length_windows(test.length), test.group.order, trained)


@torch.no_grad()
def _score(
    model: PreTrainedModel, task: Task, settings: ExpressivityConfig, spread: SpreadTable | None
) -> Score:
    """The score on `settings.sequences` of the task, which are counted into `spread` too."""
    total = None
    for start in range(0, settings.sequences, settings.batch_size):
        batch = task.batch(range(start, min(start + settings.batch_size, settings.sequences)))
        logits = model(input_ids=batch.input_ids.to(model.device), use_cache=False).logits
        score = Score.of(task, logits, batch)
        total = score if total is None else total + score
        if spread is not None:
            words = slice(task.seq_len - task.length, None)  # without the beginning of sequence
            spread.add(logits[:, words], batch.labels[:, words])
    return total


def _summary(layer: Transitions) -> dict[str, list]:
    """Numbers for each head."""
    values, shares = layer.eigenvalues(), layer.explained_variance()
    rotates = (values.imag.abs() > ROTATION).any(-1).double()  # [E, H]
    return {
        "tokens": layer.tokens.tolist(),
        "beta": layer.beta.permute(2, 1, 0).tolist(),  # [H][N][E]
        "beta_spread": layer.beta_spread.amax(0).T.tolist(),  # [H][N], the largest over tokens
        "share_of_reflections": (layer.beta > REFLECTION).double().mean((0, 1)).tolist(),
        "share_of_tokens_that_rotate": rotates.mean(0).tolist(),
        "smallest_real_part": values.real.amin((0, 2)).tolist(),
        "effective_dimension": layer.effective_dimension().tolist(),
        "components_of_95_percent": (1 + (shares.cumsum(-1) < 0.95).sum(-1)).tolist(),
        "explained_variance": shares[:, :10].tolist(),
    }


def _table(record: Mapping[str, Any]) -> str:
    lines = [f"# {record['checkpoint']}", "", "| test set | metric | value | |", "|---|---|---|---|"]
    for name, metrics in record["accuracy"].items():
        for key, value in metrics.items():
            chance = record["chance"][name] if key in ("token_accuracy", "accuracy") else ""
            lines.append(f"| {name} | {key.replace('_', ' ')} | {value:.4f} | {chance} |")
    if found := record["spread_ratio"]:
        lines += [
            "",
            f"Length from which fewer than {ACCURACY:.0%} of the products are right, predicted by the spread "
            "ratio and measured:",
            "",
            "| test set | threshold | predicted | measured |",
            "|---|---|---|---|",
        ]
        for name, row in found.items():
            cells = [row["threshold"], row["predicted_length"], row["measured_length"]]
            shown = ["-" if value is None else f"{value:.3g}" for value in cells]
            lines.append(f"| {name} | {' | '.join(shown)} |")
    for number, layer in enumerate(record["layers"]):
        lines += [
            "",
            f"Layer {number}, {len(layer['tokens'])} tokens. A reflection is a Householder step with beta "
            f"above {REFLECTION}; a token rotates if an eigenvalue has an imaginary part above {ROTATION}.",
            "",
            "| head | mean beta by Householder step | reflections | rotating tokens | smallest real part | "
            "keys: effective dimension | components of 95% |",
            "|---|---|---|---|---|---|---|",
        ]
        for head, steps in enumerate(layer["beta"]):
            cells = [
                str(head),
                ", ".join(f"{sum(values) / len(values):.2f}" for values in steps),
                f"{layer['share_of_reflections'][head]:.0%}",
                f"{layer['share_of_tokens_that_rotate'][head]:.0%}",
                f"{layer['smallest_real_part'][head]:.3f}",
                f"{layer['effective_dimension'][head]:.2f}",
                str(layer["components_of_95_percent"][head]),
            ]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"
