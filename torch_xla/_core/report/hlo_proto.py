"""Writes HLO modules in the text and JSON forms of their protobuf messages, which some tools read; main fields only."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class _Field:
    name: str
    kind: str  # a message below, or "string", "int", "id" or "element_type"
    many: bool = False


# By message, then by the number that a field has in XLA's protocol.
_FIELDS: dict[str, dict[int, _Field]] = {
    "module": {
        1: _Field("name", "string"),
        2: _Field("entry_computation_name", "string"),
        3: _Field("computations", "computation", many=True),
        4: _Field("host_program_shape", "program_shape"),
        5: _Field("id", "id"),
        6: _Field("entry_computation_id", "id"),
    },
    "computation": {
        1: _Field("name", "string"),
        2: _Field("instructions", "instruction", many=True),
        4: _Field("program_shape", "program_shape"),
        5: _Field("id", "id"),
        6: _Field("root_id", "id"),
    },
    "instruction": {
        1: _Field("name", "string"),
        2: _Field("opcode", "string"),
        3: _Field("shape", "shape"),
        9: _Field("parameter_number", "id"),
        35: _Field("id", "id"),
        36: _Field("operand_ids", "id", many=True),
        38: _Field("called_computation_ids", "id", many=True),
    },
    "program_shape": {
        1: _Field("parameters", "shape", many=True),
        2: _Field("result", "shape"),
        3: _Field("parameter_names", "string", many=True),
    },
    "shape": {
        2: _Field("element_type", "element_type"),
        3: _Field("dimensions", "id", many=True),
        4: _Field("tuple_shapes", "shape", many=True),
    },
}
_VARINT, _BYTES = 0, 2  # wire types
_WIDTHS = {1: 8, 5: 4}  # of the others

Message = list[tuple[_Field, Any]]


def parse(data: bytes, kind: str = "module") -> Message:
    """The known fields of a serialized message, in their order; nested messages are parsed too."""
    fields = _FIELDS[kind]
    entries: Message = []
    for number, value in _wire(data):
        field = fields.get(number)
        if field is None:
            continue
        if isinstance(value, int):
            entries.append((field, _element_type(value) if field.kind == "element_type" else value))
        elif field.kind == "string":
            entries.append((field, value.decode()))
        elif field.kind == "id":  # packed
            entries += [(field, number) for number in _varints(value)]
        else:
            entries.append((field, parse(value, field.kind)))
    return entries


def _element_type(number: int) -> str:
    from torch_xla._jax_internals import xla_client

    return xla_client.PrimitiveType(number).name


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at


def _varints(data: bytes) -> Iterator[int]:
    at = 0
    while at < len(data):
        value, at = _varint(data, at)
        yield value


def _wire(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Number and value of each field, those of fixed width left out."""
    at = 0
    while at < len(data):
        tag, at = _varint(data, at)
        kind = tag & 7
        if kind == _VARINT:
            value, at = _varint(data, at)
            yield tag >> 3, value
        elif kind == _BYTES:
            length, at = _varint(data, at)
            yield tag >> 3, data[at : at + length]
            at += length
        else:
            at += _WIDTHS[kind]


def text(message: Message, indent: str = "") -> str:
    """The message in protobuf's text form."""
    lines = []
    for field, value in message:
        if isinstance(value, list):
            lines.append(f"{indent}{field.name} {{\n{text(value, indent + '  ')}{indent}}}\n")
        else:
            shown = json.dumps(value) if field.kind == "string" else value
            lines.append(f"{indent}{field.name}: {shown}\n")
    return "".join(lines)


def to_json(message: Message) -> str:
    """The message in protobuf's JSON form."""
    return json.dumps(_jsonable(message))


def _jsonable(message: Message) -> dict[str, Any]:
    json_object: dict[str, Any] = {}
    for field, value in message:
        head, *rest = field.name.split("_")
        name = head + "".join(part.capitalize() for part in rest)
        shown = _jsonable(value) if isinstance(value, list) else str(value)  # 64-bit numbers are strings in it
        if field.many:
            json_object.setdefault(name, []).append(shown)
        else:
            json_object[name] = shown
    return json_object
