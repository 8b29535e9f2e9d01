"""Initial values of parameters and buffers, until an engine's memory holds them."""
