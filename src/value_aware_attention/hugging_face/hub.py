"""Finds models and tokenizers in a local folder, or on the hub where it answers."""

from contextlib import suppress
from functools import cache
from pathlib import Path
from threading import Event, Thread

SECONDS_TO_ANSWER = 6


def local_folder(name: str | Path) -> Path | None:
    """Returns the folder of that name; None = a name on the hub, such as gpt2 or org/model.

    Raises FileNotFoundError for the path of a folder that does not exist.
    """
    folder = Path(name)
    if folder.is_dir():
        return folder
    if str(name).startswith((".", "/", "~")) or len(folder.parts) > 2:
        raise FileNotFoundError(f"{name}: no such folder")
    return None


def only_local(name: str | Path) -> bool:
    """Tells whether local files alone are read: of a folder, or because the hub does not answer."""
    return local_folder(name) is not None or not hub_answers()


def hub_answers() -> bool:
    """Tells in SECONDS_TO_ANSWER whether the hub can be reached at all: its client tries longer."""
    from huggingface_hub import constants

    return _answers(constants.ENDPOINT)


@cache
def _answers(endpoint: str) -> bool:
    from huggingface_hub import get_session

    answered = Event()

    def ask() -> None:
        with suppress(Exception):  # what its HTTP client raises has changed with the client before
            get_session().head(endpoint, timeout=SECONDS_TO_ANSWER)
            answered.set()

    thread = Thread(target=ask, daemon=True)  # no timeout ends the resolution of a host's name
    thread.start()
    thread.join(SECONDS_TO_ANSWER)
    return answered.is_set()


def why_not(name: str | Path, error: Exception) -> str:
    """Says in one line why a model or tokenizer was not loaded, and how it can be given."""
    from huggingface_hub import constants

    if not only_local(name) or Path(name).is_dir():
        return str(error).strip().splitlines()[0]
    return (
        f"{name} is no local folder, nor in the hub's cache here, and {constants.ENDPOINT} does "
        f"not answer (no network?): give a local folder"
    )
