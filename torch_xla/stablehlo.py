"""Models as StableHLO: export a `torch.export` program, run it, save it, load it."""

from __future__ import annotations

import dataclasses
import enum
import json
import os
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.export.graph_signature import InputKind, OutputKind, OutputSpec

from torch_xla._core.functions import custom_calls, jax_functions
from torch_xla._errors import message
from torch_xla._torch_internals import pytree
from torch_xla.ops import dtypes

__all__ = [
    "InputLocation",
    "StableHLOExportOptions",
    "StableHLOFunc",
    "StableHLOFunctionMeta",
    "StableHLOGraphModule",
    "StableHLOModelBundle",
    "VariableSignature",
    "VariableType",
    "exported_program_to_stablehlo",
    "save_as_stablehlo",
    "save_torch_model_as_stablehlo",
]


@dataclass
class StableHLOExportOptions:
    """Options of an export.

    Attributes:
        include_human_readable_text: Whether the module's text is kept beside its bytecode.
        override_tracing_arguments: Arguments to trace with instead of the program's own example inputs.
        override_tracing_kwargs: Keyword arguments to trace with; there must be none.
        save_weights: Whether `save` writes the weights.
        inline_all_constant: Whether numbers are constants of the module; otherwise all but 0 and 1 are inputs of it.
        export_weights: Whether the result holds the weights.
        custom_ops_allowed_in_graph: Namespaces whose operators become custom calls; they take and give tensors alone.
        export_node_metadata: Whether locations carry the metadata of the program's nodes; must be False.
    """

    include_human_readable_text: bool = True
    override_tracing_arguments: tuple[Any, ...] | None = None
    override_tracing_kwargs: Mapping[str, Any] | None = None
    save_weights: bool = True
    inline_all_constant: bool = True
    export_weights: bool = True
    custom_ops_allowed_in_graph: set[str] = field(default_factory=set)
    export_node_metadata: bool = False


class VariableType(enum.Enum):
    """The source of a function's input."""

    INPUT_ARG = "input_arg"
    PARAMETER = "parameter"
    CONSTANT = "constant"


@dataclass
class VariableSignature:
    """Shape and dtype of an input or a result.

    Attributes:
        shape: Sizes; of dimensions of any size, that of the example.
        dtype: Name of the PyTorch dtype, such as ``"float32"``; of the Python type where it is no tensor.
        dynamic_dims: Dimensions of any size.
        value: The number or text, where it is no tensor: the model was exported for it.
    """

    shape: list[int]
    dtype: str
    dynamic_dims: list[int] = field(default_factory=list)
    value: int | float | str | None = None


@dataclass
class InputLocation:
    """The source of a function's input: the user's arguments, the state dict, or the constants.

    Attributes:
        type_: Which of these.
        position: Index, for arguments and constants.
        name: Name in the state dict, for parameters and buffers.
    """

    type_: VariableType
    position: int = -1
    name: str = ""

    @classmethod
    def parameter(cls, name: str) -> InputLocation:
        """An entry of the state dict."""
        return cls(VariableType.PARAMETER, name=name)

    @classmethod
    def input_arg(cls, position: int) -> InputLocation:
        """An argument of the user's, counted among the leaves of all arguments."""
        return cls(VariableType.INPUT_ARG, position=position)

    @classmethod
    def constant(cls, position: int) -> InputLocation:
        """One of the constants."""
        return cls(VariableType.CONSTANT, position=position)


@dataclass
class StableHLOFunctionMeta:
    """The calling convention of a function.

    Attributes:
        name: Name of the function.
        stablehlo_version: Version of the bytecode.
        input_signature: Shapes and dtypes of the inputs, in the function's order.
        output_signature: Likewise of the results.
        input_locations: Where each input comes from.
        unused_inputs: Arguments of the user's that the function does not take.
        input_pytree_spec: Structure of the user's arguments, as text.
        output_pytree_spec: Structure of the result, as text.
        mutations: What the function writes to; its last results are the new values.
    """

    name: str
    stablehlo_version: str
    input_signature: list[VariableSignature]
    output_signature: list[VariableSignature]
    input_locations: list[InputLocation]
    unused_inputs: list[tuple[InputLocation, VariableSignature]]
    input_pytree_spec: str | None = None
    output_pytree_spec: str | None = None
    mutations: list[InputLocation] = field(default_factory=list)


