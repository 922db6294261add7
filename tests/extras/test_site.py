"""The documentation site: it builds without a warning, its links lead somewhere, and a browser shows it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from urllib.parse import unquote

import pytest

from tests.browser import browse, needs_chromium

pytest.importorskip("mkdocs", reason="mkdocs is not installed: the site was not built")
pytestmark = pytest.mark.extras

ROOT = Path(__file__).parents[2]
PHONE = "--window-size=400,800"
# How much of the page is to the right of the window.
OVERFLOW = """<script>addEventListener("load", () => {
  const page = document.documentElement
  page.dataset.overflow = page.scrollWidth - innerWidth
})</script>"""


def built(folder: Path, *, config: Path = ROOT / "mkdocs.yml") -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--config-file",
        str(config),
        "--site-dir",
        str(folder),
    ]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": str(ROOT / "src")}
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    result = built(folder)
    assert result.returncode == 0, result.stderr
    return folder


def test_every_link_leads_somewhere_and_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    pages = sorted(site.glob("*.html"))
    assert len(pages) > 20
    ids = {page.name: set(re.findall(r'id="([^"]+)"', page.read_text(encoding="utf-8"))) for page in pages}
    broken, foreign = [], []
    for page in pages:
        text = page.read_text(encoding="utf-8")
        foreign += re.findall(r'<(?:script|img)[^>]+src="(https?:[^"]+)"', text)
        foreign += re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="(https?:[^"]+)"', text)
        for link in re.findall(r'(?:href|src)="([^"]+)"', text):
            if re.match(r"(https?|mailto|data):", link) or page.name == "404.html":
                continue
            path, _, anchor = unquote(link).partition("#")
            target = page.parent / path if path else page
            if not target.exists() or (anchor and target.name in ids and anchor not in ids[target.name]):
                broken.append(f"{page.name}: {link}")
    assert broken == []
    assert foreign == []


def test_the_reference_has_every_public_name(site: Path) -> None:
    import manymax

    text = (site / "api.html").read_text(encoding="utf-8")
    names = [name for name in manymax.__all__ if callable(getattr(manymax, name))]
    assert [name for name in names if f'id="{name.lower()}' not in text] == []


def test_llms_txt_names_every_page(site: Path) -> None:
    text = (site / "llms.txt").read_text(encoding="utf-8")
    pages = {page.name for page in site.glob("*.html")} - {"404.html", "index.html"}
    assert pages == set(re.findall(r"\(([\w.]+html)\)", text))


def test_a_broken_link_stops_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text("[nowhere](nowhere.md)")
    (tmp_path / "mkdocs.yml").write_text("site_name: broken\n")
    assert built(tmp_path / "site", config=tmp_path / "mkdocs.yml").returncode != 0


@needs_chromium
@pytest.mark.parametrize("name", ["index.html", "heads.html", "reproduction.html", "api.html", "family.html"])
@pytest.mark.parametrize("options", [("--window-size=1280,800",), (PHONE,)], ids=["desk", "phone"])
def test_a_browser_shows_the_pages(site: Path, name: str, options: tuple[str, ...]) -> None:
    page = site / f"shown-{name}"
    page.write_text(
        (site / name).read_text(encoding="utf-8").replace("</head>", f"{OVERFLOW}</head>"), encoding="utf-8"
    )
    dom, log = browse(page, *options)
    assert log == ""
    overflow = re.search(r'data-overflow="(-?\d+)"', dom)
    assert overflow is not None
    assert int(overflow[1]) <= 0
