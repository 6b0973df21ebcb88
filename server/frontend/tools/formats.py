"""How model families write tool calls."""

import secrets
import string
from dataclasses import dataclass

from server.tokenizer import Tokenizer

_ALPHANUMERIC = string.ascii_letters + string.digits


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One family's way. The calls themselves are JSON objects with a name and arguments.

    begin: in front of calls; end: behind them, or empty. bare: an answer that begins with "{" is a call as well.
    listed: calls stand in one list. named: calls may also be written as name[ARGS]{...}. arguments_key: what the family
    calls the arguments. separator: between calls.
    """

    name: str
    begin: str
    end: str = ""
    bare: bool = False
    listed: bool = False
    named: bool = False
    arguments_key: str = "arguments"
    separator: str = "\n"

    def uses_control_tokens(self, tokenizer: Tokenizer) -> bool:
        """Whether a marker is a control token, which detokenizing leaves out unless told otherwise."""
        return bool({self.begin, self.end} & set(tokenizer.special_spellings))

    def new_id(self) -> str:
        """Mistral's templates insist on nine letters and digits."""
        if self.listed:
            return "".join(secrets.choice(_ALPHANUMERIC) for _ in range(9))
        return f"call_{secrets.token_hex(12)}"


HERMES = ToolFormat("hermes", begin="<tool_call>", end="</tool_call>")
LLAMA3 = ToolFormat("llama3_json", begin="<|python_tag|>", bare=True, arguments_key="parameters", separator="; ")
MISTRAL = ToolFormat("mistral", begin="[TOOL_CALLS]", listed=True, named=True, separator=", ")

FORMATS = {
    "hermes": HERMES,
    "qwen": HERMES,
    "llama3_json": LLAMA3,
    "llama3": LLAMA3,
    "mistral": MISTRAL,
}


def format_of_template(source: str) -> ToolFormat | None:
    """The format that a chat template teaches, or None: it does not mention tools, or writes them in another way."""
    if "[TOOL_CALLS]" in source:
        return MISTRAL
    if "<tool_call>" in source:
        return HERMES
    if "<|python_tag|>" in source or ("<|eot_id|>" in source and '"parameters"' in source):
        return LLAMA3
    return None
