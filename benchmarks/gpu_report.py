"""What the checks on a GPU found: verdicts and figures, as JSON and as Markdown, written after every part."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

PASSED, FAILED, NOT_RUN = "passed", "FAILED", "not run"


@dataclass(frozen=True)
class Verdict:
    """One thing that is to be so. ok: None where it could not be seen."""

    what: str
    wanted: str
    found: str
    ok: bool | None


@dataclass
class Section:
    """What a part found.

    tables: title -> rows, each by column; problems: what its programs said when they failed.
    """

    name: str
    about: str
    seconds: float = 0.0
    verdicts: list[Verdict] = field(default_factory=list)
    tables: dict[str, list[dict[str, Any]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Of the whole part."""
        outcomes = [verdict.ok for verdict in self.verdicts]
        if False in outcomes or self.problems:
            return FAILED
        return PASSED if True in outcomes else NOT_RUN

    def judge(self, what: str, wanted: str, found: str, ok: bool | None) -> None:
        """Add a verdict."""
        self.verdicts.append(Verdict(what, wanted, found, ok))

    def not_run(self, why: str) -> None:
        """It could not be tried."""
        self.judge(self.about, "to be seen", f"not run: {why}", None)


@dataclass
class Report:
    """All sections, and what is known of the machine."""

    title: str
    notes: list[str]
    sections: list[Section] = field(default_factory=list)

    @property
    def passed(self) -> bool:
        """Whether everything that was to be so is; what was not run is not."""
        verdicts = [verdict for section in self.sections for verdict in section.verdicts]
        return all(section.state == PASSED for section in self.sections) and all(v.ok for v in verdicts)

    def write(self, folder: Path) -> None:
        """`report.json` and `report.md`."""
        whole = {"title": self.title, "notes": self.notes, "passed": self.passed}
        sections = [asdict(section) | {"state": section.state} for section in self.sections]
        text = json.dumps(whole | {"sections": sections}, indent=1)
        (folder / "report.json").write_text(text + "\n")
        (folder / "report.md").write_text("\n".join(self.lines()) + "\n")

    def lines(self) -> Iterator[str]:
        """As Markdown: first all verdicts, then the figures of each part."""
        yield f"# {self.title}"
        yield ""
        yield from (f"- {note}" for note in self.notes)
        yield from ("", "| part | seconds | | what | wanted | found |", "|---|---|---|---|---|---|")
        for section in self.sections:
            for verdict in section.verdicts:
                mark = {True: "ok", False: "**FAILED**", None: "-"}[verdict.ok]
                cells = (section.name, f"{section.seconds:.0f}", mark, *map(cell, asdict(verdict).values()))
                yield "| " + " | ".join(cells[:6]) + " |"
        for section in self.sections:
            yield from ("", f"## {section.name}: {section.state}", "", section.about)
            for title, rows in section.tables.items():
                yield from ("", title, "", *table(rows))
            for problem in section.problems:
                yield from ("", "```", problem, "```")


def table(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Rows with the columns of all of them, in the order in which they first come."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    yield "| " + " | ".join(columns) + " |"
    yield "|" + "---|" * len(columns)
    for row in rows:
        yield "| " + " | ".join(cell(row.get(name, "")) for name in columns) + " |"


def cell(value: Any) -> str:
    """A value in a table: four digits are enough, a table has no line breaks."""
    if isinstance(value, float):
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return " ".join(str(value).split()).replace("|", "/")
