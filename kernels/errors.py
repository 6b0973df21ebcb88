"""What goes wrong in choosing a backend. Its own file, since the choice and what is chosen both raise it."""


class BackendUnavailable(ValueError):
    """The backend that was asked for is unknown or can't serve the device. The message says what to do."""
