"""The programs on the page of integrations run as they stand there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "integrations.md").read_text(encoding="utf-8")
# The packages that a section of the page needs, by words of its title.
NEEDED = {
    "models of transformers": ("transformers",),
    "Lightning": ("lightning",),
    "RecTools": ("rectools",),
    "sentence-transformers": ("sentence_transformers", "datasets", "accelerate"),
}
SECTIONS = re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, flags=re.MULTILINE | re.DOTALL)


@pytest.mark.extras
@pytest.mark.filterwarnings("default")
@pytest.mark.parametrize(("title", "text"), SECTIONS, ids=[title for title, _ in SECTIONS])
def test_programs_of_the_page_run(title: str, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for words, packages in NEEDED.items():
        for package in packages if words in title else ():
            pytest.importorskip(package)
    program = "\n".join(re.findall(r"^```python\n(.*?)^```$", text, flags=re.MULTILINE | re.DOTALL))
    assert program
    monkeypatch.chdir(tmp_path)
    exec(compile(program, f"docs/integrations.md, {title}", "exec"), {})
