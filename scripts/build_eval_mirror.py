#!/usr/bin/env python
"""python scripts/build_eval_mirror.py SPLITS MIRROR
python scripts/build_eval_mirror.py FOLDER MIRROR --hub aps/super_glue --config boolq --rows validation=3270

Lay official splits out as a mirror of the Hub, for `fla-eval ... mirror=MIRROR` on a machine without network.

With --hub, FOLDER holds one data set of any name as JSON lines or parquet, with the Hub's columns; the split
stands in a file's name: train.jsonl, validation-00000-of-00002.parquet, boolq.dev.jsonl. --hub and --config
are what the task's definition in lm-eval calls dataset_path and dataset_name; without a dataset_name leave
--config out. --rows says how many rows a split must have, where that is known.

Without --hub, SPLITS holds a folder per set of the list below, with `train.jsonl`, `validation.jsonl` or
`test.jsonl` or `<config>.<split>.jsonl`; `wikitext2` holds `wiki.<split>.raw` instead. Other files are not
read. Of `hendrycks_math` the rows of level 5 are taken, which are MATH-Hard. Sets that SPLITS lacks are named
and left out.
Where SPLITS has a folder `<set>_proxy` instead of `<set>`, its rows are taken as a stand-in, and a NOTE.txt
beside them says so: evaluations mark the scores and print the note.

MIRROR gets `<org>/<name>/<config>/` with the rows, and a README.md whose header names the configs, the splits
and their rows, which `datasets.load_dataset` checks: a file that was cut short later does not load.
"""

import argparse
import json
import re
import shutil
import sys
import tempfile
from pathlib import Path

import yaml

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
NAMED = {split: split for split in SPLITS}  # the split that a word of a file's name means
NAMED |= dict.fromkeys(("valid", "val", "dev"), "validation")
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


def describe(readme: Path, config: str, splits: dict[str, tuple[list[str], int]]) -> None:
    """Write a config into the header of a data set's README.md: the files of each split, and their rows."""
    text = readme.read_text(encoding="utf-8") if readme.is_file() else "---\n{}\n---\n"
    content = yaml.safe_load(text.split("---")[1])
    files = [
        {"split": split, "path": [f"{config}/{name}" for name in names]}
        for split, (names, _) in splits.items()
    ]
    rows = [{"name": split, "num_bytes": 0, "num_examples": rows} for split, (_, rows) in splits.items()]
    for key, mine in (("configs", {"data_files": files}), ("dataset_info", {"splits": rows})):
        others = [other for other in content.get(key, ()) if other["config_name"] != config]
        content[key] = [*others, {"config_name": config, **mine}]
    readme.write_text(f"---\n{yaml.safe_dump(content, sort_keys=False)}---\n", encoding="utf-8")


def split_files(folder: Path) -> dict[str, list[Path]]:
    """The JSON-lines and parquet files of a folder by the split that their names hold.

    Raises:
        ValueError: none, no split or several in a name, or both formats.
    """
    found: dict[str, list[Path]] = {}
    for file in sorted(file for file in folder.iterdir() if file.suffix in (".jsonl", ".parquet")):
        words = re.split(r"[^a-z]+", file.stem.lower())
        splits = {NAMED[word] for word in words if word in NAMED}
        if len(splits) != 1:
            raise ValueError(f"{file}: its name must hold one of {', '.join(NAMED)}")
        found.setdefault(splits.pop(), []).append(file)
    if not found:
        raise ValueError(f"{folder} holds no .jsonl or .parquet file")
    if len({file.suffix for files in found.values() for file in files}) > 1:
        raise ValueError(
            f"{folder} holds .jsonl and .parquet files, and a data set has one format: leave one"
        )
    return {split: found[split] for split in SPLITS if split in found}


def count_rows(file: Path) -> int:
    """Rows of a JSON-lines or parquet file.

    Raises:
        ValueError: a line that is no JSON object, or a damaged parquet file.
    """
    if file.suffix == ".parquet":
        from pyarrow import ArrowInvalid
        from pyarrow.parquet import ParquetFile

        try:
            with ParquetFile(file) as table:
                return table.metadata.num_rows
        except ArrowInvalid as failure:
            raise ValueError(f"{file}: damaged ({failure})") from failure
    rows = 0
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if line.strip():
                try:
                    row = json.loads(line)
                except ValueError as failure:
                    raise ValueError(f"{file}, line {number}: {failure}") from failure
                if not isinstance(row, dict):
                    raise ValueError(f"{file}, line {number}: no JSON object")
                rows += 1
    return rows


