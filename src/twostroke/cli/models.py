"""`twostroke models`: the models that have short names, and whether they are on this machine."""

from __future__ import annotations

import sys


def models(name: str | None = None, /, *, accept_terms: bool = False) -> None:
    """List the models that have short names, or fetch one of them.

    `twostroke serve NAME` and the other commands also fetch a model that is not on this machine.

    Parameters
    ----------
    name
        The model to fetch; without it, all models are listed.
    accept_terms
        Accept the model's terms of use. They need to be accepted once.
    """
    from twostroke.errors import InvalidParameter
    from twostroke.model import fetch
    from twostroke.model.named_models import NAMED_MODELS

    if name is None and accept_terms:
        raise InvalidParameter(
            "accept_terms", True, "needs the name of one model", "Give it: twostroke models NAME --accept-terms."
        )
    if name is None:
        sys.stdout.write(_table())
        return
    if name not in NAMED_MODELS:
        raise InvalidParameter("model", name, f"is not one of {', '.join(NAMED_MODELS)}")
    model = NAMED_MODELS[name]
    if accept_terms and model.terms is not None:
        fetch.accept_terms(model)
        sys.stderr.write(f"accepted for {model.name}: the {model.licence}, {model.terms}\n")
    path = fetch.fetch(model)
    sys.stdout.write(f"{path}\n")


_HASH_DIGITS = 12
"""Number of hash digits to show; enough to tell files apart."""


def _table() -> str:
    from twostroke.model.fetch import is_checked
    from twostroke.model.named_models import NAMED_MODELS, models_folder

    rows = [("name", "kind", "size", "licence", "here", "package", "sha256", "hub id")]
    for model in NAMED_MODELS.values():
        here = "no" if not model.is_downloaded else "yes" if is_checked(model) else "not checked"
        size, digits = f"{model.num_bytes / 1e6:.0f} MB", model.sha256[:_HASH_DIGITS]
        rows.append((model.name, model.kind, size, model.licence, here, model.source, digits, model.hub_id))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    told = f"Models are stored in {models_folder()}. `twostroke models NAME` fetches a model, or checks it."
    return "\n".join([*lines, "", told, ""])
