"""Structured outputs: grammars that decide which tokens may come next. No torch."""

from server.structured.compiler import GrammarCompiler
from server.structured.grammar_text import embedded_schema
from server.structured.state import GrammarState

__all__ = ["GrammarCompiler", "GrammarState", "embedded_schema"]
