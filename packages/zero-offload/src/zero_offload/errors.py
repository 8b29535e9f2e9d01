"""Exceptions of this package."""


class OffloadError(RuntimeError):
    """An optimizer step or a migration of optimizer state failed midway.

    ``__cause__`` is the original exception. Master weights and states are then partly updated.
    Every later call of the tier raises this error, so that a checkpoint never contains them.
    """


class StorageError(OSError):
    """A block of the state file could not be read or written.

    Attributes:
        errno: error number of the failed system call.
        path: path at which the file was created.
    """

    def __init__(self, code: int | None, message: str, path: str) -> None:
        super().__init__(code, f"{path}: {message}")
        self.path = path


class StorageCorruptError(StorageError):
    """A block that was read from the disk has another checksum than when it was written."""
