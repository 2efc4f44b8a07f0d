"""Write the tables of current figures in docs/ from the JSON that was measured.

    python scripts/docs_results.py            # rewrite the tables
    python scripts/docs_results.py --check    # status 1 if a page and its JSON disagree

A page has the line `<!-- table: FUNCTION FILE ... -->`; up to `<!-- end of table -->` the text is that of the
function for these files of docs/reports/. A file is what `fla-bench ... --json FILE` writes: `environment`,
`settings` and `rows`. `transcribed` marks one that was typed from a printed table. `FILE:TABLE` is a table of
the tables.json that `fla-runs queue` writes: `environments` and `rows`.
"""

import json
import re
import shlex
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, wraps
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
TABLE = re.compile(r"(?<=<!-- table: )(\w+)(\s[^>]+?)( -->\n).*?(?=<!-- end of table -->)", re.S)
WIDTH = 120  # of lines, but for tables
SHOWN = (
    *("torch", "triton", "transformers", "deepspeed", "lm-eval"),
    *("flash-linear-attention", "flash-qla", "attn-gym"),
)
PEERS = {
    "transformer": "Transformer++ (ours)",
    "fla": "fla",
    "llama": "Llama",
    "llama-compiled": "Llama, compiled",
}
VARIANTS = {  # overrides that a row names
    "trainer.precision=fp8": "FP8",
    "trainer.cuda_graph=true": "CUDA graph",
    "trainer.activation_checkpointing=true": "full checkpointing",
    "trainer.activation_checkpointing=selective": "selective checkpointing",
    "trainer.gradient_reduction=bf16": "gradients reduced in bf16",
    "model.residual_in_fp32=false": "bf16 residual stream",
}
SEEDS = 3  # of each cell of the papers' tables
HALF = "half right to"  # head of the lengths up to which half of the sequences are right
Row = dict[str, Any]


@dataclass
class Measurement:
    """A file of docs/reports/, or one table of it."""

    name: str  # FILE or FILE:TABLE

    @property
    def file(self) -> str:
        return self.name.partition(":")[0]

    @property
    def table(self) -> str:
        return self.name.partition(":")[2]

    @cached_property
    def content(self) -> Any:
        content = json.loads((DOCS / "reports" / f"{self.file}.json").read_text())
        return content[self.table] if self.table else content

    @property
    def rows(self) -> list[Row]:
        return self.content["rows"]

    @property
    def command(self) -> list[str]:
        """Without the file that it wrote; empty if no command of the project made the figures."""
        words = list(self.content["environment"]["command"] or [])
        if "--json" in words:
            place = words.index("--json")
            del words[place : place + 2]
        return [Path(words[0]).name, *words[1:]] if words else []

    @property
    def model(self) -> str:
        """What the command trained, such as `delta_net/340m`."""
        return next(word.removeprefix("model=") for word in self.command if word.startswith("model="))

    @property
    def title(self) -> str:
        """The model, and what the command says of how it was trained."""
        words = [word for override, word in VARIANTS.items() if override in self.command]
        return ", ".join([f"`{self.model}`", *words])

    def source(self) -> str:
        """Where, by what and when it was measured; commit and date only where rows do not have their own."""
        if self.table:
            return "; ".join(_of_runs(self.content["environments"])) or "not run yet"
        about = self.content["environment"]
        parts = [about["hardware"], *_versions(about["packages"])]
        parts += [_commit(about), about["time"].partition("T")[0]] if "time" in about else []
        parts += ["typed from a printed table"] if self.content.get("transcribed") else []
        return ", ".join(filter(None, parts))


def _of_runs(environments: Sequence[Row]) -> Iterator[str]:
    """What trained the runs of a table, together where no package has two versions."""
    groups: list[list[Row]] = []
    for about in environments:
        for group in groups:
            if all(_agree(about, other) for other in group):
                group.append(about)
                break
        else:
            groups.append([about])
    for group in groups:
        packages = {
            name: next(filter(None, versions)) + ("" if all(versions) else " (some runs)")
            for name in SHOWN
            if any(versions := [about["packages"].get(name) for about in group])
        }
        days = sorted(day for about in group for day in about["time"].split(" to "))
        period = days[0] if days[0] == days[-1] else f"{days[0]} to {days[-1]}"
        runs: Counter[str] = Counter()
        for about in group:
            runs[_commit(about)] += about["runs"]
        commits = [f"{commit} ({_count(number, 'run')})" for commit, number in runs.items()]
        if len(commits) > 2:  # the JSON names them
            commits = [f"{_count(runs.total(), 'run')} by {len(commits)} commits"]
        yield ", ".join([group[0]["hardware"], *_versions(packages), period, *commits])


