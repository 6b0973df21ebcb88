"""Which release this is."""

from importlib import metadata


def version() -> str:
    try:
        return metadata.version("pageturner")
    except metadata.PackageNotFoundError:
        return "unknown"
