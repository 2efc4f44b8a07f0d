"""Reports of packed sequences: losses by document, bits per byte, beside records of earlier versions."""

import math

from test_report import record

from fla_train.eval.compare import comparison
from fla_train.eval.report import page
from fla_train.eval.tables import latex, markdown


def packed(name: str, losses: list[float], targets: list[int]) -> dict:
    """An evaluation of packed sequences, as this version writes it: a loss per document, bits per byte."""
    found = record(name, losses)
    mean = sum(a * b for a, b in zip(losses, targets, strict=True)) / sum(targets)
    more = {"loss": mean, "perplexity": math.exp(mean), "targets": targets, "sequences": 4}
    more |= {"bits_per_byte": mean / 3, "bits_per_byte_stderr": 0.02}
    more |= {"bits_per_byte_low": mean / 3 - 0.1, "bits_per_byte_high": mean / 3 + 0.1}
    for line in found["perplexity"]["web"]["lengths"]:
        line |= more
    return found


def test_documents_of_packed_sequences_count_by_their_targets() -> None:
    """Better on the one long document, worse on the short ones: better as a whole, but by one document."""
    targets = [1000, 10, 10, 10, 10]
    base = packed("base", [3.0, 3.0, 3.0, 3.0, 3.0], targets)
    other = packed("other", [2.9, 3.2, 3.2, 3.2, 3.2], targets)
    equal = packed("equal", [2.9, 2.9, 2.9, 2.8, 2.8], [100] * 5)  # other targets: nothing can be said
    rows = {(r.group, r.label): r.cells for r in comparison([base, other, equal])}
    assert [cell.mark for cell in rows["web", "perplexity, 64 tokens"]] == ["", "", ""]
    other["perplexity"]["web"]["lengths"][0]["losses"] = [2.9, 2.9, 2.91, 2.9, 2.89]
    rows = {(r.group, r.label): r.cells for r in comparison([base, other])}
    assert rows["web", "perplexity, 64 tokens"][1].mark == "▲"
    bits = rows["web", "bits per byte, 64 tokens"]
    assert bits[0].value == 1.0 and bits[0].error == 0.02 and bits[1].mark == "▲"


def test_bits_per_byte_stand_beside_perplexity_everywhere() -> None:
    new, old = packed("new", [3.0, 3.3], [5, 5]), record("old", [3.0, 3.3])
    assert "| 1.0500 |" in markdown([new]) and "& 1.050 " in latex([new])
    assert "| web | bits per byte, 64 tokens | - | 1.050 ± 0.020 | - | - |" in markdown([new, old])
    assert '"bits_per_byte": 1.05' in page([new, old])
    for text in (markdown([old]), latex([old])):  # of an earlier version
        assert "23.3" in text
    alone = packed("one", [3.0], [5])
    for line in alone["perplexity"]["web"]["lengths"]:
        line |= {"low": None, "high": None, "stderr": None, "no_interval": "one document"}
    assert "| none: one document |" in markdown([alone])
