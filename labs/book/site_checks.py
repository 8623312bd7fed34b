"""Checks the pages of the site that was built: links, size, and that nothing is loaded from the network.

Sphinx checks the links between the sources. This reads what came out, also the HTML in the outputs of notebooks.
"""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from sphinx.util import logging

if TYPE_CHECKING:
    from sphinx.application import Sphinx

MAX_PAGE_BYTES = 3_000_000
logger = logging.getLogger(__name__)


def setup(app: Sphinx) -> dict[str, Any]:
    """Registers the extension."""
    app.connect("build-finished", _check, priority=900)  # after the extensions that write files
    return {"version": "1", "parallel_read_safe": True, "parallel_write_safe": True}


def _check(app: Sphinx, error: Exception | None) -> None:
    if error is None and app.builder.format == "html":
        for complaint in complaints(Path(app.outdir)):
            logger.warning(complaint)


def complaints(site: Path) -> list[str]:
    """Returns what is wrong with the pages of a site, one line each."""
    pages = {path: _Page(path.read_text(encoding="utf-8")) for path in sorted(site.rglob("*.html"))}
    found = []
    for path, page in pages.items():
        name, size = path.relative_to(site), path.stat().st_size
        if size > MAX_PAGE_BYTES:
            found.append(
                f"{name} has {size:,} bytes, must have at most {MAX_PAGE_BYTES:,}: draw fewer or smaller figures"
            )
        remote = [url for url in page.loaded if urlsplit(url).netloc]
        found += [f"{name} loads {url} from the network, must work without one: ship the file" for url in remote]
        for url in page.loaded + page.links:
            parts = urlsplit(url)
            if parts.scheme or parts.netloc:
                continue
            target = (path.parent / unquote(parts.path)).resolve() if parts.path else path
            if not target.is_file():
                found.append(f"{name} links to {url}, which does not exist: correct the link")
            elif parts.fragment and target in pages and unquote(parts.fragment) not in pages[target].anchors:
                found.append(f"{name} links to {url}, and that page has no such anchor: correct the link")
    return found


class _Page(HTMLParser):
    """The links, the loaded files and the anchors of one page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors = {"", "top"}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        """Notes what one tag links to."""
        values = dict(attrs)
        self.anchors |= {value for key in ("id", "name") if (value := values.get(key))}
        target = values.get("href") or values.get("src")
        if target is None:
            return
        if tag == "a":
            self.links.append(target)
        elif not target.startswith("data:"):
            self.loaded.append(target)
