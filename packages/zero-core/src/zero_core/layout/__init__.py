"""Units of a model and the position of every element in their flat buffers."""
