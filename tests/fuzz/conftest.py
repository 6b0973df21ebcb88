from tests.api.conftest import anyio_backend, chat_template, config, model_files, server, tokenizer

__all__ = ["anyio_backend", "chat_template", "config", "model_files", "server", "tokenizer"]
