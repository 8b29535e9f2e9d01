"""zero-comm's Triton kernels against copy bandwidth."""
