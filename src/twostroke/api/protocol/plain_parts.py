"""Parts of a message that come as a plain text, which chats take, too: they become parts of type text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from pydantic import GetCoreSchemaHandler
from pydantic_core import CoreSchema, core_schema


@dataclass(frozen=True, slots=True)
class OrText:
    """In the place of such an object a text may stand: `Annotated[Part, OrText("text")]`."""

    type: str
    """Of the part that the text becomes."""

    def __get_pydantic_core_schema__(self, source: Any, handler: GetCoreSchemaHandler) -> CoreSchema:
        """Return the schema of the object, which is made of a text first."""
        return core_schema.no_info_before_validator_function(self._part, handler(source))

    def _part(self, given: Any) -> Any:
        return {"type": self.type, "text": given} if isinstance(given, str) else given
