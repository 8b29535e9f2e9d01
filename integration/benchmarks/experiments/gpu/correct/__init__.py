"""The part `correct`."""
