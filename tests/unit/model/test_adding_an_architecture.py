"""The worked example of docs/adding-an-architecture.md is this very code, and it runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from architectures import bitnet
from oracle import naive_model
from oracle.parity import check_layers, check_parity
from twostroke.config.architectures import ARCHITECTURE_TRAITS
from twostroke.errors import UnsupportedModel
from twostroke.model.checkpoint import read_model_config
from twostroke.model.registry import ARCHITECTURES

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def added() -> Iterator[None]:
    bitnet.add()
    yield
    del ARCHITECTURES["BitNetForCausalLM"], ARCHITECTURE_TRAITS["BitNetForCausalLM"]


def test_the_page_shows_the_code_that_runs() -> None:
    page = (REPOSITORY / "docs" / "adding-an-architecture.md").read_text(encoding="utf-8")
    assert Path(bitnet.__file__).read_text(encoding="utf-8") in page
    listings = [part.partition("```")[0] for part in page.split("```python\n")[1:-1]]
    tables = ("config/architectures.py", "model/registry.py", "model/gguf/architectures.py")
    assert len(listings) == len(tables)
    for listing, table in zip(listings, tables, strict=True):
        assert listing in (REPOSITORY / "src" / "twostroke" / table).read_text(encoding="utf-8")


@pytest.mark.usefixtures("added")
def test_an_architecture_added_from_outside(tmp_path: Path) -> None:
    check_parity(tmp_path, "BitNet", {}, seed=0, prompt_lens=[1, 61, 300], num_decode=100)


@pytest.mark.usefixtures("added")
def test_its_layers_equal_transformers(tmp_path: Path) -> None:
    check_layers(tmp_path, "BitNet", {}, chunks=[40, 21, 1, 1, 1])


def test_unknown_until_it_is_added(tmp_path: Path) -> None:
    naive_model.build(tmp_path, "BitNet")
    with pytest.raises(UnsupportedModel, match="BitNetForCausalLM; known:"):
        read_model_config(tmp_path)
