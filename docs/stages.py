"""Draws the stages of dvc.yaml as docs/stages.svg: a box for each, those of a matrix in one.

python -m docs.stages
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path
from types import SimpleNamespace

import networkx
import yaml
from dvc.repo import Repo
from grandalf.graphs import Edge, Graph, Vertex
from grandalf.layouts import SugiyamaLayout

DRAWN = Path("docs/stages.svg")
AGAIN = "_again"
BOX, GAPS, MARGIN = (116, 38), (5, 34), 8
LATER = {
    "survey": ("survey_causal", "survey_masked", "train_variant", "evaluate_variant"),
    "decoder": ("decoder",),
    "caches": ("caches", "caches_joint"),
}
"""Commands of make that measure more for the page -> their stages, without values of a matrix"""
COMMANDS = {"report": "make repro"} | {command: f"make {command}" for command in LATER}
# boxes are light and have dark text, on light pages and on dark ones
STYLE = """text { font: 12px sans-serif; text-anchor: middle; fill: #1b1b1b }
.small { font-size: 10px; fill: #444444 }
rect { stroke: #777777 }
.report { fill: #d7e8f5 } .survey { fill: #fae3d0 } .decoder { fill: #e9e0f5 }
.caches { fill: #e0f0e3 }
path { fill: none; stroke: #888888; stroke-width: 1.3 }"""


def main() -> None:
    DRAWN.write_text(drawn(graph()), encoding="utf-8")


def graph() -> networkx.DiGraph:
    """Returns the stages, each after those that it reads, without edges that others imply.

    A stage that runs again from other seeds is part of the first one's. A node has the command
    that runs it and the values that it runs once for each of.
    """
    order = Repo().index.graph
    found = networkx.DiGraph(
        (box(read.addressing), box(reader.addressing)) for reader, read in order.edges
    )
    found.remove_edges_from(list(networkx.selfloop_edges(found)))
    reduced = networkx.transitive_reduction(found)
    stages = yaml.safe_load(Path("dvc.yaml").read_text(encoding="utf-8"))["stages"]
    for name in reduced:
        both = stages[name].get("matrix", {}), stages.get(name + AGAIN, {}).get("matrix", {})
        reduced.nodes[name]["each"] = [*dict.fromkeys([*both[0], *both[1]])]
        later = (command for command, groups in LATER.items() if name in groups)
        reduced.nodes[name]["command"] = next(later, "report")
    reduced.nodes["report"]["note"] = "reads all records"
    second = [(name, "report") for name in reduced["fingerprints"]]
    reduced.remove_edges_from(second)  # from there to the last row they would cross the boxes
    return reduced


def box(stage: str) -> str:
    """Returns the box of a stage: its name without the matrix's values and without `again`."""
    return stage.partition("@")[0].removesuffix(AGAIN)


def drawn(stages: networkx.DiGraph) -> str:
    """Lays the boxes out in layers, and writes them with their edges as SVG."""
    centres = laid_out(stages)
    width, height = (
        max(centre[axis] for centre in centres.values()) + BOX[axis] / 2 + MARGIN for axis in (0, 1)
    )
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:.0f} {height + 36:.0f}">',
        f"<style>{STYLE}</style>",
        *(edge(centres[one], centres[other]) for one, other in sorted(stages.edges)),
        *(line for name in sorted(stages) for line in boxed(name, stages, *centres[name])),
        *legend(height + 10),
        "</svg>\n",
    ]
    return "\n".join(lines)


def laid_out(stages: networkx.DiGraph) -> dict[str, tuple[float, float]]:
    """Returns the centre of every box, each below those that it reads."""
    vertices = {name: Vertex(name) for name in sorted(stages)}
    for vertex in vertices.values():
        vertex.view = SimpleNamespace(w=BOX[0], h=BOX[1], xy=(0, 0))
    edges = [Edge(vertices[one], vertices[other]) for one, other in sorted(stages.edges)]
    layout = SugiyamaLayout(Graph([*vertices.values()], edges).C[0])
    layout.xspace, layout.yspace = GAPS
    layout.init_all(roots=[vertices["fingerprints"]])
    layout.draw(20)
    places = {name: vertex.view.xy for name, vertex in vertices.items()}
    least = [min(place[axis] for place in places.values()) for axis in (0, 1)]
    return {
        name: (x - least[0] + BOX[0] / 2 + MARGIN, y - least[1] + BOX[1] / 2 + MARGIN)
        for name, (x, y) in places.items()
    }


def edge(start: tuple[float, float], end: tuple[float, float]) -> str:
    """Draws a curve from the bottom of a box to the top of a lower one."""
    (x, y), (to_x, to_y) = (start[0], start[1] + BOX[1] / 2), (end[0], end[1] - BOX[1] / 2)
    half = (y + to_y) / 2
    bend = f"C{x:.0f} {half:.0f} {to_x:.0f} {half:.0f} {to_x:.0f} {to_y:.0f}"
    return f'<path d="M{x:.0f} {y:.0f} {bend}"/>'


def boxed(name: str, stages: networkx.DiGraph, x: float, y: float) -> Iterator[str]:
    node = stages.nodes[name]
    note = node.get("note", f"each {' × '.join(node['each'])}" if node["each"] else "")
    yield (
        f'<rect class="{node["command"]}" x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}" '
        f'width="{BOX[0]}" height="{BOX[1]}" rx="4"/>'
    )
    yield f'<text x="{x:.0f}" y="{y + (-2 if note else 4):.0f}">{escape(name)}</text>'
    if note:
        yield f'<text class="small" x="{x:.0f}" y="{y + 12:.0f}">{escape(note)}</text>'


def legend(y: float) -> Iterator[str]:
    """Names the command of each colour."""
    for place, (command, words) in enumerate(COMMANDS.items()):
        x = MARGIN + place * (BOX[0] + GAPS[0])
        yield f'<rect class="{command}" x="{x}" y="{y:.0f}" width="{BOX[0]}" height="20" rx="4"/>'
        yield f'<text x="{x + BOX[0] / 2:.0f}" y="{y + 14:.0f}">{words}</text>'


if __name__ == "__main__":
    main()
