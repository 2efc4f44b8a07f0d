"""The report's page in a real browser, where one is installed: what is drawn, and what the mouse changes."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
from test_report import record, row

from fla_train.eval.report import page

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
BEFORE = '<script>const errors = []; addEventListener("error", e => errors.push(e.message));</script>'
AFTER = """<script>
const all = q => [...document.querySelectorAll(q)], plots = () => all("figure").map(f => f.innerHTML);
const seen = { errors, titles: all("h2").map(h => h.textContent) };
seen.rows = all("table").map(t => t.rows.length);
seen.curves = all("figure").map(f => f.querySelectorAll('path[fill="none"]').length);
seen.bands = all("figure").map(f => f.querySelectorAll("path[opacity]").length);
const numbers = all("path").every(p => !/NaN|undefined|Infinity/.test(p.getAttribute("d")));
seen.inside = numbers && all("svg text").every(t => !t.textContent.includes("NaN"));
const changed = act => { const old = plots(); act(); return plots().map((p, i) => p !== old[i]); };
const svg = document.querySelector("svg"), box = svg.getBoundingClientRect();
const place = { clientX: box.left + box.width * .9, clientY: box.top + box.height / 2 };
seen.hover = changed(() => svg.dispatchEvent(new MouseEvent("mousemove", place)));
seen.tip = [...svg.querySelectorAll('text[font-weight]')].pop().textContent;
seen.log = changed(() => all("input")[1].click());
const select = all("select")[0];
seen.part = changed(() => { select.value = 1; select.dispatchEvent(new Event("change")); });
seen.legend = changed(() => document.querySelector(".legend span").click());
seen.left = document.querySelector("figure").querySelectorAll('path[fill="none"]').length;
seen.gates = [...all(".controls").pop().querySelectorAll("option")].map(o => o.textContent);
seen.footnotes = all("p").map(p => p.textContent).filter(text => text.startsWith("†"));
seen.captions = all("figcaption").map(c => c.textContent);
const words = all("figure").map(f => [...f.querySelectorAll("text")].map(t => t.textContent));
seen.counts = words.map(found => found.filter(text => text.startsWith("n = ")));
seen.marked = all("svg text").filter(t => t.textContent === "training length").length;
seen.legends = all(".legend").map(l => [...l.children].map(item => item.textContent));
const out = document.createElement("output");
out.textContent = JSON.stringify(seen);
document.body.append(out);
</script>"""


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_plots_are_drawn_and_answer_the_mouse(tmp_path: Path) -> None:
    seen = looked_at([record("one", [2.0, 3.0]), record("two", [2.1, 3.3])], tmp_path)
    assert seen["titles"] == [
        "The papers' columns", "Perplexity along the position", "Perplexity against context length",
        "The state along the position", "The gates along the position", "Side by side", "Could not run",
        "How it was obtained",
    ]  # fmt: skip
    assert seen["rows"][0] > 2 + 10 and seen["rows"][1] == 1 + 10  # published rows; 2 lengths and 8 metrics
    assert seen["curves"] == [2, 2, 2, 2] and seen["bands"] == [2, 2, 0, 0]
    assert seen["hover"] == [True, False, False, False] and "at 96" in seen["tip"]
    assert seen["log"] == [False, True, False, False]
    assert seen["part"] == seen["legend"] == [True, False, False, False]
    assert seen["left"] == 1  # the curve of the model that the legend still shows
    assert seen["gates"] == ["beta up to 64 tokens", "beta up to 128 tokens"]  # neither has a forget gate


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_one_evaluation_shows_its_gates_by_interval_and_notes_below_tables(tmp_path: Path) -> None:
    one = record("one", [2.0, 3.0])
    one["perplexity"]["web"]["states"]["decay"] = [[[0.0, 1.0]] * 2, [[0.3, 0.7]] * 2]
    one["perplexity"]["web"]["note"] = "only easy ones"
    seen = looked_at([one], tmp_path)
    assert seen["footnotes"] == ["† web: only easy ones."] * 2  # below the papers' columns and all numbers
    assert seen["captions"] == ["† only easy ones"] * 4  # below each figure
    assert seen["gates"] == ["beta", "decay"] and seen["curves"][2:] == [2, 2]
    assert seen["legends"][2:] == [["layer 0", "layer 1"], ["up to 64", "up to 128"]]


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_points_of_different_documents_are_not_joined(tmp_path: Path) -> None:
    """Two models on 3 documents of 64 and 128 tokens and one of 256; neither's training is known."""
    records = [record("one", [2.0] * 3), record("two", [2.1] * 3)]
    for found in records:
        found["perplexity"]["web"]["lengths"].append(row(256, [3.0]))
        found["trained_length"] = None
    seen = looked_at(records, tmp_path)
    assert seen["curves"][1] == 4 and seen["bands"][1] == 2
    assert seen["counts"] == [[], ["n = 3", "n = 3", "n = 1"], [], []] and seen["marked"] == 0


@pytest.mark.skipif(BROWSER is None, reason="no browser")
def test_a_training_length_below_all_points_is_marked(tmp_path: Path) -> None:
    one = record("one", [2.0, 3.0])
    one["trained_length"] = 16
    # Against length and in the states: of the first plot the only curve has been clicked away by then.
    assert looked_at([one], tmp_path)["marked"] == 2


def looked_at(records: list[dict], tmp_path: Path) -> dict:
    """What `AFTER` saw on the records' page; fails on a script error or coordinates that are no numbers."""
    text = page(records)
    file = tmp_path / "index.html"
    file.write_text(text.replace("<style>", BEFORE + "<style>", 1).replace("</html>", AFTER + "</html>"))
    command = [BROWSER, "--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    done = subprocess.run(
        [*command, "--window-size=1200,2400", "--dump-dom", file.as_uri()],
        capture_output=True,
        text=True,
        timeout=120,
    )
    found = re.search(r"<output>(.*?)</output>", done.stdout, re.S)
    assert found, done.stderr[-2000:]
    seen = json.loads(found[1])
    assert not seen["errors"] and seen["inside"]
    return seen
