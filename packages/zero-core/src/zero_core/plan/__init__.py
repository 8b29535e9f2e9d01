"""Memory and traffic of a run, predicted before anything is allocated."""
