"""Python processes import nothing from the current folder but custom classes."""

import subprocess
from pathlib import Path

from fla_train.utils.processes import module_command, python_command


def test_the_current_folder_hides_no_module(tmp_path: Path) -> None:
    for name in ("queue", "yaml", "fla_train"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit('imported from the current folder')")
    (tmp_path / "own.py").write_text("class Own(int): ...")
    own = "from fla_train.utils.import_class import import_class; import queue, yaml; "
    own += "assert import_class('own:Own', int, 'int').__name__ == 'Own' and sys.argv[1:] == ['a b']"
    for command in (python_command(own, "a b"), module_command("fla_train.cli.version")):
        subprocess.run(command, cwd=tmp_path, check=True, timeout=300)
