"""What each Python process of the tests imports first (tests/conftest.py): coverage rests during imports."""

import runpy
from pathlib import Path

runpy.run_path(str(Path(__file__).parents[1] / "untraced.py"))["rest_during_imports"]()
