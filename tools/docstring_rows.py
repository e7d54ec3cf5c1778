"""Extension of mkdocstrings that formats each docstring with `reference.listed` (see mkdocs.yml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]


class Rows(griffe.Extension):  # type: ignore[misc]
    """Extension of griffe that converts rows of names and meanings to Markdown lists."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Format the docstring of an object. griffe calls this for each object."""
        from reference import listed

        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)
