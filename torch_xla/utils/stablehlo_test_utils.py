"""For tests of exported modules."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from torch_xla._torch_internals import pytree


@functools.cache
def has_tf_package() -> bool:
    """Whether TensorFlow is installed."""
    return importlib.util.find_spec("tensorflow") is not None


def wrap_func_as_nn_module(f: Callable[..., Any]) -> torch.nn.Module:
    """A function as a module, which is what can be exported.

    Args:
        f: The function.
    """

    class Module(torch.nn.Module):
        def forward(self, *args: Any) -> Any:
            return f(*args)

    return Module().eval()


def load_save_model_and_inference(path: str, args: tuple[Any, ...]) -> Any:
    """The result of a model that TensorFlow saved.

    Args:
        path: Its folder.
        args: What to call it with: tensors on the CPU, and numbers.

    Returns:
        TensorFlow's tensors.

    Raises:
        ImportError: TensorFlow is not installed.
    """
    tf = importlib.import_module("tensorflow")
    inputs = pytree.tree_map_only(torch.Tensor, lambda x: tf.constant(x.numpy()), args)
    return tf.saved_model.load(path).f(*inputs)


def compare_exported_program_and_saved_model_result(
    ep: torch.export.ExportedProgram, saved_model_path: str, args: tuple[Any, ...], atol: float = 1e-7
) -> tuple[tuple[np.ndarray[Any, Any], ...], tuple[np.ndarray[Any, Any], ...]]:
    """The results of an exported program and of what TensorFlow saved of it.

    Args:
        ep: The exported program.
        saved_model_path: Folder of the saved model.
        args: What to call both with.
        atol: How far values may be apart.

    Returns:
        The values of the first, and those of the second.

    Raises:
        AssertionError: They differ in number, dtype or value.
        ImportError: TensorFlow is not installed.
    """
    saved_outputs = load_save_model_and_inference(saved_model_path, args)
    with torch.no_grad():
        exported_outputs = ep.module()(*args)
    expected = tuple(
        x.numpy() for x in (exported_outputs if isinstance(exported_outputs, tuple) else (exported_outputs,))
    )
    actual = tuple(x.numpy() for x in saved_outputs)
    assert [x.dtype for x in actual] == [x.dtype for x in expected], (actual, expected)
    for have, want in zip(actual, expected, strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=atol)
    return expected, actual
