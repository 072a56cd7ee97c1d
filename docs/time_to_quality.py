"""Draws `time_to_quality.svg`, the picture of the README, from the table of times to a given accuracy in `results.md`.

python docs/time_to_quality.py
"""

from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent
LABELS, BAR, ROW, TOP, EDGE = 150, 230, 34, 62, 16  # pixels: narrow enough for a phone

# An <img> cannot see the page around it, so the picture brings its own background, for light and dark mode.
STYLE = """
text { font: 15px system-ui, "Segoe UI", Helvetica, Arial, sans-serif; fill: #1f2328 }
.head { font-weight: 600 } .back { fill: #ffffff; stroke: #d1d9e0 } .bar { fill: #0072b2 } .plain { fill: #8c959f }
@media (prefers-color-scheme: dark) {
text { fill: #e6edf3 } .back { fill: #0d1117; stroke: #3d444d } .bar { fill: #4fa8e0 } .plain { fill: #6e7681 }
}
"""


def table(text: str) -> list[list[str]]:
    """Cells of the generated table `minilm_times`, without the line below its head."""
    block = text.split("<!-- claims: minilm_times -->")[1].strip().split("\n\n")[0]
    lines = [line for line in block.splitlines() if "---" not in line]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


def picture(text: str) -> str:
    """The SVG: a bar for each method, its minutes on the first link."""
    head, *rows = table(text)
    accuracy, link = head[1].removeprefix("updates to "), head[2].removeprefix("minutes, ")
    title = f"Minutes to {accuracy} on 4 hosts, {link.replace('mbit', ' Mbit/s')}"
    width, height = LABELS + BAR + EDGE + 90, TOP + ROW * len(rows) + EDGE
    parts = [
        f'<rect class="back" x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="6"/>',
        _text(EDGE, 32, title, "head"),
    ]
    longest = max(float(row[2]) for row in rows if row[2] != "not reached")
    for i, (name, _, minutes, *_) in enumerate(rows):
        y = TOP + i * ROW + 18
        long = 0 if minutes == "not reached" else float(minutes) * BAR / longest
        kind = "bar" if name.startswith("PowerSGD") else "plain"
        parts.append(_text(EDGE, y, name.replace("full training, bf16", "DDP in bf16")))
        parts.append(f'<rect class="{kind}" x="{LABELS}" y="{y - 15}" width="{long:.1f}" height="20"/>')
        parts.append(_text(LABELS + long + 8, y, minutes))
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" {size}>\n<title>{title}</title>\n'
        f"<style>{STYLE}</style>\n" + "\n".join(parts) + "\n</svg>\n"
    )


def _text(x: float, y: float, words: str, name: str = "body") -> str:
    return f'<text class="{name}" x="{x:.1f}" y="{y}">{escape(words)}</text>'


if __name__ == "__main__":
    (FOLDER / "time_to_quality.svg").write_text(picture((FOLDER / "results.md").read_text()))