def _agree(one: Row, other: Row) -> bool:
    """Whether two environments are of one kind of machine, and of equal versions of what both have."""
    versions = [about["packages"] for about in (one, other)]
    both = [name for name in SHOWN if all(packages.get(name) for packages in versions)]
    return one["hardware"] == other["hardware"] and all(versions[0][n] == versions[1][n] for n in both)


def _versions(packages: Mapping[str, str]) -> list[str]:
    return [f"{name} {packages[name]}" for name in SHOWN if packages.get(name)]


def _commit(about: Row) -> str:
    commit, dirty, _ = (about["commit"] or "").partition("-dirty")
    return f"commit {commit[:7]}{' with edits' if dirty else ''}" if commit else "commit not recorded"


Table = Callable[..., Iterator[str]]  # the lines of a table from one or several files
FUNCTIONS: dict[str, Table] = {}  # by the name that pages give


def of_pages(*, commands: bool = False, sources: bool = True) -> Callable[[Table], Table]:
    """A function for pages: the commands that measured come before its lines, and where it was after them."""

    def register(table: Table) -> Table:
        @wraps(table)
        def lines(*found: Measurement) -> Iterator[str]:
            if commands:
                yield from _commands(found)
            yield from table(*found)
            if sources:
                yield from _sources(found)

        FUNCTIONS[table.__name__] = lines
        return lines

    return register


@of_pages(commands=True)
def operator(*found: Measurement) -> Iterator[str]:
    """Our kernels alone, by n_h and gate."""
    yield from _table("n_h", "gate", "forward ms", "forward + backward ms", "memory MiB")
    for row in (row for row in found[0].rows if _kernel(row["kernel"]) == "ours"):
        memory = f"{row['memory_bytes'] / 2**20:,.0f}"
        yield _row(*_kind(row), f"{row['forward_ms']:.3f}", f"{row['both_ms']:.3f}", memory)


@of_pages(commands=True)
def heads(*found: Measurement) -> Iterator[str]:
    """Forward + backward of our kernels, a row for each file: heads of its own sizes.

    In brackets the time per byte of q, k and v, as a multiple of the first file's.
    """
    counts = sorted({row["num_householder"] for measured in found for row in measured.rows})
    yield from _table("K", "V", "value heads per key head", *(f"n_h = {n}, ms" for n in counts))
    for number, measured in enumerate(found, 1):
        sizes = measured.content["settings"]
        times = {row["num_householder"]: _per_byte(row, found[0].rows) for row in measured.rows}
        key = _numbered(str(sizes["head_dim"]), number, found)
        value = str(sizes["value_dim"] or sizes["head_dim"])
        yield _row(key, value, str(sizes["group"]), *(times.get(n, "") for n in counts))


@of_pages(commands=True)
def operator_peers(*found: Measurement) -> Iterator[str]:
    """Forward + backward of our kernels and others', a row for each file, n_h and gate."""
    kinds: dict[tuple[str, str], dict[str, float]] = {}
    for number, measured in enumerate(found, 1):
        for row in (row for row in measured.rows if row["both_ms"] is not None):
            num_householder, gate = _kind(row)
            kind = _numbered(num_householder, number, found), gate
            kinds.setdefault(kind, {})[_kernel(row["kernel"])] = row["both_ms"]
    names = list(dict.fromkeys(name for times in kinds.values() for name in times))
    yield from _table("n_h", "gate", *(f"{name}, ms" for name in names))
    for kind, times in kinds.items():
        yield _row(*kind, *(_compared(name, times) for name in names))


@of_pages(commands=True)
def train(*found: Measurement) -> Iterator[str]:
    """Speed of training, a row for each model."""
    yield from _table("model", "parameters", "tokens/s", "MFU", "GiB")
    for number, measured in enumerate(found, 1):
        for row in measured.rows:
            name = measured.title if row["model"] == "ours" else row["model"]
            name += f", {row['processes']} GPUs" if row.get("processes", 1) > 1 else ""
            yield _row(_numbered(name, number, found), *_speed(row))


