"""``python -m zero_engine``: the command line, for launchers that start modules."""

from zero_engine.cli import main

main()
