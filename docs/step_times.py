"""Draws `step_times.svg`, the picture of the README, from the table of steps on slow links in `results.md`.

python docs/step_times.py
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
TITLE = "Seconds per training step, and times as fast as dense DDP: ResNet-18 on emulated hosts"
LABELS, BAR, PANEL, ROW, TOP, EDGE = 266, 180, 285, 26, 100, 16  # pixels

# An <img> cannot see the page around it, so the picture brings its own background, for light and dark mode.
STYLE = """
text { font: 13px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.head { font-weight: 600 } .back { fill: #ffffff; stroke: #d1d9e0 } .compute { fill: #0072b2 } .exchange { fill: #e08a4f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .back { fill: #0d1117; stroke: #3d444d } .compute { fill: #4fa8e0 } .exchange { fill: #b8592a }
}
"""


def table(text: str) -> list[list[str]]:
    """Cells of the table whose first cell begins with "s a step", without the line below its head."""
    lines = text[text.index("| s a step (") :].split("\n\n")[0].splitlines()
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if "---" not in line]


def picture(text: str) -> str:
    """The SVG: a panel for each link, a bar for each row, its time without an exchange and the rest."""
    head, *rows = table(text)
    width, height = LABELS + 2 * PANEL + EDGE, TOP + ROW * len(rows) + EDGE
    parts = [
        f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        _text(EDGE, 28, TITLE, "head"),
    ]
    for name, x, words in (("compute", EDGE, "computing"), ("exchange", EDGE + 110, "exchanging gradients")):
        parts += [_bar(name, x, 54, 12), _text(x + 18, 54, words)]
    parts += [_text(EDGE, TOP + i * ROW + 18, row[0]) for i, row in enumerate(rows)]
    # Three columns for each link: the time, the time without an exchange, and "2.42× as fast".
    for panel, column in enumerate((1, 4)):
        left = LABELS + panel * PANEL
        parts.append(_text(left, TOP - 10, head[column], "head"))
        scale = BAR / max(float(row[column]) for row in rows)
        for i, row in enumerate(rows):
            y, step, alone = TOP + i * ROW + 18, float(row[column]), float(row[column + 1])
            parts.append(_bar("compute", left, y, alone * scale))
            parts.append(_bar("exchange", left + alone * scale, y, (step - alone) * scale))
            speedup = ", ".join([f"{row[column]} s", *row[column + 2].split()[:1]])
            parts.append(_text(left + step * scale + 6, y, speedup))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n<title>{TITLE}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, name: str = "body") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y}">{escape(words)}</text>'


def _bar(name: str, x: float, y: float, width: float) -> str:
    return f'<rect class="{name}" x="{x:.1f}" y="{y - 12}" width="{width:.1f}" height="16"/>'


if __name__ == "__main__":
    (FOLDER / "step_times.svg").write_text(picture((FOLDER / "results.md").read_text()))
