"""Structured outputs: grammars that decide which tokens may come next. No torch."""

from server.structured.compiler import GrammarCompiler
from server.structured.grammar import CompiledGrammar
from server.structured.json_schema import embedded_schema
from server.structured.state import GrammarState

__all__ = ["CompiledGrammar", "GrammarCompiler", "GrammarState", "embedded_schema"]
