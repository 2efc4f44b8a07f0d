"""Write the Python files with which transformers loads an export without this package.

The files are all modules that the model's module imports. Their first line names their origin. Their imports
have the form `from .name import`, which transformers follows within one folder. Gluon kernels are left out,
because Gluon changes between Triton releases and an export must load with any of them;
`kernels.delta_product.select` then chooses the Triton kernels.
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
LEFT_OUT = "fla_train.kernels.delta_product.hopper"
ORIGIN = "# Generated from {module}, fla_train {version}, Apache-2.0: only imports differ.\n"


def write_remote_code(config: PreTrainedConfig, folder: Path) -> None:
    """Write the files of a model of this package to `folder`, and their classes to `config.auto_map`.

    Configs of other libraries stay unchanged, and so do those with a custom mixer, which need this package.
    """
    module = MODULES.get(type(config))
    if module is None or getattr(config, "mixer", None) is not None:
        return
    for name, text in _files(module).items():
        (folder / f"{name}.py").write_text(text)
    # The config is loaded from the models' file as well: transformers copies all files for each file that
    # `auto_map` names, and two copies would have two config classes.
    classes = {AutoConfig: type(config), **import_module(module).AUTO_CLASSES}
    config.auto_map = {auto.__name__: f"{_file(module)}.{cls.__name__}" for auto, cls in classes.items()}


def _file(module: str) -> str:
    """Return the name of a module's file without its extension."""
    return module.removeprefix("fla_train.").replace(".", "_")


@cache
def _files(module: str) -> dict[str, str]:
    """Return the text of each file that `module` needs, by name."""
    texts: dict[str, str] = {}
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if _file(name) not in texts:
            texts[_file(name)], needed = _rewritten(name)
            waiting += needed
    return texts


def _rewritten(module: str) -> tuple[str, list[str]]:
    """Return a module's text with rewritten imports, and the modules of this package that it imports."""
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
