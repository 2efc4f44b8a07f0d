"""No file that the project reads can run code: no unsafe pickle, YAML, numpy file, remote code or eval."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("configs", "eval", "fla_train", "kernels", "scripts")
PICKLES = {"pickle", "cPickle", "dill", "cloudpickle", "joblib", "marshal", "shelve", "_pickle"}
READS = {"load", "loads", "open", "Unpickler"}
SAFE_YAML = {"BaseLoader", "SafeLoader", "CSafeLoader", "CBaseLoader"}
# It reads a file that the ranks of this process have just written to its temporary folder.
IN_MEMORY = {("fla_train/bench/ranks.py", "pickle.loads(Path(folder, 'result').read_bytes())")}


def dotted(node: ast.AST) -> str:
    """Return `a.b.c` for a name or its attributes."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def names(tree: ast.AST) -> dict[str, str]:
    """Return the full names of imported names: `numpy` for `np`, `torch.load` for `load`."""
    found = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found |= {alias.asname: alias.name for alias in node.names if alias.asname}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return found


def unsafe_calls(source: str) -> Iterator[str]:
    """Yield each call in `source` that may run the content of a file."""
    tree = ast.parse(source)
    imported = names(tree)
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        head, _, rest = dotted(node.func).partition(".")
        called = ".".join(filter(None, (imported.get(head, head), rest)))
        module, _, function = called.rpartition(".")
        values = {k.arg: k.value.value for k in node.keywords if isinstance(k.value, ast.Constant)}
        given = {k.arg: dotted(k.value).rpartition(".")[2] for k in node.keywords}
        if (
            (isinstance(node.func, ast.Name) and called in ("eval", "exec", "compile", "__import__"))
            or (called == "torch.load" and values.get("weights_only") is not True)
            or (called == "torch.jit.load" or module.startswith(("torch.hub", "torch.package")))
            or (module.split(".")[0] in PICKLES and function in READS)
            or (module == "pandas" and function == "read_pickle")
            or (called == "yaml.load" and given.get("Loader") not in SAFE_YAML)
            or (module == "yaml" and function.startswith(("unsafe_", "full_")))
            or (function == "from_pretrained" and "Auto" in called and "trust_remote_code" not in given)
            or values.get("weights_only") is False
            or values.get("allow_pickle") is True
            or values.get("trust_remote_code") is True
        ):
            yield ast.unparse(node)


@pytest.mark.parametrize("folder", FOLDERS)
def test_no_call_runs_what_a_file_holds(folder: str) -> None:
    found = {
        (str(path.relative_to(ROOT)), call)
        for path in (ROOT / folder).rglob("*.py")
        for call in unsafe_calls(path.read_text())
    }
    assert found == {place for place in IN_MEMORY if place[0].startswith(f"{folder}/")}
