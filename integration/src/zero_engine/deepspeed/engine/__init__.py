"""`DeepSpeedEngine` and its parts."""
