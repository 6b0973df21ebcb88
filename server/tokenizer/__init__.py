"""Text, token ids and conversations. No torch, no web stack.

`load_tokenizer(files)`, `ChatTemplate.of_model(files, tokenizer.special_tokens)`, then `encode_chat(...)` for a
conversation; an `IncrementalDetokenizer` and a `StopMatcher` a sequence on the way back.
"""

from server.tokenizer.chat_prompt import ChatPrompt, encode_chat
from server.tokenizer.chat_template import ChatTemplate, plain_content
from server.tokenizer.detokenizer import IncrementalDetokenizer
from server.tokenizer.load import load_tokenizer
from server.tokenizer.stop_strings import StopMatcher
from server.tokenizer.template_engine import TemplateLimits
from server.tokenizer.tokenizer import Tokenizer

__all__ = [
    "ChatPrompt",
    "ChatTemplate",
    "IncrementalDetokenizer",
    "StopMatcher",
    "TemplateLimits",
    "Tokenizer",
    "encode_chat",
    "load_tokenizer",
    "plain_content",
]
