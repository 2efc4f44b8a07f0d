"""A custom task: docs/examples/brackets.py, classes that break the contract, and who permits an import."""

import sys
from pathlib import Path

import pytest

from fla_train.cli.app import compose
from fla_train.cli.base import with_base
from fla_train.tasks.config import TaskConfig
from fla_train.tasks.registry import make_task, training_task
from fla_train.training.config import register, to_config, to_yaml
from fla_train.utils.keys import find_errors

KIND = "brackets:Brackets"
WRONG = """
import numpy as np
from fla_train.tasks.task import Batch, Task
class Plain(Task):
    def __init__(self, **stream):
        super().__init__(vocab_size=4, seq_len=3, **stream)
    def arrays(self, keys):
        return np.ones((len(keys), 3), dtype=np.int64), np.ones((len(keys), 3), dtype=np.int64)
    def _generate(self, keys):
        return Batch.of(*self.arrays(keys))
class Short(Plain):
    def arrays(self, keys):
        inputs, labels = super().arrays(keys)
        return inputs[:, 1:], labels
class Unknown(Plain):
    def arrays(self, keys):
        inputs, labels = super().arrays(keys)
        return inputs, labels + 3
class Stateful(Plain):
    def arrays(self, keys):
        inputs, labels = super().arrays(keys)
        return inputs + np.arange(len(keys))[:, None], labels
class NoMetric(Plain):
    headline = "f1"
class NoSizes(Plain):
    def __init__(self, **stream):
        pass
class NoSeed(Plain):
    def __init__(self):
        super().__init__()
class Abstract(Task):
    def __init__(self, **stream):
        pass
"""


@pytest.fixture(autouse=True)
def wrong(elsewhere: Path) -> None:
    (elsewhere / "wrong.py").write_text(WRONG)


def config(kind: str, **options) -> TaskConfig:
    sizes = {"test_sequences": 4, "batch_size": 2, "test_batch_size": 2}
    return TaskConfig(kind=kind, options=options, tests={"same": {}}, **sizes)


def test_brackets_are_those_of_a_stack() -> None:
    """Each word read again by a stack of Python's."""
    task = make_task(KIND, {"length": 40, "kinds": 3, "depth": 4}, seed=1)
    batch = task.batch(range(64))
    deepest = 0
    for tokens, labels in zip(batch.input_ids.tolist(), batch.labels.tolist(), strict=True):
        stack = []
        for token, label in zip(tokens, labels, strict=True):
            if token > 3:
                assert stack.pop() == token
            else:
                stack.append(token + 3)
            deepest = max(deepest, len(stack))
            assert label == (stack[-1] if stack else 0)
    assert deepest == 4
    assert set(batch.input_ids.unique().tolist()) == set(range(1, 7))


def test_the_example_has_no_errors_and_a_curriculum() -> None:
    register()
    found = to_config(compose("train", ["task=brackets", "task.curriculum=[[8,5]]"], config_dir="."))
    assert find_errors(found.task, "task.") == []
    assert training_task(found.task, 0).seq_len == 32


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        ("nowhere:Task", "No module named 'nowhere'"),
        ("brackets:Missing", "no Missing"),
        ("wrong:Abstract", "_generate"),
        ("wrong:NoSeed", "'seed'"),
        ("wrong:NoSizes", "vocab_size"),
        ("wrong:Short", "input_ids"),
        ("wrong:Unknown", "labels"),
        ("wrong:Stateful", "keys"),
        ("wrong:NoMetric", "f1"),
    ],
)
def test_a_class_that_cannot_be_used_is_one_line(kind: str, reason: str) -> None:
    (error,) = find_errors(config(kind), "task.")
    assert kind in error and reason in error
    assert "\n" not in error


def test_a_run_folder_does_not_choose_the_class(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    register()
    begun = ["task=brackets", "model=delta_net/tiny"]
    (run / "config.yaml").write_text(to_yaml(to_config(compose("train", begun, config_dir="."))))
    with pytest.raises(ValueError, match=f"task.kind={KIND}"):
        with_base([f"run.dir={run}"], config_dir=".")
    assert "brackets" not in sys.modules
    with pytest.raises(ValueError, match=f"task.kind={KIND}"):
        with_base([f"run.dir={run}", "task.options.depth=5"], config_dir=".")
    for permission in ([f"task.kind={KIND}"], ["task=brackets"]):
        overrides = with_base([f"run.dir={run}", *permission], config_dir=".")
        assert compose("train", overrides, config_dir=".").task.kind == KIND
