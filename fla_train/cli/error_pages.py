"""The page of docs/ that explains an error, by the config key or the subject that its line names first."""

import re

PAGES = {
    "docs/mixers.md": r"(model\.)?mixer(_options)?\b",
    "docs/expressivity.md": r"suite[=.]expressivity\b|task\.kind\b",
    "docs/evaluation.md": r"(trainer\.)?suite|lm-eval\b|mirror=|evaluations?\b",
    "docs/exports.md": r"hub\.|format=|checkpoint=|export(s|ed)?\b",
    "docs/data.md": r"data\.|mixture\b|the corpus\b|shard\b|fla-prepare\b|tokenizer\b",
    "docs/launching.md": r"launch\.|machines\b",
    "docs/troubleshooting.md": r"rank \d|NaN\b|backend check\b",
    "docs/performance.md": r"out of \w* ?memory|trainer\.(micro_batch_size|cuda_graph)\b",
    "docs/resume.md": r"run\.dir\b|trainer\.resume\b|checkpoint\b(?!=)|belongs to another run\b",
    "docs/finetune.md": r"init_from\b",
    "docs/sweeps.md": r"run\.job\b",
    "docs/kernels.md": r"model\.backend\b",
    "docs/models.md": r"model\.|this model\b",
    "docs/metrics.md": r"logger\.",
    "docs/configuration.md": r"(trainer|optimizer|schedule|task)\.",
}
# What names the right word itself, or a page, and the options that follow a name that is none.
ANSWERED = re.compile(r"did you mean|: write |--help lists|docs/|^    ")


def page_of(error: str) -> str | None:
    """The page about what one line of an error names first; None: it needs no page."""
    matches = {page: re.search(rf"\b({words})", error) for page, words in PAGES.items()}
    found = {page: match.start() for page, match in matches.items() if match}
    return None if ANSWERED.search(error) else min(found, key=found.get, default=None)


def with_pages(message: str) -> str:
    """A message with an error in each line, and at the end of a line the page that explains it."""
    lines = message.split("\n")
    return "\n".join(f"{line} (see {page})" if (page := page_of(line)) else line for line in lines)
