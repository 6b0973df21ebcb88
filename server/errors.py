"""The error tree: whose fault, and what it becomes on the wire. See docs/architecture.md, "Errors"."""


class ServingError(Exception):
    """Base of all errors that we raise on purpose."""


# ------------------------------------------------------------------------------------------------- the client's fault


class ClientFault(ServingError):
    """The request is wrong. status: HTTP status; param: the offending field; code: OpenAI's machine-readable code."""

    status = 400
    type = "invalid_request_error"
    code: str | None = None

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param


class InvalidRequest(ClientFault):
    pass


class PromptTooLong(InvalidRequest):
    code = "context_length_exceeded"


class UnsupportedFeature(InvalidRequest):
    """A field that we know and can't honour."""

    code = "unsupported_feature"


class ModelNotFound(ClientFault):
    status = 404
    code = "model_not_found"


class Unauthorized(ClientFault):
    status = 401
    type = "authentication_error"
    code = "invalid_api_key"


class BodyTooLarge(ClientFault):
    status = 413
    code = "request_too_large"


# ------------------------------------------------------------------------------------------------- the server's fault


class EngineFault(ServingError):
    """The request is fine, the server can't serve it. retry_after: seconds, or None where a retry won't help."""

    status = 503
    type = "server_error"
    code: str | None = None

    def __init__(self, message: str, *, retry_after: float | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.retry_after = retry_after
        self.param: str | None = None


class EngineRestarting(EngineFault):
    """Not ready yet, restarting, or draining."""

    code = "service_unavailable"


class Overloaded(EngineFault):
    status = 429
    type = "rate_limit_error"
    code = "queue_full"


class StepFailed(EngineFault):
    """The engine failed on this request."""

    status = 500
    code = "engine_error"


class RequestTimeout(EngineFault):
    """The request's own deadline passed."""

    status = 408
    type = "timeout_error"
    code = "timeout"


# ---------------------------------------------------------------------------------------------- the operator's fault


class StartupError(ServingError):
    """The server can't start; the process exits with status 2 and this message."""


class ConfigError(StartupError):
    pass


class ModelLoadError(StartupError):
    """The checkpoint can't be read: missing, truncated, corrupt, or of a family that we don't serve."""


class WeightMismatch(ModelLoadError):
    """Tensors are missing, left over, or of a wrong shape; the message lists every one."""


class OutOfMemoryAtStart(StartupError):
    """Does not fit; the message holds the memory ledger and a value that fits."""
