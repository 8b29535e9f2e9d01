"""Errors of this package that a caller may want to catch."""


class OffloadError(RuntimeError):
    """A step or a migration of state failed midway, mostly in the background.

    The cause is chained. Master weights and state are then partly updated. The tier raises on every
    later call, so that such weights are never saved by mistake.
    """


class StorageError(OSError):
    """A block of a file could not be read or written, because the disk is full or fails.

    Attributes:
        errno: of the call that failed.
        path: the name that the file had.
    """

    def __init__(self, code: int | None, message: str, path: str) -> None:
        super().__init__(code, f"{path}: {message}")
        self.path = path


class StorageCorruptError(StorageError):
    """The disk returned other bytes of a block than were written."""
