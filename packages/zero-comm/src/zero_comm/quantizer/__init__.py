"""Block quantizer: buffer format, backends for each device, and checked messages."""
