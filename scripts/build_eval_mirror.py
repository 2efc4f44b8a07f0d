#!/usr/bin/env python
"""python scripts/build_eval_mirror.py SPLITS MIRROR

Lay official splits out as a mirror of the Hub, for `fla-eval ... mirror=MIRROR` on a machine without network.

SPLITS holds a folder per set with `train.jsonl`, `validation.jsonl` or `test.jsonl` (rows with the Hub's
columns) or `<config>.<split>.jsonl`; `wikitext2` holds `wiki.<split>.raw` instead. Other files are not read.
Of `hendrycks_math` the rows of level 5 are taken, which are MATH-Hard. MIRROR gets
`<org>/<name>/<config>/` with the rows, and a README.md whose header names the configs and splits, which
`datasets.load_dataset` understands. Sets that SPLITS lacks are named and left out.

Where SPLITS has a folder `<set>_proxy` instead of `<set>`, its rows are taken as a stand-in, and a NOTE.txt
beside them says so: evaluations mark the scores and print the note.
"""

import json
import re
import sys
from pathlib import Path

from fla_train.eval.mirror import mirror_place

SETS = {  # folder of SPLITS: the Hub's name and config, as lm-eval's task definitions ask for them
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
STAND_IN = "_proxy"  # ends the name of a folder whose rows only look like the set's
NOTE = "a stand-in of the same layout for {}, not its own data: not to be read beside published numbers"
SPLITS = ("train", "validation", "test")
# The newline before a title of the first level, ` = Title = `; deeper headings repeat the sign.
BEFORE_TITLE = re.compile(r"\n(?= *= (?!=)[^\n]*[^=\n] = *(?:\n|$))")


def wikitext_rows(text: str) -> list[dict[str, str]]:
    """One row per article, its lines unchanged: the Hub set's `page` column."""
    return [{"page": page} for page in BEFORE_TITLE.split(text) if page.strip()]


def hard_rows(text: str) -> str:
    """The rows of level 5, as they are."""
    rows = (line for line in text.splitlines(keepends=True) if line.strip())
    return "".join(row for row in rows if json.loads(row)["level"] == "Level 5")


def split_text(folder: Path, split: str, config: str) -> str | None:
    """The rows of a split as JSON lines, or None if SPLITS has no such file."""
    named = [folder / f"{split}.jsonl", folder / f"{config}.{split}.jsonl"]
    raw = folder / f"wiki.{'valid' if split == 'validation' else split}.raw"
    for file in filter(Path.is_file, named):
        text = file.read_text(encoding="utf-8")
        return hard_rows(text) if folder.name.startswith("hendrycks_math") else text
    if raw.is_file():
        rows = wikitext_rows(raw.read_text(encoding="utf-8"))
        return "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    return None


def header(configs: dict[str, list[str]]) -> str:
    """README.md of a data set: its configs and the file of each of their splits."""
    lines = ["---", "configs:"]
    for config, splits in configs.items():
        lines += [f"- config_name: {config}", "  data_files:"]
        for split in splits:
            lines += [f"  - split: {split}", f"    path: {config}/{split}.jsonl"]
    return "\n".join([*lines, "---", ""])


def build(source: Path, mirror: Path) -> tuple[dict[str, dict[str, list[str]]], list[str]]:
    """Write the mirror.

    Returns:
        By Hub name and config the splits written; and the folders that `source` lacks.
    """
    written: dict[str, dict[str, list[str]]] = {}
    missing = []
    for folder, (name, config) in SETS.items():
        stand_in = not (source / folder).exists()
        rows = source / (folder + STAND_IN if stand_in else folder)
        found = {split: text for split in SPLITS if (text := split_text(rows, split, config)) is not None}
        if not found:
            missing.append(folder)
            continue
        place = mirror_place(mirror, name, config)
        place.mkdir(parents=True, exist_ok=True)
        for split, text in found.items():
            (place / f"{split}.jsonl").write_text(text, encoding="utf-8")
        note = place / "NOTE.txt"
        note.unlink(missing_ok=True)  # of a mirror that held the stand-in before
        if stand_in:
            note.write_text(NOTE.format(name) + "\n", encoding="utf-8")
        written.setdefault(name, {})[config] = list(found)
    for name, configs in written.items():
        (mirror / name / "README.md").write_text(header(configs))
    return written, missing


def main(arguments: list[str]) -> int:
    if len(arguments) != 2 or not Path(arguments[0]).is_dir():
        print(
            "usage: python scripts/build_eval_mirror.py SPLITS MIRROR (SPLITS is a folder)", file=sys.stderr
        )
        return 2
    source, mirror = map(Path, arguments)
    written, missing = build(source, mirror)
    for name, configs in written.items():
        for config, splits in configs.items():
            print(f"{mirror / name}: {config} ({', '.join(splits)})")
    for folder in missing:
        print(f"{source / folder}: no split found, so {SETS[folder][0]} is not in the mirror")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