@of_pages(commands=True)
def side_by_side(*found: Measurement) -> Iterator[str]:
    """Tokens/s of our model and its peers, a row for each call, and how much faster ours is."""
    yield from _table("model", "ours", *PEERS.values())
    for number, measured in enumerate(found, 1):
        speeds = {row["model"]: row["tokens_per_second"] for row in measured.rows}
        cells = (
            f"{speeds[peer]:,.0f} ({speeds['ours'] / speeds[peer]:.2f}x)" if peer in speeds else ""
            for peer in PEERS
        )
        yield _row(_numbered(f"`{measured.model}`", number, found), f"{speeds['ours']:,.0f}", *cells)


@of_pages(sources=False)
def peers(*found: Measurement) -> Iterator[str]:
    """Parameters, utilisation and memory of the same calls."""
    yield from _table("call", "model", "parameters", "MFU", "GiB")
    for number, measured in enumerate(found, 1):
        for row in measured.rows:
            count, _, *rest = _speed(row)
            name = PEERS.get(row["model"], f"ours, `{measured.model}`")
            yield _row(str(number), name, count, *rest)


@of_pages()
def parts(*found: Measurement) -> Iterator[str]:
    """Milliseconds of the kernels of a step by kind of work, floors in brackets."""
    kinds = list(dict.fromkeys(kind for measured in found for kind in measured.rows[0]["parts"]))
    yield from _table("model", "all", *kinds)
    for number, measured in enumerate(found, 1):
        (row,) = measured.rows
        cells = []
        for part in (row["parts"].get(kind, {"ms": None, "floor_ms": None}) for kind in kinds):
            floor = "" if part["floor_ms"] is None else f" ({part['floor_ms']:.0f})"
            cells.append("" if part["ms"] is None else f"{part['ms']:.0f}{floor}")
        total = sum(part["ms"] for part in row["parts"].values() if part["ms"] is not None)
        yield _row(_numbered(measured.title, number, found), f"{total:.0f}", *cells)


@of_pages(commands=True)
def scaling(*found: Measurement) -> Iterator[str]:
    """Tokens/s by number of GPUs; efficiency is the speed per GPU over that of one GPU of the same file."""
    yield from _table("model", "run", "GPUs", "tokens/s", "efficiency", "GiB per GPU")
    for number, measured in enumerate(found, 1):
        alone: dict[str, float] = {}
        for row in measured.rows:
            steps = "gpus" not in row  # of `fla-bench train`
            model = measured.model.rpartition("/")[2] if steps else row["model"]
            kind, gpus = ("steps", row["processes"]) if steps else (row["kind"], row["gpus"])
            speed = row["tokens_per_second"]
            if gpus == 1:
                alone[model] = speed
            share = f"{speed / gpus / alone[model]:.0%}" if gpus > 1 and model in alone else ""
            gib = row.get("memory_bytes", 0) / 2**30 if steps else row["memory_gib"]
            memory = f"{gib:.1f}" if gib else ""
            yield _row(_numbered(model, number, found), kind, str(gpus), f"{speed:,.0f}", share, memory)


@of_pages()
def context_parallel(*found: Measurement) -> Iterator[str]:
    """Tokens/s by sequence length and number of GPUs that share a sequence."""
    yield from _table("tokens of a sequence", "GPUs", "tokens/s", "of one GPU", "GiB per GPU")
    alone = {row["seq_len"]: row["tokens_per_second"] for row in found[0].rows if row["gpus"] == 1}
    for row in found[0].rows:
        length, speed = row["seq_len"], row["tokens_per_second"]
        ratio = f"{speed / alone[length]:.2f}x" if row["gpus"] > 1 and alone[length] else ""
        figures = (f"{speed:,.0f}", ratio, f"{row['memory_gib']:.1f}") if speed else ("out of memory", "", "")
        yield _row(f"{length:,}", str(row["gpus"]), *figures)


