"""A command imports no more than it needs for the first step, and a wrong backend ends it."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fla_train.kernels.delta_product.selfcheck import CheckReport
from fla_train.models.configuration import DeltaProductConfig
from fla_train.run import rank
from fla_train.run.resolve import resolve
from fla_train.training.failures import RETRY, describe_failure
from fla_train.training.plan import RunPlan
from fla_train.utils.timeline import Timeline

# Each takes a second or more, and the launcher does not need it.
NOT_IN_THE_LAUNCHER = """
    accelerate datasets deepspeed lm_eval matplotlib.figure pandas scipy.stats sklearn sympy torch._dynamo
    torch._inductor torch.distributed.tensor transformers.modeling_utils transformers.models triton wandb
    fla_train.models.configuration fla_train.models.mixers fla_train.models.modeling
""".split()
TASK = ["task=group_words", "task.batch_size=8", "init_from={hybrid}"]
NOT_BEFORE_THE_FIRST_STEP = (
    "datasets lm_eval matplotlib.figure scipy.stats tensorboard torchvision wandb".split()
)
LAUNCHER = """
import os, sys
from fla_train.cli.train import main
import fla_train.run.launch as launch
def stop(*_, **__):
    print(*sys.modules, sep="\\n", flush=True)
    os._exit(0)
launch.run_workers = stop
main()
"""
# The final environment may hide GPUs, so imports ahead must not ask for them.
WORKER = """
import gc, os, sys
gc.disable()
from importlib import import_module
from unittest.mock import patch
from fla_train.run.import_ahead import AHEAD
ask = ("is_available", "device_count", "get_device_properties", "_lazy_init")
with patch.multiple("torch.cuda", **dict.fromkeys(ask)):
    import_module(AHEAD)
assert "deepspeed" not in sys.modules
from fla_train.cli.train import main
import fla_train.kernels.delta_product.selfcheck as selfcheck
import fla_train.run.rank as rank
import fla_train.training.trainer as trainer
rank.model_cases = lambda *_: selfcheck.CASES[:1]
def stop(*_, **__):
    os.write(2, "\\n".join(sys.modules).encode())
    os._exit(0)
trainer.train_step = stop
os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
main()
"""


@pytest.mark.parametrize(
    ("program", "options", "left_out", "loaded"),
    [
        # Only the tokenizer of a text needs transformers.
        (LAUNCHER, TASK, {*NOT_IN_THE_LAUNCHER, "transformers"}, "fla_train.run.agent"),
        (LAUNCHER, ["seed=1"], {*NOT_IN_THE_LAUNCHER}, "fla_train.run.agent"),
        # The list of transformers' config classes is in `transformers.models`.
        (
            LAUNCHER,
            ["init_from={whole}"],
            {*NOT_IN_THE_LAUNCHER} - {"transformers.models"},
            "transformers.models",
        ),
        (WORKER, ["seed=1"], {*NOT_BEFORE_THE_FIRST_STEP}, "deepspeed"),
    ],
    ids=["launcher of a task", "launcher of a text", "launcher with init_from", "worker"],
)
@pytest.mark.usefixtures("unwatched")
def test_what_is_not_needed_is_not_imported(
    overrides,
    whole,
    tmp_path,
    program,
    options,
    left_out,
    loaded,
):
    """The launcher is stopped at the start of its workers, a worker that imports ahead at its first step."""
    place = ["launch.device=cpu", "trainer.check_backend=true", f"run.dir={tmp_path / 'run'}"]
    hybrid = tmp_path / "hybrid"
    layers = ["linear_attention", "full_attention"]
    DeltaProductConfig(vocab_size=8, num_hidden_layers=2, layer_types=layers).save_pretrained(hybrid)
    options = options if options is TASK else [*overrides, *options]
    options = [text.format(whole=whole, hybrid=hybrid) for text in options]
    command = [sys.executable, "-c", program, *options, *place]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    log = tmp_path / "run" / "train.log"
    modules = set((done.stdout + (log.read_text() if log.is_file() else "")).split("\n"))
    assert loaded in modules, done.stderr[-2000:]
    assert not modules & left_out


def test_a_rank_reports_an_import_that_fails_to_its_agent_and_in_its_log(tmp_path: Path) -> None:
    program = """
import sys
from types import SimpleNamespace as Namespace
from fla_train.run import worker
sys.modules["fla_train.run.rank"] = None
worker.run(Namespace(config=Namespace(run=Namespace(dir=sys.argv[1]))), None, None)
"""
    file = tmp_path / "error.json"
    environment = os.environ | {"RANK": "0", "TORCHELASTIC_ERROR_FILE": str(file)}
    done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], env=environment, timeout=100)
    assert done.returncode == RETRY
    assert "fla_train.run.rank" in json.loads(file.read_text())["message"]
    assert "fla_train.run.rank" in (tmp_path / "train.log").read_text()


def train_with_a_broken_backend(plan: RunPlan) -> tuple[str, bool]:
    """Return the description of the error on a rank, and whether it is final."""
    report = CheckReport("chunk", "cpu", torch.float32, (), failure="no such instruction")
    request = SimpleNamespace(arrived=lambda: False)
    with pytest.MonkeyPatch.context() as patch, pytest.raises(ValueError) as refused:
        patch.setattr(rank, "check_backend", lambda *_, **__: report)
        rank.train(plan, io.StringIO(), request, Timeline())
    return describe_failure(refused.value)


def test_a_backend_that_is_wrong_ends_the_run_for_good_before_it_writes(make_config, warm_ranks, tmp_path):
    plan = resolve(make_config("trainer.check_backend=true", f"run.dir={tmp_path}"), data="prepare")
    ((line, final),) = warm_ranks.run(1, train_with_a_broken_backend, plan)
    assert final and "no such instruction" in line and "model.backend" in line
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]
