"""Structured outputs: grammars that decide which tokens may come next. No torch."""

from server.structured.compiler import GrammarCompiler
from server.structured.json_schema import embedded_schema
from server.structured.state import GrammarState

__all__ = ["GrammarCompiler", "GrammarState", "embedded_schema"]
