"""Parts of URLs."""

from collections.abc import Mapping


def quote(text: str) -> str:
    """A name as one segment of a path or value of a query."""
    if text.isascii() and text.replace("-", "").replace("_", "").isalnum():
        return text
    from urllib.parse import quote as quote_all  # most names need no quoting, and urllib is slow to import

    return quote_all(text, safe="")


def query(options: Mapping[str, str | int | float | bool | None]) -> str:
    """`a=1&b=true`; what is None, False or empty is left out."""
    pairs = []
    for key, value in options.items():
        if value is not None and value != "" and value is not False:
            pairs.append(f"{key}={quote('true' if value is True else str(value))}")
    return "&".join(pairs)
