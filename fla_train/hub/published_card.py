"""The model card of a push: that of the export, with what is known only then."""

import math
from collections.abc import Iterator
from pathlib import Path

from huggingface_hub import EvalResult, ModelCard
from huggingface_hub.repocard import REGEX_YAML_BLOCK
from yaml import YAMLError

from fla_train.hub.paths import own_name, run_folder
from fla_train.utils.safe_files import parse_yaml, read_json

CARD = "README.md"
TRAINING_FILE = "training.json"  # the CardInfo of an export
PLACEHOLDER = "user/model"  # the repository's name in the card of an export
CHECKPOINT = 'checkpoint = "{}"'  # the line of the card's code that has it
USE = "## Use\n"  # the heading that results of evaluations stand before


def published_card(
    folder: Path, name: str, origin: Path, *, license: str | None = None, language: str | None = None
) -> str:
    """README.md of an exported folder for the repository `name`; empty if the folder has none.

    Its commands get the repository's name, its header licence and language. Results of `fla-eval` on
    `origin`, which its run folder holds, are added to the header's model-index and as a table.

    Raises:
        ValueError: the header is no valid YAML.
    """
    if not (folder / CARD).is_file():
        return ""
    text = (folder / CARD).read_text().replace(CHECKPOINT.format(PLACEHOLDER), CHECKPOINT.format(name))
    results = list(_results(origin))
    if not (license or language or results):
        return text
    try:
        if header := REGEX_YAML_BLOCK.search(text):
            parse_yaml(header[2], "it")  # ModelCard would follow aliases without end
        card = ModelCard(text)
    except (YAMLError, ValueError) as error:
        raise ValueError(f"{folder / CARD} has no valid header: {' '.join(str(error).split())}") from error
    data = card.data
    data.license, data.language = license or data.license, language or data.language
    if results:
        data.model_name = data.model_name or name
        data.eval_results = [*(data.eval_results or ()), *results]
        rows = (f"| {r.dataset_name} | {r.metric_type} | {r.metric_value:.4f} |" for r in results)
        table = "\n".join(["| evaluated on | metric | value |", "|---|---|---|", *rows])
        card.text = card.text.replace(USE, f"## Evaluation\n\n{table}\n\n{USE}", 1)
    return str(card)


def _results(export: Path) -> Iterator[EvalResult]:
    """Those of the newest evaluation of each data set or task, if it is newer than the export.

    The export's age is that of its training record; an edit of the card changes that of the folder.
    """
    run = run_folder(export)
    found: dict[str, float] = {}
    training = export / TRAINING_FILE
    written = (training if training.is_file() else export).stat().st_mtime
    for file in sorted(run.glob("eval/*/results.json") if run else (), key=lambda file: file.stat().st_mtime):
        try:
            record = read_json(file)
        except ValueError:  # cut short by a full disk
            continue
        if own_name(record.get("checkpoint", "")) == own_name(export) and file.stat().st_mtime >= written:
            found |= record.get("metrics", {})
    for key, value in found.items():
        name, _, metric = key.removeprefix("eval/").rpartition("/")
        if math.isfinite(value):
            yield EvalResult("text-generation", name, name, metric, value)
