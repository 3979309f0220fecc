"""Resolution of a model argument on this machine, and suggestions if it names nothing that can be run."""

from __future__ import annotations

import contextlib
import re
import stat
from collections.abc import Sequence
from pathlib import Path

from twostroke.errors import ModelNotFound, shown
from twostroke.gguf.container import first_part
from twostroke.model.fetch import fetch
from twostroke.model.named_models import NAMED_MODELS
from twostroke.plain_words import reason_of

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_HUB_ADDRESS = re.compile(
    r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([A-Za-z0-9][\w.-]*/[\w.-]+)(?:[/:?#].*)?"
)
_SHORT_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(?::[\w.-]+)?")
_MAGIC = b"GGUF"
_MAX_NAMED = 4
_REMEDY = "Give a folder with config.json, a GGUF file, a short name, or a hub id (owner/name)."


def local_path(model: str) -> Path:
    """Return the model argument as a path, which need not exist.

    Raises:
        ModelNotFound: the system cannot look there: the text is too long, or it is not permitted.
    """
    try:
        path = Path(model).expanduser()
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            path.stat()
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: the home folder of an unknown user
        why = error.strerror if isinstance(error, OSError) else reason_of(error)
        raise ModelNotFound(f"the model {shown(model)} cannot be looked up ({why}). {_REMEDY}") from error
    return path


def gguf_path(model: str) -> Path | None:
    """Return the GGUF file that a model argument names.

    That is the file itself, the only GGUF file of a folder without config.json, or the file of a short name, which
    is fetched if it is absent.

    Returns:
        None if the argument names something else: a folder, a hub id.

    Raises:
        ModelNotFound: there is no such file, it is of another kind, a folder has several, or it cannot be fetched.
        SetupError: there is no room for the fetched file, or its terms are not accepted.
    """
    path = local_path(model)
    if path.is_dir():
        return _only_gguf(path)
    if kind := _special_file_kind(path):
        raise ModelNotFound(f"{path} is {kind}; a model cannot be read from it. {_REMEDY}")
    if model in NAMED_MODELS and not path.exists():
        return fetch(NAMED_MODELS[model])
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise ModelNotFound(f"there is no file {model!r}. Check the path.")
        return path
    if not path.is_file():
        return None
    if _begins_as_gguf(path):  # Ollama names its files by their hash
        return path
    raise ModelNotFound(_not_a_model_file(path))


def no_folder(model: str) -> ModelNotFound:
    """Return the error for a model argument that is neither a folder nor a hub id."""
    path = local_path(model)
    address = _HUB_ADDRESS.fullmatch(model)
    if path.is_file():
        why = _not_a_model_file(path)
    elif address is not None:
        why = f"there is no folder {model!r}. To fetch it from the hub, give its id: {address[1]}."
    elif any(character.isspace() for character in model):
        why = f"there is no folder {model!r}. Names of models have no spaces; give a prompt after the model, quoted."
    elif _SHORT_NAME.fullmatch(model):
        why = f"there is no folder {model!r}, and the short names are {', '.join(NAMED_MODELS)}. {_REMEDY}"
    else:
        why = f"there is no folder {model!r}, and it is not a hub id (owner/name). Check the path."
    return ModelNotFound(why)


def no_config(folder: Path) -> ModelNotFound:
    """Return the error for a folder without config.json."""
    within = sorted(folder.glob("*/config.json")) or sorted(folder.glob("snapshots/*/config.json"))
    meant = f" Did you mean {within[0].parent}?" if within else f" {_REMEDY}"
    return ModelNotFound(f"{folder} has no config.json; it is not a Hugging Face model folder.{meant}")


_SPECIAL_FILE_KINDS = (
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
)


def _special_file_kind(path: Path) -> str:
    """Return the kind of a path that is neither a file nor a folder; empty for files, folders and absent paths."""
    try:
        mode = path.stat().st_mode
    except OSError:
        return ""
    return next((kind for is_kind, kind in _SPECIAL_FILE_KINDS if is_kind(mode)), "")


def _only_gguf(folder: Path) -> Path | None:
    if (folder / "config.json").is_file():
        return None
    found = (path for path in folder.iterdir() if path.suffix.lower() == ".gguf" and path.is_file())
    files = sorted({first_part(path) for path in found})
    if len(files) > 1:
        raise ModelNotFound(f"{folder} holds {len(files)} GGUF files; give one of them: {_named(files)}.")
    return files[0] if files else None


def _named(files: Sequence[Path]) -> str:
    more = f" or {len(files) - _MAX_NAMED} more" if len(files) > _MAX_NAMED else ""
    return ", ".join(str(path) for path in files[:_MAX_NAMED]) + more


def _begins_as_gguf(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC
    except OSError:
        return False


def _not_a_model_file(path: Path) -> str:
    folder = path.absolute().parent
    if (folder / "config.json").is_file():
        return f"{path} is one file of a model. Give its folder: {folder}."
    if path.suffix == ".safetensors":
        return f"{path} holds only weights. Give a folder that has config.json and tokenizer.json beside them."
    return f"{path} is a file, but not a GGUF file. {_REMEDY}"
