"""What confines the output: JSON by request, and the form of required tool calls."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

from tidemill.mesh.v1.worker_pb2 import Grammar
from tidemill_gateway.spec import GenerationSpec, Tool
from tidemill_gateway.validation import invalid

MAX_SCHEMA_BYTES = 256 << 10
MAX_PARALLEL_CALLS = 8


def grammar_of(spec: GenerationSpec) -> Grammar | None:
    """The grammar of a request; None: free text."""
    if _calls_are_due(spec):
        return _schema_grammar(grammar_field(spec), _calls_schema_text(spec))
    if spec.response_format == "json_object":
        return _grammar(Grammar.KIND_JSON_OBJECT, "")
    if spec.response_format == "json_schema":
        return _schema_grammar(grammar_field(spec), spec.json_schema)
    return None


def grammar_field(spec: GenerationSpec) -> str:
    """What the caller calls the field that a grammar was made of."""
    if _calls_are_due(spec):
        return "tools"
    return "response_format.json_schema" if spec.response_format == "json_schema" else "response_format"


def _calls_are_due(spec: GenerationSpec) -> bool:
    return bool(spec.tools) and spec.tool_mode in ("required", "named")


def _schema_grammar(field: str, text: str) -> Grammar:
    if len(text.encode()) > MAX_SCHEMA_BYTES:
        raise invalid(field, "the schema is too large", f"{MAX_SCHEMA_BYTES} bytes")
    try:
        schema = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise invalid(field, f"is not JSON: {error}") from error
    if not isinstance(schema, dict | bool):
        raise invalid(field, "must be a JSON schema: an object")
    return _grammar(Grammar.KIND_JSON_SCHEMA, text)


def _grammar(kind: "Grammar.Kind.ValueType", text: str) -> Grammar:
    digest = hashlib.sha256(f"{kind}:{text}".encode()).hexdigest()
    return Grammar(kind=kind, text=text, digest=digest)


def _calls_schema_text(spec: GenerationSpec) -> str:
    try:
        return json.dumps(_calls_schema(spec))
    except RecursionError as error:
        raise invalid(grammar_field(spec), "a tool's parameters are nested too deeply") from error


def _calls_schema(spec: GenerationSpec) -> dict[str, Any]:
    if spec.tool_mode == "named":
        return _parameters(next(tool for tool in spec.tools if tool.name == spec.tool_name))
    call = _any_of([_call_schema(tool) for tool in spec.tools])
    if not spec.parallel_tool_calls:
        return call
    return {"type": "array", "items": call, "minItems": 1, "maxItems": MAX_PARALLEL_CALLS}


def _any_of(schemas: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return schemas[0] if len(schemas) == 1 else {"anyOf": list(schemas)}


def _call_schema(tool: Tool) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": {"name": {"const": tool.name}, "arguments": _parameters(tool)},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _parameters(tool: Tool) -> dict[str, Any]:
    return tool.parameters or {"type": "object", "properties": {}, "additionalProperties": False}
