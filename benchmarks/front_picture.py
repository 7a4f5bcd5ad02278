"""The README's picture, from committed results: time per step and what is sent, plain DDP against automatic mode.

python -m benchmarks.front_picture        # writes docs/images/speed.svg
"""

import json
from dataclasses import dataclass
from pathlib import Path

from benchmarks import results

PICTURE = Path(__file__).resolve().parents[1] / "docs" / "images" / "speed.svg"
CASES = {"MLP": "mlp-1", "ResNet": "resnet-1", "ViT": "vit-1", "LSTM": "lstm-1", "GPT": "gpt-1"}
OURS = "espresso:efsignsgd"
GREY, BLUE, DARK = "#b8bec6", "#1f6feb", "#24292f"
ROW, TOP, LABELS, PANEL, GAP = 46, 64, 66, 300, 70


@dataclass(frozen=True)
class Bar:
    """One model: what plain DDP and ours take of one thing, and what computing alone takes."""

    name: str
    plain: float
    ours: float
    alone: float | None


def read() -> tuple[list[Bar], list[Bar]]:
    """Milliseconds a step, and megabytes a step and host."""
    times, sent = [], []
    for name, case in CASES.items():
        body = json.loads((results.RESULTS_DIR / f"speed_{case}.json").read_text())
        arms = {row["arm"]: row for row in body["rows"]}
        plain, ours, alone = arms["plain"], arms[OURS], arms["none"]
        times.append(Bar(name, plain["step_ms"], ours["step_ms"], alone["step_ms"]))
        sent.append(Bar(name, plain["mb_per_step_per_host"], ours["mb_per_step_per_host"], None))
    return times, sent


def panel(bars: list[Bar], left: int, title: str, unit: str) -> list[str]:
    """One panel of paired bars."""
    scale = (PANEL - 60) / max(bar.plain for bar in bars)
    lines = [f'<text x="{left}" y="{TOP - 16}" font-weight="bold">{title}</text>']
    for row, bar in enumerate(bars):
        y = TOP + row * ROW
        for value, colour, at in ((bar.plain, GREY, y), (bar.ours, BLUE, y + 16)):
            shown = f"{value:.0f}" if value >= 10 else f"{value:.1f}"
            lines.append(f'<rect x="{left}" y="{at}" width="{value * scale:.1f}" height="14" fill="{colour}"/>')
            lines.append(f'<text x="{left + value * scale + 5:.1f}" y="{at + 12}">{shown} {unit}</text>')
        if bar.alone is not None:
            x = left + bar.alone * scale
            lines.append(f'<path d="M{x:.1f} {y - 3}V{y + 33}" stroke="{DARK}" stroke-dasharray="3 2"/>')
    return lines


def draw() -> str:
    """The picture as SVG."""
    times, sent = read()
    width, height = LABELS + 2 * PANEL + GAP, TOP + ROW * len(times) + 26
    right = LABELS + PANEL + GAP
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
        f' font-family="sans-serif" font-size="12" fill="{DARK}">',
        "<title>Time per step and data sent: plain DDP against Espresso, two hosts at 1 Gb/s</title>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
        f'<rect x="{LABELS}" y="10" width="12" height="12" fill="{GREY}"/>',
        f'<text x="{LABELS + 17}" y="20">plain DDP</text>',
        f'<rect x="{LABELS + 92}" y="10" width="12" height="12" fill="{BLUE}"/>',
        f'<text x="{LABELS + 109}" y="20">Espresso, efsignsgd, automatic mode</text>',
        f'<path d="M{right - 20} 8V24" stroke="{DARK}" stroke-dasharray="3 2"/>',
        f'<text x="{right - 12}" y="20">computing alone</text>',
    ]
    for row, bar in enumerate(times):
        lines.append(f'<text x="{LABELS - 10}" y="{TOP + row * ROW + 19}" text-anchor="end">{bar.name}</text>')
    lines += panel(times, LABELS, "time per step", "ms")
    lines += panel(sent, right, "sent per step and host", "MB")
    note = "models of 9 to 11 M parameters, two emulated hosts, 1 Gb/s verified, one CPU worker each"
    lines.append(f'<text x="{LABELS}" y="{height - 10}" fill="#57606a">{note}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


if __name__ == "__main__":
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(draw())
