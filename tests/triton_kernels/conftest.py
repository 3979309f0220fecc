"""Triton's kernels, in processes of their own (`make test-triton`); in others they are skipped, and it is said why.

The directory is not named `triton`: `tests` is on the path of imports, and it would pass for the package.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from model_folders import write_random_model
from triton_device import device, why_not

WHY_NOT = why_not()


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """Skips a module before it is imported, since that would need Triton."""
    return None if WHY_NOT is None else _Unrunnable.from_parent(parent, path=module_path)


@pytest.fixture(autouse=True, scope="session")
def interpreter_for_tests() -> None:
    """Changes Triton's interpreter for the whole process. Nearly all of its time went into what has nothing to do with
    a program's numbers, and these stay the same, but for the order of a product; see what each function says. The names
    are those of Triton 3.9."""
    import triton.language as tl
    from triton.runtime import interpreter

    if device().type == "cuda":
        return
    interpreter.np = _numpy_with(matmul=_product_in_the_order_of_the_depth)  # type: ignore[assignment]
    interpreter._patch_lang = _once_for_all(interpreter._patch_lang, interpreter._LangPatchScope)
    interpreter._get_np_dtype = _by_name(interpreter._get_np_dtype)
    # each sum of integers is computed a second time for a check that has no effect unless Triton's `debug` is on
    interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
    _remember_shapes(tl.block_type, tl.tensor)
    semantic = type(interpreter.interpreter_semantic)
    semantic.broadcast_impl_value = _where_shapes_differ(semantic.broadcast_impl_value)


@pytest.fixture(scope="session")
def random_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of all tests with one layer less, since interpreting a third layer tests nothing new."""
    families = ("llama", "mistral", "qwen3", "bloom", "gpt_oss")
    return {
        family: write_random_model(tmp_path_factory.mktemp(family), family, num_hidden_layers=2) for family in families
    }


def _numpy_with(**functions: Any) -> ModuleType:
    """NumPy with other functions, for one module alone."""
    module = ModuleType(np.__name__)
    module.__dict__.update(vars(np) | functions)
    return module


def _product_in_the_order_of_the_depth(a: Any, b: Any, dtype: Any = None) -> Any:
    """The interpreter multiplies by NumPy's BLAS, which on some processors adds up in another order where a tile has
    another height or width. Our kernels' bits are to be judged, not its: each element is summed here in the order of
    the tile's depth. Whether a card's units do so is seen on a card alone."""
    if a.ndim != 2 or dtype is None:
        return np.matmul(a, b, dtype=dtype)
    left, right = np.ascontiguousarray(a.T, dtype)[:, :, None], np.ascontiguousarray(b, dtype)
    total = np.zeros((a.shape[0], b.shape[1]), dtype)
    term = np.empty_like(total)
    for column, row in zip(left, right, strict=True):
        np.multiply(column, row, out=term)
        np.add(total, term, out=total)
    return total


def _once_for_all(patch: Callable[[Any], Any], scope_without_changes: Callable[[], Any]) -> Callable[[Any], Any]:
    """The interpreter replaces hundreds of functions of the language for every launch, and once more for every call of
    one program by another: more than half of the time that all of these tests took. This process compiles nothing, so
    they are replaced when a program is first seen (which are depends on the modules that it sees), and stay so."""
    done: set[Any] = set()

    def patch_once(function: Any) -> Any:
        if function not in done:
            patch(function)
            done.add(function)
        return scope_without_changes()

    return patch_once


def _by_name(numpys_type_of: Callable[[Any], np.dtype[Any]]) -> Callable[[Any], np.dtype[Any]]:
    """The interpreter makes its table of types anew for every number that it looks at."""
    import triton.language as tl

    known: dict[str, np.dtype[Any]] = {}

    def found(its_type: Any) -> np.dtype[Any]:
        element = its_type.element_ty if isinstance(its_type, tl.block_type) else its_type
        if isinstance(element, tl.pointer_type):
            return numpys_type_of(element)
        if element.name not in known:
            known[element.name] = numpys_type_of(element)
        return known[element.name]

    return found


def _remember_shapes(block_type: Any, tensor: Any) -> None:
    """The interpreter wraps the sizes of a shape one by one, and twice over, for all that a program computes."""
    type_initialise, tensor_initialise = block_type.__init__, tensor.__init__
    known_types: dict[Any, Any] = {}
    known_tensors: dict[str, Any] = {}

    def type_init(self: Any, element_ty: Any, shape: Any) -> None:
        key = element_ty.name, *[getattr(size, "value", size) for size in shape]
        if key not in known_types:
            type_initialise(self, element_ty, shape)
            known_types[key] = self.shape, self.numel, self.name
        self.element_ty = element_ty
        self.shape, self.numel, self.name = known_types[key]

    def tensor_init(self: Any, handle: Any, type: Any) -> None:
        if type.name not in known_tensors:
            tensor_initialise(self, handle, type)
            known_tensors[type.name] = self.shape, self.numel, self.dtype
        self.handle, self.type = handle, type
        self.shape, self.numel, self.dtype = known_tensors[type.name]

    block_type.__init__, tensor.__init__ = type_init, tensor_init


def _where_shapes_differ(broadcast: Callable[..., Any]) -> Callable[..., Any]:
    """Most operands have the same shape already, which the interpreter takes long to find out."""

    def broadcast_others(self: Any, lhs: Any, rhs: Any) -> Any:
        left, right = lhs.type, rhs.type
        if left.is_block() and right.is_block():
            is_same = left.shape.values == right.shape.values
        else:
            is_same = not left.is_block() and not right.is_block()
        return (lhs, rhs) if is_same else broadcast(self, lhs, rhs)

    return broadcast_others


class _Unrunnable(pytest.Module):
    """Module whose tests cannot run here; a failure if it was named explicitly and everything is required."""

    def collect(self) -> list[pytest.Item]:
        """None."""
        wanted = any(Path(__file__).parent.name in arg for arg in self.config.args)
        if wanted and self.config.getoption("require_all"):
            raise self.CollectError(WHY_NOT)
        pytest.skip(WHY_NOT or "", allow_module_level=True)
