"""The tensors that an object holds, however deep."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from types import FunctionType, MethodType
from typing import Any

from torch import Tensor

from twostroke.layers.elementwise import Rotary
from twostroke.runner.kv_storage import JoinedStorages, KVStorage


def tensors_of(thing: Any, seen: set[int]) -> Iterator[Tensor]:
    """Yield every tensor reachable from an object, except rotary tables, which belong to the context."""
    if id(thing) in seen or isinstance(thing, Rotary | KVStorage | JoinedStorages | type | str | bytes | int | float):
        return
    seen.add(id(thing))
    if isinstance(thing, Tensor):
        yield thing
        return
    children: list[Any] = []
    if isinstance(thing, dict):
        children += thing.values()
    elif isinstance(thing, list | tuple | set | frozenset):
        children += thing
    elif isinstance(thing, functools.partial):
        children += [thing.func, *thing.args, *thing.keywords.values()]
    elif isinstance(thing, FunctionType):
        children += [cell.cell_contents for cell in thing.__closure__ or ()]
    elif isinstance(thing, MethodType):
        children.append(thing.__self__)
    elif type(thing).__module__.startswith("twostroke"):
        children += vars(thing).values() if hasattr(thing, "__dict__") else ()
        slots = [name for kind in type(thing).__mro__ for name in getattr(kind, "__slots__", ())]
        children += [getattr(thing, name) for name in slots if hasattr(thing, name)]
    for child in children:
        yield from tensors_of(child, seen)
