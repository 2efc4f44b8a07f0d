"""The page of docs/ that explains an error, by the config key or the subject that its line names first."""

import re

PAGES = {
    "docs/mixers.md": r"\bmixer(?:_options)?\b",
    "docs/expressivity.md": r"\bsuite=expressivity\b|\bsuite\.expressivity\b",
    "docs/evaluation.md": r"\b(?:trainer\.)?suite|\blm-eval\b|\bmirror=|\bevaluations?\b",
    "docs/exports.md": r"\bhub\.|\bformat=|\bcheckpoint=|\bexport(?:s|ed)?\b",
    "docs/data.md": r"\bdata\.|\bmixture\b|\bthe corpus\b|\bshard\b|\bfla-prepare\b|\btokenizer\b",
    "docs/launching.md": r"\blaunch\.|\bmachines\b",
    "docs/reliability.md": r"\brun\.dir\b|\btrainer\.resume\b|\bcheckpoint\b(?!=)|\branks?\b|\bout of memory\b",
    "docs/kernels.md": r"\bmodel\.backend\b|\bbackend check\b|\bTRITON_PTXAS_PATH\b",
    "docs/models.md": r"\bmodel\.|\bthis model\b",
    "docs/training.md": r"\b(?:trainer|optimizer|schedule|task|logger)\.|\binit_from\b|\brun\.job\b",
}
# What names the right word itself, or a page, and the options that follow a name that is none.
ANSWERED = re.compile(r"did you mean|: write |docs/|^    ")


def page_of(error: str) -> str | None:
    """The page about what one line of an error names first."""
    found = {page: match.start() for page, words in PAGES.items() if (match := re.search(words, error))}
    return None if ANSWERED.search(error) else min(found, key=found.get, default=None)


def with_pages(message: str) -> str:
    """A message with an error in each line, and at the end of a line the page that explains it."""
    lines = message.split("\n")
    return "\n".join(f"{line} (see {page})" if (page := page_of(line)) else line for line in lines)
