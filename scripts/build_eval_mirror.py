#!/usr/bin/env python
"""python scripts/build_eval_mirror.py SPLITS MIRROR

Lay official splits out as folders of the Hub, for `fla-eval ... mirror=MIRROR` on a machine without network.
Where there is a network, `hf download ORG/NAME --repo-type dataset --local-dir MIRROR/ORG/NAME` does the
same.

SPLITS holds a folder for each set of the list below, with `<split>.jsonl` or `<config>.<split>.jsonl` in the
Hub's columns; `wikitext2` holds `wiki.<split>.raw`. Other files and folders are not read. MATH-Hard has the
rows of level 5 of `hendrycks_math`.
"""

import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import yaml

SETS = {  # folder of SPLITS: name and config on the Hub, as lm-eval's task definitions have them
    "wikitext2": ("EleutherAI/wikitext_document_level", "wikitext-2-raw-v1"),
    "lambada_openai": ("EleutherAI/lambada_openai", "default"),
    "piqa": ("baber/piqa", "default"),
    "hellaswag": ("Rowan/hellaswag", "default"),
    "winogrande": ("allenai/winogrande", "winogrande_xl"),
    "arc_easy": ("allenai/ai2_arc", "ARC-Easy"),
    "arc_challenge": ("allenai/ai2_arc", "ARC-Challenge"),
    "swde": ("hazyresearch/based-swde-v2", "default"),
    "squad_completion": ("hazyresearch/based-squad", "default"),
    "fda": ("hazyresearch/based-fda", "default"),
    "codeparrot": ("codeparrot/codeparrot-clean-valid", "default"),
    "openthoughts_math": ("open-r1/OpenThoughts-114k-math", "default"),
    "triviaqa": ("mandarjoshi/trivia_qa", "rc.wikipedia.nocontext"),
    "slimpajama": ("cerebras/SlimPajama-627B", "default"),
    "hendrycks_math": ("lighteval/MATH-Hard", "default"),
}
SPLITS = {"train": "train", "validation": "valid", "test": "test"}  # split: its name in WikiText's files
# The newline before a title of the first level, ` = Title = `; deeper headings repeat the sign.
BEFORE_TITLE = re.compile(r"\n(?= *= (?!=)[^\n]*[^=\n] = *(?:\n|$))")


def rows(folder: Path, config: str, split: str) -> Iterator[dict]:
    """Yield the rows of a split; none if the folder does not have it."""
    for file in (folder / f"{split}.jsonl", folder / f"{config}.{split}.jsonl"):
        if file.is_file():
            lines = file.read_text(encoding="utf-8").split("\n")
            content = (json.loads(line) for line in lines if line.strip())
            yield from (r for r in content if folder.name != "hendrycks_math" or r["level"] == "Level 5")
    if (raw := folder / f"wiki.{SPLITS[split]}.raw").is_file():
        pages = BEFORE_TITLE.split(raw.read_text(encoding="utf-8"))
        yield from ({"page": page} for page in pages if page.strip())


def main(source: Path, mirror: Path) -> None:
    """Write the sets that `source` has."""
    configs: dict[str, list[dict]] = {}
    for folder, (name, config) in SETS.items():
        files = []
        for split in SPLITS:
            if lines := [json.dumps(row, ensure_ascii=False) for row in rows(source / folder, config, split)]:
                file = mirror / name / config / f"{split}.jsonl"
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text("\n".join(lines) + "\n", encoding="utf-8")
                files.append({"split": split, "path": f"{config}/{split}.jsonl"})
                print(f"{file}: {len(lines):,} rows")
        if files:
            configs.setdefault(name, []).append({"config_name": config, "data_files": files})
    for name, entries in configs.items():
        header = yaml.safe_dump({"configs": entries}, sort_keys=False)
        (mirror / name / "README.md").write_text(f"---\n{header}---\n", encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
