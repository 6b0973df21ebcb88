"""What goes wrong in paging. All of it is a bug in the caller or in us: a client can't cause any."""


class PagingError(Exception):
    """Base of this package's errors."""


class OutOfBlocks(PagingError):
    """More blocks were taken than are free. Ask first: `BlockPool.num_free`."""


class InvariantViolation(PagingError, AssertionError):
    """The books don't balance; the message says which line of them."""
