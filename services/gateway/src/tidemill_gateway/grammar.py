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
    if spec.tools and spec.tool_mode in ("required", "named"):
        return _schema_grammar("tools", json.dumps(_calls_schema(spec)))
    if spec.response_format == "json_object":
        return _grammar(Grammar.KIND_JSON_OBJECT, "")
    if spec.response_format == "json_schema":
        return _schema_grammar("response_format.json_schema", spec.json_schema)
    return None


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
