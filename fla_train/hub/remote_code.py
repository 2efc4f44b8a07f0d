"""Write the Python files with which transformers loads an export without this package.

transformers follows imports of the form `from .name import` within one folder, so all modules that the model
imports are joined into the few files of `FILES`. Modules of one file share a namespace: no two of them may
define the same name. Gluon kernels are left out, because Gluon changes between Triton releases and an export
must load with any of them; `kernels.delta_product.select` then chooses the Triton kernels.
"""

import ast
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from transformers import AutoConfig, PreTrainedConfig

from fla_train import __version__
from fla_train.models.configuration import DeltaProductConfig
from fla_train.models.zoo.mamba_configuration import SignedMambaConfig

MODULES = {DeltaProductConfig: "fla_train.models.modeling", SignedMambaConfig: "fla_train.models.zoo.mamba"}
# The file of a module, by the first of these names with which its own begins.
FILES = {
    "fla_train.kernels.delta_product": "delta_product",
    "fla_train.kernels.fused_ops": "fused_ops",
    "fla_train.kernels.context_parallel": "modeling",
    "fla_train.kernels": "launching",
    "fla_train": "modeling",
}
LEFT_OUT = "fla_train.kernels.delta_product.hopper"
ORIGIN = "# Generated from {module}, fla_train {version}, Apache-2.0: only imports differ.\n"


def write_remote_code(config: PreTrainedConfig, folder: Path) -> None:
    """Write the files of a model of this package to `folder`, and their classes to `config.auto_map`.

    Configs of other libraries stay unchanged, and so do those with a custom mixer, which need this package.
    """
    module = MODULES.get(type(config))
    if module is None or getattr(config, "mixer", None) is not None:
        return
    for name, text in source_files(module).items():
        (folder / f"{name}.py").write_text(text)
    # The config is loaded from the models' file as well: transformers copies all files for each file that
    # `auto_map` names, and two copies would have two config classes.
    classes = {AutoConfig: type(config), **import_module(module).AUTO_CLASSES}
    config.auto_map = {auto.__name__: f"{_file(module)}.{cls.__name__}" for auto, cls in classes.items()}


def _file(module: str) -> str:
    """Return the name of a module's file without its extension."""
    return next(file for start, file in FILES.items() if module.startswith(start))


@cache
def source_files(module: str) -> dict[str, str]:
    """Return the text of each file that `module` needs, by name."""
    texts: dict[str, str] = {}
    _add(module, texts, set())
    return texts


def _add(module: str, texts: dict[str, str], done: set[str]) -> None:
    """Append a module to its file, after those that it imports and before those that its calls import."""
    done.add(module)
    text = Path(find_spec(module).origin).read_text()
    lines, tree, later = text.splitlines(keepends=True), ast.parse(text), []
    for node in ast.walk(tree):
        if not isinstance(node, ast.ImportFrom) or not node.module.startswith("fla_train."):
            continue
        place = slice(node.lineno - 1, node.end_lineno)
        line, indent = "".join(lines[place]), " " * node.col_offset
        if node.module.startswith(LEFT_OUT):
            line = f'{indent}raise ModuleNotFoundError("{node.module}")\n'
        else:
            line = line.replace(f"from {node.module} import", f"from .{_file(node.module)} import")
            if _file(node.module) == _file(module):
                line = f"{indent}pass\n" if indent else ""
            if node in tree.body and node.module not in done:
                _add(node.module, texts, done)
            later.append(node.module)
        lines[place] = [line, *[""] * (node.end_lineno - node.lineno)]
    origin = ORIGIN.format(module=module, version=__version__)
    texts[_file(module)] = texts.get(_file(module), "") + origin + "".join(lines).strip("\n") + "\n\n\n"
    for other in later:
        if other not in done:
            _add(other, texts, done)
