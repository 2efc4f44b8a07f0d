"""Links and files that the README and the docs name exist, and the navigation has every page."""

import re
from pathlib import Path

import pytest
from test_layout import ROOT, tracked

PAGES = [path for path in tracked() if path.suffix == ".md"]


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.M)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in headings}


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for link in re.findall(r"\]\(([^)\s]+)\)", (ROOT / page).read_text()):
        name, _, anchor = link.partition("#")
        target = (ROOT / page).parent / name if name else ROOT / page
        if not link.startswith("http") and (
            not target.exists() or (anchor and anchor not in anchors(target))
        ):
            broken.append(link)
    assert not broken, f"{page} links to {', '.join(broken)}"


def test_every_page_is_in_the_navigation_of_the_site() -> None:
    nav = re.findall(r"^ +- (?:.*: )?(\S+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    pages = [page.relative_to("docs") for page in PAGES if page.parts[0] == "docs"]
    assert sorted(nav) == sorted(str(page) for page in pages if page.parts[0] != "reports")
