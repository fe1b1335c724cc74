"""Lets a reader search the site from disk, with nothing but the site's own files.

A page that is opened from disk may neither fetch search_index.json nor start a worker from a file.
Material reads search/search_index.js there instead; search/worker.js starts its worker from a text.
(Its own plugin, `offline`, has the page fetch such a script from a CDN.)
"""

import json
from pathlib import Path
from typing import Any

WORKER = "search/worker.js"
FROM_TEXT = """if (location.protocol === "file:") {
  const text = %s, Own = Worker
  window.Worker = function () { return new Own(URL.createObjectURL(new Blob([text]))) }
}
"""


def on_config(config: Any) -> None:
    """Has every page load the script before those that start the worker."""
    config.extra["polyfills"] = [WORKER]


def on_post_build(config: Any) -> None:
    """Writes the index and the worker as scripts."""
    site = Path(config.site_dir)
    index = (site / "search/search_index.json").read_text(encoding="utf-8")
    (site / "search/search_index.js").write_text(f"var __index = {index}", encoding="utf-8")
    (worker,) = (site / "assets/javascripts/workers").glob("search.*.js")
    text = json.dumps(worker.read_text(encoding="utf-8"))
    (site / WORKER).write_text(FROM_TEXT % text, encoding="utf-8")
