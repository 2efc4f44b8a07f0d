"""Python files of an export, by which transformers loads a model of this package without the package.

They are the modules that the model's module imports, each with a first line about its origin, and with
imports that transformers follows: it finds `from .name import`, of files that lie in one folder. Kernels in
Gluon are left out. Gluon is experimental and changes from one Triton to the next; the package can require a
Triton, an export is loaded by any. `kernels.delta_product.select` then takes the kernels in Triton.
"""

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from fla_train import __version__
from fla_train.models.auto import LazyModelConfig

LEFT_OUT = "fla_train.kernels.delta_product.hopper"
ORIGIN = "# Generated from {module}, fla_train {version}, Apache-2.0: only imports differ.\n"


def write_remote_code(config: PreTrainedConfig, folder: Path) -> None:
    """Write the Python files of a model of this package to `folder`, and their classes to `config.auto_map`.

    A config of another library is left as it is.
    """
    if not isinstance(config, LazyModelConfig):
        return
    for name, text in _files(config.modeling_module).items():
        (folder / f"{name}.py").write_text(text)
    # The config comes from the models' file, too: transformers makes a copy of all files for each file that
    # `auto_map` names, and two copies would have two config classes.
    classes = {AutoConfig: type(config), **import_module(config.modeling_module).AUTO_CLASSES}
    file = _file(config.modeling_module)
    config.auto_map = {auto.__name__: f"{file}.{found.__name__}" for auto, found in classes.items()}


def _file(module: str) -> str:
    """The name of a module's file, without its ending."""
    return module.removeprefix("fla_train.").replace(".", "_")


@cache
def _files(module: str) -> dict[str, str]:
    """The text of each file that `module` needs, by name."""
    texts: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if _file(name) not in texts:
            texts[_file(name)], needed = _rewritten(name)
            waiting += needed
    return texts


def _rewritten(module: str) -> tuple[str, list[str]]:
    """A module's text with rewritten imports, and the modules of this package that it imports."""
    text = Path(find_spec(module).origin).read_text()
    lines, needed = text.splitlines(keepends=True), []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.ImportFrom) or not node.module.startswith("fla_train."):
            continue
        line, old = lines[node.lineno - 1], f"from {node.module} import"
        if node.module.startswith(LEFT_OUT):
            assert node.end_lineno == node.lineno, f"{module}: write the import of {node.module} in one line"
            lines[node.lineno - 1] = line.replace(line.strip(), f'raise ModuleNotFoundError("{node.module}")')
            continue
        needed.append(node.module)
        lines[node.lineno - 1] = line.replace(old, f"from .{_file(node.module)} import")
    return ORIGIN.format(module=module, version=__version__) + "".join(lines), needed
