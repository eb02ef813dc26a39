"""What `make docs` does to each page: links that leave the manual lead to the repository, and the files they name must be there."""

import re
from pathlib import Path
from typing import Any

from mkdocs.exceptions import PluginError

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"(\]\()((?:\.\.|measurements)/[^)#\s]+)(#[^)]*)?(\))")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """The page with links such as ../CONTRIBUTING.md or measurements/ made addresses of the repository."""
    folder = Path(page.file.abs_src_path).parent

    def leads(match: "re.Match[str]") -> str:
        target = (folder / match[2]).resolve()
        if not target.exists():
            raise PluginError(f"{page.file.src_uri} links to {match[2]}, which does not exist")
        kind = "tree" if target.is_dir() else "blob"
        return f"{match[1]}{config.repo_url}/{kind}/main/{target.relative_to(ROOT)}{match[3] or ''}{match[4]}"

    return LINK.sub(leads, markdown)