@of_pages(commands=True)
def evaluation(*found: Measurement) -> Iterator[str]:
    """Seconds for the requests of each task, and for perplexity by length."""
    yield from _table("task", "ours s", "`HFLM` s", "ours is faster by")
    for row in found[0].rows:
        if row.get("round") == 1:
            name = row.get("task", "all")
            yield _row(name, f"{row['ours']:.2f}", f"{row['hflm']:.2f}", f"{row['hflm'] / row['ours']:.2f}x")
    yield ""
    yield from _table("perplexity of 4 sequences, tokens each", "seconds", "MiB")
    for row in found[0].rows:
        if "length" in row:
            yield _row(f"{row['length']:,}", f"{row['seconds']:.2f}", f"{row['peak_mib']:,.0f}")


@of_pages()
def figures(*found: Measurement) -> Iterator[str]:
    """Single figures that no command writes as JSON: what, value, and where each was measured."""
    where = "machine" if any("machine" in row for row in found[0].rows) else "commit"
    yield from _table("what", "figure", where, "date")
    for row in found[0].rows:
        yield _row(row["what"], row["value"], row.get(where, ""), row.get("time", ""))


@of_pages(commands=True)
def decoding(*found: Measurement) -> Iterator[str]:
    """Milliseconds of a further token of all sequences, by batch, context and model.

    A peer is compared with ours of its own file; ours is shown from the first file that has it.
    """
    rows: dict[tuple[int, int], dict[str, Row]] = {}
    for measured in found:
        ours = {(row["batch"], row["context"]): row for row in measured.rows if row["model"] == "ours"}
        for row in measured.rows:
            place = row["batch"], row["context"]
            beside = row | {"ours": ours[place]["milliseconds"]}
            rows.setdefault(place, {}).setdefault(row["model"], beside)
    names = list(dict.fromkeys(name for models in rows.values() for name in models))
    shown = (PEERS.get(name, name) for name in names)
    yield from _table("sequences", "context", *(f"{name}, ms" for name in shown), "ours, tokens/s", "GiB")
    for (batch, context), models in rows.items():
        ours = models["ours"]
        speed = f"{1e3 * batch / ours['milliseconds']:,.0f}"
        cells = (_decoded(models.get(name)) for name in names)
        yield _row(str(batch), f"{context:,}", *cells, speed, f"{ours['gibibytes']:.1f}")


@of_pages()
def losses(*found: Measurement) -> Iterator[str]:
    """Mean training loss of the steps up to each bound, a row for each run, and the validation loss."""
    yield from _table(
        "run", *(f"to {step}" for step in found[0].content["settings"]["to_step"]), "validation"
    )
    for row in found[0].rows:
        values = (*row["mean_losses"], row["validation"])
        yield _row(row["run"], *("" if value is None else f"{value:.3f}" for value in values))


@of_pages()
def starts(*found: Measurement) -> Iterator[str]:
    """Loss of held-out documents up to a length, by what training sequences started from."""
    lengths = list(found[0].rows[0]["loss"])[::2]
    yield from _table("model", "documents", "start", *(f"{int(length):,}" for length in lengths))
    for row in found[0].rows:
        losses = (f"{row['loss'][length]:.3f}" for length in lengths)
        yield _row(row["model"], row["documents"], row["start"], *losses)


@of_pages()
def validation_losses(*found: Measurement) -> Iterator[str]:
    """Loss (perplexity) of the validation split and of its domains."""
    domains = list(found[0].rows[0]["validation_loss"])
    yield from _table("validation loss (perplexity)", *(row["model"] for row in found[0].rows))
    for name in domains:
        pairs = ((row["validation_loss"][name], row["perplexity"][name]) for row in found[0].rows)
        yield _row(name, *(f"{loss:.3f} ({perplexity:.2f})" for loss, perplexity in pairs))


@of_pages(sources=False)
def equal_size(found: Measurement) -> Iterator[str]:
    """The tables that `scripts/reproduce_lm.sh` writes."""
    from fla_train.eval.lm_comparison import tables  # imports torch: seconds

    yield "\n\n".join(tables(found.content))


