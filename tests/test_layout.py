"""Dependency arrows between packages, and the content of the wheel (docs/architecture.md)."""

import ast
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
LINKED = ("configs", "eval", "kernels")  # folders beside fla_train/, which links to them

# A package may import itself and the packages named here, directly; nothing else of fla_train.
ARROWS = {
    "kernels": {"utils"},
    "models": {"kernels", "utils"},
    "hub": {"models", "kernels", "utils"},
    "data": {"utils"},
    "tasks": {"utils"},
    "training": {"data", "tasks", "hub", "models", "kernels", "configs", "utils"},
    "eval": {"data", "tasks", "hub", "models", "kernels", "configs", "utils"},
    "bench": {"training", "eval", "data", "tasks", "models", "kernels", "utils"},
    "cli": {
        *("api", "run", "bench", "training", "eval", "data", "tasks", "hub", "models"),
        *("kernels", "configs", "utils"),
    },
    "configs": set(),
    "utils": set(),
}
KERNEL_IMPORTS = {"torch", "triton", "fla_train"}
MODEL_IMPORTS = {"torch", "transformers", "fla_train"}


def tracked() -> list[Path]:
    """Return the files of the project: those of the git checkout, or all of an sdist."""
    if not (ROOT / ".git").exists():
        found = (path.relative_to(ROOT) for path in sorted(ROOT.rglob("*")) if path.is_file())
        made = {"__pycache__", "build", "dist", "fla_train.egg-info", "PKG-INFO", "setup.cfg"}
        return [path for path in found if not made & {*path.parts} and path.parts[0][0] != "."]
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [Path(line) for line in listed.stdout.splitlines() if (ROOT / line).exists()]


def python_files(folder: str) -> list[Path]:
    return sorted((ROOT / "fla_train" / folder).rglob("*.py"))


def imported(path: Path, *, for_types: bool = True) -> set[str]:
    """Return the absolute names of the modules that a file imports anywhere.

    Args:
        for_types: include imports for type checkers.
    """
    package = list(path.relative_to(ROOT).parts[:-1])
    names, tree = set(), ast.parse(path.read_text())
    if not for_types:
        types = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
        tree.body = [node for node in tree.body if node not in types]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            names |= {f"{stem}.{alias.name}" for alias in node.names}
    return names


def test_no_two_test_files_share_a_name() -> None:
    """pytest imports test files by their bare names: of two that share one it collects only the first."""
    names = [path.name for path in tracked() if path.parts[0] == "tests" and path.name.startswith("test_")]
    shared = sorted({name for name in names if names.count(name) > 1})
    assert not shared, f"several test files are named {', '.join(shared)}"


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_dependencies_point_one_way(package: str) -> None:
    allowed = ARROWS[package] | {package}
    for path in python_files(package):
        used = {
            name.split(".")[1] for name in imported(path) if name.startswith("fla_train.") and name.count(".")
        }
        used -= {"__version__"}
        assert used <= allowed, f"{path.relative_to(ROOT)} imports {sorted(used - allowed)}"


def test_modules_import_each_other_without_circles() -> None:
    """Imports inside functions count too; those for type checkers only do not."""
    modules: dict[str, Path] = {}
    for path in [path for folder in (".", *LINKED) for path in python_files(folder)]:
        modules[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    imports = {}
    for name, path in modules.items():
        found = {
            other if other in modules else other.rpartition(".")[0]
            for other in imported(path, for_types=False)
        }
        imports[name] = found & modules.keys() - {name}
    while leaves := {name for name, found in imports.items() if not found & imports.keys()}:
        imports = {name: found for name, found in imports.items() if name not in leaves}
    assert not imports, f"a circle goes through some of {', '.join(sorted(imports))}"


@pytest.mark.parametrize(("package", "allowed"), [("kernels", KERNEL_IMPORTS), ("models", MODEL_IMPORTS)])
def test_outside_imports_of_the_lower_layers(package: str, allowed: set[str]) -> None:
    for path in python_files(package):
        outside = {name.split(".")[0] for name in imported(path)} - sys.stdlib_module_names - allowed
        assert not outside, f"{path.relative_to(ROOT)} imports {sorted(outside)}"


def test_kernels_can_be_imported_without_triton() -> None:
    """The Python files of an export run where it is missing; Hopper's kernels are not among them."""
    for path in python_files("kernels"):
        direct = {name for name in imported(path) if name.split(".")[0] == "triton"}
        if path.name != "optional_triton.py" and "hopper" not in path.parts:
            assert not direct, f"{path.relative_to(ROOT)}: import tl and triton from kernels.optional_triton"


def test_wheel_claims_only_fla_train(tmp_path: Path) -> None:
    source = tmp_path / "source"  # a copy, so that no build folder lands in the checkout
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path, follow_symlinks=False)
    code = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"fla_train"}
    configs = ROOT / "fla_train/configs"
    yaml = {str(p.relative_to(configs)) for p in configs.rglob("*.yaml")}
    assert yaml == {
        n.removeprefix("fla_train/configs/") for n in names if n.endswith(".yaml") and "/configs/" in n
    }
    for command, script in PYPROJECT["project"]["scripts"].items():
        assert command.startswith("fla-"), f"{command} may be another package's, and would replace it"
        assert script.split(":")[0].replace(".", "/") + ".py" in names, f"no module behind {script}"
