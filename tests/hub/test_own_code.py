"""Exports contain the Python files of our models, and load with them where this package is missing."""

import ast
import os
import re
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path
from symtable import symtable

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.dynamic_module_utils import get_class_from_dynamic_module, get_imports

import fla_train
from fla_train.hub import remote_code
from fla_train.hub.export import export_model
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.modeling import AUTO_CLASSES, DeltaProductForCausalLM

IDS = torch.arange(20).reshape(2, 10) * 7919 % 320
SIZE = {"vocab_size": 320, "hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 64}
MODELS = {
    "delta_net": {},
    "gated_delta_product": {"num_householder": 3, "use_forget_gate": True, "use_output_gate": True},
    "hybrid": {
        "num_householder": 2,
        "use_forget_gate": True,
        "layer_types": ["linear_attention", "sliding_attention"],
        "sliding_window": 4,
    },
}


def model_of(name: str, num_heads: int = 2, head_dim: int = 16) -> DeltaProductForCausalLM:
    torch.manual_seed(0)
    config = DeltaProductConfig(**SIZE, num_heads=num_heads, head_dim=head_dim, **MODELS[name])
    return DeltaProductForCausalLM(config).eval()


def run_bare(folder: Path, *arguments: str, **environment: str) -> None:
    torch.save(IDS, folder / "ids.pt")
    script = Path(__file__).with_name("bare_environment.py")
    done = subprocess.run(
        [sys.executable, script, folder, *arguments],
        cwd=folder,
        env={**os.environ, "HF_MODULES_CACHE": str(folder.parent / "modules"), **environment},
        stdin=subprocess.DEVNULL,  # transformers asks there whether code may run
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_exports_load_in_a_bare_environment(tokenizer, tmp_path: Path) -> None:
    """With torch, transformers and their requirements: the same bits by every class, and the same tokens."""
    folder, names = tmp_path / "exports", ("delta_net", "hybrid")
    for name in names:
        export_model(model_of(name), tokenizer, folder / name)
    run_bare(folder)
    for name in names:
        results = torch.load(folder / f"{name}.pt")
        assert "trust_remote_code=True" in results["error"]
        assert name != names[0] or results.keys() > {auto_class.__name__ for auto_class in AUTO_CLASSES}
        for auto_class, model_class in AUTO_CLASSES.items():
            if auto_class.__name__ not in results:
                continue
            result = results[auto_class.__name__]
            assert result["module"].startswith(f"transformers_modules.{name}.")
            model = auto_class.from_pretrained(tmp_path / "saved" / f"{auto_class.__name__}-{name}")
            assert type(model) is model_class
            with torch.no_grad():
                expected = model(IDS[:1], use_cache=False)
            for outputs in result["outputs"]:
                assert outputs.keys() == expected.keys()
                assert all(torch.equal(outputs[key], expected[key]) for key in expected)
        tokens = model_of(name).generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=8)
        assert torch.equal(results["tokens"], tokens)


@pytest.mark.long
def test_triton_kernels_run_in_a_bare_environment(tokenizer, tmp_path: Path) -> None:
    """On a CPU in Triton's interpreter; heads of 64 channels use the chunk kernels."""
    model = model_of("hybrid", num_heads=1, head_dim=64)
    export_model(model, tokenizer, tmp_path / "exports" / "hybrid")
    names = ("FLA_TRAIN_BACKEND", "FLA_TRAIN_FUSED_OPS")
    run_bare(tmp_path / "exports", "triton", TRITON_INTERPRET="1", **dict.fromkeys(names, "triton"))
    results = torch.load(tmp_path / "exports" / "hybrid.pt")
    logits = results["AutoModelForCausalLM"]["outputs"][0]["logits"]
    with torch.no_grad():
        torch.testing.assert_close(logits, model(IDS[:1]).logits, rtol=1e-4, atol=1e-5)


@pytest.fixture
def export(tokenizer, tmp_path: Path) -> Path:
    return export_model(model_of("gated_delta_product"), tokenizer, tmp_path / "export")


def test_files_are_generated_from_the_package(export: Path) -> None:
    """What a Hub's user sees: where each file comes from, and imports of torch and transformers only."""
    for file in export.glob("*.py"):
        start, *parts = re.split(r"^# Generated from ", file.read_text(), flags=re.MULTILINE)
        assert not start and parts
        for part in parts:
            first, rest = part.split("\n", 1)
            assert f"fla_train {fla_train.__version__}" in first and "Apache-2.0" in first
            source = Path(find_spec(re.match(r"[\w.]+\w", first)[0]).origin).read_text().splitlines()
            changed = [line.strip() for line in rest.splitlines() if line not in source]
            assert all(re.match(r"from \.|raise ModuleNotFoundError|pass$", line) for line in changed), first
        assert set(get_imports(file)) <= sys.stdlib_module_names | {"torch", "transformers"}, file.name


@pytest.mark.parametrize("module", remote_code.MODULES.values())
def test_a_name_means_one_thing_in_a_file(module: str):
    for file, text in remote_code.source_files(module).items():
        meanings: dict[str, set] = defaultdict(set)
        for number, part in enumerate(re.split(r"^# Generated from ", text, flags=re.MULTILINE)):
            code = "# " + part
            for node in ast.parse(code).body:
                for name in node.names if isinstance(node, ast.Import | ast.ImportFrom) else ():
                    meanings[name.asname or name.name].add((getattr(node, "module", None), name.name))
            for symbol in symtable(code, file, "exec").get_symbols():
                if symbol.is_assigned() and not symbol.is_imported():
                    meanings[symbol.get_name()].add(number)
        assert {name for name, found in meanings.items() if len(found) > 1} <= {"_"}, file


def by_its_own_code(folder: Path) -> PreTrainedModel:
    """As transformers loads it where this package is not imported."""
    copy = get_class_from_dynamic_module("modeling.DeltaProductForCausalLM", folder)
    return copy.from_pretrained(folder)


def test_the_package_and_an_export_work_in_one_process(export: Path) -> None:
    """Both register operators with torch, under names of their own."""
    ours, theirs = AutoModelForCausalLM.from_pretrained(export), by_its_own_code(export)
    assert not isinstance(theirs, DeltaProductForCausalLM)
    with torch.no_grad():
        expected = ours(IDS, use_cache=False).logits
        for model in (ours, theirs):
            compiled = torch.compile(model, fullgraph=True, backend="eager")
            assert torch.equal(compiled(IDS, use_cache=False).logits, expected)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [16, 128])  # for which Hopper kernels run in the package, and not here
def test_an_export_runs_its_triton_kernels_on_a_gpu(head_dim: int, tmp_path: Path) -> None:
    model = model_of("gated_delta_product", head_dim=head_dim).to("cuda", torch.bfloat16)
    copy = by_its_own_code(export_model(model, None, tmp_path / "export", dtype=torch.bfloat16)).to("cuda")
    ids = IDS.repeat(1, 20).to("cuda")
    losses = [m.train()(ids, labels=ids).loss for m in (model, copy)]
    torch.testing.assert_close(*losses, rtol=1e-2, atol=0)
    for loss in losses:
        loss.backward()
    expected, actual = (m.get_parameter("model.layers.0.attn.k_proj.weight").grad for m in (model, copy))
    assert (expected - actual).norm() <= 3e-2 * expected.norm()
    tokens = copy.eval().generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=8)
    assert tokens.shape == (2, ids.shape[1] + 8)
    kernels = {module for module in sys.modules if module.startswith("transformers_modules.export")}
    assert any(name.endswith(".delta_product") for name in kernels)
