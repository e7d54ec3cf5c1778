"""Draws small SVG pictures of rectangles, lines, arrows and text, in colours for light and dark pages.

A picture has its own background. A style sheet inside the file makes it dark if the system is in dark mode.
Coordinates are rounded to tenths of a pixel, so the same numbers give the same bytes everywhere.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

MARGIN = 28
# Colours of ranks on a light and a dark page; most colour-blind people can tell them apart (Okabe and Ito).
RANKS = (("#2b7bba", "#5aa5dd"), ("#b96b00", "#f0ad4e"), ("#14805f", "#3fc49a"), ("#a8518c", "#d98cc0"))
COLOURS = {
    "paper": ("#ffffff", "#15181d"),
    "edge": ("#d9dde3", "#343a43"),
    "ink": ("#1c2026", "#e8eaed"),
    "dim": ("#68707c", "#9aa3af"),
    "faint": ("#eef0f3", "#23282f"),
    "there": ("#bcd7ee", "#2c4a66"),
    "work": ("#2b7bba", "#5aa5dd"),
    "coming": ("#2b7bba", "#5aa5dd"),
    "sum": ("#b96b00", "#f0ad4e"),
    **{f"rank{number}": pair for number, pair in enumerate(RANKS)},
}
FONT = "font-family:system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue','DejaVu Sans',sans-serif"


def style() -> str:
    """Return the style sheet: classes for fill and stroke in each colour, and their dark variants."""

    def rules(side: int) -> str:
        return "".join(
            f".{name}{{fill:{pair[side]}}}.l-{name}{{stroke:{pair[side]}}}" for name, pair in COLOURS.items()
        )

    texts = f"text{{{FONT};font-size:13px}}.head{{font-size:17px;font-weight:600}}.small{{font-size:11.5px}}"
    texts += ".bold{font-weight:600}.on{fill:#ffffff;font-weight:600}.mid{text-anchor:middle}"
    texts += ".end{text-anchor:end}.line{fill:none}.thin{stroke-width:1}.thick{stroke-width:2}"
    dark = f"@media (prefers-color-scheme: dark){{{rules(1)}.on{{fill:#101317}}}}"
    return f"<style>{texts}{rules(0)}{dark}</style>"


def number(value: float) -> str:
    """Return a coordinate as text, rounded to a tenth of a pixel."""
    return f"{value:.1f}".removesuffix(".0")


class Picture:
    """An SVG picture that is built line by line. Screen readers read `title` and `about`."""

    def __init__(self, width: int, title: str, about: str) -> None:
        self.width, self.title, self.about = width, title, about
        self.parts: list[str] = []
        self.text(MARGIN, 38, title, "ink head")

    def box(self, x: float, y: float, w: float, h: float, kind: str, *, edge: str = "", r: float = 2) -> None:
        """Draw a rectangle. `kind` and `edge`: classes of its fill and of its outline."""
        line = f" l-{edge} thin" if edge else ""
        self.parts.append(
            f'<rect x="{number(x)}" y="{number(y)}" width="{number(w)}" height="{number(h)}" '
            f'rx="{number(r)}" class="{kind}{line}"/>'
        )

    def line(self, points: Sequence[tuple[float, float]], kind: str, *, dashes: str = "") -> None:
        """Draw a line through the given points."""
        way = " ".join(f"{number(x)},{number(y)}" for x, y in points)
        dashed = f' stroke-dasharray="{dashes}"' if dashes else ""
        self.parts.append(f'<polyline points="{way}" class="line l-{kind}"{dashed}/>')

    def arrow(self, start: tuple[float, float], stop: tuple[float, float], kind: str) -> None:
        """Draw a straight arrow, which must be horizontal or vertical."""
        (x0, y0), (x1, y1) = start, stop
        length = abs(x1 - x0) + abs(y1 - y0)
        dx, dy = (x1 - x0) / length, (y1 - y0) / length
        self.line([start, (x1 - 5 * dx, y1 - 5 * dy)], f"{kind} thick")
        back = (x1 - 8 * dx, y1 - 8 * dy)
        corners = [
            (x1, y1),
            (back[0] - 4.5 * dy, back[1] + 4.5 * dx),
            (back[0] + 4.5 * dy, back[1] - 4.5 * dx),
        ]
        way = " ".join(f"{number(x)},{number(y)}" for x, y in corners)
        self.parts.append(f'<polygon points="{way}" class="{kind}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "ink") -> None:
        """Draw a line of text whose baseline is at y."""
        self.parts.append(f'<text x="{number(x)}" y="{number(y)}" class="{kind}">{escape(text)}</text>')

    def done(self, height: float) -> str:
        """Return the text of the SVG file."""
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {number(height)}" '
            f'width="{self.width}" height="{number(height)}" role="img" aria-labelledby="title about">'
        )
        paper = (
            f'<rect x="0.5" y="0.5" width="{self.width - 1}" height="{number(height - 1)}" rx="10" '
            'class="paper l-edge thin"/>'
        )
        got = f'<title id="title">{escape(self.title)}</title><desc id="about">{escape(self.about)}</desc>'
        return "\n".join([head, got, style(), paper, *self.parts, "</svg>"]) + "\n"
