"""The script that sets losses of several evaluations against one of them, document by document."""

import json
import math
from pathlib import Path
from types import ModuleType

import pytest

from tests.eval.conftest import load_script

# Loss per token of two documents over their first 4, 8 and 16 tokens.
ONE = {4: [2.0, 4.0], 8: [3.0, 5.0], 16: [3.5, 6.0]}
TWO = {4: [2.0, 3.0], 8: [2.5, 4.5], 16: [3.0, 6.5]}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load_script("paired_losses")


def write(folder: Path, losses: dict[int, list[float]], fingerprint: str = "f") -> str:
    result = {
        "lengths": [{"length": length, "losses": values} for length, values in losses.items()],
        "data": {"fingerprint": fingerprint},
    }
    sets = {"web": result, "code": result, "lost": {"error": "not to be had"}}
    folder.mkdir()
    record = {"name": folder.name, "perplexity": sets, "tasks": {}, "paper_row": {}}
    (folder / "results.json").write_text(json.dumps(record))
    return str(folder)


def test_spans_and_what_is_lost_with_the_length(script, tmp_path: Path, capsys) -> None:
    places = [write(tmp_path / name, losses) for name, losses in (("one", ONE), ("two", TWO), ("same", ONE))]
    assert script.main([*places, "--of", "0:4", "0:4,8:16"]) == 0
    head, _, *rows = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    assert head[-3:] == ["web (2)", "code (2)", "all (4)"]
    assert [row[:2] for row in rows] == [
        [name, label] for name in ("two", "same") for label in ("0 to 4", "8 to 16 less 0 to 4")
    ]
    # First 4 tokens: 0 and -1. Tokens 8 to 16 are 2 l(16) - l(8): 4 and 7 in `one`, 3.5 and 8.5 in `two`.
    assert rows[0][2] == "-0.500 (0.500)" and rows[0][4] == f"-0.500 ({0.5 / math.sqrt(3):.3f})"
    assert rows[1][2] == "+1.000 (1.500)" and rows[1][2] == rows[1][3]
    assert rows[2][2] == rows[3][2] == "+0.000 (0.000)"


def test_what_cannot_be_paired_is_a_line(script, tmp_path: Path, capsys) -> None:
    one = write(tmp_path / "one", ONE)
    other = write(tmp_path / "other", TWO, fingerprint="g")
    short = write(tmp_path / "short", ONE | {16: [3.5]})
    for places, of, message in (
        ([one, other], "0:4", "other and one did not read the same tokens of web"),
        ([one, one], "0:5", "web: 5 is no length that was measured and that all 2 documents reach"),
        ([short, short], "0:16", "web: 16 is no length"),
        ([one, str(tmp_path)], "0:4", "holds no results.json"),
    ):
        assert script.main([*places, "--of", of]) == 2
        printed = capsys.readouterr()
        assert message in printed.err and not printed.out
    for wrong in ("4:0", "0", "0:4,4:8,8:16", "a:b"):
        with pytest.raises(SystemExit):
            script.main([one, one, "--of", wrong])


def test_documents_count_by_their_targets(script, tmp_path: Path, capsys) -> None:
    """Of packed sequences, where documents are of any length, and some begin behind the span."""
    rows = {4: ([2.0, 3.0, 0.0], [6, 2, 0]), 8: ([2.0, 3.0, 4.0], [8, 4, 4])}
    places = []
    for name, more in (("one", 0.0), ("two", 0.5)):
        lengths = [
            {"length": n, "losses": [losses[0] + more, *losses[1:]], "targets": targets}
            for n, (losses, targets) in rows.items()
        ]
        sets = {"web": {"lengths": lengths, "data": {"fingerprint": "f"}}}
        (tmp_path / name).mkdir()
        record = {"name": name, "perplexity": sets, "tasks": {}, "paper_row": {}}
        (tmp_path / name / "results.json").write_text(json.dumps(record))
        places.append(str(tmp_path / name))
    assert script.main([*places, "--of", "0:4", "0:8"]) == 0
    *_, first, whole = [line.strip("| ").split(" | ") for line in capsys.readouterr().out.splitlines()]
    error = math.sqrt(1 / 2 * ((3 / 8 - 0) ** 2 + (3 / 8 - 3 / 6) ** 2))  # 0.5 nats on 6 of 8 targets
    assert first[2] == f"+0.375 ({error:.3f})"
    left = [0.0, 4 / 12, 4 / 12]
    error = math.sqrt(2 / 3 * sum((0.25 - value) ** 2 for value in left))
    assert whole[2] == f"+0.250 ({error:.3f})"
    for place in places:  # sequences of the training length, which the longer ones do not begin with
        record = json.loads((tmp_path / place / "results.json").read_text())
        record["perplexity"]["web"]["lengths"][0]["own_sequences"] = True
        (tmp_path / place / "results.json").write_text(json.dumps(record))
    assert script.main([*places, "--of", "0:4"]) == 2
    assert "4 is no length" in capsys.readouterr().err
    assert script.main([*places, "--of", "0:8"]) == 0
