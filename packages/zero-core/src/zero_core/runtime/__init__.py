"""Parts of an engine beside its passes: gathered parameters, offloaded states, copies, checks."""
