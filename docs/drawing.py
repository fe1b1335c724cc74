"""Draws the picture of README: two ways to choose two of eight keys.

python -m docs.drawing    # writes docs/drawing.png and drawing_dark.png
"""

from pathlib import Path

from value_aware_study.report.exhibits.drawing import drawing
from value_aware_study.report.look import png

if __name__ == "__main__":
    for dark, name in enumerate(("drawing.png", "drawing_dark.png")):
        Path(__file__).with_name(name).write_bytes(png(drawing().charts, dark=bool(dark)))
