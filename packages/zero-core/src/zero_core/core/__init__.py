"""The core of every engine, which no feature changes."""
