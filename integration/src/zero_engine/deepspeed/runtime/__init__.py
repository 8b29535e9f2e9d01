"""The parts of ``deepspeed.runtime`` that scripts import."""
