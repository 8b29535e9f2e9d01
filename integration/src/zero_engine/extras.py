"""Libraries that only some commands need, from the extras of this package."""

from __future__ import annotations

from importlib.util import find_spec

from zero_core.errors import MissingPartError


def require(extra: str, user: str, *modules: str) -> None:
    """Check that ``modules``, which the extra ``extra`` installs, are there for ``user``.

    Raises:
        MissingPartError: names the first that is not, and the line that installs the extra.
    """
    for module in modules:
        if find_spec(module) is None:
            raise MissingPartError(
                f"{user} needs the package {module}, which is not installed: "
                f'pip install "./integration[{extra}]" in a checkout'
            )
