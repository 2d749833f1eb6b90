"""Small parts that plots are drawn from: an SVG sheet, a linear axis, ticks, the width of a text.

Invariants: no text is placed without room for it; colours are CSS classes, so light, dark and print are
the style sheet's business. Must not know: what is plotted.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence
from dataclasses import dataclass

FONT_PX = 12
CHAR_PX = 8.3
"""Width of one character of the plots' font at `FONT_PX`, on the wide side, so that texts keep apart: DejaVu Sans Bold."""


def text_px(text: str) -> float:
    """Return the width that a text needs at most, in pixels."""
    return len(text) * CHAR_PX


def nice_ticks(low: float, high: float, *, count: int) -> list[float]:
    """Return round values from low to high, about so many, in steps of 1, 2 or 5 times a power of ten."""
    span = high - low
    if not span > 0 or not math.isfinite(span):
        return [low]
    raw = span / max(1, count)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= raw * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    last = math.floor(high / step + 1e-9)
    return [round(index * step, 12) for index in range(first, last + 1)]


def number(value: float) -> str:
    """Write a number for people: three significant digits, no exponent in the usual range."""
    if value == 0:
        return "0"
    magnitude = abs(value)
    if magnitude < 0.001 or magnitude >= 1e6:
        return f"{value:.2g}"
    digits = max(0, 2 - math.floor(math.log10(magnitude)))
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


@dataclass(frozen=True, slots=True)
class Scale:
    """A linear map from values to pixels."""

    low: float
    high: float
    start_px: float
    stop_px: float

    def px(self, value: float) -> float:
        """Return the place of a value, held inside the axis."""
        share = (value - self.low) / (self.high - self.low) if self.high > self.low else 0.0
        return self.start_px + min(1.0, max(0.0, share)) * (self.stop_px - self.start_px)

    def ticks(self) -> list[float]:
        """Return round values whose labels have room."""
        room_px = abs(self.stop_px - self.start_px)
        is_upright = self.stop_px < self.start_px
        each_px = 26.0 if is_upright else 62.0
        return nice_ticks(self.low, self.high, count=max(2, int(room_px / each_px)))


class Sheet:
    """An SVG picture that grows part by part."""

    def __init__(self, width: float, height: float, *, label: str, css_class: str = "") -> None:
        self.width = width
        self.height = height
        self._label = label
        self._class = css_class
        self._parts: list[str] = []

    def rect(
        self, x: float, y: float, width: float, height: float, css_class: str, *, tip: str = ""
    ) -> None:
        """Draw a box; `tip` is shown when it is pointed at."""
        inside = f"<title>{html.escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{max(0.8, width):.1f}" height="{height:.1f}" '
            f'class="{css_class}">{inside}</rect>'
        )

    def line(self, x1: float, y1: float, x2: float, y2: float, css_class: str) -> None:
        """Draw a straight line."""
        self._parts.append(
            f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" class="{css_class}"/>'
        )

    def circle(self, x: float, y: float, radius: float, css_class: str, *, tip: str = "") -> None:
        """Draw a dot."""
        inside = f"<title>{html.escape(tip)}</title>" if tip else ""
        self._parts.append(
            f'<circle cx="{x:.1f}" cy="{y:.1f}" r="{radius:.1f}" class="{css_class}">{inside}</circle>'
        )

    def path(self, points: Sequence[tuple[float, float]], css_class: str) -> None:
        """Draw a line through points."""
        if points:
            steps = "L".join(f"{x:.1f} {y:.1f}" for x, y in points)
            self._parts.append(f'<path d="M{steps}" class="{css_class}"/>')

    def text(
        self, x: float, y: float, text: str, *, anchor: str = "start", css_class: str = ""
    ) -> None:
        """Write a text with its base line at y; it is kept inside the sheet."""
        width = text_px(text)
        before = {"start": 0.0, "middle": width / 2, "end": width}[anchor]
        x = min(max(x, before), self.width - (width - before)) if width < self.width else before
        attribute = f' class="{css_class}"' if css_class else ""
        self._parts.append(
            f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{attribute}>{html.escape(text)}</text>'
        )

    def x_axis(self, scale: Scale, y: float, top: float, *, title: str) -> None:
        """Draw ticks with labels below y, a grid up to top, and the title under the labels."""
        self.line(scale.start_px, y, scale.stop_px, y, "axis")
        free_from = -math.inf
        for tick in scale.ticks():
            x, label = scale.px(tick), number(tick)
            self.line(x, top, x, y, "grid")
            if x - text_px(label) / 2 >= free_from:
                self.text(x, y + 15, label, anchor="middle", css_class="tick")
                free_from = x + text_px(label) / 2 + 6
        middle = (scale.start_px + scale.stop_px) / 2
        self.text(middle, y + 31, title, anchor="middle", css_class="unit")

    def y_axis(self, scale: Scale, x: float, right: float, *, title: str) -> None:
        """Draw ticks with labels left of x, a grid up to right, and the title above the axis."""
        for tick in scale.ticks():
            y = scale.px(tick)
            self.line(x, y, right, y, "grid")
            self.text(x - 6, y + 4, number(tick), anchor="end", css_class="tick")
        self.text(x, scale.stop_px - 9, title, css_class="unit")

    def svg(self) -> str:
        """Return the picture; its width is the place's, its proportions are kept."""
        return (
            f'<svg viewBox="0 0 {self.width:.0f} {self.height:.0f}" role="img" class="{self._class}" '
            f'aria-label="{html.escape(self._label)}">{"".join(self._parts)}</svg>'
        )
