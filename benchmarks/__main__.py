"""Lists the results and whether each is from the present code: python -m benchmarks."""

from benchmarks.record import FOLDER, overview

text = overview(FOLDER)
print(text)
(FOLDER / "README.md").write_text(text)