@dataclass
class StableHLOFunc:
    """A function as StableHLO.

    Attributes:
        meta: How to call it.
        bytecode: The module.
        text: The module for human eyes, if it was kept.
    """

    meta: StableHLOFunctionMeta
    bytecode: bytes
    text: str | None


@dataclass
class StableHLOModelBundle:
    """All of an exported model.

    Attributes:
        state_dict: Parameters and buffers as NumPy arrays.
        additional_constants: Further tensors the functions take.
        stablehlo_funcs: The functions.
    """

    state_dict: dict[str, Any]
    additional_constants: list[np.ndarray]
    stablehlo_funcs: list[StableHLOFunc]


class StableHLOGraphModule:
    """An exported model that can be called; `bundle` holds its parts."""

    def __init__(self, bundle: StableHLOModelBundle) -> None:
        self._bundle = bundle
        self._functions = {func.meta.name: func for func in bundle.stablehlo_funcs}
        self._default = bundle.stablehlo_funcs[0].meta.name
        self._loaded: dict[str, jax_functions.LoadedModule] = {}
        self._state: dict[tuple[VariableType, int, str], torch.Tensor] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """`evaluate` of the first function."""
        return self.evaluate(self._default, args, kwargs)

    def evaluate(self, method_name: str, args: tuple[Any, ...], kwargs: dict[str, Any] | None = None) -> Any:
        """Runs a function on the current XLA device.

        Args:
            method_name: Name of the function.
            args: Arguments as the model takes them; tensors on any device.
            kwargs: Keyword arguments, likewise.

        Returns:
            What the model returns, with tensors on the XLA device. Buffers and arguments that it writes to have their
            new values afterwards.

        Raises:
            ValueError: The arguments are not such as the model was exported for.
        """
        meta = self._functions[method_name].meta
        leaves = _leaves(meta, args, kwargs or {})
        inputs = [self._input(location, leaves) for location in meta.input_locations]
        for i, (tensor, signature) in enumerate(zip(inputs, meta.input_signature, strict=True)):
            _check(i, tensor, signature)
        module = self._loaded.get(method_name)
        if module is None:
            module = self._loaded[method_name] = jax_functions.load_module(self._functions[method_name].bytecode)
        results = iter(module(inputs))
        outs = [None if s.dtype == "NoneType" else next(results) for s in meta.output_signature]
        for location, value in zip(meta.mutations, results, strict=True):
            if location.type_ is VariableType.INPUT_ARG:
                with torch.no_grad():
                    leaves[location.position].copy_(value)
            else:
                self._state[_key(location)] = value
        if meta.output_pytree_spec is None:
            return outs
        return pytree.tree_unflatten(outs, pytree.treespec_loads(meta.output_pytree_spec))

    def _input(self, location: InputLocation, leaves: Sequence[Any]) -> torch.Tensor:
        if location.type_ is VariableType.INPUT_ARG:
            return torch.as_tensor(leaves[location.position])
        key = _key(location)
        if key not in self._state:
            if location.type_ is VariableType.CONSTANT:
                value = self._bundle.additional_constants[location.position]
            elif location.name in self._bundle.state_dict:
                value = self._bundle.state_dict[location.name]
            else:
                got = f"weight {location.name!r} is missing"
                raise KeyError(message("stablehlo", got, do="export with export_weights=True"))
            self._state[key] = jax_functions.upload(value)
        return self._state[key]

    def get_stablehlo_bytecode(self, method_name: str | None = None) -> bytes:
        """The module of a function as bytecode."""
        return self._functions[method_name or self._default].bytecode

    def get_stablehlo_text(self, method_name: str | None = None) -> str | None:
        """The module of a function as text, if it was exported with it."""
        return self._functions[method_name or self._default].text

    def save(self, directory_path: str | os.PathLike[str], options: StableHLOExportOptions | None = None) -> None:
        """Writes the model: ``functions/``, ``data/`` (weights) and ``constants/``.

        Args:
            directory_path: Folder to write to; made if it is not there.
            options: `save_weights` is read.
        """
        folder = Path(directory_path)
        if options is None or options.save_weights:
            for name, value in self._bundle.state_dict.items():
                _save_array(folder / "data" / name, value)
        for position, value in enumerate(self._bundle.additional_constants):
            _save_array(folder / "constants" / str(position), value)
        (folder / "functions").mkdir(parents=True, exist_ok=True)
        (folder / "constants").mkdir(exist_ok=True)
        for function in self._bundle.stablehlo_funcs:
            path = folder / "functions" / function.meta.name
            path.with_name(f"{path.name}.meta").write_text(json.dumps(function.meta, default=_to_json))
            path.with_name(f"{path.name}.bytecode").write_bytes(function.bytecode)
            if function.text is not None:
                path.with_name(f"{path.name}.mlir").write_text(function.text)

    @classmethod
    def load(cls, directory_path: str | os.PathLike[str]) -> StableHLOGraphModule:
        """Reads what `save` wrote.

        Args:
            directory_path: The folder.
        """
        folder = Path(directory_path)
        functions = []
        for path in sorted((folder / "functions").glob("*.meta")):
            text = path.with_suffix(".mlir")
            functions.append(
                StableHLOFunc(
                    _meta_from_json(json.loads(path.read_text())),
                    path.with_suffix(".bytecode").read_bytes(),
                    text.read_text() if text.exists() else None,
                )
            )
        named = _typed(_arrays_in(folder / "data"), functions, VariableType.PARAMETER)
        constants = _typed(_arrays_in(folder / "constants"), functions, VariableType.CONSTANT)
        ordered = [constants[name] for name in sorted(constants, key=int)]
        return cls(StableHLOModelBundle(named, ordered, functions))


