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
LINKED = ("configs", "eval", "kernels")  # fla_train/ has links to these folders

# A package may import itself and the packages named here, directly; nothing else of fla_train.
ARROWS = {
    "kernels": {"utils"},
    "models": {"kernels", "utils"},
    "hub": {"models", "kernels", "utils"},
    "data": {"utils"},
    "tasks": {"utils"},
    "training": {"data", "tasks", "hub", "models", "kernels", "configs", "utils"},
    "eval": {"data", "tasks", "hub", "models", "kernels", "configs", "utils"},
    "run": {"training", "data", "tasks", "hub", "models", "kernels", "configs", "utils"},
    "bench": {"run", "training", "eval", "data", "tasks", "hub", "models", "kernels", "utils"},
    "cli": {
        *("api", "bench", "run", "training", "eval", "data", "tasks", "hub", "models"),
        *("kernels", "configs", "utils"),
    },
    "configs": set(),
    "utils": set(),
}


def tracked() -> list[Path]:
    """Return the files of the git checkout, with new ones."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
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


@pytest.mark.parametrize("package", sorted(ARROWS))
def test_dependencies_point_one_way(package: str) -> None:
    allowed = ARROWS[package] | {package}
    for path in python_files(package):
        used = {name.split(".")[1] for name in imported(path) if name.startswith("fla_train.")}
        extra = used - allowed - {"__version__"}
        assert not extra, f"{path.relative_to(ROOT)} imports {sorted(extra)}"


def test_modules_import_each_other_without_circles() -> None:
    """Imports inside functions count, but those for type checkers do not."""
    modules: dict[str, Path] = {}
    for path in [path for folder in (".", *LINKED) for path in python_files(folder)]:
        modules[".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")] = path
    imports = {}
    for name, path in modules.items():
        names = imported(path, for_types=False)
        targets = {target if target in modules else target.rpartition(".")[0] for target in names}
        imports[name] = targets & modules.keys() - {name}
    while leaves := {name for name, targets in imports.items() if not targets & imports.keys()}:
        imports = {name: targets for name, targets in imports.items() if name not in leaves}
    assert not imports, f"a circle goes through some of {', '.join(sorted(imports))}"


def test_wheel_claims_only_fla_train(tmp_path: Path) -> None:
    source = tmp_path / "source"  # Building in the checkout would leave a build folder there.
    for path in tracked():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path, follow_symlinks=False)
    code = "import setuptools.build_meta as b, sys; b.build_wheel(sys.argv[1])"
    subprocess.run([sys.executable, "-c", code, str(tmp_path)], cwd=source, capture_output=True, check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert {n.split("/")[0] for n in names if ".dist-info" not in n} == {"fla_train"}
    yaml = {f"fla_train/{path.relative_to(ROOT)}" for path in (ROOT / "configs").rglob("*.yaml")}
    assert yaml == {name for name in names if name.endswith(".yaml") and "/configs/" in name}
    for command, script in PYPROJECT["project"]["scripts"].items():
        assert command.startswith("fla-"), f"{command} may be the name of another package's command"
        assert script.split(":")[0].replace(".", "/") + ".py" in names, f"no module behind {script}"
