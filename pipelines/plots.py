"""Draws the plots of dvc.yaml as outputs/<scale>/dvc_plots/index.html, for use offline.

python -m pipelines.plots

`dvc plots show` itself writes a page that loads Vega from a CDN.
"""

import subprocess
import sys

import vl_convert

from pipelines.verdict import OUTPUTS, scale_of_run

PAGE = """<!DOCTYPE html>
<meta charset="utf-8">
<title>Plots of this run</title>
<style>div[id] { display: inline-block; margin: 8px }</style>
<script>{bundle}</script>
{plot_divs}
"""


def main() -> None:
    """Writes the template with Vega inside, then DVC's page made of it."""
    folder = OUTPUTS / scale_of_run() / "dvc_plots"
    folder.mkdir(parents=True, exist_ok=True)
    template = folder / "template.html"
    bundle = vl_convert.javascript_bundle("window.vegaEmbed = vegaEmbed;")
    page = PAGE.replace("{bundle}", bundle)
    template.write_text(page, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "dvc",
        "plots",
        "show",
        "--html-template",
        str(template),
        "-o",
        str(folder),
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"error: {done.stderr.strip().splitlines()[-1]}")
    print((folder / "index.html").resolve().as_uri())


if __name__ == "__main__":
    main()