def _key(location: InputLocation) -> tuple[VariableType, int, str]:
    return location.type_, location.position, location.name


def _leaves(meta: StableHLOFunctionMeta, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """The user's arguments in the order of the exported model's, those by keyword too."""
    if meta.input_pytree_spec is None:
        return pytree.tree_leaves((args, kwargs))
    try:
        leaves = pytree.treespec_loads(meta.input_pytree_spec).flatten_up_to((tuple(args), kwargs))
    except ValueError as error:
        got = "got arguments of another structure"
        raise ValueError(message("stablehlo", got, expected=f"that of the exported ones: {error}")) from None
    for location, signature in meta.unused_inputs:
        leaf = leaves[location.position]
        if signature.value is not None and (type(leaf).__name__, leaf) != (signature.dtype, signature.value):
            raise ValueError(
                message(
                    "stablehlo",
                    f"got {leaf!r} for argument {location.position}",
                    expected=f"{signature.value!r}, which the model was exported with",
                    do="export it with the other value, or with a tensor",
                )
            )
    return leaves


def _check(position: int, tensor: torch.Tensor, signature: VariableSignature) -> None:
    expected = ["?" if i in signature.dynamic_dims else str(size) for i, size in enumerate(signature.shape)]
    if len(expected) != tensor.dim() or any(
        want not in ("?", str(size)) for want, size in zip(expected, tensor.shape, strict=True)
    ):
        raise ValueError(
            message(
                "stablehlo",
                f"got shape {list(tensor.shape)} for input {position}",
                expected=f"[{', '.join(expected)}]",
            )
        )
    dtype = str(tensor.dtype).removeprefix("torch.")
    if dtype != signature.dtype:
        raise ValueError(
            message("stablehlo", f"got {dtype} for input {position}", expected=signature.dtype, do="convert it")
        )


def _save_array(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "wb") as file:
        np.save(file, value)


def _arrays_in(folder: Path) -> Iterator[tuple[str, Any]]:
    if folder.exists():
        for path in filter(Path.is_file, folder.rglob("*")):  # a name may have slashes
            with open(path, "rb") as file:
                yield path.relative_to(folder).as_posix(), np.load(file)


def _typed(arrays: Iterator[tuple[str, Any]], functions: Sequence[StableHLOFunc], kind: VariableType) -> dict[str, Any]:
    """Arrays of files by their names; NumPy's files do not tell the types that it does not have, such as bfloat16."""
    types = {
        location.name or str(location.position): signature.dtype
        for function in functions
        for location, signature in zip(function.meta.input_locations, function.meta.input_signature, strict=True)
        if location.type_ is kind
    }
    return {
        name: value.view(dtypes.numpy_dtype(getattr(torch, types[name])))
        if value.dtype.kind == "V" and name in types
        else value
        for name, value in arrays
    }


def _to_json(value: Any) -> Any:
    return value.value if isinstance(value, enum.Enum) else dataclasses.asdict(value)


def _meta_from_json(values: dict[str, Any]) -> StableHLOFunctionMeta:
    def location(v: dict[str, Any]) -> InputLocation:
        return InputLocation(VariableType(v["type_"]), v["position"], v["name"])

    return StableHLOFunctionMeta(
        **{
            **values,
            "input_signature": [VariableSignature(**v) for v in values["input_signature"]],
            "output_signature": [VariableSignature(**v) for v in values["output_signature"]],
            "input_locations": [location(v) for v in values["input_locations"]],
            "unused_inputs": [(location(place), VariableSignature(**v)) for place, v in values["unused_inputs"]],
            "mutations": [location(v) for v in values.get("mutations", ())],
        }
    )


def _run_decompositions(exported_model: torch.export.ExportedProgram) -> torch.export.ExportedProgram:
    with warnings.catch_warnings():
        # PyTorch copies its own tree specs in a way it warns of.
        warnings.filterwarnings("ignore", message=".*isinstance.treespec, LeafSpec", category=FutureWarning)
        table = torch.export.default_decompositions()
        # Its decomposition has other strides than its Meta kernel, and views of its result fail then, as in GPT-2.
        table.pop(torch.ops.aten.scaled_dot_product_attention.default)
        return exported_model.run_decompositions(table)


def exported_program_to_stablehlo(
    exported_model: torch.export.ExportedProgram, options: StableHLOExportOptions | None = None
) -> StableHLOGraphModule:
    """Lowers an exported program; nothing runs on a device yet.

    Args:
        exported_model: What `torch.export.export` returned.
        options: How to export.

    Returns:
        A callable with the calling convention of the exported model.

    Raises:
        NotImplementedError: An option, or an operator of the model, cannot be exported.
    """
    options = options or StableHLOExportOptions()
    for name in ("export_node_metadata", "override_tracing_kwargs"):
        if getattr(options, name):
            raise NotImplementedError(message("stablehlo", f"got {name}", expected="the default"))
    program = _run_decompositions(exported_model)
    custom_calls.put_into(program.graph_module, options.custom_ops_allowed_in_graph)
    return StableHLOGraphModule(_bundle_of(program, options))


def _bundle_of(program: torch.export.ExportedProgram, options: StableHLOExportOptions) -> StableHLOModelBundle:
    graph = program.graph
    placeholders = [node for node in graph.nodes if node.op == "placeholder"]
    state = {**program.state_dict, **program.constants}
    signature: list[VariableSignature] = []
    locations: list[InputLocation] = []
    unused: list[tuple[InputLocation, VariableSignature]] = []
    weights: dict[str, Any] = {}
    arguments: dict[str, InputLocation] = {}
    for node, spec in zip(placeholders, program.graph_signature.input_specs, strict=True):
        if spec.kind == InputKind.USER_INPUT:
            location = arguments[node.name] = InputLocation.input_arg(len(arguments))
        else:
            assert spec.target is not None
            location = InputLocation.parameter(spec.target)
            if options.export_weights:
                weights[spec.target] = jax_functions.as_numpy(state[spec.target])
        value = node.meta.get("val")
        described = _signature(value)
        if isinstance(value, torch.Tensor) and node.users:
            locations.append(location)
            signature.append(described)
        elif spec.kind == InputKind.USER_INPUT:
            unused.append((location, described))
    results = next(iter(reversed(graph.nodes))).args[0]
    outputs = program.graph_signature.output_specs
    for spec in outputs:
        if spec.kind not in (OutputKind.USER_OUTPUT, *_WRITTEN):
            got = f"got a result that is a {spec.kind.name}"
            raise NotImplementedError(message("stablehlo", got, expected="a model of tensors, without its loss"))
    positions = [i for i, spec in enumerate(outputs) if spec.kind is OutputKind.USER_OUTPUT]
    written = [i for i, spec in enumerate(outputs) if spec.kind in _WRITTEN]
    user_outputs = [results[i] for i in positions]
    returned = [_signature(node.meta.get("val") if isinstance(node, torch.fx.Node) else node) for node in user_outputs]
    module, constants = jax_functions.export_module(
        program.graph_module, [*positions, *written], not options.inline_all_constant, program.range_constraints
    )
    for i, constant in enumerate(constants):
        locations.append(InputLocation.constant(i))
        signature.append(VariableSignature([], str(constant.dtype)))
    meta = StableHLOFunctionMeta(
        name="forward",
        stablehlo_version="0.0.0",
        input_signature=signature,
        output_signature=returned,
        input_locations=locations,
        unused_inputs=unused,
        input_pytree_spec=pytree.treespec_dumps(program.call_spec.in_spec),
        output_pytree_spec=pytree.treespec_dumps(program.call_spec.out_spec),
        mutations=[_written_to(outputs[i], arguments) for i in written],
    )
    text = module.text() if options.include_human_readable_text else None
    return StableHLOModelBundle(weights, constants, [StableHLOFunc(meta, module.bytecode(), text)])


# What a model does to its own tensors, and to its arguments.
_WRITTEN = (OutputKind.BUFFER_MUTATION, OutputKind.PARAMETER_MUTATION, OutputKind.USER_INPUT_MUTATION)


def _written_to(spec: OutputSpec, arguments: Mapping[str, InputLocation]) -> InputLocation:
    assert spec.target is not None
    return (
        arguments[spec.target] if spec.kind is OutputKind.USER_INPUT_MUTATION else InputLocation.parameter(spec.target)
    )


def _signature(value: Any) -> VariableSignature:
    if isinstance(value, torch.Tensor):
        open_dims = [i for i, size in enumerate(value.shape) if not isinstance(size, int)]
        shape = [size if isinstance(size, int) else size.node.hint for size in value.shape]
        return VariableSignature(shape, str(value.dtype).removeprefix("torch."), open_dims)
    constant = value if isinstance(value, (bool, int, float, str)) else None
    return VariableSignature([], type(value).__name__, value=constant)


def save_as_stablehlo(
    exported_model: torch.export.ExportedProgram,
    stablehlo_dir: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Exports a program and saves it.

    Args:
        exported_model: What `torch.export.export` returned.
        stablehlo_dir: Folder to write to.
        options: How to export.
    """
    exported_program_to_stablehlo(exported_model, options).save(stablehlo_dir, options)


def save_torch_model_as_stablehlo(
    torchmodel: torch.nn.Module,
    args: tuple[Any, ...],
    path: str | os.PathLike[str],
    options: StableHLOExportOptions | None = None,
) -> None:
    """Exports a module and saves it.

    Args:
        torchmodel: The module.
        args: Arguments to trace it with.
        path: Folder to write to.
        options: How to export; its `override_tracing_arguments` take the place of `args`.
    """
    if options is not None and options.override_tracing_arguments is not None:
        args = options.override_tracing_arguments
    save_as_stablehlo(torch.export.export(torchmodel, args), path, options)
