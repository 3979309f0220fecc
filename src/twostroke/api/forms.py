"""The form that an output has to have, whichever field of a request asks for it, and what is wrong with it by name."""

from __future__ import annotations

import contextlib
from collections.abc import Generator
from dataclasses import dataclass

from twostroke.api.dialect import ChatTools
from twostroke.api.protocol.chat import ResponseFormat
from twostroke.api.protocol.sampling import StructuredOutputsField
from twostroke.errors import InvalidParameter
from twostroke.sampling_params import StructuredOutputs

OWN_FIELD = "structured_outputs"
"""The engine's word for forms, and a request's field that means just that."""


@dataclass(frozen=True, slots=True)
class Asker:
    """Who asks for a form.

    Attributes:
        field: of the request.
        told: what it asks for, where the engine's form was made of it and nobody would know it again.
    """

    field: str
    told: str = ""

    @contextlib.contextmanager
    def named(self) -> Generator[None]:
        """Raise what the engine says of its form as said of the field that asked."""
        try:
            yield
        except InvalidParameter as error:
            if self.field == OWN_FIELD or not error.name.startswith(OWN_FIELD):
                raise
            raise InvalidParameter(self.field, self.told or error.value, error.limit, error.remedy) from error


@dataclass(frozen=True, slots=True)
class Form:
    """What an output has to be, and who asks for it."""

    wanted: StructuredOutputs
    asker: Asker


def form_of(
    field: StructuredOutputsField | None, response_format: ResponseFormat | None, tools: ChatTools
) -> Form | None:
    """Return the one form that the output of a chat has to have.

    A call that is required goes before `response_format`, which is about an answer in text.

    Args:
        field: of the request.
        response_format: of the request.
        tools: of the request.

    Raises:
        InvalidParameter: several ask, or one that cannot be followed.
    """
    found: list[Form] = []
    if field is not None:
        found.append(Form(structured_outputs(field), Asker(OWN_FIELD)))
    schema = tools.schema
    if schema is not None:
        asker = Asker("tools", ", ".join(tool.name for tool in tools.tools))
        with asker.named():
            found.append(Form(StructuredOutputs(json=schema), asker))
    elif response_format is not None and response_format.type != "text":
        asker = Asker("response_format")
        with asker.named():
            found.append(Form(_of_format(response_format), asker))
    if len(found) > 1:
        asked = " and ".join(form.asker.field for form in found)
        raise InvalidParameter(asked, "...", "each constrains the output", "Ask for one of them.")
    return found[0] if found else None


def structured_outputs(field: StructuredOutputsField) -> StructuredOutputs:
    """Return the form that the field of that name asks for.

    Raises:
        InvalidParameter: it cannot be followed.
    """
    # JSON null is "not given"; unknown kinds were named already
    given = {"json" if name == "json_" else name: getattr(field, name) for name in type(field).model_fields}
    return StructuredOutputs(**{kind: value for kind, value in given.items() if value is not None})


def _of_format(response_format: ResponseFormat) -> StructuredOutputs:
    if response_format.type == "json_object":
        return StructuredOutputs(json_object=True)
    wanted = response_format.json_schema
    if wanted is None or wanted.schema_ is None:
        raise InvalidParameter(
            "response_format", response_format.type, "needs a schema", "Send it in the field schema."
        )
    return StructuredOutputs(json=wanted.schema_)