@of_pages(sources=False)
def complete_runs(found: Measurement) -> Iterator[str]:
    """How many runs of each table are complete, and which cells lack some."""
    from fla_train.eval.expressivity_table import read_tables  # seconds

    yield from _table("table", "runs", "complete", "missing seeds")
    all_runs = all_complete = 0
    for name, table in read_tables().items():
        rows = [row for row, content in table["rows"].items() if content["overrides"] is not None]
        missing, complete = [], 0
        for column in table["columns"]:
            done = found.content[name]["rows"]
            cells = {row: done.get(row, {}).get(column) for row in rows}
            lacks = {row: SEEDS - len(cell["values"]) if cell else SEEDS for row, cell in cells.items()}
            complete += SEEDS * len(rows) - sum(lacks.values())
            whole = {"all rows": SEEDS} if set(lacks.values()) == {SEEDS} else lacks
            missing += [f"{row}, {column}: {seeds}" for row, seeds in whole.items() if seeds]
        runs = SEEDS * len(rows) * len(table["columns"])
        all_complete, all_runs = all_complete + complete, all_runs + runs
        yield _row(f"`{name}`", f"{runs:,}", f"{complete:,}", "; ".join(missing))
    yield _row("all", f"{all_runs:,}", f"{all_complete:,}", "")


@of_pages()
def papers_table(found: Measurement) -> Iterator[str]:
    """A table of the expressivity papers: published figures, ours, and how long ours were trained."""
    from fla_train.eval.expressivity_table import read_tables, show_averages, show_published  # seconds

    table = read_tables()[found.table]
    rows = {row: dict(zip(table["columns"], c["published"], strict=True)) for row, c in table["rows"].items()}
    ours = {row: found.content["rows"].get(row, {}) for row in rows}
    published = {name for cells in rows.values() for name, value in cells.items() if value is not None}
    measured = {name for cells in ours.values() for name, cell in cells.items() if cell}
    columns = [column for column in table["columns"] if column in published | measured]
    beside = [*table.get("beside", {}), *([HALF] if "half" in table else [])]
    heads = ["model"]
    for column in columns:
        heads += [f"{column}: paper", "ours"] if column in published else [f"{column}: ours"]
        heads += ["; ".join(beside)] if beside else []
    heads += ["average: paper", "ours"] if table.get("average") else []
    yield from _wrapped(f"{table['title']}. Paper: {table['source']}.", WIDTH)
    yield ""
    yield from _table(*heads) if columns else ()
    for row in rows:
        cells = []
        for column in columns:
            cell = ours[row].get(column)
            cells += [show_published(rows[row][column])] if column in published else []
            cells += [_of_seeds(cell)]
            cells += [_others(cell, beside)] if beside else []
        if table.get("average"):
            cells += show_averages(rows[row].values(), [ours[row].get(column) for column in rows[row]])
        if any(cells):
            yield _row(row, *cells)
    trained = [
        _trained(name, [cells.get(name) for cells in ours.values()]) for name in columns if name in measured
    ]
    if trained:
        yield ""
        yield from _wrapped(
            f"Steps (presented sequences, relative to the full recipe): {'; '.join(trained)}.", WIDTH
        )


def _others(cell: Row | None, names: Sequence[str]) -> str:
    """The values beside a figure, over its seeds; - for one that was not measured."""
    from fla_train.eval.expressivity_table import half_right, span

    if cell is None:
        return ""
    found = {name: span(values.values(), "{:.3f}".format) for name, values in cell["beside"].items()}
    found |= {HALF: half_right(cell)} if cell["half"] else {}
    return "; ".join(found.get(name, "-") for name in names)


def _trained(column: str, cells: Sequence[Row | None]) -> str:
    """How long the runs of a column were trained."""
    from fla_train.eval.expressivity_table import percent, span

    cells = [cell for cell in cells if cell]
    steps = span((count for cell in cells for count in cell["steps"].values()), "{:,}".format)
    share = span((part for cell in cells for part in cell["share_of_paper_words"].values()), percent)
    return f"{column} {steps} ({share}%)"


def rewritten(page: str) -> str:
    """The text of a page with all its tables made anew."""

    def table(found: re.Match[str]) -> str:
        measurements = map(Measurement, found[2].split())
        lines = "\n".join(FUNCTIONS[found[1]](*measurements))
        return f"{found[1]}{found[2]}{found[3]}\n{lines}\n\n"

    return TABLE.sub(table, page)


def _kernel(name: str) -> str:
    """The project whose kernel `fla-bench kernels` called."""
    return name.replace("fla_train", "ours").partition(" ")[0]


def _kind(row: Row) -> tuple[str, str]:
    return str(row["num_householder"]), "yes" if row["gated"] else "no"


