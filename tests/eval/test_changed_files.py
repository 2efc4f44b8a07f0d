"""Finished parts are not used again after documents, tasks or code have changed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import fla_train
from fla_train.eval.config import EvalConfig, PerplexityConfig, SuiteConfig
from fla_train.eval.result import EvalResult
from fla_train.eval.run import evaluate
from fla_train.hub.card import CardInfo
from fla_train.hub.export import export_model
from tests.eval.conftest import CHOICES


@pytest.fixture
def result_of(scholar, tokenizer, tmp_path: Path) -> Callable[..., EvalResult]:
    """`result_of(suite, mirror=None)`: the result of the same model in the same folder."""
    checkpoint = export_model(scholar, tokenizer, tmp_path / "model", CardInfo(seq_len=64))

    def result(suite: SuiteConfig, mirror: Path | None = None) -> EvalResult:
        where = {"output": str(tmp_path / "out"), "mirror": mirror and str(mirror)}
        return evaluate(EvalConfig(str(checkpoint), suite=suite, **where), progress=False)[1]

    return result


def write(file: Path, text: str, key: str = "text") -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({key: text}) + "\n")
    return file


@pytest.mark.parametrize("mirrored", [False, True])
def test_documents(mirrored: bool, result_of, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor after an update of this package."""
    place = tmp_path / "mirror/cerebras/SlimPajama-627B/test.jsonl" if mirrored else tmp_path / "own.jsonl"
    sets = ["slimpajama" if mirrored else str(place)]
    suite = SuiteConfig(name="p", perplexity=PerplexityConfig(sets=sets, lengths=[16], layout="documents"))

    def found() -> tuple[str, float]:
        result = result_of(suite, tmp_path / "mirror" if mirrored else None)
        return result.scores[0].fingerprint, result.scores[0].value

    write(place, "all work and no play")
    first = found()
    write(place, "all play and no work")  # as many bytes
    second = found()
    assert first[0] != second[0] and first[1] != second[1]
    (part,) = (tmp_path / "out/parts").iterdir()
    part.write_text(part.read_text().replace(str(second[1]), "1.5"))
    assert found()[1] == 1.5
    monkeypatch.setattr(fla_train, "__version__", "another")
    assert found() == second


def test_tasks(result_of, write_task, quiz: list[dict]) -> None:
    def prompts(text: str) -> str:
        folder = write_task("quiz", quiz, **CHOICES | {"doc_to_text": text})
        suite = SuiteConfig(name="t", tasks=["quiz"], include_path=str(folder), limit=2)
        return result_of(suite).scores[0].fingerprint

    assert prompts("{{question}}") != prompts("Q: {{question}}")


def test_mixers(build_model, tokenizer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    document = write(tmp_path / "own.jsonl", "all work and no play")
    sets = PerplexityConfig(sets=[str(document)], lengths=[16], layout="documents")
    config = EvalConfig("model", "out", mixer="scaled:Scaled", suite=SuiteConfig("p", sets))

    def loss(scale: int) -> float:
        monkeypatch.delitem(sys.modules, "scaled", raising=False)
        lines = ["from fla_train.models.mixers.delta_product import DeltaProductMixer"]
        lines += ["class Scaled(DeltaProductMixer):", "    def forward(self, x, context=None, cache=None):"]
        lines += [f"        return {scale} * super().forward(x, context, cache)"]
        Path("scaled.py").write_text("\n".join(lines))
        if not Path("model").exists():
            export_model(build_model(mixer="scaled:Scaled"), tokenizer, "model", CardInfo(seq_len=64))
        return evaluate(config, progress=False)[1].scores[0].value

    assert loss(1) == loss(1) != loss(1000)
