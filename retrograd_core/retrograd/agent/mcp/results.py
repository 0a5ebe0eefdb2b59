"""What a tool of an MCP server gave, as text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from retrograd.agent.tools.texts import cap_text
from retrograd_hookspecs import StepResult

if TYPE_CHECKING:
    from mcp_types import CallToolResult

NO_CONTENT = "(no content)"


def step_result(result: CallToolResult, limit: int) -> StepResult:
    """The texts of a result, at most `limit` bytes; what is no text is described."""
    parts = [_text(block) for block in result.content]
    if not parts and result.structured_content is not None:
        parts.append(json.dumps(result.structured_content, ensure_ascii=False))
    text = "\n".join(parts) or NO_CONTENT
    return StepResult(observation=cap_text(text, limit), is_error=bool(result.is_error))


def _text(block: Any) -> str:
    if block.type == "text":
        return str(block.text)
    if block.type in ("image", "audio"):
        return f"[{block.type} {block.mime_type}, {_decoded_size(block.data)} bytes]"
    if block.type == "resource_link":
        return f"[link to {block.uri}: {block.name}]"
    if block.type == "resource":
        resource = block.resource
        if (text := getattr(resource, "text", None)) is not None:
            return str(text)
        kind = resource.mime_type or "application/octet-stream"
        return f"[resource {resource.uri}, {kind}, {_decoded_size(resource.blob)} bytes]"
    return f"[content of type {block.type}]"


def _decoded_size(base64: str) -> int:
    """Bytes that a base64 text stands for."""
    stripped = base64.rstrip("=")
    return len(stripped) * 3 // 4
