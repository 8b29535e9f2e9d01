"""Access to whole parameters, offloading of device memory, and inputs on the host."""
