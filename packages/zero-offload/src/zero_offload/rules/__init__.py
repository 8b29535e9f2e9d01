"""Update rules: optimizer updates by host kernels, on memory that the caller owns."""
