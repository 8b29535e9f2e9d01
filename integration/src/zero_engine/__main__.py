"""Entry point of ``python -m zero_engine``, for launchers that start modules."""

from zero_engine.cli import main

main()
