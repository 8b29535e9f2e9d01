"""What all test files share."""

from zero_core.testing import preload

# Compiling imports it, seconds long; so ranks are forked from a server that has it.
preload("torch._inductor.compile_fx", "torch._dynamo.testing")
