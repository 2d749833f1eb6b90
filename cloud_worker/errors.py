"""Every way in which the worker says no. The message is one sentence that names the thing."""

from __future__ import annotations


class WorkerError(Exception):
    """Root of the cloud worker's errors."""


class ConfigError(WorkerError):
    """A setting is unknown or has a bad value; the program exits with code 2."""


class PortInUse(WorkerError):
    """The HTTP address is taken by another program; the program exits with code 3."""


class BrokerUnavailable(WorkerError):
    """The broker does not answer or does not let this worker in; the program exits with code 4."""


class ModelUnavailable(WorkerError):
    """The model cannot be loaded, or a profile does not fit it; the program exits with code 5."""


class OrderError(WorkerError):
    """A step was reported that the session's work order did not hand out; our own bug."""


class NoMemory(WorkerError):
    """A session does not fit the memory that is left."""

    def __init__(self, *, needed_bytes: int, free_bytes: int, total_bytes: int) -> None:
        super().__init__(
            f"the session needs {needed_bytes} bytes of worker memory, "
            f"{free_bytes} of {total_bytes} are free"
        )
        self.needed_bytes = needed_bytes
        self.free_bytes = free_bytes
        self.total_bytes = total_bytes

    @property
    def can_ever_fit(self) -> bool:
        """Whether waiting helps: the session fits an idle worker."""
        return self.needed_bytes <= self.total_bytes
