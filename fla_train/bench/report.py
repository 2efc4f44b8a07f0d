"""Print results as Markdown tables while they are measured, and write them as JSON and Markdown files."""

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fla_train.bench.roofline import known_ceilings
from fla_train.utils.environment import describe_environment

Row = dict[str, Any]
DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


class Report:
    """The results of one command: printed lines, and `content` for JSON.

    Attributes:
        device: a GPU if there is one.
        dtype: dtype of activations, by default bf16 on a GPU and fp32 on a CPU.
        ceilings: the data sheet's speeds of the device; None where they are not known.
    """

    def __init__(self, options: Mapping[str, Any]) -> None:
        on_gpu = torch.cuda.is_available()
        self.device = torch.device("cuda" if on_gpu else "cpu")
        self.dtype = DTYPES[options.get("dtype") or ("bf16" if on_gpu else "fp32")]
        self.ceilings = known_ceilings(self.device, self.dtype)
        self.lines: list[str] = []
        self.content = {
            "environment": describe_environment(str(self.device)),
            "threads": torch.get_num_threads(),
            "settings": dict(options),
            "ceilings": vars(self.ceilings) if self.ceilings else None,
        }
        hardware = torch.cuda.get_device_name() if on_gpu else f"{torch.get_num_threads()} CPU threads"
        self.print(f"{hardware}, torch {torch.__version__}")
        self.print(", ".join(f"{key} {value}" for key, value in options.items() if value is not None))

    def print(self, line: object = "") -> None:
        """Print a line and keep it."""
        print(line, flush=True)
        self.lines.append(str(line))

    def table(self, name: str, columns: Sequence[str], rows: Iterable[Row]) -> list[Row]:
        """Print each row as soon as it is measured, and keep the rows as `name`.

        Args:
            columns: keys of the rows, which are the titles. A cell stays empty if its row lacks the key.
        """
        self.print("\n| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
        kept = self.content[name] = []
        for row in rows:
            self.print("| " + " | ".join(_cell(row.get(key)) for key in columns) + " |")
            kept.append(row)
        return kept

    def write(self, file: Path) -> None:
        """Write the content to `file` and the printed lines next to it."""
        file.write_text(json.dumps(self.content, indent=1, default=str) + "\n")
        file.with_suffix(".md").write_text("\n".join(self.lines) + "\n")


def _cell(value: object) -> str:
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return "" if value is None else str(value)
