"""What the reference shows of docstrings: mkdocstrings takes each through `reference.listed` (mkdocs.yml)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import griffe

ROOT = Path(__file__).resolve().parents[1]


class Rows(griffe.Extension):  # type: ignore[misc]
    """Rows of names and meanings become lists."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe for each thing that it has read."""
        from reference import listed

        if obj.docstring:
            obj.docstring.value = listed(obj.docstring.value)
