"""Names of earlier versions: each is taken at each place that takes it, and announced by one line."""

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
import warnings
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_layout import ROOT

from fla_train.cli import bench, bench_commands
from fla_train.kernels.delta_product import delta_product, resolve_backend
from fla_train.kernels.delta_product.triton.launch_table import fallback, read_table
from fla_train.kernels.fused_ops import backend as fused_ops
from fla_train.models import DeltaProductConfig, build_config
from fla_train.utils.aliases import ALIASES, announce

CPU = torch.device("cpu")
VALUES = {"TOKENS": 512, "true": True}
Case = SimpleNamespace  # of the alias in question: name (that or the present one), folder, monkeypatch


@pytest.fixture(autouse=True)
def nothing_announced() -> None:
    announce.cache_clear()


def environment(case: Case) -> Any:
    for name, value in {"TRITON_INTERPRET": "1", "FLA_TRAIN_FUSED_OPS": ""}.items():
        case.monkeypatch.setenv(name, value)  # restored afterwards
    case.monkeypatch.delenv("FLA_TRAIN_FUSED_OPS")
    case.monkeypatch.setenv(case.name, "triton")
    module = runpy.run_path(fused_ops.__file__)
    inherited = [os.environ.get(name) for name in ("FLA_TRAIN_NEIGHBOURS", "FLA_TRAIN_FUSED_OPS")]
    return module["resolve_backend"]("auto", torch.zeros(1)), inherited


def operator(case: Case) -> Any:
    options = {"recompute": VALUES[case.name]} if case.name in VALUES else {"backend": case.name}
    torch.manual_seed(0)
    q, k, v, beta = (torch.rand(1, 3, *axes) for axes in ((2, 4), (1, 2, 4), (1, 2, 4), (1, 2)))
    return delta_product(q, k, v, beta, **options)[0].tolist()


def variable(case: Case) -> Any:
    case.monkeypatch.setenv("FLA_TRAIN_BACKEND", case.name)
    return resolve_backend("auto", CPU)


def model_config(case: Case) -> Any:
    key = "recompute_operator" if case.name in VALUES else "backend"
    return build_config({key: VALUES.get(case.name, case.name)}).to_dict()


def export(case: Case) -> Any:
    config = {"recompute_operator" if case.name in VALUES else "backend": VALUES.get(case.name, case.name)}
    (case.folder / "config.json").write_text(json.dumps({"model_type": "delta_product", **config}))
    return DeltaProductConfig.from_pretrained(case.folder).to_dict()


def command_line(case: Case) -> Any:
    requests = []
    commands = dict.fromkeys(bench_commands.COMMANDS, lambda request: requests.append(vars(request)))
    case.monkeypatch.setattr(bench_commands, "COMMANDS", commands)
    if case.name.startswith("--"):
        bench.run(["kernels", case.name, "1", "3"])
        bench.run(["fused_ops", f"{case.name}=3"])
    else:
        bench.run([case.name])
        bench.run(["evaluation", case.name, "tokenizer"])  # a folder may have any name
        requests[1].pop("mirror")
    return requests


def imported(case: Case) -> Any:
    sys.modules.pop("fla_train.baselines", None)
    importlib.import_module(case.name)


def launch_table(case: Case) -> Any:
    present = ALIASES["launch table"].get(case.name, case.name)
    row = {"architecture": "cpu", "key_dim": 64, "value_dim": 192, "num_householder": 2}
    row |= asdict(fallback()) | {"chunk_prepare_wy": {"maxnreg": 99}}
    row[case.name] = row.pop(present)
    (file := case.folder / "launches.json").write_text(json.dumps({"rows": [row]}))
    return {key: asdict(options) for key, options in read_table(file).items()}


USES: dict[str, list[Callable[[Case], Any]]] = {
    "environment": [environment],
    "backend": [operator, variable, model_config, export],
    "recompute": [operator, model_config, export],
    "fla-bench": [command_line],
    "import": [imported],
    "launch table": [launch_table],
}


@pytest.mark.parametrize(
    ("alias", "name", "use"),
    [
        pytest.param(alias, name, use, id=f"{alias}-{use.__name__}")
        for place, names in ALIASES.items()
        for alias, name in names.items()
        for use in USES[place]
    ],
)
def test_an_alias_does_what_the_present_name_does_and_says_so(
    alias: str, name: str, use: Callable, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def result(given: str) -> Any:
        with monkeypatch.context() as patch:
            return use(Case(name=given, folder=tmp_path, monkeypatch=patch))

    with pytest.warns(FutureWarning) as lines:
        by_alias = result(alias)
    for line in map(str, (line.message for line in lines)):
        assert str(VALUES.get(alias, alias)) in line and name in line
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        assert result(name) == by_alias


def test_the_present_variable_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLA_TRAIN_FUSED_OPS", "torch")
    monkeypatch.setenv("FLA_TRAIN_NEIGHBOURS", "triton")
    with pytest.warns(FutureWarning):
        module = runpy.run_path(fused_ops.__file__)
    assert module["resolve_backend"]("auto", torch.zeros(1)) == "torch"


def test_a_line_is_printed_once() -> None:
    program = "import warnings; from fla_train.utils.aliases import announce; announce('x', 'old', 'new');"
    program += "warnings.simplefilter('default'); announce('x', 'old', 'new')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    (line,) = done.stderr.splitlines()
    assert done.returncode == 0 and "new" in line and "old" in line


def test_the_docs_have_the_same_table() -> None:
    section = (ROOT / "docs" / "architecture.md").read_text().split("\n## Aliases\n")[1]
    rows = re.findall(r"^\| `(.+?)`.*? \| `(.+?)` \|", section, re.M)
    assert sorted(rows) == sorted(pair for names in ALIASES.values() for pair in names.items())
