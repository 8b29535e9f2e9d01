"""Parts of an engine other than its passes: gathered parameters, offloaded states, host inputs."""
