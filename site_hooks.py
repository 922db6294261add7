"""Hooks of the documentation site: pages that live outside of docs/, the reference of the API, and llms.txt.

MkDocs reads one folder. The README is the home page of the site, and the changelog, the security notes and the
contributing guide are pages as well; their links, and the links of pages to files outside of docs/, are changed to what
the site has. mkdocs.yml names this file.
"""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import griffe
from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

import manymax
from manymax import distributed
from manymax.integrations import huggingface, sentence_transformers

ROOT = Path(__file__).parent
# Pages made of files outside of docs/.
PAGES = {
    "index.md": "README.md",
    "contributing.md": "CONTRIBUTING.md",
    "changelog.md": "CHANGELOG.md",
    "security.md": "SECURITY.md",
}
REPOSITORY_ONLY = re.compile(r"\[([^\]]*)\]\((?!https?:|#|mailto:)([^)]*)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages and the figures that are outside of docs/, and the reference of the API."""
    for page, source in PAGES.items():
        files.append(File.generated(config, page, content=_with_links_of_the_site(ROOT / source)))
    for figure in sorted((ROOT / "results" / "benchmarks").glob("*.svg")):
        files.append(File.generated(config, f"figures/{figure.name}", abs_src_path=str(figure)))
    files.append(File.generated(config, "api.md", content=api_page()))
    return files


def on_page_markdown(markdown: str, page: Any, config: MkDocsConfig, files: Files) -> str:
    """Change links of the pages in docs/ to files outside of it."""
    return _links(markdown, Path("docs"))


def on_post_build(config: MkDocsConfig) -> None:
    """Write llms.txt, the list of all pages with what each is about."""
    lines = [f"# {config.site_name}", "", f"> {config.site_description}", ""]
    for title, entries in [(title, pages) for section in config.nav or [] for title, pages in section.items()]:
        if isinstance(entries, str):
            continue
        lines += [f"## {title}", ""]
        for entry in entries:
            ((name, page),) = entry.items()
            lines.append(f"- [{name}]({page.removesuffix('.md')}.html): {_about(page)}")
        lines.append("")
    (Path(config.site_dir) / "llms.txt").write_text("\n".join(lines), encoding="utf-8")


def api_page() -> str:
    """The reference: every public name with its signature and docstring, grouped by what it is."""
    heads = [name for name in manymax.__all__ if name.startswith("linear_")]
    modules = [name for name in manymax.__all__ if name.startswith("Linear")]
    losses = [name for name in manymax.__all__ if name.endswith(("_loss", "Loss")) and name not in (*heads, *modules)]
    taken = {*heads, *modules, *losses, "metrics", "samplers", "__version__"}
    groups: dict[str, list[tuple[str, object]]] = {
        "Heads as functions": _named("manymax", heads),
        "Heads as modules": _named("manymax", modules),
        "Losses of given scores, and of two towers": _named("manymax", losses),
        "Maps, targets and the rest": _named("manymax", sorted(set(manymax.__all__) - taken)),
        "Samplers": _named("manymax.samplers", manymax.samplers.__all__),
        "Metrics": _named("manymax.metrics", manymax.metrics.__all__),
        "Several processes": _named("manymax.distributed", distributed.__all__),
        "Optimisers": _named("manymax.optim", manymax.optim.__all__),
        "Language models of transformers": _named("manymax.integrations.huggingface", huggingface.__all__),
        "Sentence-transformers": _named("manymax.integrations.sentence_transformers", sentence_transformers.__all__),
    }
    sections = [
        f"## {title}\n\n" + "\n".join(_entry(name, value) for name, value in found) for title, found in groups.items()
    ]
    return "\n".join(["# API", "", "Every public name, with its arguments and its docstring.", "", *sections])


def _named(module: str, names: Iterable[str]) -> list[tuple[str, object]]:
    """(full name, value) of the classes and functions among some names of a module."""
    found = [(f"{module}.{name}", getattr(importlib.import_module(module), name)) for name in names]
    return [(name, value) for name, value in found if callable(value)]


def _entry(name: str, value: object) -> str:
    """The section of a class or function: signature, then the parts of its docstring."""
    try:
        call = f"{name}{inspect.signature(value)}"  # type: ignore[arg-type]
    except (TypeError, ValueError):
        call = name
    text = f"### {name.rpartition('.')[2]}\n\n```python\n{call}\n```\n\n"
    for section in griffe.Docstring(inspect.getdoc(value) or "").parse("google", warnings=False):
        text += _part(section)
    return text


def _part(section: Any) -> str:
    """A part of a docstring as Markdown."""
    match section.kind.value:
        case "text":
            return f"{section.value}\n\n"
        case "parameters" | "attributes":
            rows = "".join(f"- **{each.name}**: {_in_one_line(each.description)}\n" for each in section.value)
            return f"**Arguments**\n\n{rows}\n"
        case "returns" | "raises" | "yields":
            words = (" ".join(filter(None, (getattr(each, "name", ""), each.description))) for each in section.value)
            return f"**{section.kind.value.capitalize()}**\n\n" + "".join(f"{_in_one_line(w)}\n\n" for w in words)
        case "examples":
            code = "\n\n".join(
                f"```pycon\n{code}\n```" if kind.value != "text" else code for kind, code in section.value
            )
            return f"**Example**\n\n{code}\n\n"
        case _:  # an admonition, such as References
            return f"**{section.title or section.value.kind}**\n\n{_in_one_line(section.value.description)}\n\n"


def _in_one_line(text: str) -> str:
    return " ".join(text.split())


def _with_links_of_the_site(source: Path) -> str:
    """The text of a file outside of docs/, with its links to pages of the site."""
    return _links(source.read_text(encoding="utf-8"), source.parent.relative_to(ROOT))


def _links(text: str, folder: Path) -> str:
    """`text`, written in `folder`, with links of the site; those to other files of the repository become plain text."""

    def changed(match: re.Match[str]) -> str:
        label, target = match.groups()
        path, hash_sign, anchor = target.partition("#")
        inside = Path(_normal(folder / path))
        pages = {Path(source): page for page, source in PAGES.items()}
        if inside in pages:
            return f"[{label}]({pages[inside]}{hash_sign}{anchor})"
        if inside.parts[:1] == ("docs",):
            return f"[{label}]({'/'.join(inside.parts[1:])}{hash_sign}{anchor})"
        if inside.suffix == ".svg":
            return f"[{label}](figures/{inside.name})"
        return label if match.string[max(0, match.start() - 1)] != "!" else ""

    return REPOSITORY_ONLY.sub(changed, text)


def _normal(path: Path) -> str:
    """A relative path without `..`."""
    parts: list[str] = []
    for part in path.parts:
        parts = parts[:-1] if part == ".." else [*parts, part]
    return "/".join(parts)


def _about(page: str) -> str:
    """The first sentence of a page."""
    source = ROOT / PAGES.get(page, f"docs/{page}")
    if not source.exists():
        return "Every public name, with its docstring."
    text = source.read_text(encoding="utf-8")
    for paragraph in re.split(r"\n\s*\n", text):
        if paragraph and not paragraph.startswith(("#", "!", "<", "|", "```", ">")):
            return " ".join(paragraph.split()).split(". ")[0].rstrip(".") + "."
    return page
