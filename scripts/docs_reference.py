"""Insert the config files, the comparison of frameworks and formulas into the site: a hook of mkdocs.yml.

The line `<!-- generated: NAME -->` of a page is replaced by the text that the function `NAME` returns. Blocks
of LaTeX (```math, which GitHub renders) become MathML, which browsers draw without a script.
"""

import re
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMANDS = ("train", "prepare", "eval", "export", "generate")
OPEN = {"trainer", "launch"}  # groups with a single option, shown unfolded


def on_page_markdown(markdown: str, **_: object) -> str:
    """Return the text of a page with its generated parts; mkdocs calls this for each page."""
    markdown = re.sub(r"<!-- generated: (\w+) -->", lambda match: GENERATED[match[1]](), markdown)
    return re.sub(r"^```math\n(.*?)^```$", lambda match: _mathml(match[1]), markdown, flags=re.S | re.M)


def on_page_content(html: str, **_: object) -> str:
    """Return the HTML of a page with the notebook's links translated and break points in its keys."""
    html = re.sub(r'href="(\w+)\.md', r'href="../\1/', html)
    return re.sub(r"(?<=<code>)[^<\n]+(?=</code>)", _breakable, html)


def _breakable(code: re.Match[str]) -> str:
    return re.sub(r"(?<=[._=/,:(])(?=\w)", "<wbr>", code[0])


def configuration() -> str:
    """Return the file of each command, then the files of each group, as folded blocks of YAML."""
    configs = ROOT / "configs"
    lines = []
    for command in COMMANDS:
        lines += [f"## fla-{command}\n", *_block(configs / f"{command}.yaml"), ""]
    for group in sorted(path for path in configs.iterdir() if any(path.glob("**/*.yaml"))):
        lines.append(f"## {group.name}\n")
        for file in sorted(group.rglob("*.yaml")):
            option = file.relative_to(group).with_suffix("")
            lines.append(f'???{"+" * (group.name in OPEN)} note "{group.name}={option}"\n')
            lines += [textwrap.indent("\n".join(_block(file)), "    "), ""]
    return "\n".join(lines)


def comparison() -> str:
    """Return the table of docs/comparison.md, with links to its notes."""
    page = (ROOT / "docs" / "comparison.md").read_text()
    (table,) = re.findall(r"(?:^\|.*\n)+", page, re.M)
    return re.sub(r"\[(\d+)\]", r"[[\1]](comparison.md#notes)", table)


def _mathml(latex: str) -> str:
    from latex2mathml.converter import convert  # installed by the extra `docs`

    return f'<div class="formula">{convert(latex.strip(), display="block")}</div>'


def _block(file: Path) -> list[str]:
    return ["```yaml", file.read_text().rstrip(), "```"]


GENERATED = {"comparison": comparison, "configuration": configuration}
