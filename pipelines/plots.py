"""Draws the plots of dvc.yaml into outputs/plots/index.html, which opens without a network.

python -m pipelines.plots

`dvc plots show` itself writes a page that loads Vega from a CDN.
"""

import subprocess
import sys
from pathlib import Path

import vl_convert

FOLDER = Path("outputs/dvc_plots")
PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<title>Plots of this run</title>
<script>{bundle}</script>
{plot_divs}
"""


def main() -> None:
    """The template with Vega inside, then DVC's page made of it."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    template = FOLDER / "template.html"

    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    page = PAGE.replace("{bundle}", bundle)
    template.write_text(page, encoding="utf-8")
    command = ["dvc", "plots", "show", "--html-template", str(template), "-o", str(FOLDER)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {done.stderr.strip().splitlines()[-1]}")
    print((FOLDER / "index.html").resolve().as_uri())


if __name__ == "__main__":
    main()
