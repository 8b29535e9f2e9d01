"""One accelerator, part by part."""
