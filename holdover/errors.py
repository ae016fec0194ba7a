"""The errors a user can meet. Each message says what happened, to which thing, and what to do."""


class HoldoverError(Exception):
    """Something that the user can mend; the command line prints it on one line and exits with code 2."""


class ModelError(HoldoverError):
    """A checkpoint folder that cannot be served as it is."""


class TierError(HoldoverError):
    """A tier that cannot be opened, read or written. `evicted` names what had gone for a write that then failed."""

    def __init__(self, message: str, evicted: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.evicted = evicted


class TraceError(HoldoverError):
    """A file that is no trace, or a trace that cannot be replayed."""


class RequestError(HoldoverError):
    """A request that cannot be served. `param` names the field at fault, as in OpenAI's error object."""

    def __init__(self, message: str, param: str | None = None, status: int = 400, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.status = status
        self.code = code
