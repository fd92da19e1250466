"""Real text for benchmarks, without a download."""

from pathlib import Path


def real_text(path: str | None = None) -> str:
    """The text in `path`; by default the Python language reference that CPython ships (460,000 characters)."""
    if path is not None:
        return Path(path).read_text(encoding="utf-8")
    from pydoc_data.topics import topics

    return "\n\n".join(topics.values())
