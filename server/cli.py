"""The command line. Each command imports what it needs when it runs, so that --help is quick."""

import argparse
import signal
import sys
from collections.abc import Sequence

from rich.console import Console

from server import config
from server.errors import ConfigError, StartupError
from server.version import version

EXIT_CANNOT_START = 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="pageturner", description="An OpenAI-compatible inference server with a paged KV cache."
    )
    parser.add_argument("--version", action="version", version=f"pageturner {version()}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_serve(commands)
    _add_chat(commands)
    _add_plan(commands)
    commands.add_parser("bench", help="measure a server or this machine", add_help=False)
    return parser


def _parse(words: list[str]) -> argparse.Namespace:
    """What follows `bench` is the benchmark's own; argparse would keep a flag in its first place for itself."""
    if words[:1] == ["bench"]:
        return argparse.Namespace(command="bench", rest=words[1:])
    return _parser().parse_args(words)


_Commands = argparse._SubParsersAction  # argparse gives this type no public name


def _add_serve(commands: "_Commands[argparse.ArgumentParser]") -> None:
    serve = commands.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model. Numbers may be written 4096, 4k (4,000), 4K (4,096), 2GiB. Every flag is also a "
        f"key of the --config file and, in capitals behind {config.ENVIRONMENT_PREFIX}, an environment variable.",
    )
    _add_model_settings(serve)


def _add_plan(commands: "_Commands[argparse.ArgumentParser]") -> None:
    plan = commands.add_parser(
        "plan",
        help="how much KV cache a model needs, without loading it",
        description="Prints KV bytes a token, and how many requests fit. Takes the flags of serve.",
    )
    _add_model_settings(plan)


def _add_model_settings(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model",
        nargs="?",
        default=argparse.SUPPRESS,
        metavar="MODEL",
        help="a folder, a .gguf file or a hub id [the embedded SmolLM2-135M-Instruct]",
    )
    parser.add_argument("--config", metavar="FILE", help="a YAML file of settings; the presets are in configs/")
    config.add_flags(parser)


def _add_chat(commands: "_Commands[argparse.ArgumentParser]") -> None:
    chat = commands.add_parser("chat", help="talk to a running server in the terminal")
    chat.add_argument("--url", default="http://127.0.0.1:8000", help="the server [%(default)s]")
    chat.add_argument("--model", help="default: the first one that the server names")
    chat.add_argument("--api-key", help="where the server wants one")
    chat.add_argument("--system", help="a system message")
    chat.add_argument("--temperature", type=float, help="default: the server's")
    chat.add_argument("--max-tokens", type=int, help="longest answer")


def _load(arguments: argparse.Namespace) -> config.ServerConfig:
    flags = {key: value for key, value in vars(arguments).items() if "." in key}
    if "model" in arguments:
        if not arguments.model.strip():
            raise ConfigError("MODEL is empty; leave it out for the embedded default model")
        flags["engine.model.model"] = arguments.model
    return config.load(flags, config_file=arguments.config)


def _serve(settings: config.ServerConfig) -> int:
    """A signal ends a server in order, exit status 0, also before serve.run() handles signals itself."""

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    signal.signal(signal.SIGTERM, interrupt)
    try:
        from server import serve

        return serve.run(settings)
    except KeyboardInterrupt:
        return 0


def _run(arguments: argparse.Namespace) -> int:
    match arguments.command:
        case "serve":
            return _serve(_load(arguments))
        case "plan":
            settings = _load(arguments)
            from server import plan

            return plan.run(settings.engine)
        case "chat":
            from server import chat

            return chat.run(
                url=arguments.url,
                model=arguments.model,
                api_key=arguments.api_key,
                system=arguments.system,
                temperature=arguments.temperature,
                max_tokens=arguments.max_tokens,
            )
        case _:
            from server.bench.cli import main as bench

            return int(bench(arguments.rest))


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parse(sys.argv[1:] if argv is None else list(argv))
    try:
        return _run(arguments)
    except StartupError as error:
        Console(stderr=True).print(f"[bold red]error:[/] {_escape(str(error))}", highlight=False, soft_wrap=True)
        return EXIT_CANNOT_START
    except KeyboardInterrupt:
        return 130


def _escape(text: str) -> str:
    from rich.markup import escape

    return escape(text)


if __name__ == "__main__":
    sys.exit(main())
