"""The result of an evaluation: results.json holds one `EvalResult`, the source of all tables and figures."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from fla_train.utils.filesystem import write_whole
from fla_train.utils.safe_files import read_json


class Value(NamedTuple):
    """A number, its standard error, and the ends of its 95% interval; None where they are not known."""

    value: float
    stderr: float | None = None
    low: float | None = None
    high: float | None = None


@dataclass(frozen=True)
class Score:
    """One number of an evaluation, and the data for comparing it.

    Attributes:
        section: `perplexity`, `needle`, `tasks` or `expressivity`.
        data: data set, needle task and prompt (`niah_single_1/ruler`), task of lm-eval, or test set.
        metric: `loss` (nats per token), `perplexity`, `bits_per_byte`, `accuracy`, `acc_norm`, ...
        value: the number.
        length: context length in tokens; None for tasks.
        stderr: standard error over documents.
        low: lower end of the 95% interval.
        high: upper end of the 95% interval.
        documents: documents, samples or examples behind the number.
        sequences: sequences behind the number, where documents are joined or cut; else None.
        higher_is_better: None where the task does not say.
        chance: expected value of guesses, where that is known.
        fingerprint: hash of the data. Only numbers of equal fingerprints are compared.
        by_document: contribution of each document to the number or to its logarithm; empty if not known.
            `perplexity` and `bits_per_byte` are compared by the documents of `loss`.
        weights: weight of each document in the mean; None for equal weights.
    """

    section: str
    data: str
    metric: str
    value: float
    length: int | None = None
    stderr: float | None = None
    low: float | None = None
    high: float | None = None
    documents: int = 0
    sequences: int | None = None
    higher_is_better: bool | None = None
    chance: float | None = None
    fingerprint: str = ""
    by_document: Sequence[float] = field(default_factory=list)
    weights: Sequence[float] | None = None

    @property
    def key(self) -> tuple[str, str, str, int | None]:
        """Return the arguments of `EvalResult.find`, by which a comparison matches scores."""
        return self.section, self.data, self.metric, self.length


@dataclass(frozen=True)
class Curve:
    """A metric along the positions of the sequences that reach `length`.

    Attributes:
        data: data set.
        metric: `perplexity` or `bits_per_byte`.
        length: tokens of each sequence that count; the figure has a row of panels for each length.
        sequences: how many sequences each point averages.
        edges: point i covers the tokens edges[i] <= t < edges[i + 1].
        value: one number for each point.
        low: lower ends of the 95% intervals, None for each point without one.
        high: upper ends.
    """

    data: str
    metric: str
    length: int
    sequences: int
    edges: Sequence[int]
    value: Sequence[float]
    low: Sequence[float | None]
    high: Sequence[float | None]


@dataclass
class Measurements:
    """The results of one set or task. They are kept on disk, so an interrupted evaluation can resume.

    Attributes:
        scores: one for each number.
        curves: losses along the positions.
        notes: sentences below the tables.
        accuracy: by test set of a synthetic task, see `fla_train.tasks.score.TaskScore.curve`.
    """

    scores: list[Score] = field(default_factory=list)
    curves: list[Curve] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    accuracy: dict[str, dict[str, Any]] = field(default_factory=dict)

    @classmethod
    def from_json(cls, content: dict[str, Any]) -> "Measurements":
        """Return what `asdict` made plain."""
        scores = [Score(**score) for score in content["scores"]]
        curves = [Curve(**curve) for curve in content["curves"]]
        return cls(scores, curves, content["notes"], content["accuracy"])


@dataclass
class EvalResult(Measurements):
    """Everything that an evaluation found.

    Attributes:
        name: what tables and figures call the model.
        checkpoint: folder or Hub name.
        files: name, size and time of the files of the checkpoint, or the commit on the Hub.
        model: type, number of parameters, and `positions`, the tokens that a model with a table of positions
            can read.
        trained_length: tokens of a training sequence, if known.
        window: tokens of prompt and answer in tasks of lm-eval; None without tasks.
        suite: the settings.
        environment: hardware, packages, commit and dtype.
        errors: the error of each set or task that could not run.
        seconds: wall time.
    """

    name: str = ""
    checkpoint: str = ""
    files: list = field(default_factory=list)
    model: dict[str, Any] = field(default_factory=dict)
    trained_length: int | None = None
    window: int | None = None
    suite: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, Any] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    seconds: float = 0.0

    def add(self, measured: Measurements) -> None:
        """Add the results of a set or task."""
        self.scores += measured.scores
        self.curves += measured.curves
        self.notes += [note for note in measured.notes if note not in self.notes]
        self.accuracy |= measured.accuracy

    def find(self, section: str, data: str, metric: str, length: int | None = None) -> Score | None:
        """Return the score with this key, if the evaluation has it."""
        return next((s for s in self.scores if s.key == (section, data, metric, length)), None)

    def in_section(self, section: str) -> list[Score]:
        """Return the scores of a section."""
        return [score for score in self.scores if score.section == section]

    def metrics(self) -> dict[str, float]:
        """Return the scores as `eval/<data>/<metric>[_<length>]`, for metrics.jsonl and model cards."""
        return {
            f"eval/{s.data}/{s.metric}" + ("" if s.length is None else f"_{s.length}"): s.value
            for s in self.scores
            if (s.section, s.metric) != ("perplexity", "perplexity")
        }

    def save(self, file: Path) -> None:
        """Write the result, and `metrics` with it, as JSON."""
        write_whole(file, json.dumps(asdict(self) | {"metrics": self.metrics()}, indent=1) + "\n")

    @classmethod
    def load(cls, file: Path) -> "EvalResult":
        """Read what `save` wrote.

        Raises:
            ValueError: the file holds something else.
        """
        content = read_json(file)
        content.pop("metrics", None)
        try:
            return cls(**content | vars(Measurements.from_json(content)))
        except (KeyError, TypeError) as error:
            raise ValueError(f"{file} is not the result of an evaluation ({error})") from error


def find_result(place: str | Path) -> EvalResult:
    """Read the result in a folder of `fla-eval`, or the newest result with scores of a run folder.

    Raises:
        ValueError: there is none, or it is damaged.
    """
    folder = Path(place).expanduser()
    if (folder / "results.json").is_file():
        return EvalResult.load(folder / "results.json")
    for file in sorted(folder.glob("eval/*/results.json"), key=lambda file: -file.stat().st_mtime):
        if (result := EvalResult.load(file)).scores:  # otherwise it has only errors
            return result
    raise ValueError(f"{place} holds no results of fla-eval: name a folder that it wrote, or a run folder")


def unique(items: Iterable) -> list:
    """Return the items without repetitions, in their order."""
    return list(dict.fromkeys(items))
