"""What every engine does, whatever its features."""