def _per_byte(row: Row, first: Sequence[Row]) -> str:
    """A time, and how often that of the first file's row with as many steps fits, per byte."""
    (unit,) = (other["ps_per_byte"] for other in first if other["num_householder"] == row["num_householder"])
    share = "" if row in first else f" ({row['ps_per_byte'] / unit:.2f}x)"
    return f"{row['both_ms']:.3f}{share}"


def _compared(name: str, times: Mapping[str, float]) -> str:
    """A time and, for a peer, how often ours fits; empty where it was not measured."""
    if name not in times:
        return ""
    digits = 3 if times["ours"] < 10 else 0
    return f"{times[name]:.{digits}f}" + (f" ({times[name] / times['ours']:.2f}x)" if name != "ours" else "")


def _decoded(row: Row | None) -> str:
    """A time and, for a peer, how often ours fits; empty where it was not measured or could not run."""
    if row is None or row["milliseconds"] is None:
        return ""
    time = row["milliseconds"]
    return f"{time:.3f}" if row["model"] == "ours" else f"{time:.2f} ({time / row['ours']:.1f}x)"


def _speed(row: Row) -> tuple[str, str, str, str]:
    """Parameters, tokens/s, MFU, GiB."""
    count, memory = row["parameters"] / 1e6, row["memory_bytes"]
    size = f"{count / 1e3:.2f}B" if count > 1e3 else f"{count:.1f}M".replace(".0M", "M")
    peak = "" if memory is None else f"{memory / 2**30:.1f}"
    return size, f"{row['tokens_per_second']:,.0f}", f"{row['mfu']:.1%}", peak


def _of_seeds(cell: Row | None) -> str:
    """Best (median; lowest), of three seeds where no number of seeds is named; *: a run was cut."""
    if cell is None:
        return ""
    best, median, lowest = (f"{cell[key]:.3f}" for key in ("best", "median", "lowest"))
    text = best + ("*" if cell["cut"] else "") + (f" ({median}; {lowest})" if best != lowest else "")
    count = len(cell["values"])
    return text if count == 3 and best != lowest else f"{text}, {_count(count, 'seed')}"


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'s' if number != 1 else ''}"


def _numbered(name: str, number: int, found: Sequence[Measurement]) -> str:
    """The name with the number of its source below the table, where there are several."""
    return name if len(found) == 1 else f"{name} ({number})"


def _table(*heads: str) -> Iterator[str]:
    yield _row(*heads)
    yield "|" + "---|" * len(heads)


def _row(*cells: str) -> str:
    return " ".join(f"| {cell}" if cell else "|" for cell in cells) + " |"


def _commands(found: Sequence[Measurement]) -> Iterator[str]:
    commands = [shlex.join(measured.command) for measured in found if measured.command]
    if commands:
        lines = (" \\\n  ".join(_wrapped(command, WIDTH - 4)) for command in commands)
        yield "\n".join(["```sh", *lines, "```\n"])


def _sources(found: Sequence[Measurement]) -> Iterator[str]:
    """A line for each source, or for several that differ in nothing but the file."""
    groups: dict[str, list[tuple[int, Measurement]]] = {}
    for number, measured in enumerate(found, 1):
        groups.setdefault(measured.source(), []).append((number, measured))
    yield ""
    for source, members in groups.items():
        mark = "- " if len(groups) > 1 else ""
        numbers = ", ".join(f"({number})" for number, _ in members)
        links = ", ".join(f"[JSON](reports/{measured.file}.json)" for _, measured in members)
        text = f"{mark}{numbers + ': ' if len(found) > 1 else ''}{source} ({links})."
        yield f"\n{' ' * len(mark)}".join(_wrapped(text, WIDTH - len(mark)))


def _wrapped(text: str, width: int) -> list[str]:
    return textwrap.wrap(text, width, break_on_hyphens=False, break_long_words=False)


def main(arguments: Sequence[str]) -> int:
    wrong = []
    for page in sorted(DOCS.glob("*.md")):
        text = page.read_text()
        if (made := rewritten(text)) != text:
            wrong.append(page)
            if "--check" not in arguments:
                page.write_text(made)
    for page in wrong:
        print(f"{page.relative_to(DOCS.parent)}: {'differs' if '--check' in arguments else 'rewritten'}")
    return int(bool(wrong) and "--check" in arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
