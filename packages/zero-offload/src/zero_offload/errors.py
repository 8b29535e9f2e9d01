"""Exceptions of this package."""


class OffloadError(RuntimeError):
    """An optimizer step or a migration of optimizer state failed midway.

    ``__cause__`` is the original exception. Master weights and states may be partly updated, or
    lost. Later steps, reads and writes of the tier raise this error, to protect checkpoints.
    """


class StorageError(OSError):
    """A file of offloaded state or parameters could not be created, read or written.

    Attributes:
        errno: number of the operating system's error, EIO if data are missing or damaged.
        path: path of the file, which was unlinked right after its creation.
    """

    def __init__(self, code: int | None, message: str, path: str) -> None:
        super().__init__(code, f"{path}: {message}")
        self.path = path


class StorageCorruptError(StorageError):
    """A block that was read from the disk has another checksum than when it was written."""