def add(folder: Path, mirror: Path, name: str, config: str, wanted: dict[str, int]) -> dict[str, int]:
    """Lay a folder of any data set out, and read it back.

    Args:
        name: the set's on the Hub.
        config: as tasks ask for it.
        wanted: rows by split, where they are known.

    Returns:
        Rows by split.

    Raises:
        ValueError: files, names or counts that cannot be right, or rows that do not load; nothing is left.
    """
    place, readme = mirror_place(mirror, name, config), mirror / name / "README.md"
    files = split_files(folder)
    rows = {split: sum(map(count_rows, files[split])) for split in files}
    for split, count in wanted.items():
        if rows.get(split, 0) != count:
            raise ValueError(
                f"{folder}: {rows.get(split, 0):,} rows of {split} for {count:,}: files are missing"
            )
    before = readme.read_text(encoding="utf-8") if readme.is_file() else None
    shutil.rmtree(place, ignore_errors=True)
    place.mkdir(parents=True)
    for file in (file for split in files.values() for file in split):
        shutil.copyfile(file, place / file.name)
    describe(readme, config, {split: ([f.name for f in files[split]], rows[split]) for split in files})
    import datasets  # takes seconds

    with tempfile.TemporaryDirectory() as cache:
        try:
            loaded = datasets.load_dataset(str(mirror / name), config, cache_dir=cache)
        except Exception as failure:  # whatever `datasets` makes of rows that do not fit together
            while failure.__cause__:
                failure = failure.__cause__
            shutil.rmtree(place)
            readme.unlink() if before is None else readme.write_text(before, encoding="utf-8")
            raise ValueError(f"{place} does not load: {' '.join(str(failure).split())[:300]}") from failure
        assert {split: len(loaded[split]) for split in loaded} == rows
    return rows


def build(source: Path, mirror: Path) -> tuple[dict[str, dict[str, dict[str, int]]], list[str]]:
    """Write the mirror of the sets of the list.

    Returns:
        By Hub name, config and split the rows written; and the folders that `source` lacks.
    """
    written: dict[str, dict[str, dict[str, int]]] = {}
    missing = []
    for folder, (name, config) in SETS.items():
        stand_in = not (source / folder).exists()
        rows = source / (folder + STAND_IN if stand_in else folder)
        found = {split: text for split in SPLITS if (text := split_text(rows, split, config)) is not None}
        if not found:
            missing.append(folder)
            continue
        with tempfile.TemporaryDirectory() as laid_out:
            for split, text in found.items():
                Path(laid_out, f"{split}.jsonl").write_text(text, encoding="utf-8")
            written.setdefault(name, {})[config] = add(Path(laid_out), mirror, name, config, {})
        if stand_in:
            note = mirror_place(mirror, name, config) / "NOTE.txt"
            note.write_text(NOTE.format(name) + "\n", encoding="utf-8")
    return written, missing


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("source", type=Path, metavar="FOLDER")
    parser.add_argument("mirror", type=Path, metavar="MIRROR")
    parser.add_argument("--hub", metavar="ORG/NAME")
    parser.add_argument("--config", default="default")
    parser.add_argument("--rows", nargs="+", default=[], metavar="SPLIT=ROWS")
    options = parser.parse_args(arguments)
    if not options.source.is_dir():
        parser.error(f"{options.source} is no folder")
    try:
        if options.hub:
            wanted = {split: int(rows) for split, _, rows in (text.partition("=") for text in options.rows)}
            counts = add(options.source, options.mirror, options.hub, options.config, wanted)
            written, missing = {options.hub: {options.config: counts}}, []
        else:
            written, missing = build(options.source, options.mirror)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    for name, configs in written.items():
        for config, splits in configs.items():
            counts = ", ".join(f"{split} {rows:,}" for split, rows in splits.items())
            print(f"{options.mirror / name}: {config} ({counts})")
    for folder in missing:
        print(f"{options.source / folder}: no split found, so {SETS[folder][0]} is not in the mirror")
    return 0 if written else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
