#!/usr/bin/env python
"""python scripts/run_transformers_tests.py [--source FOLDER] [--cache FOLDER] [--only NAME ...] [-- OPTIONS]

Run transformers' common model tests on four models of ours, and beside them on three linear RNNs of its own.

The installed package has no tests. They come from --source, a checkout of huggingface/transformers of the
installed version; without it the tag of that version is cloned into --cache (default: ~/.cache/fla_train).
Needs `pip install parameterized`; tests that need more packages, a GPU or the network skip themselves.
OPTIONS go to pytest (-n 4, -v).

Prints passed, failed and skipped tests per model, then the failed by name and the skipped by reason; the exit
status is 1 if one failed.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections import Counter
from pathlib import Path

import transformers

REPOSITORY = "https://github.com/huggingface/transformers"
OURS = Path(__file__).resolve().parent / "delta_product_common_tests.py"
THEIRS = "tests/models/{name}/test_modeling_{name}.py"
MODELS = {  # name: the file and the class of its tests
    "delta_net": (str(OURS), "DeltaNetTest"),
    "gated_delta_net": (str(OURS), "GatedDeltaNetTest"),
    "delta_product": (str(OURS), "DeltaProductTest"),
    "hybrid": (str(OURS), "HybridTest"),
    "qwen3_next": (THEIRS.format(name="qwen3_next"), "Qwen3NextModelTest"),
    "olmo_hybrid": (THEIRS.format(name="olmo_hybrid"), "OlmoHybridModelTest"),
    "mamba2": (THEIRS.format(name="mamba2"), "Mamba2ModelTest"),
}


def checkout(cache: Path) -> Path:
    """The tests of the installed transformers, cloned on the first use."""
    folder = cache / f"transformers-{transformers.__version__}"
    if not folder.exists():
        cache.mkdir(parents=True, exist_ok=True)
        tag = f"v{transformers.__version__}"
        part = folder.with_suffix(".part")
        shutil.rmtree(part, ignore_errors=True)
        command = ["git", "clone", "--depth", "1", "--branch", tag, REPOSITORY, str(part)]
        subprocess.run(command, check=True)
        part.rename(folder)
    return folder


def run(name: str, source: Path, options: list[str]) -> ElementTree.Element:
    """Run the tests of one model from `source`; pytest's report, one <testcase> a test."""
    file, test_class = MODELS[name]
    environment = os.environ | {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "TQDM_DISABLE": "1"}
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = [sys.executable, "-m", "pytest", f"{file}::{test_class}", "-q", "--tb=short"]
        command += ["-c", "pyproject.toml", "-p", "conftest", "--noconftest", f"--junitxml={report}"]
        quiet = None if "-v" in options else subprocess.DEVNULL
        subprocess.run([*command, *options], cwd=source, env=environment, stdout=quiet)
        if not report.exists():
            raise SystemExit(f"pytest wrote no report for {name}: run it with -- -v to see why")
        return ElementTree.parse(report).getroot()


def without_names(reason: str) -> str:
    """A reason to skip without the names of test, model and pipeline, so that equal ones count as one."""
    reason = re.sub(r"\w+Test::test_\w+ is skipped: ", "", " ".join(reason.split()))
    return re.sub(r"`[\w-]+`|\S*(DeltaProduct|Qwen3Next|OlmoHybrid|Mamba2)\S*", "...", reason)[:100]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", type=Path, help="a checkout of huggingface/transformers")
    parser.add_argument("--cache", type=Path, default=Path("~/.cache/fla_train").expanduser())
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME")
    parser.add_argument("options", nargs="*", help="for pytest, after --")
    arguments = parser.parse_args()
    source = (arguments.source or checkout(arguments.cache)).resolve()
    package = source / "src" / "transformers" / "__init__.py"  # what its tests import
    if not package.is_file() or f'__version__ = "{transformers.__version__}"' not in package.read_text():
        parser.error(f"--source {source} is no checkout of transformers {transformers.__version__}")

    failed_anywhere = False
    print(f"transformers {transformers.__version__}, tests from {source}")
    print(f"{'model':<16} passed failed skipped")
    for name in arguments.only:
        cases = list(run(name, source, arguments.options).iter("testcase"))
        failed = [c for c in cases if c.find("failure") is not None or c.find("error") is not None]
        skipped = [c.find("skipped").get("message", "") for c in cases if c.find("skipped") is not None]
        failed_anywhere |= bool(failed) or not cases
        passed = len(cases) - len(failed) - len(skipped)
        print(f"{name:<16} {passed:>6} {len(failed):>6} {len(skipped):>7}", flush=True)
        for case in failed:
            print(f"    failed: {case.get('name') or 'collecting the tests; see them with -- -v'}")
        for reason, count in Counter(map(without_names, skipped)).most_common():
            print(f"    skipped {count:>3}: {reason}")
    return int(failed_anywhere)


if __name__ == "__main__":
    sys.exit(main())
